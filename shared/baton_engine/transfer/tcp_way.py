"""The way by `tcp`: from a prefill rank one connection, one sending and one listening thread to each decode rank.

So a decode rank that does not read holds up nobody but itself. `sendmsg` takes pages straight from the pool; once it has
returned, the kernel has its copy and the pages are not read any more.
"""

import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from baton_core.errors import Reason
from baton_core.kv_layout import Run
from baton_core.request import Incarnation, PageId, Room
from baton_engine.kv_pool import KVPool, PageMemory
from baton_engine.transfer.attempts import AttemptTable
from baton_engine.transfer.checksum import Checksums
from baton_engine.transfer.flow import Flow
from baton_engine.transfer.pool_bytes import Bytes, PoolSource
from baton_engine.transfer.staging import gather
from baton_engine.transfer.tcp_wire import (
    ANSWER,
    CHECKSUM,
    FRAME,
    FRAME_BYTES_MAX,
    GREETING,
    MAGIC,
    PIECE,
    PIECES_MAX,
    VERSION,
    AnswerKind,
    FrameKind,
    Piece,
    receive_exactly,
    send_all,
    shut,
)
from baton_engine.transfer.ways import Job, Target


class TcpWay:
    """Sends pages of `pool` to decode ranks, in the name of rank `own`; with `staged`, many small runs in one piece."""

    name = "tcp"

    def __init__(
        self,
        pool: KVPool,
        own: Incarnation,
        table: AttemptTable,
        *,
        connect_timeout_ms: int,
        staged: bool = False,
        checksum: bool = False,
    ) -> None:
        self._memory = pool.memory
        self._sums = Checksums(pool.memory) if checksum else None
        self._staged = PoolSource(pool) if staged else None
        self._own = own
        self._table = table
        self._connect_timeout_s = connect_timeout_ms / 1000
        self._streams: dict[tuple[Incarnation, str], _Stream] = {}

    def check(self, address: str) -> None:
        """It is `host:port`."""
        _endpoint(address)

    def probe(self, peer: Incarnation, address: str) -> None:
        """There is nothing to try: a connection is opened for the first push."""

    def prepare(self, flow: Flow, target: Target) -> None:
        """Nothing: a connection that breaks while it is idle harms nobody."""

    def put(self, job: Job) -> None:
        """Queue finished pages for the rank that ordered them."""
        key = (job.flow.peer, job.target.address)
        stream = self._streams.get(key)
        if stream is None or stream.dead:
            connect = _Connector(_endpoint(job.target.address), self._own, self._connect_timeout_s)
            stream = self._streams[key] = _Stream(
                job.flow.peer, connect, self._table, self._memory, self._staged, self._sums
            )
        stream.put(job)

    def nudge(self, flow: Flow, target: Target) -> None:
        """Nothing: each frame asks before it reads."""

    def peer_gone(self, peer: Incarnation) -> None:
        """Close the connection."""
        for key in [key for key in self._streams if key[0] == peer]:
            self._streams.pop(key).close()

    def close(self) -> None:
        """End every stream."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{address!r} is no address")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class _Connector:
    """Opens a stream to one decode rank."""

    endpoint: tuple[str, int]
    own: Incarnation
    timeout_s: float

    def __call__(self) -> socket.socket:
        stream = socket.create_connection(self.endpoint, timeout=self.timeout_s)
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = self.own.encode("ascii")
        send_all(stream, [GREETING.pack(MAGIC, VERSION, len(name)), name])
        return stream


class _Stream:
    """The connection to one decode rank and its two threads. Once it breaks it is dead, and fails what it carried."""

    def __init__(
        self,
        peer: Incarnation,
        connect: _Connector,
        table: AttemptTable,
        memory: PageMemory,
        staged: PoolSource | None,
        sums: Checksums | None,
    ) -> None:
        self.dead = False
        self._died_of = ""
        self._peer = peer
        self._connect = connect
        self._table = table
        self._memory = memory
        self._staged = staged
        self._sums = sums
        self._buffer: Bytes = np.empty(0, dtype=np.uint8)  # of the sending thread
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._socket: socket.socket | None = None
        threading.Thread(target=self._send, name="kv-send", daemon=True).start()

    def put(self, job: Job) -> None:
        """Queue a push; on a stream that has just died, fail it."""
        with self._wake:
            if not self.dead:
                self._jobs.append(job)
                job.flow.carrier = self
                self._wake.notify()
                return
        self._table.fail(job.flow.one, Reason.TRANSFER_FAILED, self._died_of)

    def close(self) -> None:
        """End the stream and its threads."""
        self._die("closed")

    def _send(self) -> None:
        try:
            stream = self._connect()
        except OSError as error:
            self._die(f"cannot connect to decode: {error}")
            return
        with self._wake:
            self._socket = stream
            late = self.dead
        if late:
            stream.close()
            return
        threading.Thread(target=self._listen, args=(stream,), name="kv-acks", daemon=True).start()
        try:
            while (job := self._next()) is not None:
                if self._sums is not None:
                    self._send_checksum(stream, self._sums, job)
                source = None if job.flow.plan.is_one_run else self._staged  # else there is nothing to gather
                if source is not None:
                    self._send_staged(stream, source, job)
                for frame in _frames(job, pages=source is None):
                    if not self._send_frame(stream, job, frame):
                        break
        except OSError as error:
            self._die(f"sending failed: {error}")

    def _next(self) -> Job | None:
        with self._wake:
            while not self._jobs and not self.dead:
                self._wake.wait()
            return None if self.dead else self._jobs.popleft()

    def _send_frame(self, stream: socket.socket, job: Job, frame: "_OutFrame") -> bool:
        if not self._table.enter(job.flow, self, cut=self.close):
            return False
        try:
            head = FRAME.pack(frame.kind, len(frame.pieces), job.push.attempt, job.push.room, frame.nbytes)
            pieces = b"".join(PIECE.pack(p.ordinal, p.offset, p.nbytes) for p in frame.pieces)
            views = [self._memory.source(page, run.source_offset, run.nbytes) for page, run in frame.sources]
            send_all(stream, [head + pieces + frame.row, *views])
        finally:
            self._table.leave(job.flow)
        return True

    def _send_checksum(self, stream: socket.socket, sums: Checksums, job: Job) -> None:
        """Nothing of an attempt that is given up: none of its frames will be sent."""
        if not self._table.enter(job.flow, self):
            return
        try:
            checksum = sums.take_in(job)
        finally:
            self._table.leave(job.flow)
        if checksum is not None:
            head = FRAME.pack(FrameKind.CHECKSUM, 0, job.push.attempt, job.push.room, CHECKSUM.size)
            send_all(stream, [head + CHECKSUM.pack(checksum)])

    def _send_staged(self, stream: socket.socket, source: PoolSource, job: Job) -> None:
        """Frame by frame: gather, and write at once. The pages are read only while they are gathered."""
        page_bytes = job.flow.plan.source_page_bytes
        if not page_bytes:
            return
        step = max(1, FRAME_BYTES_MAX // page_bytes) * job.flow.plan.turns
        if len(self._buffer) < page_bytes:
            self._buffer = np.empty(max(FRAME_BYTES_MAX, page_bytes), dtype=np.uint8)
        for start in range(job.ordinals.start, job.ordinals.stop, step):
            ordinals = range(start, min(start + step, job.ordinals.stop))
            if not self._table.enter(job.flow, self):
                return
            try:
                nbytes = gather(source, job, ordinals, self._buffer)
            finally:
                self._table.leave(job.flow)
            if nbytes:
                head = FRAME.pack(FrameKind.STAGED, 1, job.push.attempt, job.push.room, nbytes)
                pages = PIECE.pack(ordinals.start, len(ordinals), 0)
                send_all(stream, [head + pages, self._buffer[:nbytes].data])

    def _listen(self, stream: socket.socket) -> None:
        try:
            while True:
                kind, attempt, room, landed = ANSWER.unpack(receive_exactly(stream, ANSWER.size))
                self._answered(kind, room, attempt, landed)
        except (OSError, struct.error) as error:
            self._die(f"decode ended the connection: {error}")

    def _answered(self, kind: int, room: Room, attempt: int, landed_bytes: int) -> None:
        one = self._table.get(room, attempt)
        flow = None if one is None else one.flows.get(self._peer)
        if one is None or flow is None:
            return
        if kind == AnswerKind.REFUSED:
            self._table.refused(one, "decode refused the pages: it gave this attempt up")
        else:
            self._table.moved(flow, landed_bytes, row=kind == AnswerKind.DONE)

    def _die(self, text: str) -> None:
        with self._wake:
            if self.dead:
                return
            self.dead, self._died_of = True, text
            self._jobs.clear()
            self._wake.notify_all()
            stream = self._socket
        if stream is not None:
            shut(stream)
        self._table.carrier_lost(self, text)


@dataclass(frozen=True, slots=True)
class _OutFrame:
    """One frame to send: pieces with their sources, or a row."""

    kind: FrameKind
    nbytes: int
    pieces: tuple[Piece, ...] = ()
    sources: tuple[tuple[PageId, Run], ...] = ()
    row: bytes = b""


def _frames(job: Job, *, pages: bool) -> Iterator[_OutFrame]:
    """The push as frames within the limits of the wire: its pages in order, if asked for, and the row last."""
    if pages:
        yield from _page_frames(job)
    row = job.row
    if row is not None:
        yield _OutFrame(FrameKind.ROW, len(row), row=row)


def _page_frames(job: Job) -> Iterator[_OutFrame]:
    pieces: list[Piece] = []
    sources: list[tuple[PageId, Run]] = []
    nbytes = 0
    first, pages = job.push.first, job.push.pages
    for ordinal, target_ordinal, run in job.flow.plan.pieces(job.ordinals, job.target.wanted):
        if pieces and (len(pieces) == PIECES_MAX or nbytes + run.nbytes > FRAME_BYTES_MAX):
            yield _OutFrame(FrameKind.PAGES, nbytes, tuple(pieces), tuple(sources))
            pieces, sources, nbytes = [], [], 0
        pieces.append(Piece(target_ordinal, run.target_offset, run.nbytes))
        sources.append((pages[ordinal - first], run))
        nbytes += run.nbytes
    if pieces:
        yield _OutFrame(FrameKind.PAGES, nbytes, tuple(pieces), tuple(sources))
