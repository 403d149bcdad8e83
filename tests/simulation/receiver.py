"""Decode's end of the simulated transfers: one thread a stream checks, then writes. `transfer` tells the whole."""

from typing import TYPE_CHECKING

from baton_core import kv_layout
from baton_core.effects import Expect
from baton_core.messages import MetadataRow
from baton_core.ranks import Member
from simulation.invariants import Broken, check_row, check_write
from simulation.oracle import Oracle
from simulation.transfer import Attempt, Bytes, Transfer, Way, layout_of, member_name_beside

if TYPE_CHECKING:
    from simulation.network import Stream


class Receiver(Transfer):
    """Decode's end: pages and rows are written here, by its own threads."""

    def expect(self, effect: Expect) -> None:
        """Zero the row, open the attempt, order its pages from every rank that feeds this one."""
        source, member = layout_of(effect.source), self.rank.member
        self.rank.metadata[effect.row] = None
        attempt = Attempt(
            rid=effect.rid,
            room=effect.room,
            attempt=effect.attempt,
            peer=effect.peer,
            pages=effect.pages,
            pages_total=self.layout.pages(effect.prompt_tokens),
            row=effect.row,
        )
        names_row = kv_layout.row_writer(source, self.layout, member)
        for writer in kv_layout.writers(source, self.layout, member):
            attempt.ways[writer] = Way(
                owed=kv_layout.bytes_fed(source, writer, self.layout, member, effect.prompt_tokens, effect.held_pages),
                plan=kv_layout.plan(source, writer, self.layout, member),
                wanted=range(effect.held_pages, len(effect.pages)),
                writes_row=writer == names_row,
                ordered=True,
            )
        self.begin(attempt)
        for writer, way in attempt.ways.items():
            self._order(attempt, writer, way)

    def _order(self, attempt: Attempt, writer: Member, way: Way) -> None:
        peer = self.world.ranks.get(member_name_beside(attempt.peer, writer))
        if peer is None or not peer.alive:
            self.world.at(self.world.network.latency(), self.break_off, attempt, "connection refused")
            return
        way.stream = self.world.network.stream(peer, self.rank)
        way.stream.post(False, "order", attempt.room, attempt.attempt, way.wanted.start)

    def heard(self, stream: "Stream", message: tuple[object, ...]) -> None:
        """A page, or the row."""
        kind, room, number, *rest = message
        attempt = self.attempts.get((room, number))  # type: ignore[arg-type]
        if attempt is None or not self.may_write(attempt, stream):
            return
        if kind == "page":
            self._write(stream, attempt, *rest)  # type: ignore[arg-type]
        elif kind == "row":
            self._row(stream, attempt, *rest)  # type: ignore[arg-type]
        elif kind == "broken":
            self.break_off(attempt, "prefill could not read the page")

    def may_write(self, attempt: Attempt, stream: "Stream") -> bool:
        """The receiver's check before every write."""
        way = attempt.ways.get(stream.prefill.member)
        return not attempt.dead and way is not None and way.stream is stream

    def _write(self, stream: "Stream", attempt: Attempt, pieces: tuple[Bytes, ...]) -> None:
        random, rates = self.world.random.random, self.world.rates
        attempt.ways[stream.prefill.member].busy = stream.busy = attempt.begun = True
        if rates.writer_stuck and random() < rates.writer_stuck:
            self.world.fault("writer_stuck", self.rank, attempt.rid)
            return
        self.world.at(int(random() * 3), self._land, stream, attempt, pieces)

    def _land(self, stream: "Stream", attempt: Attempt, pieces: tuple[Bytes, ...]) -> None:
        if not self.rank.alive or not stream.open:
            return
        if self.rank.paused:
            self.world.at(40, self._land, stream, attempt, pieces)
            return
        way, memory = attempt.ways[stream.prefill.member], self.rank.memory
        for ordinal, offset, content in pieces:
            page = attempt.pages[ordinal]
            check_write(self.rank, attempt.rid, attempt.room, attempt.attempt, page)
            start = page * memory.page_bytes + offset
            memory.bytes[start : start + len(content)] = content
            way.moved += len(content)
        way.busy = stream.busy = False
        owed = sum(one.owed for one in attempt.ways.values())
        received = sum(one.moved for one in attempt.ways.values())
        attempt.progress = attempt.pages_total * received // owed if owed else attempt.pages_total
        stream.post(False, "landed", attempt.room, attempt.attempt, way.moved)
        stream.pump(True)
        if attempt.dead:
            self._stop(attempt)
        self.changed()

    def _row(self, stream: "Stream", attempt: Attempt, row: MetadataRow) -> None:
        random, rates, rid = self.world.random.random, self.world.rates, attempt.rid
        delay = 0
        if rates.row_corrupt and random() < rates.row_corrupt:
            self.world.fault("row_corrupt", self.rank, rid)
            wrong = (row.room + 1, row.attempt) if random() < 0.5 else (row.room, row.attempt + 1)
            row = MetadataRow(room=wrong[0], attempt=wrong[1], first_token=row.first_token)
        if rates.row_never and random() < rates.row_never:
            self.world.fault("row_never", self.rank, rid)
        else:
            if rates.row_late and random() < rates.row_late:
                self.world.fault("row_late", self.rank, rid)
                delay = int(random() * 1.3 * self.rank.ledger.limits.transfer_stall_ms)
            self.world.at(delay, self._row_lands, attempt, stream.prefill.member, row)
        way = attempt.ways[stream.prefill.member]
        way.row_done = True
        stream.post(False, "row_done", attempt.room, attempt.attempt)
        self.changed()

    def _row_lands(self, attempt: Attempt, writer: Member, row: MetadataRow) -> None:
        known = self.attempts.get((attempt.room, attempt.attempt)) is attempt
        if not self.rank.alive or not known or attempt.dead:
            return  # the receiver's check again: this attempt may write no more
        check_row(self.rank, attempt.rid, attempt.room, attempt.attempt, attempt.row)
        text = f"{self.rank} row {attempt.row} of {attempt.rid} is written by {attempt.row_from} and by {writer}"
        if attempt.row_from is not None:
            raise Broken("one row writer", text)
        attempt.row_from = writer
        self.rank.metadata[attempt.row] = row
        self.changed()


class FakeReceiver(Receiver):
    """`--transfer fake` on decode: nothing moves; the pages are there by magic, and the row is decode's own."""

    def expect(self, effect: Expect) -> None:
        """The right contents appear at once."""
        oracle = Oracle(self.rank.ledger.live[effect.rid].known_tokens(0, effect.prompt_tokens))
        self.rank.memory.write(effect.pages, oracle.folds[: effect.prompt_tokens], effect.held_pages)
        row = MetadataRow(room=effect.room, attempt=effect.attempt, first_token=oracle.next())
        self.rank.metadata[effect.row] = row
        self.begin(Attempt(rid=effect.rid, room=effect.room, attempt=effect.attempt, magic=True))
