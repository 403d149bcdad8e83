"""The conversation of the `shm` backend, over a unix socket of whole messages (`SOCK_SEQPACKET`).

    prefill rank (the writer)                                              decode rank (owner of pool and rows)
    HELLO    magic, version, boot id, name of the rank  -------------------->
             <------  WELCOME page bytes, pages, rows + the descriptors of pool and rows, or a refusal in words
    BEGIN    serial, room, attempt, order digest  -------------------------->  may this writer still write?
             <------  GRANT serial, or REFUSED serial
    PROGRESS serial, bytes written  ---------------------------------------->
    CHECKSUM serial, checksum of all this writer owes, where wanted  ------->
             <------  REVOKE serial: stop
    STOPPED  serial (this writing is over), or FINISHED serial, bytes (all this writer owes is written; the row,
             where it owes one, after the pages, and its room word last)  -->

Decode cannot check single writes, so it grants a *writing* as a whole and believes in its end only when the writer says
so, or when the writer is gone. A serial names one writing on one connection: it is drawn by the writer and never reused
there, so nothing late can be taken for news of another life of the same room.

End of file means that the writer is gone: a process that dies drops its mappings before its files, and a living one
unmaps the pool before it closes the socket. `hung_up` tells this end from an empty message and from half a shutdown,
neither of which proves anything.

All integers are little-endian. Messages have borders, so one that makes no sense is ignored without losing step.
"""

import os
import select
import socket
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from baton_core.request import Incarnation, PageId

MAGIC = b"BTSM"
VERSION = 2
HELLO = struct.Struct("<4sHH36s")  # magic, version, length of the name that follows, boot id
WELCOME = struct.Struct("<4sHHQII")  # magic, version, 1 if refused (a text follows), page bytes, pages, rows
FRAME = struct.Struct("<BxxxIQIxxxxQ")  # kind, serial, room, attempt, count (bytes written, or the order digest)
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: `struct ucred`

NAME_BYTES_MAX = 256
TEXT_BYTES_MAX = 1_024
SERIAL_MAX = 2**32 - 1
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Kind(IntEnum):
    """What a frame says; the first four go from prefill to decode."""

    BEGIN = 1
    PROGRESS = 2
    FINISHED = 3
    STOPPED = 4
    GRANT = 5
    REFUSED = 6
    REVOKE = 7
    CHECKSUM = 8  # from prefill again


class WireError(ConnectionError):
    """The other end is not what it should be, or is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One small message. `count` is bytes written (PROGRESS, FINISHED), a checksum, or the digest of the order (BEGIN)."""

    kind: Kind
    serial: int
    room: int = 0
    attempt: int = 0
    count: int = 0

    def pack(self) -> bytes:
        """The frame as bytes."""
        return FRAME.pack(self.kind, self.serial, self.room, self.attempt, self.count)

    @staticmethod
    def unpack(raw: bytes) -> "Frame":
        """The frame in `raw`. Raises ValueError if it is none."""
        if len(raw) != FRAME.size:
            raise ValueError(f"a frame has {FRAME.size} bytes, not {len(raw)}")
        kind, serial, room, attempt, count = FRAME.unpack(raw)
        return Frame(kind=Kind(kind), serial=serial, room=room, attempt=attempt, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What a writer learns about the memory it may write to."""

    page_bytes: int
    pages: int
    rows: int

    def pack(self) -> bytes:
        """The message that goes with the two descriptors."""
        return WELCOME.pack(MAGIC, VERSION, 0, self.page_bytes, self.pages, self.rows)


def refusal(text: str) -> bytes:
    """The message that ends a conversation before it began."""
    return WELCOME.pack(MAGIC, VERSION, 1, 0, 0, 0) + text.encode()[:TEXT_BYTES_MAX]


def hello(boot_id: str, incarnation: Incarnation) -> bytes:
    """A writer's first message."""
    name = incarnation.encode("ascii")
    return HELLO.pack(MAGIC, VERSION, len(name), boot_id.encode("ascii")) + name


def parse_hello(raw: bytes) -> tuple[str, Incarnation]:
    """Boot id and name of a writer. Raises WireError."""
    if len(raw) < HELLO.size:
        raise WireError("not a greeting")
    magic, version, length, boot_id = HELLO.unpack_from(raw)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"not an shm writer of version {VERSION}: {magic!r} version {version}")
    name = raw[HELLO.size :]
    if len(name) != length or not 0 < length <= NAME_BYTES_MAX or not name.isascii():
        raise WireError(f"a greeting with a name of {len(name)} bytes")
    return boot_id.decode("ascii", "replace"), name.decode("ascii")


def receive_welcome(stream: socket.socket) -> tuple[Welcome, int, int]:
    """Decode's answer, with the descriptors of its pool and its rows, which are the caller's to close.

    Raises WireError on anything else, and leaves no descriptor open then.
    """
    ancillary_bytes = socket.CMSG_SPACE(2 * struct.calcsize("i"))
    raw, ancillary, _, _ = stream.recvmsg(WELCOME.size + TEXT_BYTES_MAX, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, what, data in ancillary:
        if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors += struct.unpack(f"{len(data) // 4}i", data)
    try:
        welcome = _parse_welcome(raw, len(descriptors))
    except WireError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return welcome, descriptors[0], descriptors[1]


def _parse_welcome(raw: bytes, descriptors: int) -> Welcome:
    if len(raw) < WELCOME.size:
        raise WireError("decode closed the connection instead of greeting" if not raw else "not a greeting")
    magic, version, refused, page_bytes, pages, rows = WELCOME.unpack_from(raw)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"not an shm receiver of version {VERSION}: {magic!r} version {version}")
    if refused:
        raise WireError(f"decode refused: {raw[WELCOME.size :].decode(errors='replace')}")
    if descriptors != 2 or min(page_bytes, pages, rows) < 1:
        raise WireError(f"decode sent {descriptors} descriptors, {pages} pages of {page_bytes} bytes, {rows} rows")
    return Welcome(page_bytes=page_bytes, pages=pages, rows=rows)


def order_digest(pages: tuple[PageId, ...], row: int) -> int:
    """32 bits that tie a BEGIN to the very order it answers: an order of the room's earlier life names other pages."""
    return zlib.crc32(struct.pack(f"<{len(pages) + 1}q", row, *pages))


def own_boot_id() -> str:
    """Names this host since its last start; equal in all its containers."""
    return BOOT_ID.read_text().strip()


def require_trusted(stream: socket.socket) -> None:
    """Raise WireError unless the process at the other end runs as this user, or as root."""
    raw = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, uid, _ = CREDENTIALS.unpack(raw)
    if uid not in (0, os.geteuid()):
        raise WireError(f"the process at the other end runs as user {uid}, this one as {os.geteuid()}")


def hung_up(stream: socket.socket, wait_ms: int = 0) -> bool:
    """Whether the other end is closed for good, or is within `wait_ms`: its process closed every copy of it, or died."""
    poller = select.poll()
    poller.register(stream, 0)
    return any(event & select.POLLHUP for _, event in poller.poll(wait_ms))


def says_no_more(stream: socket.socket) -> bool:
    """Whether the other end has shut its half down: what is read from it is empty from now on, for ever."""
    poller = select.poll()
    poller.register(stream, select.POLLRDHUP)
    return any(event & select.POLLRDHUP for _, event in poller.poll(0))
