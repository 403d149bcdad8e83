"""One flow of an attempt: what goes between this rank and one rank of the other unit."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from baton_core.kv_layout import Plan
from baton_core.request import Incarnation

if TYPE_CHECKING:
    from baton_engine.transfer.attempts import Attempt


@dataclass(slots=True, kw_only=True, eq=False)
class Flow:
    """What goes between this rank and one of the other unit's. Guarded by the lock of its `AttemptTable`."""

    one: "Attempt"
    peer: Incarnation
    plan: Plan
    owed_bytes: int
    carries_row: bool
    held_pages: int = 0  # on prefill: of the reader's, the first of the prompt, which nobody writes
    moved_bytes: int = 0
    row_moved: bool = False
    busy: int = 0  # threads that touch its pages right now
    busy_since_s: float = 0.0  # of a monotonic clock
    busy_s: float = 0.0  # so long in all, up to then
    way: str = "none"  # by which it is carried
    carrier: object | None = None  # the stream that carries it
    halt: Callable[[], None] | None = None  # asks whoever touches the pages to stop
    cut: Callable[[], None] | None = None  # cuts them off, where that can be done
    must_verify: bool = False
    checksum: int | None = None  # what the writer says, once it has said so
    verified: bool = False
    digest: blake2b | None = None  # on prefill, of the bytes so far
    digested_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether everything owed is there."""
        return self.moved_bytes >= self.owed_bytes and (self.row_moved or not self.carries_row)

    @property
    def wants_check(self) -> bool:
        """Whether it counts only when its checksum is right; who owes nothing has nothing to vouch for."""
        return self.owed_bytes > 0 and (self.must_verify or self.checksum is not None)

    @property
    def complete(self) -> bool:
        """Whether everything owed is there, and is what was sent."""
        return self.is_whole and (self.verified or not self.wants_check)
