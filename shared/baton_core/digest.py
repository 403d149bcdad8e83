"""Numbers that say in what state a core is, for the digest by which the ranks of a unit prove that they are alike.

Everything that decides what happens next is in: phases, pages, queues in order, pools, cache, rooms, deadlines. Texts are
not (they are the leader's business), nor what one pipeline stage alone has stopped (`draining`).
"""

from collections.abc import Iterable

from baton_core.ledger import Ledger
from baton_core.machine import Handoff, Phase

_PHASES = {phase: number for number, phase in enumerate(Phase)}


def numbers_of_ledger(ledger: Ledger) -> list[int]:
    """The books of one side."""
    pool, rows, cache, rooms = ledger.pool, ledger.rows, ledger.cache, ledger.rooms
    numbers = [ledger.draining, ledger.arrivals, len(ledger.live), rooms.tombstones, rooms.trace.digest()]
    numbers += (pool.free, pool.trace.digest(), ledger.epoch, ledger.stale_before)
    if rows is not None:
        numbers += (rows.free, rows.trace.digest())
    if ledger.slots.total:
        numbers += (ledger.slots.free, ledger.slots.trace.digest(), ledger.copies_begun, len(ledger.copies))
    if cache is not None:
        numbers += (cache.pages, cache.locked, cache.hit_tokens, cache.asked_tokens, cache.trace.digest())
    for reason in sorted(ledger.rejections):
        numbers += (reason, ledger.rejections[reason])
    for handoff in ledger.live.values():
        numbers += _numbers_of(handoff)
    return numbers


def numbers_of_queue(queue: Iterable[Handoff]) -> list[int]:
    """Who stands in a queue, in order."""
    serials = [handoff.serial for handoff in queue]
    return [len(serials), *serials]


def bytes_of_ledger(ledger: Ledger, others: Iterable[str]) -> bytes:
    """Names in the books, and `others`."""
    peers = [handoff.peer or "" for handoff in ledger.live.values()]
    return "\0".join([*ledger.live, *peers, *others]).encode()


def _numbers_of(one: Handoff) -> tuple[int, ...]:
    return (
        one.serial,
        one.room,
        one.attempt,
        _PHASES[one.phase],
        one.deadline_at,
        -1 if one.stage_deadline_at is None else one.stage_deadline_at,
        -1 if one.row is None else one.row,
        one.opened,
        one.in_step,
        one.planned,
        one.computed,
        one.pushed,
        one.progress,
        one.cached_tokens,
        0 if one.to_finish is None else one.to_finish.reason,
        one.answered,
        one.fenced,
        one.is_retracted,
        one.retractions,
        one.rebootstraps,
        one.computes_here,
        one.overtaken,
        one.copy,
        len(one.slots),
        len(one.outputs),
        one.outputs[-1] if one.outputs else -1,
        len(one.shared),
        one.epoch,
        # Which pages were handed out, and in which order, is in the pool's trace; these say who got them.
        len(one.pages),
        one.pages[0] if one.pages else -1,
        one.pages[-1] if one.pages else -1,
    )
