"""The unit's log on the wire: the leader's ROUTER, and a DEALER of every other member.

    member  Join ──►                                                    once; it waits in the queue until the leader is there
            Done, Idled, Report, Nudge ──►                              notes
            ◄── Welcome, Entry …, Farewell                              every position of the log, in order

Both ends are ours and on one host or one private network; frames are msgpack, checked by their codec, never pickle. What
comes over another connection than a member's is counted and dropped: ports are scanned. A member that cannot be understood,
does not read, or whose connection broke, is another matter: the unit cannot go on without it.
"""

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import zmq

from baton_core import events
from baton_core.errors import EngineError
from baton_core.events import AgreedPoll, Input, PeerGone, PeerSaid
from baton_core.limits import Millis
from baton_core.plan import StepResult
from baton_core.ranks import Member
from baton_core.request import Incarnation
from baton_core.unit_log import Done, Idled, LogEntry, Report
from baton_io.codec import Codec, FrameError
from baton_io.links import PAYLOADS
from baton_io.seats import Seats, open_router

HIGH_WATER_MARK = 65_536
FRAME_BYTES_MAX = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A member is here; the leader answers with `Welcome` once everybody is."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Everybody is here; the log begins."""

    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """The log is complete: leave."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Nudge:
    """What this member sees of some transfer has changed: the leader should write an entry."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """`PeerSaid` with its message as the link carries it: a union of classes has no plain msgpack form."""

    peer: Incarnation
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """`LogEntry` with its inputs encoded one by one."""

    position: int
    now: Millis
    inputs: tuple[bytes, ...]
    results: tuple[StepResult, ...]
    consensus: tuple[AgreedPoll, ...]
    round: int | None


_INPUTS = Codec(
    {
        1: events.Submit,
        2: events.Abort,
        3: events.AbortAll,
        4: events.StopHere,
        5: events.Resolved,
        6: events.LookupFailed,
        7: events.DrainBegan,
        8: events.FlushCache,
        9: PeerGone,
        10: _Said,
        11: events.Pause,
        12: events.Continue,
    }
)
_NOTES = Codec({1: Join, 2: Done, 3: Report, 4: Nudge, 5: Idled})
_LOG = Codec({1: _Entry, 2: Welcome, 3: Farewell})

Note = Done | Idled | Report | Nudge


class LeaderChannel:
    """The leader's end. Not thread-safe: the driver's loop owns it."""

    def __init__(self, address: str, members: int) -> None:
        """Bind. Raises EngineError when the address cannot be had."""
        self._members = members
        self._position = 0
        self._seats = Seats(range(1, members))
        self.bad_frames = 0
        """Frames of strangers."""
        self._context = zmq.Context(io_threads=1)
        self.socket = _bounded(open_router(self._context))
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise EngineError(f"the log of this unit cannot listen at {address}: {error}") from error

    def gather(self, timeout_ms: Millis) -> None:
        """Wait until every other member has joined. Raises EngineError naming who has not."""
        until_s = time.monotonic() + timeout_ms / 1000
        while missing := self._seats.missing:
            left_ms = round(1000 * (until_s - time.monotonic()))
            if left_ms <= 0 or not self.socket.poll(left_ms):
                text = ", ".join(str(member) for member in missing)
                raise EngineError(f"member {text} of this unit did not come within {timeout_ms} ms")
            sender, *parts = self.socket.recv_multipart()
            self._seat(sender, parts)
        self._broadcast(_LOG.encode(Welcome(members=self._members)))

    def send(self, entry: LogEntry) -> None:
        """To every other member. Raises EngineError where one takes nothing any more."""
        self._position = entry.position
        self._broadcast(_LOG.encode(_packed(entry)))

    def farewell(self) -> None:
        """The log is complete; whoever is still there may leave. Never raises."""
        frame = _LOG.encode(Farewell(position=self._position))
        for name in self._seats.names.values():
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send_multipart([name, frame], zmq.NOBLOCK)

    def receive(self) -> list[Note]:
        """Every note that has come in. Raises EngineError where a member's cannot be read."""
        notes: list[Note] = []
        while True:
            try:
                sender, *parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return notes
            member = self._seats.of(sender)
            if member is None:
                self.bad_frames += 1
                continue
            if len(parts) != 1:
                raise EngineError(f"member {member} of this unit sent a note of {len(parts)} parts")
            notes.append(_decoded(_NOTES, parts[0]))

    def close(self) -> None:
        """Close; what was not sent is dropped after a moment."""
        self.socket.close(linger=200)
        self._context.term()

    def _seat(self, sender: bytes, parts: list[bytes]) -> None:
        """Who says first that it is a member is that member; anything else is a stranger's."""
        try:
            note = _NOTES.decode(parts[0]) if len(parts) == 1 else None
        except FrameError:
            note = None
        if not (isinstance(note, Join) and self._seats.take(sender, note.member)):
            self.bad_frames += 1

    def _broadcast(self, frame: bytes) -> None:
        for member, name in self._seats.names.items():
            try:
                self.socket.send_multipart([name, frame], zmq.NOBLOCK)
            except zmq.ZMQError as error:  # Again: its queue is full; EHOSTUNREACH: it is gone
                raise EngineError(f"member {member} of this unit does not take the log: {error}") from error


class MemberChannel:
    """Any other member's end."""

    def __init__(self, address: str, member: Member) -> None:
        self._member = member
        self.over = False
        """Whether the leader has said farewell."""
        self._context = zmq.Context(io_threads=1)
        self.socket = _bounded(self._context.socket(zmq.DEALER))
        self.socket.connect(address)

    def gather(self, timeout_ms: Millis) -> None:
        """Join, and wait until everybody has. Raises EngineError."""
        self.note(Join(member=self._member))
        if not self.socket.poll(timeout_ms):
            raise EngineError(f"the leader of this unit did not begin its log within {timeout_ms} ms")
        welcome = _decoded(_LOG, self.socket.recv())
        if not isinstance(welcome, Welcome):
            raise EngineError("the log of this unit began without a welcome")

    def note(self, note: Note | Join) -> None:
        """Tell the leader. Raises EngineError where it does not listen any more."""
        try:
            self.socket.send(_NOTES.encode(note), zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineError("the leader of this unit does not take notes any more") from error

    def receive(self) -> list[LogEntry]:
        """Every entry that has come in, in order."""
        entries: list[LogEntry] = []
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return entries
            packed = _decoded(_LOG, frame)
            if isinstance(packed, _Entry):
                entries.append(_unpacked(packed))
            elif isinstance(packed, Farewell):
                self.over = True

    def close(self) -> None:
        """Close; what was not sent is dropped after a moment."""
        self.socket.close(linger=200)
        self._context.term()


def _packed(entry: LogEntry) -> _Entry:
    return _Entry(
        position=entry.position,
        now=entry.now,
        inputs=tuple(_INPUTS.encode(_plain(event)) for event in entry.inputs),
        results=entry.results,
        consensus=entry.consensus,
        round=entry.round,
    )


def _unpacked(packed: _Entry) -> LogEntry:
    return LogEntry(
        position=packed.position,
        now=packed.now,
        inputs=tuple(_event(_decoded(_INPUTS, raw)) for raw in packed.inputs),
        results=packed.results,
        consensus=packed.consensus,
        round=packed.round,
    )


def _plain(event: Input) -> object:
    return _Said(peer=event.peer, payload=PAYLOADS.encode(event.message)) if isinstance(event, PeerSaid) else event


def _event(plain: object) -> Input:
    if isinstance(plain, _Said):
        return PeerSaid(peer=plain.peer, message=_decoded(PAYLOADS, plain.payload))
    return plain  # type: ignore[return-value]  # the codec makes nothing but inputs


def _decoded(codec: Codec, frame: bytes) -> Any:
    """What is in a frame of a sibling. Raises EngineError: siblings run the same code, so this unit is at fault."""
    try:
        return codec.decode(frame)
    except FrameError as error:
        raise EngineError(f"a sibling sent what this rank cannot read: {error}") from error


def _bounded(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    return socket
