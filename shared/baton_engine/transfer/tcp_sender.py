"""The prefill end of `tcp`: one connection, one sending and one listening thread a decode rank.

So a decode rank that does not read holds up nobody but itself. `sendmsg` takes pages straight from the pool; once it has
returned, the kernel has its copy and the pages are not read any more.
"""

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from baton_core.agreement import KVPoll, Poller
from baton_core.effects import Push
from baton_core.errors import Reason
from baton_core.kv_layout import Layout, LayoutMismatch, Run, plan
from baton_core.messages import PageOrder
from baton_core.request import Incarnation, PageId, Room
from baton_engine.kv_pool import PageMemory
from baton_engine.transfer.attempts import Attempt, AttemptTable, TablePoller
from baton_engine.transfer.protocol import Poke
from baton_engine.transfer.wire import (
    ANSWER,
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
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One push, with the runs that its order asks for."""

    one: Attempt
    push: Push
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Ordered:
    """What an order says about where and how to send."""

    address: tuple[str, int]
    runs: tuple[Run, ...]


class TcpSender:
    """Sends pages of `memory`, laid out as `layout`, to decode ranks, in the name of `incarnation`."""

    def __init__(
        self, memory: PageMemory, layout: Layout, incarnation: Incarnation, poke: Poke, *, connect_timeout_ms: int
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._incarnation = incarnation
        self._table = AttemptTable(poke)
        self._connect_timeout_s = connect_timeout_ms / 1000
        self._orders: dict[tuple[Room, int], Ordered] = {}
        self._streams: dict[tuple[Incarnation, str, int], _Stream] = {}

    def offer(self, room: Room, attempt: int, peer: Incarnation, pages_total: int) -> None:
        """`peer` may order this attempt."""
        self._table.open(
            Attempt(room=room, attempt=attempt, peer=peer, status=KVPoll.Bootstrapping, pages_total=pages_total)
        )

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """Take a page order; one that was not offered, or that comes twice, changes nothing."""
        one = self._table.get(order.room, order.attempt)
        if one is None or one.peer != peer or one.status is not KVPoll.Bootstrapping:
            log.info("transfer.order_ignored", room=order.room, attempt=order.attempt, peer=peer)
            return
        try:
            ordered = self._understand(one, order)
        except (ValueError, LayoutMismatch) as error:
            self._table.fail(one, Reason.LAYOUT_MISMATCH, str(error))
            return
        self._orders[(order.room, order.attempt)] = ordered
        self._table.advance(one, KVPoll.WaitingForInput)

    def push(self, push: Push) -> None:
        """Queue finished pages for the rank that ordered them."""
        one = self._table.get(push.room, push.attempt)
        ordered = self._orders.get((push.room, push.attempt))
        assert one is not None
        assert ordered is not None, "pushed before it was ordered"
        self._table.advance(one, KVPoll.Transferring)
        self._stream_to(one.peer, ordered.address).put(Job(one, push, ordered.runs))

    def poller(self, room: Room, attempt: int) -> Poller:
        """This rank's view of the attempt."""
        return TablePoller(self._table, room, attempt)

    def revoke(self, room: Room, attempt: int) -> None:
        """Skip what is queued of the attempt; what is being sent ends with its frame."""
        self._table.revoke(room, attempt)

    def fence(self, room: Room, attempt: int) -> None:
        """Close the stream whose peer does not take the frame."""
        self._table.fence(room, attempt)

    def forget(self, room: Room, attempt: int) -> None:
        """Drop the attempt and its order."""
        self._table.forget(room, attempt)
        self._orders.pop((room, attempt), None)

    def peer_gone(self, peer: Incarnation) -> None:
        """Close the peer's streams and fail what they carried."""
        for key in [key for key in self._streams if key[0] == peer]:
            self._streams.pop(key).close()
        self._table.peer_lost(peer, f"decode worker {peer} is gone")

    def close(self) -> None:
        """End every stream."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _understand(self, one: Attempt, order: PageOrder) -> Ordered:
        if order.backend != "tcp":
            raise ValueError(f"transfer backend is tcp on prefill and {order.backend} on decode")
        if len(order.pages) != one.pages_total:
            raise ValueError(f"{len(order.pages)} pages are ordered; the prompt has {one.pages_total}")
        host, _, port = order.address.rpartition(":")
        if not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ValueError(f"{order.address!r} is no address")
        return Ordered((host.strip("[]"), int(port)), plan(self._layout, Layout.from_text(order.layout)))

    def _stream_to(self, peer: Incarnation, address: tuple[str, int]) -> "_Stream":
        key = (peer, *address)
        stream = self._streams.get(key)
        if stream is None or stream.dead:
            connect = _Connector(address, self._incarnation, self._connect_timeout_s)
            stream = self._streams[key] = _Stream(connect, self._table, self._memory)
        return stream


@dataclass(frozen=True, slots=True)
class _Connector:
    """Opens a stream to one decode rank."""

    address: tuple[str, int]
    incarnation: Incarnation
    timeout_s: float

    def __call__(self) -> socket.socket:
        stream = socket.create_connection(self.address, timeout=self.timeout_s)
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = self.incarnation.encode("ascii")
        send_all(stream, [GREETING.pack(MAGIC, VERSION, len(name)), name])
        return stream


class _Stream:
    """The connection to one decode rank and its two threads. Once it breaks it is dead, and fails what it carried."""

    def __init__(self, connect: Callable[[], socket.socket], table: AttemptTable, memory: PageMemory) -> None:
        self.dead = False
        self._died_of = ""
        self._connect = connect
        self._table = table
        self._memory = memory
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._socket: socket.socket | None = None
        threading.Thread(target=self._send, name="kv-send", daemon=True).start()

    def put(self, job: Job) -> None:
        """Queue a push; on a stream that has just died, fail it."""
        with self._wake:
            if not self.dead:
                self._jobs.append(job)
                job.one.carrier = self
                self._wake.notify()
                return
        self._table.fail(job.one, Reason.TRANSFER_FAILED, self._died_of)

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
                for frame in _frames(job):
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
        if not self._table.enter(job.one, self, self.close):
            return False
        try:
            head = FRAME.pack(frame.kind, len(frame.pieces), job.push.attempt, job.push.room, frame.nbytes)
            pieces = b"".join(PIECE.pack(p.ordinal, p.offset, p.nbytes) for p in frame.pieces)
            views = [self._memory.source(page, run.source_offset, run.nbytes) for page, run in frame.sources]
            send_all(stream, [head + pieces + frame.row, *views])
        finally:
            self._table.leave(job.one)
        return True

    def _listen(self, stream: socket.socket) -> None:
        try:
            while True:
                kind, attempt, room, landed = ANSWER.unpack(receive_exactly(stream, ANSWER.size))
                self._answered(kind, room, attempt, landed)
        except (OSError, struct.error) as error:
            self._die(f"decode ended the connection: {error}")

    def _answered(self, kind: int, room: Room, attempt: int, landed: int) -> None:
        one = self._table.get(room, attempt)
        if one is None:
            return
        if kind == AnswerKind.REFUSED:
            self._table.fail(one, Reason.TRANSFER_FAILED, "decode refused the pages: it gave this attempt up")
        else:
            status = KVPoll.Success if kind == AnswerKind.DONE else KVPoll.Transferring
            self._table.advance(one, status, landed)

    def _die(self, text: str) -> None:
        with self._wake:
            if self.dead:
                return
            self.dead, self._died_of = True, text
            self._jobs.clear()
            self._wake.notify_all()
            stream = self._socket
        if stream is not None:
            try:
                stream.shutdown(socket.SHUT_RDWR)
            except OSError:
                log.debug("transfer.already_closed")
            stream.close()
        self._table.carrier_lost(self, text)


@dataclass(frozen=True, slots=True)
class _OutFrame:
    """One frame to send: pieces with their sources, or a row."""

    kind: FrameKind
    nbytes: int
    pieces: tuple[Piece, ...] = ()
    sources: tuple[tuple[PageId, Run], ...] = ()
    row: bytes = b""


def _frames(job: Job) -> Iterator[_OutFrame]:
    """The push as frames within the limits of the wire, pages in order, the row last."""
    pieces: list[Piece] = []
    sources: list[tuple[PageId, Run]] = []
    nbytes = 0
    for index, page in enumerate(job.push.pages):
        for run in job.runs:
            if pieces and (len(pieces) == PIECES_MAX or nbytes + run.nbytes > FRAME_BYTES_MAX):
                yield _OutFrame(FrameKind.PAGES, nbytes, tuple(pieces), tuple(sources))
                pieces, sources, nbytes = [], [], 0
            pieces.append(Piece(job.push.first + index, run.target_offset, run.nbytes))
            sources.append((page, run))
            nbytes += run.nbytes
    if pieces:
        yield _OutFrame(FrameKind.PAGES, nbytes, tuple(pieces), tuple(sources))
    if job.push.row is not None:
        raw = job.push.row.pack()
        yield _OutFrame(FrameKind.ROW, len(raw), row=raw)
