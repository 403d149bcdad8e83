"""What the router knows about one worker: a frozen view, replaced whole when anything in it changes."""

from dataclasses import dataclass
from enum import Enum

from baton_core.request import Incarnation


class Role(Enum):
    """Which leg of a request a worker serves. A colocated worker is a decode worker that is asked alone."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    """What the router may send to a worker."""

    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    UNREADY = "unready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker at one address. `reason` says why it is not usable, in words for an operator.

    `fingerprint` None means unknown (a worker that is not ours): it is taken to match everything, and the workers'
    own handshake has the last word. `in_flight` counts the legs this router has open there.
    """

    url: str
    role: Role
    instance: str = ""
    incarnation: Incarnation = ""
    fingerprint: str | None = None
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    dp_size: int = 1
    context_tokens: int = 0  # 0: unknown
    model: str = ""
    state: WorkerState = WorkerState.UNREADY
    reason: str = "not probed yet"
    in_flight: int = 0

    def __post_init__(self) -> None:
        if not self.url or self.dp_size < 1 or self.in_flight < 0:
            raise ValueError(f"worker {self.url!r}: dp_size {self.dp_size}, in_flight {self.in_flight}: out of range")

    @property
    def usable(self) -> bool:
        """Whether new requests may go there."""
        return self.state is WorkerState.READY


def compatible(prefill: Worker, decode: Worker) -> bool:
    """Whether the pages of one fit the other, as far as their published fingerprints say."""
    return not prefill.fingerprint or not decode.fingerprint or prefill.fingerprint == decode.fingerprint
