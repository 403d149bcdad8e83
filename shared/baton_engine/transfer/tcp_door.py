"""Where `tcp` comes in on decode: a thread a connection receives pages straight into the pool, after checking each frame.

The thread does the writing itself, so a revoked attempt is safe as soon as its threads have left the pages: later frames
of it are read into a scratch buffer and refused. A writer that stops in the middle of a frame is fenced by closing its
stream.
"""

import socket
import struct
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import structlog

from baton_core.agreement import Staging
from baton_core.errors import Reason
from baton_core.messages import ROW_BYTES
from baton_core.request import Incarnation, Room
from baton_engine.kv_pool import KVPool, RowMemory
from baton_engine.transfer.attempts import AttemptTable, Flow, Incoming
from baton_engine.transfer.checksum import verify
from baton_engine.transfer.pool_bytes import PoolTarget
from baton_engine.transfer.staging import StagingRing, scatter, staged_bytes
from baton_engine.transfer.tcp_wire import (
    ANSWER,
    CHECKSUM,
    FRAME,
    FRAME_BYTES_MAX,
    GREETING,
    MAGIC,
    NAME_BYTES_MAX,
    PIECE,
    PIECES_MAX,
    VERSION,
    AnswerKind,
    FrameKind,
    Piece,
    StreamOver,
    WireError,
    receive_exactly,
    receive_into,
    send_all,
    shut,
)

log = structlog.get_logger(__name__)

GREETING_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 1_024


class TcpDoor:
    """Listens on `host` (a free port) and writes what prefill ranks send into `pool` and `rows`.

    What comes staged waits in `staging`, where there is one.
    """

    name = "tcp"

    def __init__(
        self,
        pool: KVPool,
        rows: RowMemory,
        table: AttemptTable,
        *,
        host: str,
        advertise_host: str,
        staging: StagingRing | None = None,
    ) -> None:
        self._memory = pool.memory
        self._page_bytes = pool.page_bytes
        self._target = PoolTarget(pool)
        self._ring = staging
        self.staging: Staging | None = staging
        self._rows = rows
        self._table = table
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

    def close(self) -> None:
        """Stop listening and end every connection."""
        shut(self._listener)
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            shut(stream)
        if self._ring is not None:
            self._ring.close()

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
                shut(stream)
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
            if not isinstance(error, OSError) or (isinstance(error, WireError) and not isinstance(error, StreamOver)):
                self._table.nonsense(self.name)
                log.warning("transfer.bad_frame", text=str(error))
        finally:
            with self._lock:
                self._streams.discard(stream)
            shut(stream)
        self._table.carrier_lost(stream, text)

    def _greet(self, stream: socket.socket) -> Incarnation:
        stream.settimeout(GREETING_TIMEOUT_S)
        magic, version, length = GREETING.unpack(receive_exactly(stream, GREETING.size))
        if magic != MAGIC or version != VERSION or not 0 < length <= NAME_BYTES_MAX:
            raise WireError(f"not a KV stream of version {VERSION}: {magic!r} version {version}")
        writer = receive_exactly(stream, length).decode("ascii")
        stream.settimeout(None)
        return writer

    def _frame(self, stream: socket.socket, writer: Incarnation) -> None:
        kind, count, attempt, room, nbytes = FRAME.unpack(receive_exactly(stream, FRAME.size))
        if nbytes > FRAME_BYTES_MAX + PIECES_MAX * self._page_bytes or count > PIECES_MAX:
            raise WireError(f"frame of {count} pieces and {nbytes} bytes is over the limit")
        pieces = [Piece(*fields) for fields in PIECE.iter_unpack(receive_exactly(stream, count * PIECE.size))]
        flow = self._flow(room, attempt, writer)
        if flow is None:
            self._throw_away(stream, nbytes)
        if flow is None or not self._take(stream, FrameKind(kind), flow, pieces, nbytes):
            send_all(stream, [ANSWER.pack(AnswerKind.REFUSED, attempt, room, 0)])
            return
        settled = self._ring is None or self._ring.settled(room, attempt)
        if settled:
            verify(self._table, self._memory, flow)
        # What is not scattered yet is verified afterwards, and what it says then decode tells.
        answer = AnswerKind.DONE if flow.complete or (flow.is_whole and not settled) else AnswerKind.ACK
        send_all(stream, [ANSWER.pack(answer, attempt, room, flow.moved_bytes)])

    def _flow(self, room: Room, attempt: int, writer: Incarnation) -> Flow | None:
        one = self._table.get(room, attempt)
        if one is None:
            return None
        if writer not in one.flows:
            raise WireError(f"room {room} is written by {', '.join(one.flows)}, not by {writer}")
        return one.flows[writer]

    def _take(self, stream: socket.socket, kind: FrameKind, flow: Flow, pieces: Sequence[Piece], nbytes: int) -> bool:
        """Take the rest of a frame in; False if the attempt is given up, and nothing was written."""
        assert isinstance(flow.one, Incoming)
        if kind is FrameKind.STAGED and not flow.one.is_given_up:
            return self._receive_staged(stream, flow, flow.one, pieces, nbytes)
        if not self._table.enter(flow, stream, cut=partial(shut, stream), way=self.name):
            self._throw_away(stream, nbytes)
            return False
        try:
            if kind is FrameKind.PAGES:
                self._receive_pages(stream, flow, flow.one, pieces, nbytes)
            elif kind is FrameKind.CHECKSUM:
                self._receive_checksum(stream, flow, nbytes)
            else:
                self._receive_row(stream, flow, flow.one, nbytes)
        finally:
            self._table.leave(flow)
        return True

    def _receive_staged(
        self, stream: socket.socket, flow: Flow, one: Incoming, pieces: Sequence[Piece], nbytes: int
    ) -> bool:
        """Into the ring, or, where it is full, into memory of this thread's own and on into the pages."""
        ordinals = range(pieces[0].ordinal, pieces[0].ordinal + pieces[0].offset) if pieces else range(0)
        if ordinals.stop > flow.plan.source_pages(one.prompt_tokens):
            raise WireError(f"room {one.room}: source pages {ordinals} do not exist")
        if not nbytes or nbytes != staged_bytes(flow, ordinals, len(one.pages)):
            raise WireError(f"room {one.room}: source pages {ordinals} and {nbytes} bytes do not fit")
        self._require_owed(flow, nbytes)
        flow.carrier, flow.way = stream, self.name
        slot = None if self._ring is None else self._ring.memory.reserve(nbytes)
        if self._ring is not None and slot is not None:
            try:
                receive_into(stream, [self._ring.memory.view(slot).data])
            except OSError:
                self._ring.memory.release(slot)
                raise
            self._ring.put(flow, ordinals, slot)
        else:
            payload = np.empty(nbytes, dtype=np.uint8)
            receive_into(stream, [payload.data])
            if not self._table.enter(flow, stream):
                return False
            try:
                scatter(self._target, flow, ordinals, payload)
            finally:
                self._table.leave(flow)
        self.bytes_received += nbytes
        self._table.moved(flow, flow.moved_bytes + nbytes)
        return True

    def _require_owed(self, flow: Flow, nbytes: int) -> None:
        if flow.moved_bytes + nbytes > flow.owed_bytes:
            text = f"{flow.peer} sends more than the {flow.owed_bytes} bytes it owes"
            raise WireError(f"room {flow.one.room}: {text}")

    def _receive_pages(
        self, stream: socket.socket, flow: Flow, one: Incoming, pieces: Sequence[Piece], nbytes: int
    ) -> None:
        if sum(piece.nbytes for piece in pieces) != nbytes:
            raise WireError(f"room {one.room}: pieces and payload differ in size")
        for piece in pieces:
            if piece.ordinal >= len(one.pages) or piece.nbytes == 0:
                raise WireError(f"room {one.room}: page {piece.ordinal} of {len(one.pages)} does not exist")
            if piece.offset + piece.nbytes > self._page_bytes:
                raise WireError(f"room {one.room}: piece ends beyond the page ({self._page_bytes} bytes)")
        self._require_owed(flow, nbytes)
        pages = {one.pages[piece.ordinal] for piece in pieces}
        try:
            receive_into(stream, [self._memory.target(one.pages[p.ordinal], p.offset, p.nbytes) for p in pieces])
        except OSError:
            for page in pages:
                self._memory.dropped(page)
            raise
        for page in pages:
            self._memory.landed(page)
        self.bytes_received += nbytes
        self._table.moved(flow, flow.moved_bytes + nbytes)

    def _receive_checksum(self, stream: socket.socket, flow: Flow, nbytes: int) -> None:
        if nbytes != CHECKSUM.size or flow.checksum is not None or flow.is_whole:
            raise WireError(f"room {flow.one.room}: a checksum of {nbytes} bytes from {flow.peer}, again or too late")
        (flow.checksum,) = CHECKSUM.unpack(receive_exactly(stream, nbytes))

    def _receive_row(self, stream: socket.socket, flow: Flow, one: Incoming, nbytes: int) -> None:
        if nbytes != ROW_BYTES or not flow.carries_row:
            raise WireError(f"room {one.room}: a row of {nbytes} bytes from {flow.peer}; nobody expects it")
        raw = receive_exactly(stream, nbytes)
        if flow.moved_bytes != flow.owed_bytes:
            text = f"the row came after {flow.moved_bytes} of {flow.owed_bytes} bytes"
            self._table.fail(one, Reason.TRANSFER_FAILED, text)
            return
        self._rows.write(one.row, raw)
        self._table.moved(flow, flow.moved_bytes, row=True)

    def _throw_away(self, stream: socket.socket, nbytes: int) -> None:
        # The scratch buffer is shared between threads on purpose: nobody reads what is thrown away.
        while nbytes:
            part = self._scratch[: min(nbytes, len(self._scratch))]
            receive_into(stream, [part])
            nbytes -= len(part)
