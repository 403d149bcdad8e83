"""Prefill's end of the simulated transfers: finished pages are read and sent on. `transfer` tells the whole."""

from typing import TYPE_CHECKING

from baton_core import kv_layout
from baton_core.effects import Offer, Push
from baton_core.ranks import unit_of
from baton_core.request import PageId, Room
from simulation.invariants import Broken, check_touch
from simulation.transfer import Attempt, Bytes, Transfer, Way, layout_of, member_name_beside

if TYPE_CHECKING:
    from simulation.network import Stream
    from simulation.rank import Rank


class Sender(Transfer):
    """Prefill's end: pages are read here, one at a time on each way."""

    def __init__(self, rank: "Rank") -> None:
        super().__init__(rank)
        # Orders that came before this rank, which may be behind its leader, took the log entry that offers.
        self._early: dict[tuple[Room, int, str], tuple[Stream, int]] = {}

    def offer(self, effect: Offer) -> None:
        """Take this attempt's orders, from the ranks of this unit only."""
        target, member = layout_of(effect.target), self.rank.member
        attempt = Attempt(
            rid=effect.rid,
            room=effect.room,
            attempt=effect.attempt,
            peer=effect.peer,
            pages_total=effect.pages_total,
            prompt_tokens=effect.prompt_tokens,
        )
        for reader in kv_layout.readers(self.layout, target, member):
            attempt.ways[reader] = Way(
                owed=kv_layout.bytes_fed(self.layout, member, target, reader, effect.prompt_tokens),
                plan=kv_layout.plan(self.layout, member, target, reader),
                wanted=range(target.pages(effect.prompt_tokens)),
                writes_row=kv_layout.row_writer(self.layout, target, reader) == member,
            )
        for reader, way in attempt.ways.items():
            _find_ends(attempt, way)
            early = self._early.pop((effect.room, effect.attempt, member_name_beside(effect.peer, reader)), None)
            if early is not None and early[0].open:
                self._ordered(attempt, way, *early)
        self._progress(attempt)
        self.begin(attempt)

    def heard(self, stream: "Stream", message: tuple[object, ...]) -> None:
        """An order, or how far the writing is."""
        kind, room, number, *rest = message
        attempt = self.attempts.get((room, number))  # type: ignore[arg-type]
        if attempt is None and kind == "order":
            key = room, number, stream.decode.name
            self._early[key] = stream, rest[0]  # type: ignore[index,assignment]
            self.world.at(self.world.shape.limits.other_leg_ms, self._early.pop, key, None)
            return
        way = None if attempt is None else attempt.ways.get(stream.decode.member)
        if attempt is None or way is None or unit_of(attempt.peer) != unit_of(stream.decode.name):
            return
        if kind == "order" and not attempt.revoked:
            self._ordered(attempt, way, stream, int(str(rest[0])))
        elif way.stream is not stream:
            return
        elif kind == "landed":
            way.moved = max(way.moved, int(str(rest[0])))
            self._progress(attempt)
        elif kind == "row_done" and not attempt.dead:
            way.row_done = True
        self.changed()

    def _ordered(self, attempt: Attempt, way: Way, stream: "Stream", held_pages: int) -> None:
        """What the reader holds already is not for it."""
        way.stream, way.ordered = stream, True
        way.wanted = range(held_pages, way.wanted.stop)
        way.owed = way.plan.owed_bytes(attempt.prompt_tokens, held_pages)
        _find_ends(attempt, way)
        self._progress(attempt)

    def _progress(self, attempt: Attempt) -> None:
        """The leading pages that all readers have; pages that this rank does not send count as there."""
        missing = (ordinal for way in attempt.ways.values() for ordinal, end in way.ends.items() if end > way.moved)
        attempt.progress = min(missing, default=attempt.pages_total)

    def push(self, effect: Push) -> None:
        """Send finished pages, and the row after the last."""
        attempt = self.attempts[effect.room, effect.attempt]
        if attempt.revoked:
            return  # this stage stopped on its own, ahead of the consensus
        attempt.begun = True
        for way in attempt.ways.values():
            pages = enumerate(effect.pages, effect.first)
            way.queue += [(ordinal, page) for ordinal, page in pages if ordinal in way.ends]
            way.last = effect.row if way.writes_row else None
            if not way.busy:
                self._read_next(attempt, way)
        self.changed()

    def _read_next(self, attempt: Attempt, way: Way) -> None:
        random, rates, stream = self.world.random.random, self.world.rates, way.stream
        if attempt.dead or stream is None:
            return
        if not way.queue:
            if way.last is not None:
                stream.post(True, "row", attempt.room, attempt.attempt, way.last)
                way.last = None
            return
        ordinal, page = way.queue.popleft()
        way.busy = True
        delay = int(random() * 3)
        if rates.reader_stuck and random() < rates.reader_stuck:
            self.world.fault("reader_stuck", self.rank, attempt.rid)
            return
        if rates.transfer_slow and random() < rates.transfer_slow:
            self.world.fault("transfer_slow", self.rank, attempt.rid)
            delay = int(random() * 1.3 * self.rank.ledger.limits.transfer_stall_ms)
        self.world.at(delay, self._read, stream, attempt, way, ordinal, page)

    def _read(self, stream: "Stream", attempt: Attempt, way: Way, ordinal: int, page: PageId) -> None:
        if not self.rank.alive or not stream.open:
            return
        if self.rank.paused:
            self.world.at(40, self._read, stream, attempt, way, ordinal, page)
            return
        check_touch(self.rank, attempt.rid, attempt.room, attempt.attempt, page, "reads")
        way.busy = False
        if attempt.dead:
            self._stop(attempt)
            return
        rates = self.world.rates
        if rates.transfer_error and self.world.random.random() < rates.transfer_error / 4:
            self.world.fault("transfer_error", self.rank, attempt.rid)
            self.break_off(attempt, "could not read the page")
            if self.world.random.random() < 0.7:
                stream.post(True, "broken", attempt.room, attempt.attempt)
            return
        stream.post(True, "page", attempt.room, attempt.attempt, self._pieces(attempt, way, ordinal, page))
        self._read_next(attempt, way)
        self.changed()

    def _pieces(self, attempt: Attempt, way: Way, ordinal: int, page: PageId) -> tuple[Bytes, ...]:
        memory, pieces = self.rank.memory, []
        for _, target, run in way.plan.pieces(range(ordinal, ordinal + 1), way.wanted):
            start = page * memory.page_bytes + run.source_offset
            pieces.append((target, run.target_offset, bytes(memory.bytes[start : start + run.nbytes])))
        return tuple(pieces)


def _find_ends(attempt: Attempt, way: Way) -> None:
    """Which pages of the prompt go this way, and how much is there after each."""
    moved = 0
    way.ends.clear()
    for ordinal, _, run in way.plan.pieces(range(attempt.pages_total), way.wanted):
        moved += run.nbytes
        way.ends[ordinal] = moved


class FakeSender(Sender):
    """`--transfer fake` on prefill: ordered at once, and pushed in no time."""

    def offer(self, effect: Offer) -> None:
        """No order will come, and none is needed."""
        plan = kv_layout.plan(self.layout, 0, self.layout, 0)
        way = Way(owed=1, plan=plan, wanted=range(0), writes_row=True, ordered=True)
        self.begin(Attempt(rid=effect.rid, room=effect.room, attempt=effect.attempt, ways={0: way}))

    def push(self, effect: Push) -> None:
        """There they are."""
        attempt = self.attempts[effect.room, effect.attempt]
        if attempt.revoked:
            raise Broken("law of pages", f"push of room {effect.room} after its revoke")
        attempt.progress = effect.first + len(effect.pages)
        attempt.magic = effect.row is not None
        self.changed()
