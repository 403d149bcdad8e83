"""Where `shm` comes in on decode: it hands its pool to prefill ranks on this host, grants writings, and waits for their end.

Whoever holds the mapping can write whenever it likes, and nothing decode could do takes the mapping away. So pages of a
granted attempt are free in exactly two cases: the writer said STOPPED or FINISHED, or the writer's socket is at end of
file, which comes after the kernel (or the writer itself) dropped the mapping. Therefore `fence` asks again and forces
nothing: a writer that is stopped but alive keeps the pages (the core counts them as quarantined) until it goes on or
dies; its own supervisor ends a rank without progress. Closing decode's end of the socket proves nothing and counts for
nothing.
"""

import contextlib
import os
import secrets
import socket
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from baton_core.agreement import Staging
from baton_core.errors import EngineError, Reason
from baton_core.request import Incarnation
from baton_engine.kv_pool import KVPool, RowMemory
from baton_engine.transfer.attempts import AttemptTable, Flow, Incoming
from baton_engine.transfer.checksum import verify
from baton_engine.transfer.shm_wire import (
    FRAME,
    HELLO,
    NAME_BYTES_MAX,
    Frame,
    Kind,
    Welcome,
    WireError,
    hung_up,
    order_digest,
    own_boot_id,
    parse_hello,
    refusal,
    require_trusted,
    says_no_more,
)

log = structlog.get_logger(__name__)

GREETING_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 1_024
HALF_CLOSED_LOOK_MS = 500
SOCKET_SUFFIX = ".kv"


@dataclass(slots=True, eq=False)
class _Writer:
    """One prefill rank's connection."""

    stream: socket.socket
    name: Incarnation
    grants: dict[int, "_Grant"] = field(default_factory=dict)  # by serial; its own thread's


@dataclass(frozen=True, slots=True, eq=False)
class _Grant:
    """A writing under way: from GRANT until the writer says that it is over, or is gone."""

    flow: Flow
    writer: _Writer
    serial: int

    def ask_to_stop(self) -> None:
        """Say REVOKE. Lost where the writer is stopped and its queue full: a fence asks again."""
        with contextlib.suppress(OSError):
            self.writer.stream.send(Frame(kind=Kind.REVOKE, serial=self.serial).pack(), socket.MSG_DONTWAIT)

    def ask_again(self) -> None:
        """All that a fence can do: a living writer cannot be cut off; its pages stay held until it answers or dies."""
        one = self.flow.one
        log.warning("transfer.quarantined", room=one.room, attempt=one.attempt, writer=self.writer.name)
        self.ask_to_stop()


class ShmDoor:
    """Offers `pool` and `rows` on a unix socket in `directory` (by default a private one below the system's temporary
    directory) to processes of the same user and of root. Raises EngineError where that cannot be."""

    name = "shm"
    staging: Staging | None = None

    def __init__(self, pool: KVPool, rows: RowMemory, table: AttemptTable, *, directory: str = "") -> None:
        descriptor = pool.file_descriptor
        if descriptor is None:
            raise EngineError(f"shm needs a KV pool in host memory, not on {pool.device}: use --transfer tcp (or auto)")
        self._descriptors = (descriptor, rows.file_descriptor)
        self._welcome = Welcome(page_bytes=pool.page_bytes, pages=pool.pages, rows=rows.rows).pack()
        self._memory = pool.memory
        self._rows = rows
        self._boot_id = own_boot_id()
        self._table = table
        self._lock = threading.Lock()
        self._streams: set[socket.socket] = set()
        self._closing = False
        self.bytes_received = 0
        try:
            self._listener, self.address = _listen(Path(directory) if directory else _private_directory())
        except OSError as error:
            raise EngineError(f"shm cannot listen in {directory or tempfile.gettempdir()}: {error}") from error
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening and end every conversation. What was granted stays granted: see the top of this file."""
        with self._lock:
            self._closing = True
            streams = list(self._streams)
        Path(self.address).unlink(missing_ok=True)
        for stream in (self._listener, *streams):
            _shut_down(stream)
        self._listener.close()

    # -- connections

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                welcome = not self._closing and len(self._streams) < CONNECTIONS_MAX
                if welcome:
                    self._streams.add(stream)
            if not welcome:
                stream.close()
                continue
            threading.Thread(target=self._serve, args=(stream,), name="kv-grant", daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        """One prefill rank's connection, until that rank is gone."""
        try:
            writer = self._greet(stream)
            if writer is not None:
                self._converse(writer)
        finally:
            with self._lock:
                self._streams.discard(stream)
            stream.close()

    def _greet(self, stream: socket.socket) -> _Writer | None:
        """Hand the descriptors to a writer we trust; None (nothing was handed out) for anybody else."""
        try:
            require_trusted(stream)
            stream.settimeout(GREETING_TIMEOUT_S)
            boot_id, name = parse_hello(stream.recv(HELLO.size + NAME_BYTES_MAX + 1))
            if boot_id != self._boot_id:
                raise WireError(f"this host's boot id is {self._boot_id}, the writer's {boot_id}")
            socket.send_fds(stream, [self._welcome], list(self._descriptors))
            stream.settimeout(None)
        except OSError as error:
            self._table.nonsense(self.name)
            log.info("transfer.stranger", text=str(error))
            with contextlib.suppress(OSError):
                stream.send(refusal(str(error)), socket.MSG_DONTWAIT)
            return None
        return _Writer(stream, name)

    def _converse(self, writer: _Writer) -> None:
        while True:
            try:
                raw = writer.stream.recv(FRAME.size + 1)
            except ConnectionResetError:
                continue  # said once where the writer died with our words unread; what it wrote before is still there
            except OSError as error:
                log.error("transfer.unreadable", writer=writer.name, text=str(error))
                return
            if self._closing:
                return  # our own end: it says nothing about the writer
            if raw:
                self._hear(writer, raw)
            elif hung_up(writer.stream) or (says_no_more(writer.stream) and self._outlived(writer)):
                self._gone(writer)
                return
            elif not self._closing:
                self._table.nonsense(self.name)
                log.warning("transfer.bad_frame", writer=writer.name, text="empty")

    def _outlived(self, writer: _Writer) -> bool:
        """Wait for the end of a writer that can say nothing any more but lives; False where this end closes first."""
        log.warning("transfer.half_closed", writer=writer.name)
        while not self._closing:
            if hung_up(writer.stream, HALF_CLOSED_LOOK_MS):
                return True
        return False

    def _gone(self, writer: _Writer) -> None:
        """The writer and its mapping are no more."""
        text = f"prefill rank {writer.name} is gone: its connection ended"
        for grant in writer.grants.values():
            self._table.fail(grant.flow.one, Reason.TRANSFER_FAILED, text)
            self._table.leave(grant.flow)

    # -- frames

    def _hear(self, writer: _Writer, raw: bytes) -> None:
        try:
            frame = Frame.unpack(raw)
        except ValueError as error:
            self._table.nonsense(self.name)
            log.warning("transfer.bad_frame", writer=writer.name, text=str(error))
            return
        if frame.kind is Kind.BEGIN:
            self._begin(writer, frame)
            return
        is_last = frame.kind in (Kind.FINISHED, Kind.STOPPED)
        grant = writer.grants.pop(frame.serial, None) if is_last else writer.grants.get(frame.serial)
        if grant is None:
            log.debug("transfer.late_frame", writer=writer.name, kind=frame.kind.name)
        elif frame.kind is Kind.PROGRESS:
            self._count(grant.flow, frame.count)
            self._table.moved(grant.flow, min(frame.count, grant.flow.owed_bytes))
        elif frame.kind is Kind.CHECKSUM:
            grant.flow.checksum = frame.count
        elif frame.kind is Kind.FINISHED:
            self._finished(grant.flow, frame.count)
        elif frame.kind is Kind.STOPPED:
            self._table.refused(grant.flow.one, f"prefill rank {writer.name} stopped writing")
            self._table.leave(grant.flow)

    def _begin(self, writer: _Writer, frame: Frame) -> None:
        one = self._table.get(frame.room, frame.attempt)
        flow = None if one is None else one.flows.get(writer.name)
        granted = False
        if flow is not None and _may_write(flow, writer, frame):
            grant = _Grant(flow, writer, frame.serial)
            granted = self._table.enter(flow, writer, halt=grant.ask_to_stop, cut=grant.ask_again, way=self.name)
            if granted:
                writer.grants[frame.serial] = grant
        if not granted:
            log.info("transfer.refused", room=frame.room, attempt=frame.attempt, writer=writer.name)
        answer = Frame(kind=Kind.GRANT if granted else Kind.REFUSED, serial=frame.serial)
        # May block while the writer is stopped: this thread serves nobody else. A writer that is gone is noticed next.
        with contextlib.suppress(OSError):
            writer.stream.send(answer.pack())

    def _finished(self, flow: Flow, written_bytes: int) -> None:
        one = flow.one
        assert isinstance(one, Incoming)
        row_is_there = not flow.carries_row or self._rows.room_word(one.row) != 0
        self._count(flow, written_bytes)
        self._table.leave(flow)
        if written_bytes == flow.owed_bytes and row_is_there:
            self._table.moved(flow, written_bytes, row=flow.carries_row)
            verify(self._table, self._memory, flow)
        else:
            text = f"{flow.peer} finished after {written_bytes} of {flow.owed_bytes} bytes, or without the row"
            self._table.fail(one, Reason.TRANSFER_FAILED, text)

    def _count(self, flow: Flow, written_bytes: int) -> None:
        self.bytes_received += max(0, min(written_bytes, flow.owed_bytes) - flow.moved_bytes)


def _may_write(flow: Flow, writer: _Writer, frame: Frame) -> bool:
    one = flow.one
    return (
        isinstance(one, Incoming)
        and flow.busy == 0
        and flow.moved_bytes == 0
        and not flow.complete
        and frame.serial not in writer.grants
        and frame.count == order_digest(one.pages, one.row)
    )


def _shut_down(stream: socket.socket) -> None:
    """Wake the thread that is blocked on the socket, which then closes it; closing alone would not wake it."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def _listen(directory: Path) -> tuple[socket.socket, str]:
    """A socket in `directory`, and its path. Removes what receivers that were killed left there."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in directory.glob(f"*{SOCKET_SUFFIX}"):
        _remove_if_dead(path)
    path = directory / f"{os.getpid()}-{secrets.token_hex(4)}{SOCKET_SUFFIX}"
    unready = path.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(unready))
        unready.chmod(0o600)
        listener.listen(128)
        # Under its own name it is always listening, so that nobody takes it for a dead one.
        unready.rename(path)
    except OSError:
        listener.close()
        raise
    return listener, str(path)


def _remove_if_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.debug("transfer.left_alone", path=str(path), text=str(error))


def _private_directory() -> Path:
    """A directory that only this user can enter. Raises OSError if another user made it first."""
    directory = Path(tempfile.gettempdir()) / f"baton-kv-{os.geteuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if directory.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{directory} is not private to user {os.geteuid()}")
    return directory
