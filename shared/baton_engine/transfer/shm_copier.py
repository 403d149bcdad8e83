"""Copies pages into a decode rank's pool: everything that one prefill rank does to one decode rank, on one thread.

    take ──► BEGIN ──► (granted) copy a batch ──► listen ──► copy a batch ──► … ──► PROGRESS, or row and FINISHED
                                                    │ REVOKE, or revoked on our side
                                                    └────────────────────────────► STOPPED

The thread that copies is the one that listens and answers. So when it says STOPPED, no write is under way, and between
REVOKE and STOPPED lies at most one batch.
"""

import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton_core.errors import Reason
from baton_core.messages import ROOM_WORD, ROW_BYTES
from baton_core.request import PageId
from baton_engine.sealed_memory import SealedWindow
from baton_engine.transfer.attempts import AttemptTable
from baton_engine.transfer.checksum import Checksums
from baton_engine.transfer.flow import Flow
from baton_engine.transfer.pool_bytes import BATCH_BYTES, Bytes, PoolSource, rows_of
from baton_engine.transfer.shm_wire import FRAME, SERIAL_MAX, Frame, Kind, Welcome, WireError, order_digest
from baton_engine.transfer.ways import Job

POPULATE_PAGES = 8  # mapped in one go while there is nothing to copy
OUTBOX_MAX = 65_536

Span = tuple[int, int, int, int, int, int]
"""Source offset, target offset, bytes; how many such rows, and how far apart they are in source and target.

Offsets count from the start of a pool.
"""


@dataclass(slots=True, eq=False)
class _Writing:
    """What BEGIN opened and FINISHED or STOPPED ends."""

    flow: Flow
    serial: int
    granted: bool = False
    over: bool = False
    written_bytes: int = 0
    parked: list[tuple[Job, list[Span]]] = field(default_factory=list)  # until the grant


class DecodeMemory:
    """A decode rank's pool and rows, mapped here. Takes both descriptors over; raises ValueError or OSError."""

    def __init__(self, welcome: Welcome, pool_descriptor: int, rows_descriptor: int) -> None:
        self.welcome = welcome
        try:
            self._pool = SealedWindow(pool_descriptor, welcome.pages * welcome.page_bytes)
        except (OSError, ValueError):
            os.close(rows_descriptor)
            raise
        try:
            self._rows = SealedWindow(rows_descriptor, welcome.rows * ROW_BYTES)
        except (OSError, ValueError):
            self._pool.close()
            raise
        self.bytes: Bytes = np.frombuffer(self._pool.mapping, dtype=np.uint8)
        self._rows.populate(0, welcome.rows * ROW_BYTES)
        self._populated = bytearray(welcome.pages)
        self._order = threading.Lock()
        self._order.acquire()

    def populate(self, page: PageId) -> None:
        """Map a page that will be written soon."""
        if page < self.welcome.pages and not self._populated[page]:
            self._populated[page] = True
            self._pool.populate(page * self.welcome.page_bytes, self.welcome.page_bytes)

    def write_row(self, row: int, raw: bytes) -> None:
        """Fill a row, its room word last: whoever sees the word sees the row and every page copied before it."""
        first = row * ROW_BYTES
        self._rows.mapping[first + ROOM_WORD.size : first + ROW_BYTES] = raw[ROOM_WORD.size :]
        # Release, then acquire: nothing written above may become visible after what is written below. x86 keeps stores
        # in order anyway; ARM does so only here. The word itself is one aligned store of 8 bytes.
        self._order.release()
        self._order.acquire()
        self._rows.mapping[first : first + ROOM_WORD.size] = raw[: ROOM_WORD.size]

    def close(self) -> None:
        """Unmap both."""
        del self.bytes
        self._pool.close()
        self._rows.close()


class Copier:
    """One decode rank's writings. Built, used and dropped on one thread; never blocks.

    `halted` tells that the thread shall end. Raises OSError when decode is gone.
    """

    def __init__(
        self,
        stream: socket.socket,
        memory: DecodeMemory,
        source: PoolSource,
        table: AttemptTable,
        carrier: object,
        halted: Callable[[], bool],
        sums: Checksums | None = None,
    ) -> None:
        self._sums = sums
        self._stream, self._memory, self._source = stream, memory, source
        self._table, self._carrier, self._halted = table, carrier, halted
        self._serials = itertools.count(1)
        self._writings: dict[int, _Writing] = {}
        self._by_flow: dict[int, _Writing] = {}  # by id of a flow that `_writings` keeps alive
        self._ready: deque[tuple[_Writing, Job, list[Span]]] = deque()
        self._cold: deque[PageId] = deque()
        self._outbox: deque[bytes] = deque()

    @property
    def unsent(self) -> bool:
        """Whether the socket was full; call `flush` when it can be written."""
        return bool(self._outbox)

    def warm(self, pages: Sequence[PageId]) -> None:
        """These pages will be written."""
        self._cold.extend(pages)

    def take(self, job: Job) -> None:
        """A push; the first of an attempt that has anything for this rank asks decode for the grant."""
        spans = _spans(job, self._source.page_bytes, self._source.span_bytes_max)
        if not (spans or job.row) or not self._fits(job):
            return
        writing = self._by_flow.get(id(job.flow)) or self._begin(job)
        if writing.granted:
            self._ready.append((writing, job, spans))
        else:
            writing.parked.append((job, spans))

    def work(self) -> bool:
        """Copy one push, or map a few pages; False if there is nothing to do."""
        if self._ready:
            writing, job, spans = self._ready.popleft()
            if not writing.over:
                self._copy(writing, job, spans)
            return True
        for _ in range(min(POPULATE_PAGES, len(self._cold))):
            self._memory.populate(self._cold.popleft())
        return bool(self._cold)

    def sweep(self) -> None:
        """End the writings of attempts that failed or were revoked on our side."""
        for writing in [one for one in self._writings.values() if one.flow.one.is_given_up]:
            self._stop(writing)

    def flush(self) -> None:
        """Send what the socket did not take."""
        while self._outbox:
            try:
                self._stream.send(self._outbox[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._outbox.popleft()

    def hear(self) -> None:
        """Take in everything that decode said."""
        while True:
            try:
                raw = self._stream.recv(FRAME.size + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not raw:
                raise WireError("end of file")
            try:
                frame = Frame.unpack(raw)
            except ValueError as error:
                raise WireError(str(error)) from error
            self._answered(frame)

    # -- writings

    def _fits(self, job: Job) -> bool:
        target, welcome = job.target, self._memory.welcome
        text = ""
        if target.page_bytes != welcome.page_bytes:
            text = f"a page has {target.page_bytes} bytes in decode's order and {welcome.page_bytes} in its pool"
        elif max(target.pages, default=0) >= welcome.pages or target.row >= welcome.rows:
            text = f"decode's order names a page or row outside its {welcome.pages} pages and {welcome.rows} rows"
        if text:
            self._table.fail(job.flow.one, Reason.LAYOUT_MISMATCH, text)
        return not text

    def _begin(self, job: Job) -> _Writing:
        writing = _Writing(job.flow, next(self._serials) & SERIAL_MAX)
        self._writings[writing.serial] = self._by_flow[id(job.flow)] = writing
        self._send(
            Frame(
                kind=Kind.BEGIN,
                serial=writing.serial,
                room=job.flow.one.room,
                attempt=job.flow.one.attempt,
                count=order_digest(job.target.pages, job.target.row, job.target.held_pages),
            )
        )
        return writing

    def _answered(self, frame: Frame) -> None:
        writing = self._writings.get(frame.serial)
        if frame.kind is Kind.REFUSED:
            if writing is not None:
                self._close(writing)
                self._table.refused(writing.flow.one, "decode refused the pages: it gave this attempt up")
        elif writing is None:
            # Granted or revoked after we gave it up: decode still waits to hear that.
            self._send(Frame(kind=Kind.STOPPED, serial=frame.serial))
        elif frame.kind is Kind.GRANT:
            writing.granted = True
            self._ready.extend((writing, job, spans) for job, spans in writing.parked)
            writing.parked.clear()
        elif frame.kind is Kind.REVOKE:
            self._stop(writing)
            self._table.refused(writing.flow.one, "decode revoked the attempt")

    def _stop(self, writing: _Writing) -> None:
        self._close(writing)
        self._send(Frame(kind=Kind.STOPPED, serial=writing.serial))

    def _close(self, writing: _Writing) -> None:
        writing.over = True
        del self._writings[writing.serial], self._by_flow[id(writing.flow)]

    def _send(self, frame: Frame) -> None:
        if len(self._outbox) >= OUTBOX_MAX:
            raise WireError(f"decode has not read {OUTBOX_MAX} messages")
        self._outbox.append(frame.pack())
        self.flush()

    # -- copying

    def _copy(self, writing: _Writing, job: Job, spans: list[Span]) -> None:
        flow, row = writing.flow, job.row
        if not self._table.enter(flow, self._carrier):
            self._stop(writing)
            return
        try:
            checksum = None if self._sums is None else self._sums.take_in(job)
            if checksum is not None:
                self._send(Frame(kind=Kind.CHECKSUM, serial=writing.serial, count=checksum))
            whole = self._copy_spans(writing, spans)
            if whole:
                writing.written_bytes += sum(span[2] * span[3] for span in spans)
                self._say_how_far(writing, job.target.row, row)
        finally:
            self._table.leave(flow)
        if whole:
            self._table.moved(flow, writing.written_bytes, row=row is not None)

    def _say_how_far(self, writing: _Writing, number: int, row: bytes | None) -> None:
        """Write the row, if it is due, and tell decode what is there."""
        if row is not None:
            self._memory.write_row(number, row)
        # Who owes the row ends with it; what is missing then, decode will notice.
        owes_row = writing.flow.carries_row
        is_last = row is not None if owes_row else writing.written_bytes >= writing.flow.owed_bytes
        if is_last:
            self._close(writing)
        kind = Kind.FINISHED if is_last else Kind.PROGRESS
        self._send(Frame(kind=kind, serial=writing.serial, count=writing.written_bytes))

    def _copy_spans(self, writing: _Writing, spans: list[Span]) -> bool:
        """Copy, batch by batch; False if told to stop in between."""
        source, memory, left = self._source, self._memory, BATCH_BYTES
        for source_offset, target_offset, nbytes, count, source_step, target_step in spans:
            if left <= 0:
                left = BATCH_BYTES
                self.hear()
                if writing.over or writing.flow.one.is_given_up or self._halted():
                    return False
            # Both sides are views of bytes, so this is one memcpy (or one a row), without the interpreter lock. No
            # variable keeps the target: one in the frame of an exception would keep the pool mapped.
            if count == 1:
                np.copyto(memory.bytes[target_offset : target_offset + nbytes], source.view(source_offset, nbytes))
            else:
                np.copyto(
                    rows_of(memory.bytes, target_offset, nbytes, count, target_step),
                    source.rows(source_offset, nbytes, count, source_step),
                )
            left -= nbytes * count
        return True


def _spans(job: Job, source_page_bytes: int, span_bytes_max: int) -> list[Span]:
    """The push as copies, neighbouring pages joined up to `span_bytes_max`."""
    push_first, pages, ordered, page_bytes = job.push.first, job.push.pages, job.target.pages, job.target.page_bytes
    spans: list[Span] = []
    source_end = target_end = joined = -1
    for ordinal, first, stripes in job.flow.plan.stripes(job.ordinals, job.target.wanted):
        source_page = pages[ordinal - push_first] * source_page_bytes
        for stripe in stripes:
            source_offset = source_page + stripe.source_offset
            target_offset = ordered[first + stripe.target_ordinal] * page_bytes + stripe.target_offset
            nbytes, count = stripe.nbytes, stripe.count
            if count > 1:
                spans.append((source_offset, target_offset, nbytes, count, stripe.source_step, stripe.target_step))
                source_end = -1
                continue
            if source_offset == source_end and target_offset == target_end and joined + nbytes <= span_bytes_max:
                joined += nbytes
                spans[-1] = (source_offset + nbytes - joined, target_offset + nbytes - joined, joined, 1, 0, 0)
            else:
                joined = nbytes
                spans.append((source_offset, target_offset, nbytes, 1, 0, 0))
            source_end, target_end = source_offset + nbytes, target_offset + nbytes
    return spans
