"""What an app process and its scheduler ranks say to each other, over one ipc socket pair per rank.

The app is torch-free and owns HTTP, the tokenizer and the registry. App to the leader of a unit: the core's own inputs;
to any rank: `Ping` and `Stop`. Leader to app: batches of tokens, look-ups, rooms to register. Any rank to app: readiness,
snapshots, last words.
"""

from dataclasses import dataclass, field

from baton_core import events
from baton_core.effects import Emit, LookUp, RegisterRank
from baton_core.request import Incarnation, RequestId
from baton_io.codec import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """App to rank: answer with a `Snapshot` at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """App to rank: leave the loop and exit 0 (after a drain, or because a sibling died)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """Rank to app, once: the model is loaded. `fingerprint` is the canonical text compared in the handshake, and
    `layout` that of how the whole unit shares its KV.
    """

    rank: int
    pid: int
    rank_host: str
    rank_port: int  # where the rank's control socket listens (prefill), else 0
    fingerprint: str
    layout: str
    kv_pages: int
    page_tokens: int
    kv_bytes: int
    context_tokens: int  # longest prompt + output the model and the pool allow
    kv_dtype: str
    load_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Rank to app while loading: `done` of `total` in `what` (shown to people, never logged per tensor)."""

    rank: int
    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Emits:
    """Rank to app: everything one tick has to say to clients, in one message."""

    emits: tuple[Emit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUps:
    """Rank to app (decode): rooms whose prefill worker must be found."""

    lookups: tuple[LookUp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterRanks:
    """Rank to app (prefill): decode cannot know on which DP rank these rooms run; tell the registries."""

    rooms: tuple[RegisterRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersLost:
    """Rank to app: conversations with these workers ended; what is cached about them is stale."""

    peers: tuple[Incarnation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A phase that a request went through, by the monotonic clock of the host."""

    name: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All phases of a request that has ended, in order; `reason` is why it failed, or empty."""

    rid: RequestId
    stages: tuple[Stage, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Rank to app, about once a second and on `Ping`: gauges and cumulative counters, ready to be exported.

    Keys are metric names without the role prefix (`pages_free`, `queue_requests{queue=waiting}`, …): `gauges` are
    current values, `counters` only grow, `samples` are new histogram observations since the last snapshot. `timelines`
    are of the requests that ended since, where requests are traced.
    """

    rank: int
    progress: int  # grows with every turn of the loop; the app's measure of liveness
    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    timelines: tuple[Timeline, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """Rank to app, last words: why it exits."""

    rank: int
    text: str


TO_RANK = Codec(
    {
        1: events.Submit,
        2: events.Abort,
        3: events.AbortAll,
        4: events.StopHere,
        5: events.Resolved,
        6: events.LookupFailed,
        7: events.DrainBegan,
        8: Ping,
        9: Stop,
        10: events.FlushCache,
        11: events.Pause,
        12: events.Continue,
    }
)
"""Codec of the app-to-rank direction."""

TO_APP = Codec(
    {
        1: RankReady,
        2: LoadProgress,
        3: Emits,
        4: LookUps,
        5: Snapshot,
        6: RankFailed,
        7: PeersLost,
        8: RegisterRanks,
    }
)
"""Codec of the rank-to-app direction."""
