"""A tcp-like transfer backend over simulated pools: the receiver's own thread checks, then writes.

    decode                                       prefill
    Expect: zero the row, open    -- order --->  (offered to this peer, not revoked: pages may go)
    check, write, land            <-- page ----  read one page at a time, in order
    write the row, room word last <-- row -----  after the last page
    Success                       -- done ---->  Success

`writers_stopped` is said once and for good: after a revoke (or a broken stream), when nothing is under way any more. A
thread that is stuck in the middle of a page is freed by `fence`, which breaks the stream.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton_core.agreement import KVPoll, Observation, Watch
from baton_core.effects import Expect, Fence, Forget, Offer, Push, Revoke
from baton_core.errors import Reason
from baton_core.messages import MetadataRow
from baton_core.request import PageId, RequestId, Room
from simulation.invariants import Broken, check_row, check_touch, require

if TYPE_CHECKING:
    from simulation.network import Stream
    from simulation.process import Process

BROKEN = "the stream broke"


@dataclass(slots=True, kw_only=True)
class Attempt:
    """What a backend keeps about one attempt. `busy`: a page is being read or written right now."""

    rid: RequestId
    room: Room
    attempt: int
    stream: "Stream | None" = None
    ordered: bool = False
    pages: tuple[PageId, ...] = ()
    row: int = 0  # decode: where the row goes
    last: MetadataRow | None = None  # prefill: the row to send after the last page
    queue: list[tuple[int, PageId]] = field(default_factory=list)  # prefill: pages to send
    progress: int = 0
    busy: bool = False
    revoked: bool = False
    stopped: bool = False
    done: bool = False
    failed: tuple[Reason, str] | None = None
    peer: str = ""

    @property
    def dead(self) -> bool:
        """Nothing more may begin."""
        return self.revoked or self.failed is not None

    def poll(self) -> Observation:
        """The state right now."""
        if self.failed is not None or self.revoked:
            reason, text = self.failed or (None, "")
            return Observation(
                poll=KVPoll.Failed, writers_stopped=self.stopped, reason=reason, text=text, progress=self.progress
            )
        state = KVPoll.Bootstrapping
        if self.done:
            state = KVPoll.Success
        elif self.progress or self.queue or self.busy:
            state = KVPoll.Transferring
        elif self.ordered:
            state = KVPoll.WaitingForInput
        return Observation(poll=state, progress=self.progress)


class Transfer:
    """What both sides' backends do alike."""

    def __init__(self, process: "Process") -> None:
        self.process = process
        self.world = process.world
        self.attempts: dict[tuple[Room, int], Attempt] = {}
        self.dirty = False

    def poller(self, watch: Watch) -> Attempt:
        """The attempt that a core watches."""
        return self.attempts[watch.room, watch.attempt]

    def kept(self) -> list[tuple[Room, int]]:
        """Attempts that are not forgotten."""
        return list(self.attempts)

    def begin(self, attempt: Attempt) -> None:
        """Keep a new attempt; its name must be free, or late messages of another life would hit it."""
        key = attempt.room, attempt.attempt
        require(key not in self.attempts, "law of pages", f"{self.process} opens room, attempt {key} twice at once")
        self.attempts[key] = attempt
        self.changed()

    def changed(self) -> None:
        """An observation changed: poke the scheduler."""
        self.dirty = True
        if self.process.alive:
            self.process.wake(0)

    def revoke(self, effect: Revoke) -> None:
        """Begin nothing more; say when nothing is under way."""
        attempt = self.attempts[effect.room, effect.attempt]
        attempt.revoked = True
        attempt.queue.clear()
        if not attempt.busy:
            self.world.at(int(self.world.random.random() * 6), self._stop, attempt)
        self.changed()

    def fence(self, effect: Fence) -> None:
        """Break the peer's stream, which frees the thread that is stuck in it."""
        attempt = self.attempts[effect.room, effect.attempt]
        stream = attempt.stream
        if stream is not None:
            stream.close()
            self.closed(stream)
        self._stop(attempt)

    def forget(self, effect: Forget) -> None:
        """The attempt's pages are back in the pool."""
        self.attempts.pop((effect.room, effect.attempt), None)

    def closed(self, stream: "Stream") -> None:
        """A stream broke: what was under way will never end otherwise, so it ended."""
        for attempt in list(self.attempts.values()):
            if attempt.stream is not stream or attempt.done:
                continue
            attempt.busy = False
            self.break_off(attempt, BROKEN)

    def break_off(self, attempt: Attempt, text: str) -> None:
        """The attempt fails by the world's fault."""
        if attempt.failed is None:
            attempt.failed = (Reason.TRANSFER_FAILED, text)
        attempt.queue.clear()
        if not attempt.busy:
            self._stop(attempt)
        self.changed()

    def _stop(self, attempt: Attempt) -> None:
        if not attempt.busy and not attempt.stopped:
            attempt.stopped = True
            self.changed()

    def heard(self, stream: "Stream", message: tuple[object, ...]) -> None:
        """Something arrived on a stream."""
        raise NotImplementedError


class Receiver(Transfer):
    """Decode's end: pages and rows are written here, by its own thread."""

    def expect(self, effect: Expect) -> None:
        """Zero the row, open the attempt, order its pages."""
        process = self.process
        process.rows[effect.row] = None
        attempt = Attempt(rid=effect.rid, room=effect.room, attempt=effect.attempt, pages=effect.pages, row=effect.row)
        attempt.ordered = True
        self.begin(attempt)
        peer = self.world.by_incarnation(effect.peer)
        if peer is None:
            self.world.at(self.world.network.latency(), self.break_off, attempt, "connection refused")
            return
        attempt.stream = self.world.network.stream(peer, process)
        attempt.stream.post(False, "order", effect.room, effect.attempt, process.incarnation, len(effect.pages))

    def heard(self, stream: "Stream", message: tuple[object, ...]) -> None:
        """A page, or the row."""
        kind, room, number, *rest = message
        attempt = self.attempts.get((room, number))  # type: ignore[arg-type]
        if attempt is None or not self.may_write(attempt, stream):
            return
        if kind == "page":
            self._write(stream, attempt, *rest)  # type: ignore[arg-type]
        elif kind == "row":
            self._row(attempt, *rest)  # type: ignore[arg-type]
        elif kind == "broken":
            self.break_off(attempt, "prefill could not read the page")

    def may_write(self, attempt: Attempt, stream: "Stream") -> bool:
        """The receiver's check before every write."""
        return not attempt.dead and attempt.stream is stream

    def _write(self, stream: "Stream", attempt: Attempt, ordinal: int, content: int) -> None:
        random, rates = self.world.random.random, self.world.rates
        if ordinal >= len(attempt.pages):
            return
        attempt.busy = stream.busy = True
        if rates.writer_stuck and random() < rates.writer_stuck:
            self.world.fault("writer_stuck", self.process, attempt.rid)
            return
        self.world.at(int(random() * 3), self._land, stream, attempt, ordinal, content)

    def _land(self, stream: "Stream", attempt: Attempt, ordinal: int, content: int) -> None:
        if not self.process.alive or not stream.open:
            return
        if self.process.paused:
            self.world.at(40, self._land, stream, attempt, ordinal, content)
            return
        page = attempt.pages[ordinal]
        check_touch(self.process, attempt.rid, attempt.room, attempt.attempt, page, "writes")
        self.process.memory[page] = content
        attempt.busy = stream.busy = False
        attempt.progress += 1
        stream.post(False, "landed", attempt.room, attempt.attempt, attempt.progress)
        stream.pump(True)
        if attempt.dead:
            self._stop(attempt)
        self.changed()

    def _row(self, attempt: Attempt, row: MetadataRow) -> None:
        random, rates, rid = self.world.random.random, self.world.rates, attempt.rid
        delay = 0
        if rates.row_corrupt and random() < rates.row_corrupt:
            self.world.fault("row_corrupt", self.process, rid)
            wrong = (row.room + 1, row.attempt) if random() < 0.5 else (row.room, row.attempt + 1)
            row = MetadataRow(room=wrong[0], attempt=wrong[1], first_token=row.first_token)
        if rates.row_never and random() < rates.row_never:
            self.world.fault("row_never", self.process, rid)
        else:
            if rates.row_late and random() < rates.row_late:
                self.world.fault("row_late", self.process, rid)
                delay = int(random() * 1.3 * self.process.ledger.limits.transfer_stall_ms)
            self.world.at(delay, self._row_lands, attempt, row)
        attempt.done = True
        assert attempt.stream is not None
        attempt.stream.post(False, "done", attempt.room, attempt.attempt)
        self.changed()

    def _row_lands(self, attempt: Attempt, row: MetadataRow) -> None:
        known = self.attempts.get((attempt.room, attempt.attempt)) is attempt
        if not self.process.alive or not known or attempt.dead:
            return  # the receiver's check again: this attempt may write no more
        check_row(self.process, attempt.rid, attempt.room, attempt.attempt, attempt.row)
        self.process.rows[attempt.row] = row
        self.changed()


class Sender(Transfer):
    """Prefill's end: pages are read here, one at a time per attempt."""

    def offer(self, effect: Offer) -> None:
        """Take this attempt's order, from this peer only."""
        self.begin(Attempt(rid=effect.rid, room=effect.room, attempt=effect.attempt, peer=effect.peer))

    def heard(self, stream: "Stream", message: tuple[object, ...]) -> None:
        """An order, or how far the writing is."""
        kind, room, number, *rest = message
        attempt = self.attempts.get((room, number))  # type: ignore[arg-type]
        if attempt is None:
            return
        if kind == "order" and rest[0] == attempt.peer and not attempt.revoked:
            attempt.stream, attempt.ordered = stream, True
        elif attempt.stream is not stream:
            return
        elif kind == "landed":
            attempt.progress = max(attempt.progress, int(str(rest[0])))
        elif kind == "done" and not attempt.dead:
            attempt.done = True
        self.changed()

    def push(self, effect: Push) -> None:
        """Send finished pages, and the row after the last."""
        attempt = self.attempts[effect.room, effect.attempt]
        attempt.queue += [(effect.first + index, page) for index, page in enumerate(effect.pages)]
        attempt.last = effect.row
        if not attempt.busy:
            self._read_next(attempt)
        self.changed()

    def _read_next(self, attempt: Attempt) -> None:
        random, rates, stream = self.world.random.random, self.world.rates, attempt.stream
        if attempt.dead or stream is None:
            return
        if not attempt.queue:
            if attempt.last is not None:
                stream.post(True, "row", attempt.room, attempt.attempt, attempt.last)
            return
        ordinal, page = attempt.queue.pop(0)
        attempt.busy = True
        delay = int(random() * 3)
        if rates.reader_stuck and random() < rates.reader_stuck:
            self.world.fault("reader_stuck", self.process, attempt.rid)
            return
        if rates.transfer_slow and random() < rates.transfer_slow:
            self.world.fault("transfer_slow", self.process, attempt.rid)
            delay = int(random() * 1.3 * self.process.ledger.limits.transfer_stall_ms)
        self.world.at(delay, self._read, stream, attempt, ordinal, page)

    def _read(self, stream: "Stream", attempt: Attempt, ordinal: int, page: PageId) -> None:
        if not self.process.alive or not stream.open:
            return
        if self.process.paused:
            self.world.at(40, self._read, stream, attempt, ordinal, page)
            return
        check_touch(self.process, attempt.rid, attempt.room, attempt.attempt, page, "reads")
        attempt.busy = False
        if attempt.dead:
            self._stop(attempt)
            return
        rates = self.world.rates
        if rates.transfer_error and self.world.random.random() < rates.transfer_error / 4:
            self.world.fault("transfer_error", self.process, attempt.rid)
            self.break_off(attempt, "could not read the page")
            if self.world.random.random() < 0.7:
                stream.post(True, "broken", attempt.room, attempt.attempt)
            return
        stream.post(True, "page", attempt.room, attempt.attempt, ordinal, self.process.memory[page])
        self._read_next(attempt)
        self.changed()


class FakeReceiver(Receiver):
    """`--transfer fake` on decode: nothing moves; the pages are there by magic, and the row is decode's own."""

    def expect(self, effect: Expect) -> None:
        """The right contents appear at once."""
        from simulation.oracle import Oracle

        request = self.process.ledger.live[effect.rid].request
        oracle = Oracle(request.prompt, self.world.shape.page_tokens)
        for page, content in zip(effect.pages, oracle.contents, strict=True):
            self.process.memory[page] = content
        row = MetadataRow(room=effect.room, attempt=effect.attempt, first_token=oracle.next())
        self.process.rows[effect.row] = row
        self.begin(Attempt(rid=effect.rid, room=effect.room, attempt=effect.attempt, ordered=True, done=True))


class FakeSender(Sender):
    """`--transfer fake` on prefill: ordered at once, and pushed in no time."""

    def offer(self, effect: Offer) -> None:
        """No order will come, and none is needed."""
        self.begin(Attempt(rid=effect.rid, room=effect.room, attempt=effect.attempt, ordered=True))

    def push(self, effect: Push) -> None:
        """There they are."""
        attempt = self.attempts[effect.room, effect.attempt]
        if attempt.revoked:
            raise Broken(f"law of pages: push of room {effect.room} after its revoke")
        attempt.progress = effect.first + len(effect.pages)
        attempt.done = effect.row is not None
        self.changed()
