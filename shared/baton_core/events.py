"""What may happen to a core: agreed facts only.

Inputs are drained by the unit's leader and broadcast; observations are reduced over the unit first (`agreement`). A core
never sees anything that one rank alone saw.
"""

from dataclasses import dataclass

from baton_core.errors import Reason, Verdict
from baton_core.messages import MetadataRow, RoomMessage
from baton_core.request import Incarnation, Request, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A request arrived at this worker's app."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End this request with this verdict: the client left, or somebody asked for it."""

    rid: RequestId
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortAll:
    """End every live request with this verdict."""

    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class StopHere:
    """The app found a stop string: what came so far is the answer; compute no more."""

    rid: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEndpoint:
    """Where one prefill rank listens for page orders (and, on the leader, for room messages)."""

    host: str
    port: int
    tp_rank: int = 0
    cp_rank: int = 0
    pp_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapInfos:
    """What a registry told about the prefill worker of a room; `endpoints[0]` is the unit's leader."""

    incarnation: Incarnation
    dp_rank: int
    endpoints: tuple[RankEndpoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Decode: the look-up of this request's prefill worker succeeded."""

    rid: RequestId
    infos: BootstrapInfos


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupFailed:
    """Decode: the look-up failed; the text names the registry and what to do."""

    rid: RequestId
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSaid:
    """A room message from the leader of another worker's unit."""

    peer: Incarnation
    message: RoomMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone:
    """The link to this peer is down for good (that incarnation): all its rooms fail."""

    peer: Incarnation
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainBegan:
    """No new requests from now on; what runs may finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache:
    """Return every cached page that nobody uses to the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedPoll:
    """What all ranks of the unit agree on about one handoff: the minimum of what each saw.

    Only `agreement` makes these (the type keeps local and agreed apart). `writers_stopped` means, on decode, that nothing
    can write this attempt's pages any more; on prefill, that nothing reads them. `row` is the leader's metadata row, with
    Success on decode.
    """

    rid: RequestId
    attempt: int
    poll: int
    writers_stopped: bool
    reason: Reason | None = None
    rank: int = 0
    text: str = ""
    progress: int = 0
    row: MetadataRow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One agreement: a poll for every handoff the core asked to watch, in that order."""

    polls: tuple[AgreedPoll, ...]


Input = Submit | Abort | AbortAll | StopHere | Resolved | LookupFailed | PeerSaid | PeerGone | DrainBegan | FlushCache
Event = Input | Observed
