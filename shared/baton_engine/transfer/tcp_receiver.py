"""The decode end of `tcp`: a thread a connection receives pages straight into the pool, after checking each frame.

The receiver does the writing itself, so a revoked attempt is safe as soon as its thread has left the pages: later frames
of it are read into a scratch buffer and refused. A writer that stops in the middle of a frame is fenced by closing its
stream.
"""

import socket
import struct
import threading
from collections.abc import Sequence

import structlog

from baton_core.agreement import KVPoll, Poller
from baton_core.errors import Reason
from baton_core.messages import ROW_BYTES
from baton_core.request import Incarnation, PageId, Room
from baton_engine.kv_pool import PageMemory, RowMemory
from baton_engine.transfer.attempts import Attempt, AttemptTable, TablePoller
from baton_engine.transfer.protocol import Poke
from baton_engine.transfer.wire import (
    ANSWER,
    FRAME,
    FRAME_BYTES_MAX,
    GREETING,
    INCARNATION_BYTES_MAX,
    MAGIC,
    PIECE,
    PIECES_MAX,
    VERSION,
    AnswerKind,
    FrameKind,
    Piece,
    WireError,
    receive_exactly,
    receive_into,
    send_all,
)

log = structlog.get_logger(__name__)

GREETING_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 1_024


class TcpReceiver:
    """Listens on `host` (a free port) and writes what prefill ranks send into `memory` and `rows`."""

    backend = "tcp"

    def __init__(
        self, memory: PageMemory, page_bytes: int, rows: RowMemory, poke: Poke, *, host: str, advertise_host: str
    ) -> None:
        self._memory = memory
        self._page_bytes = page_bytes
        self._rows = rows
        self._table = AttemptTable(poke)
        self._scratch = memoryview(bytearray(FRAME_BYTES_MAX))
        self._streams: set[socket.socket] = set()
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        port = self._listener.getsockname()[1]
        self.address = f"[{advertise_host}]:{port}" if ":" in advertise_host else f"{advertise_host}:{port}"
        self.bytes_received = 0
        self._accepting = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._accepting.start()

    def expect(self, room: Room, attempt: int, writer: Incarnation, pages: tuple[PageId, ...], row: int) -> None:
        """Let `writer` fill these pages and this row."""
        self._rows.clear(row)
        self._table.open(
            Attempt(
                room=room,
                attempt=attempt,
                peer=writer,
                status=KVPoll.WaitingForInput,
                pages_total=len(pages),
                pages=pages,
                row=row,
            )
        )

    def poller(self, room: Room, attempt: int) -> Poller:
        """This rank's view of the attempt."""
        return TablePoller(self._table, room, attempt)

    def revoke(self, room: Room, attempt: int) -> None:
        """Refuse every later frame of the attempt."""
        self._table.revoke(room, attempt)

    def fence(self, room: Room, attempt: int) -> None:
        """Close the stream that stopped inside a frame of the attempt."""
        self._table.fence(room, attempt)

    def forget(self, room: Room, attempt: int) -> None:
        """Drop the attempt."""
        self._table.forget(room, attempt)

    def close(self) -> None:
        """Stop listening and end every connection."""
        _shut(self._listener)
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            _shut(stream)

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                crowded = len(self._streams) >= CONNECTIONS_MAX
                if not crowded:
                    self._streams.add(stream)
            if crowded:
                _shut(stream)
                continue
            threading.Thread(target=self._serve, args=(stream,), name="kv-receive", daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        """One prefill rank's stream, until it ends. Whatever ends it fails what it was carrying, and only that."""
        text = "the connection ended"
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            writer = self._greet(stream)
            while True:
                self._frame(stream, writer)
        except (OSError, ValueError, struct.error) as error:
            text = f"the connection ended: {error}"
        finally:
            with self._lock:
                self._streams.discard(stream)
            _shut(stream)
        self._table.carrier_lost(stream, text)

    def _greet(self, stream: socket.socket) -> Incarnation:
        stream.settimeout(GREETING_TIMEOUT_S)
        magic, version, length = GREETING.unpack(receive_exactly(stream, GREETING.size))
        if magic != MAGIC or version != VERSION or not 0 < length <= INCARNATION_BYTES_MAX:
            raise WireError(f"not a KV stream of version {VERSION}: {magic!r} version {version}")
        writer = receive_exactly(stream, length).decode("ascii")
        stream.settimeout(None)
        return writer

    def _frame(self, stream: socket.socket, writer: Incarnation) -> None:
        kind, count, attempt, room, nbytes = FRAME.unpack(receive_exactly(stream, FRAME.size))
        if nbytes > FRAME_BYTES_MAX + PIECES_MAX * self._page_bytes or count > PIECES_MAX:
            raise WireError(f"frame of {count} pieces and {nbytes} bytes is over the limit")
        pieces = [Piece(*PIECE.unpack(receive_exactly(stream, PIECE.size))) for _ in range(count)]
        one = self._table.get(room, attempt)
        if one is not None and one.peer != writer:
            raise WireError(f"room {room} is written by {one.peer}, not by {writer}")
        if one is None or not self._table.enter(one, stream, lambda: _shut(stream)):
            self._throw_away(stream, nbytes)
            send_all(stream, [ANSWER.pack(AnswerKind.REFUSED, attempt, room, 0)])
            return
        try:
            if kind == FrameKind.PAGES:
                self._receive_pages(stream, one, pieces, nbytes)
            elif kind == FrameKind.ROW:
                self._receive_row(stream, one, nbytes)
            else:
                raise WireError(f"unknown frame kind {kind}")
        finally:
            self._table.leave(one)
        answer = AnswerKind.DONE if one.status is KVPoll.Success else AnswerKind.ACK
        send_all(stream, [ANSWER.pack(answer, attempt, room, one.progress)])

    def _receive_pages(self, stream: socket.socket, one: Attempt, pieces: Sequence[Piece], nbytes: int) -> None:
        if sum(piece.nbytes for piece in pieces) != nbytes:
            raise WireError(f"room {one.room}: pieces and payload differ in size")
        for piece in pieces:
            if piece.ordinal >= len(one.pages) or piece.nbytes == 0:
                raise WireError(f"room {one.room}: page {piece.ordinal} of {len(one.pages)} does not exist")
            if piece.offset + piece.nbytes > self._page_bytes:
                raise WireError(f"room {one.room}: piece ends beyond the page ({self._page_bytes} bytes)")
        receive_into(stream, [self._memory.target(one.pages[p.ordinal], p.offset, p.nbytes) for p in pieces])
        self.bytes_received += nbytes
        landed = one.progress
        for piece in pieces:
            total = one.landed_bytes.get(piece.ordinal, 0) + piece.nbytes
            one.landed_bytes[piece.ordinal] = total
            if total == self._page_bytes:
                self._memory.landed(one.pages[piece.ordinal])
                landed += 1
        self._table.advance(one, KVPoll.Transferring, landed)

    def _receive_row(self, stream: socket.socket, one: Attempt, nbytes: int) -> None:
        if nbytes != ROW_BYTES or one.row is None:
            raise WireError(f"room {one.room}: a row has {ROW_BYTES} bytes, not {nbytes}")
        raw = receive_exactly(stream, nbytes)
        if one.progress != one.pages_total:
            text = f"the row came after {one.progress} of {one.pages_total} pages"
            self._table.fail(one, Reason.TRANSFER_FAILED, text)
            return
        self._rows.write(one.row, raw)
        self._table.advance(one, KVPoll.Success)

    def _throw_away(self, stream: socket.socket, nbytes: int) -> None:
        # The scratch buffer is shared between threads on purpose: nobody reads what is thrown away.
        while nbytes:
            part = self._scratch[: min(nbytes, len(self._scratch))]
            receive_into(stream, [part])
            nbytes -= len(part)


def _shut(stream: socket.socket) -> None:
    """End a stream so that a thread blocked on it wakes up; closing alone would not wake it."""
    try:
        stream.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("transfer.already_closed")
    stream.close()
