"""What must hold after every event, and when everything has come to rest."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton_core.effects import Moved
from baton_core.errors import Reason
from baton_core.ledger import Ledger
from baton_core.machine import Handoff, Phase
from baton_core.plan import StepPlan
from baton_core.request import Incarnation, RequestId, Room

if TYPE_CHECKING:
    from simulation.rank import Rank
    from simulation.unit import Unit
    from simulation.world import World

FAR = 10_000_000


class Broken(AssertionError):
    """The invariant `name` does not hold.

    Checks are written out as `if wrong: raise Broken(...)`, not as calls of a helper: they run millions of times in a
    suite, and a helper would have the text of every one of them made only to throw it away.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")


def check_moves(rank: "Rank", moved: Moved) -> None:
    """Phases follow each other along the table, from where the request really was."""
    legal = rank.legal_moves
    if (moved.source, moved.target) not in legal:
        raise Broken("table", f"{rank} {moved.rid}: {moved.source} -> {moved.target}")
    was = rank.phases.get(moved.rid, "intake")
    if was != moved.source:
        raise Broken("table", f"{rank} {moved.rid} was {was}, moved from {moved.source}")
    if moved.target in ("done", "failed"):
        rank.phases.pop(moved.rid, None)
    else:
        rank.phases[moved.rid] = moved.target


def check_books(rank: "Rank", now: int) -> None:
    """Pool and row accounting is exact, limits hold, and nothing waits without a deadline that `now` has not passed."""
    ledger = rank.ledger
    held = rows = slots = 0
    for handoff in ledger.live.values():
        held += len(handoff.pages) - len(handoff.shared)
        rows += handoff.row is not None
        slots += len(handoff.slots)
        if handoff.fenced:
            if not (handoff.in_step or handoff.opened or handoff.copy):
                raise Broken("liveness", f"{rank} {handoff.rid} is fenced and waits for nothing")
        else:
            due = handoff.due_at
            if due <= now:
                raise Broken("liveness", f"{rank} {handoff.rid} in {handoff.phase}: due at {due}, it is {now}")
        if handoff.shared:
            pages = tuple(node.page for node in handoff.shared)
            if handoff.pages[: len(pages)] != pages:
                raise Broken("pages", f"{rank} {handoff.rid} shares {pages} of {handoff.pages}")
    pool = ledger.pool
    cached = 0 if ledger.cache is None else ledger.cache.pages
    if pool.free + held + cached != pool.total:
        raise Broken("pages", f"{rank}: {pool.free} free + {held} held + {cached} cached != {pool.total}")
    if ledger.cache is not None and rank.flushes:
        stale = [page for page in ledger.cache.found() if rank.pages_born[page] < rank.flushes]
        if stale:
            raise Broken("flush", f"{rank}: pages {stale} are cached and older than the last flush")
    if ledger.rows is not None:
        total = ledger.rows.total
        if ledger.rows.free + rows != total:
            raise Broken("rows", f"{rank}: {ledger.rows.free} free + {rows} != {total}")
    host = ledger.slots
    if host.free + slots != host.total:
        raise Broken("slots", f"{rank}: {host.free} free + {slots} != {host.total}")
    _check_limits(rank, ledger)


def check_peer_gone(rank: "Rank", peer: Incarnation) -> None:
    """Nobody goes on waiting for a peer that is gone."""
    for handoff in rank.ledger.live.values():
        waits = handoff.peer == peer and handoff.phase not in _NEEDS_NOBODY
        if waits:
            raise Broken("peer gone", f"{rank} {handoff.rid} in {handoff.phase} still waits for {peer}")


_NEEDS_NOBODY = (
    Phase.ARRIVED,
    Phase.RUNNING,
    Phase.BACKING_UP,
    Phase.RETRACTED,
    Phase.RESTORING,
    Phase.COMPUTING,
    Phase.REVOKING,
)


def check_cause(world: "World", reason: Reason, text: str) -> None:
    """A request fails only for reasons that the world gave."""
    causes = _CAUSES.get(reason)
    if causes is None:
        return
    narrow = world.shape.limits.link_window < _NARROW and reason in (Reason.PEER_LOST, Reason.TRANSFER_FAILED)
    found = narrow or any(world.tally.faults[kind] for kind in causes)
    if not found:
        raise Broken("cause", f"{reason.name} ({text}) though there was none of {', '.join(causes)}")


_NARROW = 1_000  # such a window of a link may fill without any fault
_LINKS = (
    "frame_lost",
    "frame_late",
    "frame_repeated",
    "crash",
    "pause",
    "partition",
    "clock_jump",
    "slow_rank",
    "collective_timeout",
    "hop_cut",
)
_HOPS = ("registry_crash", "registry_pause", "hop_cut", "partition")
_MIXED_UP = ("leg_repeated", "room_reused")
_STREAMS = (*_LINKS, "restart", "drain", "transfer_slow", "transfer_error", "writer_stuck", "reader_stuck")
_CAUSES: dict[Reason, tuple[str, ...]] = {
    Reason.METADATA_CORRUPT: ("row_corrupt",),
    Reason.TRANSFER_FAILED: _STREAMS,
    Reason.LAYOUT_MISMATCH: ("layout_differs",),
    Reason.PROMPT_MISMATCH: ("prompt_differs", *_MIXED_UP),
    Reason.DP_CONFLICT: ("rank_differs", "route_conflict"),
    Reason.INVALID_REQUEST: ("intake_reject",),
    Reason.DUPLICATE_ROOM: _MIXED_UP,
    Reason.ABORTED: ("abort_all",),
    Reason.CLIENT_GONE: ("client_abort", "leg_cancelled"),
    Reason.DRAINING: ("drain", "crash", "collective_timeout"),
    Reason.LOOKUP_FAILED: ("lookup_failed", "crash", "drain", "collective_timeout", "leg_missing", *_HOPS),
    Reason.PEER_LOST: (*_LINKS, "lookup_stale", "drain"),
    Reason.DEVICE_FAULT: ("step_failed",),
    Reason.WORKER_LOST: ("crash", "drain", "collective_timeout"),
}
"""Of which faults a world must have seen at least one, before somebody may end for that reason."""


def _check_limits(rank: "Rank", ledger: Ledger) -> None:
    limits = ledger.limits
    if len(ledger.live) > limits.waiting_max:
        raise Broken("limits", f"{rank}: {len(ledger.live)} live requests")
    if ledger.rooms.tombstones > limits.tombstones_max:
        raise Broken("limits", f"{rank}: {ledger.rooms.tombstones} stones")
    running, kept = rank.queue_sizes()
    if running > limits.running_max:
        raise Broken("limits", f"{rank}: {running} running")
    if kept > limits.orphan_hellos_max:
        raise Broken("limits", f"{rank}: {kept} orphan hellos")


def holder(rank: "Rank", rid: RequestId, room: Room, attempt: int, what: str) -> Handoff:
    """The live handoff of this very attempt, which somebody is about to touch memory for."""
    handoff = rank.ledger.live.get(rid)
    if handoff is None or (handoff.room, handoff.attempt, handoff.opened) != (room, attempt, True):
        # The request may have gone on without this attempt, whose pages are its remains' then.
        every = [one for one in rank.ledger.live.values() if (one.room, one.attempt) == (room, attempt)]
        handoff = next((one for one in every if one.opened), every[0] if every else None)
    if handoff is None:
        raise Broken("law of pages", f"{rank} {what} for {rid} room {room} attempt {attempt}, which is over")
    return handoff


def check_touch(rank: "Rank", rid: RequestId, room: Room, attempt: int, page: int, what: str) -> None:
    """A transfer reads or writes `page` only while this very attempt holds it."""
    handoff = holder(rank, rid, room, attempt, what)
    if page not in handoff.pages:
        raise Broken("law of pages", f"{rank} {what} page {page}, which {rid} does not hold")


def check_write(rank: "Rank", rid: RequestId, room: Room, attempt: int, page: int) -> None:
    """Likewise a write, which moreover hits only what nobody else reads."""
    check_touch(rank, rid, room, attempt, page, "writes")
    shared = [node.page for node in holder(rank, rid, room, attempt, "writes").shared]
    if page in shared:
        raise Broken("law of pages", f"{rank} writes page {page} for {rid}, which the cache shares")


def check_row(rank: "Rank", rid: RequestId, room: Room, attempt: int, row: int) -> None:
    """A metadata row is written only while this very attempt holds it."""
    handoff = holder(rank, rid, room, attempt, "writes a row")
    if handoff.row != row:
        raise Broken("law of pages", f"{rank} writes row {row}; {rid} holds {handoff.row}")


def check_step(rank: "Rank", plan: StepPlan) -> None:
    """Everything a running plan names is still held by the request it was planned for."""
    for piece in plan.slices:
        handoff = rank.ledger.live.get(piece.rid)
        if handoff is None:
            raise Broken("law of pages", f"{rank} computes {piece.rid}, which is over")
        if handoff.pages != piece.pages:
            raise Broken("law of pages", f"{rank} computes pages that {piece.rid} lost")
        shared = len(handoff.shared) * rank.unit.page_tokens
        if piece.start < shared:
            raise Broken("law of pages", f"{rank} {piece.rid} writes a page that the cache shares")


def check_rest(units: Sequence["Unit"]) -> None:
    """At rest nothing is left: no request, page, row, watch, transfer, unacknowledged message or memory of a room."""
    for unit in units:
        unacked = unit.leader.unacknowledged()
        if unacked:
            raise Broken("rest", f"{unit}: {unacked} unacknowledged messages")
        for rank in unit.ranks:
            _check_rank_at_rest(rank)


def _check_rank_at_rest(rank: "Rank") -> None:
    ledger = rank.ledger
    if ledger.live:
        raise Broken("rest", f"{rank}: {list(ledger.live)} live")
    if rank.core.watched():
        raise Broken("rest", f"{rank}: {rank.core.watched()} watched")
    if ledger.cache is not None:
        ledger.cache.flush()
    if ledger.pool.free != ledger.pool.total:
        raise Broken("rest", f"{rank}: pages are missing")
    if ledger.slots.free != ledger.slots.total:
        raise Broken("rest", f"{rank}: host pages are missing")
    if ledger.rows is not None and ledger.rows.free != ledger.rows.total:
        raise Broken("rest", f"{rank}: rows are missing")
    if rank.transfer.kept():
        raise Broken("rest", f"{rank}: {rank.transfer.kept()} kept by the backend")
    now = rank.unit.leader.now
    rank.core.tick(now + FAR)
    rank.core.tick(now + 2 * FAR)  # what expired just now may leave a tombstone of its own
    if ledger.rooms.tombstones != 0:
        raise Broken("rest", f"{rank}: {ledger.rooms.tombstones} tombstones")
    if sum(rank.memories()) != 0:
        raise Broken("rest", f"{rank}: orphans, farewells {rank.memories()}")
    if rank.core.next_deadline() is not None:
        raise Broken("rest", f"{rank}: a deadline without anything waiting")
