"""The byte stream of the `tcp` backend.

    prefill rank                                                        decode rank
    GREETING magic, version, name of the rank  ------------------------>
    PAGES    room, attempt, pieces (ordinal, offset, bytes) + payload -->  checked, then received straight into the pool
    STAGED   room, attempt, source pages (first, count) + payload ----->  the same bytes in one piece; see `staging`
    CHECKSUM room, attempt + checksum of all this rank owes           -->  ahead of the last of it, where wanted
    ROW      room, attempt + row                                      -->  written, room word last
             <-----------------------------  ACK room, attempt, bytes of pages landed from this rank
             <-----------------------------  DONE the same: this rank owes nothing more
             <-----------------------------  REFUSED room, attempt (the payload was thrown away)

All integers are little-endian. A frame that does not check out ends the connection, and nothing else.
"""

import contextlib
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"BTKV"
VERSION = 2
GREETING = struct.Struct("<4sHH")  # magic, version, length of the name that follows
FRAME = struct.Struct("<BxHIQQ")  # kind, pieces, attempt, room, payload bytes
PIECE = struct.Struct("<III")  # page ordinal, offset in the page, bytes
CHECKSUM = struct.Struct("<Q")
ANSWER = struct.Struct("<BxxxIQQ")  # kind, attempt, room, bytes landed

PIECES_MAX = 512  # below IOV_MAX (1,024), with room for the header
FRAME_BYTES_MAX = 4 * 1024 * 1024  # so that a revoked transfer stops within a few milliseconds
NAME_BYTES_MAX = 256


class FrameKind(IntEnum):
    """Prefill to decode."""

    PAGES = 1
    ROW = 2
    STAGED = 3
    CHECKSUM = 4


class AnswerKind(IntEnum):
    """Decode to prefill."""

    ACK = 1
    DONE = 2
    REFUSED = 3


class WireError(ConnectionError):
    """The stream is not what it should be; the connection ends."""


class StreamOver(WireError):
    """The other end closed the stream."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` of target page number `ordinal` (in prompt order), from `offset` on."""

    ordinal: int
    offset: int
    nbytes: int


def receive_exactly(stream: socket.socket, nbytes: int) -> bytes:
    """`nbytes` from the stream. Raises StreamOver at its end."""
    buffer = bytearray(nbytes)
    receive_into(stream, [memoryview(buffer)])
    return bytes(buffer)


def receive_into(stream: socket.socket, targets: Sequence[memoryview]) -> None:
    """Fill the buffers in order, straight from the socket (which releases the interpreter lock)."""
    left = [view for view in targets if len(view)]
    while left:
        got = stream.recvmsg_into(left)[0]
        if got == 0:
            raise StreamOver("the peer closed the connection")
        left = _advance(left, got)


def send_all(stream: socket.socket, sources: Sequence[memoryview | bytes]) -> None:
    """Send the buffers in order without joining them."""
    left = [memoryview(view) for view in sources if len(view)]
    while left:
        left = _advance(left, stream.sendmsg(left))


def _advance(views: list[memoryview], nbytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= len(view)
    return []


def shut(stream: socket.socket) -> None:
    """End a stream so that a thread blocked on it wakes up; closing alone would not wake it."""
    with contextlib.suppress(OSError):  # it is over already
        stream.shutdown(socket.SHUT_RDWR)
    stream.close()
