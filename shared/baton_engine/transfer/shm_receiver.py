"""The decode end of `shm`: it hands its pool to prefill ranks on this host, grants writings, and waits for their end.

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

from baton_core.agreement import KVPoll, Poller
from baton_core.errors import EngineError, Reason
from baton_core.request import Incarnation, PageId, Room
from baton_engine.kv_pool import KVPool, RowMemory
from baton_engine.transfer.attempts import Attempt, AttemptTable, Key, TablePoller
from baton_engine.transfer.protocol import Poke
from baton_engine.transfer.shm_wire import (
    FRAME,
    HELLO,
    INCARNATION_BYTES_MAX,
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
)

log = structlog.get_logger(__name__)

GREETING_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 1_024
SOCKET_SUFFIX = ".kv"


@dataclass(slots=True, eq=False)
class _Writer:
    """One prefill rank's connection."""

    stream: socket.socket
    name: Incarnation
    grants: dict[int, "_Grant"] = field(default_factory=dict)  # by serial; touched under the receiver's lock


@dataclass(frozen=True, slots=True, eq=False)
class _Grant:
    """A writing under way: from GRANT until the writer says that it is over, or is gone."""

    one: Attempt
    writer: _Writer
    serial: int


class ShmReceiver:
    """Offers `pool` and `rows` on a unix socket in `directory` (by default a private one below the system's temporary
    directory) to processes of the same user and of root. Raises EngineError where that cannot be."""

    backend = "shm"

    def __init__(self, pool: KVPool, rows: RowMemory, poke: Poke, *, directory: str = "") -> None:
        descriptor = pool.file_descriptor
        if descriptor is None:
            raise EngineError(f"shm needs a KV pool in host memory, not on {pool.device}: use --transfer tcp (or auto)")
        self._descriptors = (descriptor, rows.file_descriptor)
        self._welcome = Welcome(page_bytes=pool.page_bytes, pages=pool.pages, rows=rows.rows).pack()
        self._pages, self._page_bytes, self._rows = pool.pages, pool.page_bytes, rows
        self._boot_id = own_boot_id()
        self._table = AttemptTable(poke)
        self._lock = threading.Lock()
        self._grants: dict[Key, _Grant] = {}
        self._streams: set[socket.socket] = set()
        self._closing = False
        self.bytes_received = 0
        try:
            self._listener, self.address = _listen(Path(directory) if directory else _private_directory())
        except OSError as error:
            raise EngineError(f"shm cannot listen in {directory or tempfile.gettempdir()}: {error}") from error
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    # -- what the driver asks

    def expect(self, room: Room, attempt: int, writer: Incarnation, pages: tuple[PageId, ...], row: int) -> None:
        """Let `writer` fill these pages and this row, once it asks."""
        assert all(page < self._pages for page in pages), f"room {room}: a page is outside the pool"
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
        """Grant nothing more for the attempt, and ask a writer that has a grant to stop."""
        # One lock with `_begin`: either it sees the revocation, or the grant is seen here.
        with self._lock:
            self._table.revoke(room, attempt)
            grant = self._grants.get((room, attempt))
        if grant is not None:
            _ask_to_stop(grant)

    def fence(self, room: Room, attempt: int) -> None:
        """Ask once more. A living writer cannot be cut off: its pages stay held until it answers or dies."""
        with self._lock:
            grant = self._grants.get((room, attempt))
        if grant is not None:
            log.warning("transfer.quarantined", room=room, attempt=attempt, writer=grant.writer.name)
            _ask_to_stop(grant)

    def forget(self, room: Room, attempt: int) -> None:
        """Drop the attempt."""
        self._table.forget(room, attempt)

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
            boot_id, name = parse_hello(stream.recv(HELLO.size + INCARNATION_BYTES_MAX + 1))
            if boot_id != self._boot_id:
                raise WireError(f"this host's boot id is {self._boot_id}, the writer's {boot_id}")
            socket.send_fds(stream, [self._welcome], list(self._descriptors))
            stream.settimeout(None)
        except OSError as error:
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
            elif hung_up(writer.stream):
                self._gone(writer)
                return
            else:
                log.warning("transfer.bad_frame", writer=writer.name, text="empty")

    def _gone(self, writer: _Writer) -> None:
        """The writer and its mapping are no more."""
        text = f"prefill worker {writer.name} is gone: its connection ended"
        with self._lock:
            grants = list(writer.grants.values())
            for grant in grants:
                self._over(grant)
        for grant in grants:
            self._table.fail(grant.one, Reason.TRANSFER_FAILED, text)
            self._table.leave(grant.one)

    # -- frames

    def _hear(self, writer: _Writer, raw: bytes) -> None:
        try:
            frame = Frame.unpack(raw)
        except ValueError as error:
            log.warning("transfer.bad_frame", writer=writer.name, text=str(error))
            return
        if frame.kind is Kind.BEGIN:
            self._begin(writer, frame)
            return
        with self._lock:
            grant = writer.grants.get(frame.serial)
            if grant is not None and frame.kind in (Kind.FINISHED, Kind.STOPPED):
                self._over(grant)
        if grant is None:
            log.debug("transfer.late_frame", writer=writer.name, kind=frame.kind.name)
        elif frame.kind is Kind.PROGRESS:
            self._count(grant.one, frame.count)
            self._table.advance(grant.one, KVPoll.Transferring, min(frame.count, grant.one.pages_total))
        elif frame.kind is Kind.FINISHED:
            self._finished(grant.one, frame.count)
        elif frame.kind is Kind.STOPPED:
            self._table.fail(grant.one, Reason.TRANSFER_FAILED, f"prefill worker {writer.name} stopped writing")
            self._table.leave(grant.one)

    def _begin(self, writer: _Writer, frame: Frame) -> None:
        with self._lock:
            one = self._table.get(frame.room, frame.attempt)
            granted = (
                one is not None and self._may_write(one, writer, frame) and self._table.enter(one, writer, _no_cut)
            )
            if one is not None and granted:
                grant = _Grant(one, writer, frame.serial)
                writer.grants[frame.serial] = self._grants[(one.room, one.attempt)] = grant
        if not granted:
            log.info("transfer.refused", room=frame.room, attempt=frame.attempt, writer=writer.name)
        answer = Frame(kind=Kind.GRANT if granted else Kind.REFUSED, serial=frame.serial)
        # May block while the writer is stopped: this thread serves nobody else. A writer that is gone is noticed next.
        with contextlib.suppress(OSError):
            writer.stream.send(answer.pack())

    def _may_write(self, one: Attempt, writer: _Writer, frame: Frame) -> bool:
        return (
            one.peer == writer.name
            and one.busy == 0
            and one.row is not None
            and one.status is KVPoll.WaitingForInput
            and frame.serial not in writer.grants
            and frame.count == order_digest(one.pages, one.row)
        )

    def _finished(self, one: Attempt, pages: int) -> None:
        assert one.row is not None
        complete = pages == one.pages_total and self._rows.room_word(one.row) != 0
        self._count(one, pages)
        self._table.leave(one)
        if complete:
            self._table.advance(one, KVPoll.Success, pages)
        else:
            text = f"prefill finished after {pages} of {one.pages_total} pages, or without the row"
            self._table.fail(one, Reason.TRANSFER_FAILED, text)

    def _count(self, one: Attempt, pages: int) -> None:
        self.bytes_received += max(0, pages - one.progress) * self._page_bytes

    def _over(self, grant: _Grant) -> None:
        grant.writer.grants.pop(grant.serial, None)
        if self._grants.get((grant.one.room, grant.one.attempt)) is grant:
            del self._grants[(grant.one.room, grant.one.attempt)]


def _ask_to_stop(grant: _Grant) -> None:
    # Lost where the writer is stopped and its queue full: `fence` asks again, and an end of the writing ends it too.
    with contextlib.suppress(OSError):
        grant.writer.stream.send(Frame(kind=Kind.REVOKE, serial=grant.serial).pack(), socket.MSG_DONTWAIT)


def _no_cut() -> None:
    """Nothing cuts off a process that maps the pool."""


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
