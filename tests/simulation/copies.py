"""Where the KV cache of a retracted request waits, on one rank: host pages, and copies in order, page by page.

A copy is slow, may be overtaken by anything that happens meanwhile, and touches a page or a slot only while the request
holds it for this very copy: the law of pages, again.
"""

from collections import deque
from typing import TYPE_CHECKING

from baton_core.agreement import KVPoll, Observation
from baton_core.effects import Backup, Restore
from baton_core.errors import Reason
from baton_core.request import PageId
from simulation.invariants import Broken

if TYPE_CHECKING:
    from simulation.rank import Rank

RETRY_MS = 40


class Copies:
    """The host store of one rank."""

    def __init__(self, rank: "Rank") -> None:
        self.rank, self.world = rank, rank.world
        self._slots: dict[PageId, bytes] = {}
        self._queue: deque[Backup | Restore] = deque()
        self._over = 0
        self._failed: set[int] = set()

    def start(self, effect: Backup | Restore) -> None:
        """Make this copy after those that were asked for before."""
        self._queue.append(effect)
        if len(self._queue) == 1:
            self._next(0)

    def observe(self, copy: int) -> Observation:
        """Whether that copy is over, and how it ended."""
        if copy > self._over:
            return Observation(poll=KVPoll.Transferring)
        if copy in self._failed:
            text = "the device failed"
            return Observation(poll=KVPoll.Failed, writers_stopped=True, reason=Reason.DEVICE_FAULT, text=text)
        return Observation(poll=KVPoll.Success, writers_stopped=True)

    def _next(self, index: int) -> None:
        delay = 1 + int(self.world.random.random() * self.world.shape.step_ms) * self.rank.slowness
        self.world.at(delay, self._page, index)

    def _page(self, index: int) -> None:
        """One page of the oldest copy, or its end."""
        if not self.rank.alive:
            return
        if self.rank.paused:
            self.world.at(RETRY_MS, self._page, index)
            return
        effect = self._queue[0]
        rate = self.world.rates.copy_failed / (6 if isinstance(effect, Backup) else 1)
        if rate and self.world.random.random() < rate:
            self.world.fault("copy_failed", self.rank, [effect.rid])
            self._failed.add(effect.copy)
            index = len(effect.pages)
        if index < len(effect.pages):
            self._copy(effect, effect.pages[index], effect.slots[index])
            self._next(index + 1)
            return
        self._queue.popleft()
        self._over = effect.copy
        self.rank.nudge()
        if self._queue:
            self._next(0)

    def _copy(self, effect: Backup | Restore, page: PageId, slot: PageId) -> None:
        handoff = self.rank.ledger.live.get(effect.rid)
        held = handoff is not None and handoff.copy == effect.copy
        own = () if handoff is None else handoff.pages[len(handoff.shared) :]
        held = held and handoff is not None and slot in handoff.slots
        held = held and page in (handoff.pages if isinstance(effect, Backup) and handoff is not None else own)
        if not held:
            raise Broken("law of pages", f"{self.rank} {effect} touches page {page} and slot {slot}")
        memory = self.rank.memory
        first = page * memory.page_bytes
        if isinstance(effect, Backup):
            self._slots[slot] = bytes(memory.bytes[first : first + memory.page_bytes])
        else:
            memory.bytes[first : first + memory.page_bytes] = self._slots[slot]
