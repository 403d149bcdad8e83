"""The line for pages: who waits for KV pages on decode, and in which order they are admitted.

All stand in one line: greatest priority first, then who was retracted, then by arrival. What fits is admitted, so a short
request passes a giant that does not fit; but only so many pass it. Then nobody does, pages gather, and it is next.
"""

from collections.abc import Callable, Iterable
from heapq import nsmallest
from itertools import islice

from baton_core.chunks import reusable_tokens
from baton_core.decode.memory import DecodeMemory
from baton_core.decode.planning import DecodeBatch
from baton_core.decode.prealloc import DecodePreallocQueue
from baton_core.decode.transfer import DecodeTransferQueue
from baton_core.ledger import Ledger
from baton_core.machine import Handoff, Phase

_PAGES_MOST = 256
"""So many pages are looked up in the prefix cache in one pass, for those that would not fit otherwise."""

_LOOK_AT = 64
"""So many of each queue are looked at: enough to find one that fits, and bounded."""


class PageLine:
    """Decides who gets pages next. It keeps nothing but `overtaken` of those who wait, and when it last looked."""

    def __init__(
        self,
        ledger: Ledger,
        memory: DecodeMemory,
        prealloc: DecodePreallocQueue,
        transfer: DecodeTransferQueue,
        batch: DecodeBatch,
    ) -> None:
        self._ledger, self._memory = ledger, memory
        self._prealloc, self._transfer, self._batch = prealloc, transfer, batch
        self._seen: tuple[int, ...] = ()
        self._grants: dict[Phase, Callable[[Handoff], None]] = {
            Phase.PREALLOC: prealloc.order_pages,
            Phase.LOCAL: batch.begin_prompt,
            Phase.RETRACTED: self._take_back,
        }

    def admit(self) -> None:
        """Give pages to whoever can have them."""
        if not (self._prealloc.queue or self._batch.local or self._memory.retracted):
            return  # whoever waits next makes the stamp a new one
        while (stamp := self._stamp()) != self._seen:
            self._seen = stamp
            self._pass()

    def _pass(self) -> None:
        spare = least_priority = None
        look_ups = _PAGES_MOST
        passed: list[Handoff] = []
        for req in self._waiting():
            if not self._may(req):
                continue
            if spare is None:
                spare = self._ledger.spare - self._promised()
            wants = self._memory.pages_expected(req)
            if wants > spare and look_ups > 0:
                in_use = self._pages_in_use(req, min(look_ups, wants - max(0, spare)))
                wants, look_ups = wants - in_use, look_ups - in_use - 1
            if wants <= spare:
                spare -= wants
                self._grants[req.phase](req)
                for one in passed:
                    one.overtaken += 1
                continue
            if least_priority is None:
                least_priority = min((one.request.priority for one in self._batch.between_steps()), default=0)
            if req.request.priority > least_priority:
                self._memory.make_way(req, wants - spare, self._batch.between_steps())
            passed.append(req)
            if req.overtaken >= self._ledger.limits.overtakings_max:
                break

    def _stamp(self) -> tuple[int, ...]:
        """What must change before it is worth to look again."""
        ledger, rows = self._ledger, self._ledger.rows
        assert rows is not None
        seats, unplanned = self._batch.prompts_wanted()
        memory = self._memory
        news = self._prealloc.accepted + memory.backups + memory.recomputations + memory.fallbacks + ledger.copies_begun
        return ledger.arrivals, ledger.returned, rows.returned, len(ledger.copies), news, seats, unplanned

    def _waiting(self) -> list[Handoff]:
        accepted = (req for req in self._prealloc.queue.values() if req.phase is Phase.PREALLOC)
        local = (req for req in self._batch.local.values() if req.phase is Phase.LOCAL)
        retracted = (req for req in self._memory.retracted.values() if not self._memory.wants_prefill(req))
        line = [*retracted, *self._first(accepted), *self._first(local)]
        return sorted(line, key=_place)

    def _first(self, waiting: Iterable[Handoff]) -> Iterable[Handoff]:
        """Those of a queue that may be next; it stands in order of arrival."""
        return nsmallest(_LOOK_AT, waiting, key=_place) if self._ledger.prioritised else islice(waiting, _LOOK_AT)

    def _pages_in_use(self, req: Handoff, most: int) -> int:
        """Pages that it would share with somebody who reads them now, `most` at most: they take nothing from `spare`."""
        cache = self._ledger.cache
        if cache is None or req.slots:
            return 0
        usable = req.known if req.phase is Phase.PREALLOC else reusable_tokens(req)
        whole = min(usable // cache.page_tokens, most)
        return cache.in_use(req.known_tokens(0, whole * cache.page_tokens))

    def _may(self, req: Handoff) -> bool:
        """Whether it waits for nothing but pages."""
        if req.phase is Phase.PREALLOC:
            return self._ledger.rows is not None and self._ledger.rows.free > 0
        seats, unplanned = self._batch.prompts_wanted()
        if req.slots:
            return seats > 0
        return seats > 0 and unplanned < self._ledger.limits.chunk_tokens

    def _promised(self) -> int:
        """Pages by which those that have some are expected to grow."""
        holders = [*self._prealloc.waiters.values(), *self._prealloc.draining.values(), *self._transfer.queue.values()]
        holders += [*self._batch.arrived.values(), *self._batch.running.values(), *self._memory.restoring.values()]
        holders += [req for req in self._batch.local.values() if req.phase is Phase.COMPUTING]
        return sum(max(0, self._memory.pages_expected(req) - len(req.pages)) for req in holders)

    def _take_back(self, req: Handoff) -> None:
        if req.slots:
            self._memory.restore(req)
        else:
            del self._memory.retracted[req.rid]
            self._batch.begin_prompt(req)


def _place(req: Handoff) -> tuple[int, bool, int]:
    return -req.request.priority, not req.is_retracted, req.serial
