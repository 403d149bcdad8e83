"""What may happen to a core: agreed facts only.

Inputs are drained by the unit's leader and broadcast; observations are reduced over the unit first (`agreement`). A core
never sees anything that one rank alone saw.
"""

from dataclasses import dataclass
from enum import Enum

from baton_core.errors import Reason, Verdict
from baton_core.messages import MetadataRow, RoomMessage
from baton_core.ranks import member_name, worker_of
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
    """What a registry told about the prefill unit of a room; `endpoints[i]` is its member `i`, and member 0 leads."""

    incarnation: Incarnation  # of the worker, as it registered
    dp_rank: int
    endpoints: tuple[RankEndpoint, ...]

    @property
    def leader(self) -> Incarnation:
        """The name of the rank that leads the unit: the one to say hello to."""
        return member_name(worker_of(self.incarnation), self.dp_rank, 0)


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
    """The link to this rank of another unit is down for good (that incarnation): all rooms of its unit fail."""

    peer: Incarnation
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainBegan:
    """No new requests from now on; what runs may finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache:
    """Return every cached page that nobody uses to the pool."""


class PauseMode(Enum):
    """What becomes of running requests when generation is paused. The values are SGLang's."""

    ABORT = "abort"  # they end
    IN_PLACE = "in_place"  # they keep their KV cache, and go on where they are
    RETRACT = "retract"  # they give it back, and compute it anew (the model's weights may have changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Compute nothing from now on. Agreement, deadlines, transfers and answers go on; so do steps under way."""

    mode: PauseMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Compute again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedPoll:
    """What all ranks of the unit agree on about one handoff: the minimum of what each saw.

    Only `agreement` makes these (the type keeps local and agreed apart). `writers_stopped` means, on decode, that nothing
    can write this attempt's pages any more; on prefill, that nothing reads them. `row` is the leader's metadata row, with
    Success on decode. Everything but `text` is the same on every rank; the leader's text is the one that counts.
    """

    rid: RequestId
    attempt: int
    serial: int = 0  # of the request (`machine.Handoff.serial`): its id, room and attempt number may be used again
    poll: int
    writers_stopped: bool
    reason: Reason | None = None
    rank: int = 0  # who saw the reason
    text: str = ""
    progress: int = 0
    row: MetadataRow | None = None
    row_index: int | None = None  # where that row is (decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPoll:
    """With pipeline stages: what this stage alone sees of a handoff that the consensus does not cover.

    Only Failed is applied, and only to the stage's own transfer: it is terminal, and must be drained.
    """

    rid: RequestId
    attempt: int
    serial: int = 0
    poll: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One agreement. With one stage: a poll for every handoff the core asked to watch, in that order.

    With several stages `polls` is the consensus of an earlier log position, and `uncovered` what the consensus leaves out.
    """

    polls: tuple[AgreedPoll, ...]
    uncovered: tuple[LocalPoll, ...] = ()


Input = (
    Submit
    | Abort
    | AbortAll
    | StopHere
    | Resolved
    | LookupFailed
    | PeerSaid
    | PeerGone
    | DrainBegan
    | FlushCache
    | Pause
    | Continue
)
Event = Input | Observed
