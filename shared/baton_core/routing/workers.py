"""What the router knows about its workers: frozen views, targets that requests may be sent to, and counted load.

A *worker* is one address. A *target* is what a policy chooses: a worker, or one data-parallel rank of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from baton_core.request import Incarnation


class Role(Enum):
    """Which leg of a request a worker serves. A colocated worker is a decode worker that is asked alone."""

    PREFILL = "prefill"
    DECODE = "decode"

    # There is one of each, so its identity will do: Enum's own is a call of Python's, and a router asks six times a request.
    __hash__ = object.__hash__


class WorkerState(Enum):
    """What the router may send to a worker."""

    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    UNREADY = "unready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker at one address. `reason` says why it is not usable, in words for an operator.

    `fingerprint` None means unknown (a worker that is not ours): it is taken to match everything, and the workers'
    own handshake has the last word.
    """

    url: str
    role: Role
    instance: str = ""
    incarnation: Incarnation = ""
    fingerprint: str | None = None
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    dp_size: int = 1
    follows_room: bool | None = None  # prefill runs a room on rank room mod dp_size; None: it does not say
    context_tokens: int = 0  # 0: unknown
    model: str = ""
    state: WorkerState = WorkerState.UNREADY
    reason: str = "not probed yet"

    def __post_init__(self) -> None:
        if not self.url or self.dp_size < 1:
            raise ValueError(f"worker {self.url!r}: dp_size {self.dp_size}: out of range")

    @property
    def usable(self) -> bool:
        """Whether new requests may go there."""
        return self.state is WorkerState.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request is sent to. `dp_rank` None: the worker as a whole, which chooses among its ranks itself."""

    key: str  # `url`, or `url@rank`
    worker: Worker
    dp_rank: int | None = None


@dataclass(slots=True, kw_only=True)
class Load:
    """The work at one target: what this router has there now, and what the worker last said about all routers."""

    in_flight: int = 0  # legs of this router
    reported_requests: int = 0  # running and waiting there, when it last said so
    in_flight_then: int = 0  # legs of this router at that time
    kv_tokens_free: int | None = None  # None: not known

    @property
    def requests(self) -> int:
        """Requests there now, as far as can be known: the report, corrected by what came and went since."""
        # Read hundreds of times for one request, hence no call of `max`.
        others = self.reported_requests - self.in_flight_then
        return self.in_flight + others if others > 0 else self.in_flight

    def report(self, *, requests: int, kv_tokens_free: int | None) -> None:
        """The worker told how much it has."""
        self.reported_requests = requests
        self.in_flight_then = self.in_flight
        self.kv_tokens_free = kv_tokens_free


Loads = Mapping[str, Load]
"""By key of the target; a target without one has no work."""

NO_LOAD = Load()


def load_of(target: Target, loads: Loads) -> int:
    """Requests at that target now."""
    return loads.get(target.key, NO_LOAD).requests


def in_flight_of(target: Target, loads: Loads) -> int:
    """Legs of this router at that target now."""
    return loads.get(target.key, NO_LOAD).in_flight


def has_room(target: Target, loads: Loads, tokens: int) -> bool:
    """Whether that many tokens of KV fit there now, as far as is known."""
    free = loads.get(target.key, NO_LOAD).kv_tokens_free
    return free is None or free >= tokens


def targets_of(worker: Worker, *, by_rank: bool) -> tuple[Target, ...]:
    """The targets that a worker offers: itself, or each of its ranks where there are several."""
    if not by_rank or worker.dp_size == 1:
        return (Target(key=worker.url, worker=worker),)
    ranks = range(worker.dp_size)
    return tuple(Target(key=f"{worker.url}@{rank}", worker=worker, dp_rank=rank) for rank in ranks)


def compatible(prefill: Worker, decode: Worker) -> bool:
    """Whether the pages of one fit the other, as far as their published fingerprints say."""
    return not prefill.fingerprint or not decode.fingerprint or prefill.fingerprint == decode.fingerprint
