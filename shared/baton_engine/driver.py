"""The loop of one scheduler rank.

    leader   wait ─► gather (app, links, notes of the others) ─► entry t ─► send it ─► Replica.apply ─► flush ─► wait
    others   wait ─► entry t ─► Replica.apply;   wait ─► something changed here ─► note to the leader

What happens at an entry, in which order, is `baton_core.unit_log.Replica`; how effects are performed is `performer`. The
loop waits neither for I/O nor for a forward, and it decides nothing. A rank by itself is a leader without others.
"""

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import structlog
import zmq

from baton_core.decode.core import DecodeCore
from baton_core.errors import Reason, Verdict
from baton_core.events import Input, PeerGone, PeerSaid
from baton_core.limits import Limits, Millis
from baton_core.messages import PageOrder
from baton_core.prefill.core import PrefillCore
from baton_core.ranks import Parallel, Place
from baton_core.rounds import Part
from baton_core.unit_log import Done, Idled, Replica, Report, UnitLeader
from baton_engine.gauges import Gauges
from baton_engine.performer import Performer, Reach
from baton_io.codec import FrameError
from baton_io.ipc import TO_RANK, Ping, Stop
from baton_io.links import Lost, News
from baton_io.rounds_channel import Rounds
from baton_io.unit_channel import LeaderChannel, MemberChannel, Nudge

log = structlog.get_logger(__name__)

SNAPSHOT_MS: Millis = 1_000


def now_ms() -> Millis:
    """The clock of this host, in milliseconds; the only one the scheduler reads."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Poked:
    """What woke the loop: since when it has been due, and whether some transfer changed (or only a step ended)."""

    since: Millis
    changed: bool


class Poker:
    """Wakes the loop from any thread, through an eventfd; remembers since when it has been due."""

    def __init__(self) -> None:
        self.file_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._since: Millis | None = None
        self._changed = False

    def __call__(self) -> None:
        """Wake the loop: what a transfer's poller would say has changed."""
        self._poke(changed=True)

    def computed(self) -> None:
        """Wake the loop: a step has ended."""
        self._poke(changed=False)

    def drain(self) -> Poked | None:
        """Forget the pokes, and say what they were."""
        with self._lock:
            since, self._since = self._since, None
            changed, self._changed = self._changed, False
            if since is None:
                return None
            os.eventfd_read(self.file_descriptor)
            return Poked(since, changed)

    def _poke(self, *, changed: bool) -> None:
        with self._lock:
            self._changed = self._changed or changed
            if self._since is None:
                self._since = now_ms()
                # Inside the lock: whoever drains sees the note and the event together, or neither.
                os.eventfd_write(self.file_descriptor, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What a rank's loop is made of, beside its `Reach`."""

    core: PrefillCore | DecodeCore
    poker: Poker
    limits: Limits
    gauges: Gauges
    parallel: Parallel
    place: Place


class _Loop(ABC):
    """What the leader's loop and the others' have in common."""

    def __init__(self, wiring: Wiring, reach: Reach) -> None:
        self._core, self._poker, self._limits = wiring.core, wiring.poker, wiring.limits
        self._gauges, self._parallel, self._place = wiring.gauges, wiring.parallel, wiring.place
        self._links, self._app, self._compute = reach.links, reach.app, reach.compute
        self._performer = Performer(reach, wiring.gauges)
        self._replica = Replica(wiring.core, self._performer, wiring.parallel, wiring.place.member)
        self._stopping = False
        self._bad_frames = 0  # on the ipc
        self._snapshot_at = now_ms()

    def run(self) -> None:
        """Turn until the app says stop. Raises what ends the worker: a dead compute thread, a lost sibling, divergence."""
        due: Millis | None = None
        while not self._stopping:
            poked = self._wait(due)
            now = now_ms()
            since = [at for at in (due, now if poked is None else poked.since) if at is not None and at <= now]
            if poked is not None or (due is not None and due <= now):
                self._gauges.tick_lag(now - min(since))
            self._turn(now, changed=poked is not None and poked.changed)
            self._check_step(now)
            self._snapshot(now)
            due = self._next_due()

    @abstractmethod
    def _turn(self, now: Millis, *, changed: bool) -> None:
        """Take what came in, and do what it asks for. `changed`: some transfer of this rank looks different now."""

    @abstractmethod
    def _sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        """More sockets whose readability means news."""

    @abstractmethod
    def _dues(self) -> list[Millis | None]:
        """When the next turn is due without news."""

    def _strays(self) -> int:
        """Frames of strangers at this rank's ports inside the worker."""
        return 0

    def _late(self) -> str:
        """Which siblings have not finished the oldest step, for people."""
        return ""

    def _wait(self, due: Millis | None) -> Poked | None:
        poller = zmq.Poller()
        poller.register(self._poker.file_descriptor, zmq.POLLIN)
        for socket in (self._app, *self._sockets(), *self._links.sockets):
            poller.register(socket, zmq.POLLIN)
        timeout_ms = None if due is None else max(0, due - now_ms())
        if timeout_ms is None:
            poller.poll()
        elif timeout_ms > 0:
            asleep = now_ms()
            poller.poll(timeout_ms)
            self._compute.excuse(now_ms() - asleep - timeout_ms)
        return self._poker.drain()

    def _next_due(self) -> Millis | None:
        dues: list[Millis | None] = [*self._dues(), self._links.next_due(), self._snapshot_at]
        if self._compute.busy_since_ms is not None:
            dues.append(self._compute.busy_since_ms + self._limits.step_ms)
        return min(due for due in dues if due is not None)

    def _heard_from_app(self) -> list[Input]:
        """The app's inputs; what is for the loop itself is obeyed here."""
        inputs: list[Input] = []
        while True:
            try:
                frame = self._app.recv(zmq.NOBLOCK)
            except zmq.Again:
                return inputs
            try:
                message = TO_RANK.decode(frame)
            except FrameError as error:
                self._bad_frames += 1
                log.error("ipc.bad_frame", error=str(error))
                continue
            if isinstance(message, Ping):
                self._snapshot_at = 0
            elif isinstance(message, Stop):
                self._stopping = True
            else:
                inputs.append(message)

    def _heard_from_peers(self, now: Millis) -> list[Input]:
        """Room messages and losses; page orders go to the transfer backend at once."""
        inputs: list[Input] = []
        news: list[News] = [*self._links.receive(now), *self._links.tick(now)]
        for one in news:
            if isinstance(one, Lost):
                log.info("link.lost", peer=one.peer, reason=one.text)
                self._performer.lost(one.peer)
                text = f"lost the link to worker {one.peer}: {one.text}"
                inputs.append(PeerGone(peer=one.peer, verdict=Verdict(reason=Reason.PEER_LOST, text=text)))
            elif isinstance(one.payload, PageOrder):
                self._performer.ordered(one.peer, one.payload)
            else:
                inputs.append(PeerSaid(peer=one.peer, message=one.payload))
        return inputs

    def _own_notes(self) -> list[Done | Idled]:
        """What was computed here since the last call."""
        member, speaks = self._place.member, self._place.member == self._parallel.speaker
        notes: list[Done | Idled] = []
        for result in self._compute.finished():
            if result is None:
                notes.append(Idled(member=member))
                continue
            self._gauges.step_over(result.step, time.monotonic())
            counts = speaks or self._place.leads or result.failed is not None
            notes.append(Done(member=member, step=result.step, result=result if counts else None))
        return notes

    def _check_step(self, now: Millis) -> None:
        busy_since = self._compute.busy_since_ms
        if busy_since is not None and now - busy_since > self._limits.step_ms:
            raise RuntimeError(
                f"a step has run for {now - busy_since} ms (step_ms {self._limits.step_ms}){self._late()}"
            )

    def _snapshot(self, now: Millis) -> None:
        if now >= self._snapshot_at:
            self._snapshot_at = now + SNAPSHOT_MS
            self._gauges.stray_frames = self._bad_frames + self._strays()
            self._performer.say(self._gauges.snapshot(self._core, self._links))


class LeaderLoop(_Loop):
    """Member 0: writes the log of its unit, and speaks for it."""

    def __init__(self, wiring: Wiring, reach: Reach, channel: LeaderChannel | None, rounds: Rounds | None) -> None:
        super().__init__(wiring, reach)
        self._channel, self._rounds = channel, rounds
        self.leader = UnitLeader(wiring.parallel, reach.side.rows)
        self._begun: deque[int] = deque()
        self._part = Part(wiring.parallel.members)

    def take_report(self, report: Report) -> None:
        """A stage's report (our own stage's comes this way). Raises Divergence."""
        self.leader.report(report)

    def _turn(self, now: Millis, *, changed: bool) -> None:
        for event in (*self._heard_from_app(), *self._heard_from_peers(now)):
            self.leader.put(event)
        nudged = self._take_notes()
        due = self._core.next_deadline()
        solo = self._parallel.members == 1
        if self.leader.wants or nudged or changed or solo or (due is not None and due <= now):
            self._write(now)
        self._take_rounds(now)
        self._performer.flush()

    def _write(self, now: Millis, number: int | None = None) -> None:
        entry = self.leader.next_entry(now, number)
        self._gauges.position = entry.position
        if self._channel is not None:
            self._channel.send(entry)
        steps = self._core.steps.count
        self._replica.apply(entry, self._performer)
        if number is None:
            self._part.changed()
        else:
            planned = self._core.steps.count != steps
            self._part.began(number, self._core.steps.count if planned else None)

    def _take_notes(self) -> bool:
        """Notes of all members, ourselves included; whether one of them saw a transfer change."""
        nudged = False
        for note in (*self._own_notes(), *(() if self._channel is None else self._channel.receive())):
            match note:
                case Done():
                    if self.leader.done(note):
                        self._round_over(self._part.computed(note.step))
                case Idled():
                    self._round_over(self._part.idled(note.member))
                case Report():
                    self.leader.report(note)
                case Nudge():
                    nudged = True
                case _:
                    assert_never(note)
        return nudged

    # -- rounds of DP attention

    def _take_rounds(self, now: Millis) -> None:
        """Begin what began elsewhere, and want a round where there is work."""
        if self._rounds is None:
            return
        self._begun.extend(self._rounds.begun())
        while self._begun:
            self._write(now, self._begun.popleft())
            self._begun.extend(self._rounds.begun())
        if self._part.wants(self._core.has_work):
            self._rounds.want()

    def _round_over(self, number: int | None) -> None:
        if number is not None:
            assert self._rounds is not None
            self._rounds.over(number)

    # -- the loop

    def _sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        ends = (self._channel, self._rounds)
        return [end.socket for end in ends if end is not None and end.socket is not None]

    def _strays(self) -> int:
        return sum(end.bad_frames for end in (self._channel, self._rounds) if end is not None)

    def _dues(self) -> list[Millis | None]:
        # Our own stage's report may have made news while the entry was applied.
        return [now_ms() if self.leader.wants else None, self._core.next_deadline()]

    def _late(self) -> str:
        late = self.leader.late()
        return "".join(
            f"; step {step} is not finished by rank {', '.join(self._rank(member) for member in members)}"
            for step, members in late.items()
        )

    def _rank(self, member: int) -> str:
        return str(self._parallel.rank_of(self._place.dp_rank, member))


class MemberLoop(_Loop):
    """Any other member: applies the log, and notes what changes here."""

    def __init__(self, wiring: Wiring, reach: Reach, channel: MemberChannel) -> None:
        super().__init__(wiring, reach)
        self._channel = channel
        self._nudged = False

    def _turn(self, now: Millis, *, changed: bool) -> None:
        strays = [*self._heard_from_app(), *self._heard_from_peers(now)]
        for stray in strays:
            # A link of this rank that was lost shows in what it observes; everything else goes to the leader.
            if not isinstance(stray, PeerGone):
                log.error("rank.not_the_leader", got=type(stray).__name__)
        for note in self._own_notes():
            self._channel.note(note)
        if (changed or strays) and not self._nudged:
            self._nudged = True
            self._channel.note(Nudge(member=self._place.member))
        for entry in self._channel.receive():
            self._nudged = False
            self._gauges.position = entry.position
            self._replica.apply(entry, self._performer)
        # Not when the app says so: a member that leaves before its leader looks like one that died.
        self._stopping = self._channel.over
        self._performer.flush()

    def _sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return [self._channel.socket]

    def _dues(self) -> list[Millis | None]:
        return []
