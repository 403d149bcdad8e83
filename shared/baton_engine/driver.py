"""The loop of one scheduler rank.

    leader   wait ─► gather (app, links, notes of the others) ─► entry t ─► send it ─► Replica.apply ─► flush ─► wait
    others   wait ─► entry t ─► Replica.apply;   wait ─► something changed here ─► note to the leader

What happens at an entry, in which order, is `baton_core.unit_log.Replica`; how effects are performed is `performer`. The
loop waits neither for I/O nor for a forward, and it decides nothing. A rank by itself is a leader without others.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import zmq

from baton_core.decode.core import DecodeCore
from baton_core.errors import Reason, Verdict
from baton_core.events import Input, PeerGone, PeerSaid
from baton_core.limits import Limits, Millis
from baton_core.messages import PageOrder
from baton_core.prefill.core import PrefillCore
from baton_core.ranks import Parallel, Place
from baton_core.unit_log import Done, Replica, Report, UnitLeader
from baton_engine.compute import Computed
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


class _Loop:
    """What the leader's loop and the others' have in common."""

    def __init__(self, wiring: Wiring, reach: Reach) -> None:
        self._core, self._poker, self._limits = wiring.core, wiring.poker, wiring.limits
        self._gauges, self._parallel, self._place = wiring.gauges, wiring.parallel, wiring.place
        self._links, self._app, self._compute = reach.links, reach.app, reach.compute
        self._performer = Performer(reach, wiring.gauges)
        self._replica = Replica(wiring.core, self._performer, wiring.parallel, wiring.place.member)
        self._stopping = False
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

    def _turn(self, now: Millis, *, changed: bool) -> None:
        raise NotImplementedError

    def _sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        raise NotImplementedError

    def _dues(self) -> list[Millis | None]:
        raise NotImplementedError

    def _late(self) -> str:
        """Which siblings have not finished the oldest step, for people."""
        return ""

    def _wait(self, due: Millis | None) -> Poked | None:
        poller = zmq.Poller()
        poller.register(self._poker.file_descriptor, zmq.POLLIN)
        for socket in (self._app, *self._sockets(), *self._links.sockets):
            poller.register(socket, zmq.POLLIN)
        timeout_ms = None if due is None else max(0, due - now_ms())
        if timeout_ms != 0:
            poller.poll(timeout_ms)
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

    def _finished(self) -> list[Computed]:
        done = self._compute.finished()
        for _ in done:
            self._gauges.step_over(time.monotonic())
        return done

    def _check_step(self, now: Millis) -> None:
        busy_since = self._compute.busy_since_ms
        if busy_since is not None and now - busy_since > self._limits.step_ms:
            raise RuntimeError(
                f"a step has run for {now - busy_since} ms (step_ms {self._limits.step_ms}){self._late()}"
            )

    def _snapshot(self, now: Millis) -> None:
        if now >= self._snapshot_at:
            self._snapshot_at = now + SNAPSHOT_MS
            self._performer.say(self._gauges.snapshot(self._core, self._links))


class LeaderLoop(_Loop):
    """Member 0: writes the log of its unit, and speaks for it."""

    def __init__(self, wiring: Wiring, reach: Reach, channel: LeaderChannel | None, rounds: Rounds | None) -> None:
        super().__init__(wiring, reach)
        self._channel, self._rounds = channel, rounds
        self.leader = UnitLeader(wiring.parallel, reach.side.rows)
        self._begun: deque[int] = deque()
        self._round: int | None = None  # the one that runs
        self._round_step: int | None = None  # our step in it; None: idle
        self._idled: set[int] = set()  # members that idled through it
        self._wanted = self._futile = False

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
        while self._rounds is not None and (self._begun or self._rounds_news()):
            self._write(now, self._begun.popleft())
        self._want_round()
        self._performer.flush()

    def _write(self, now: Millis, number: int | None = None) -> None:
        entry = self.leader.next_entry(now, number)
        self._gauges.position = entry.position
        if self._channel is not None:
            self._channel.send(entry)
        if number is None:
            self._futile = False
        else:
            self._round, self._wanted = number, False
            self._idled.clear()
        steps = self._core.steps.count
        self._replica.apply(entry)
        if number is not None:
            self._round_step = self._core.steps.count if self._core.steps.count != steps else None
            self._futile = self._round_step is None

    def _take_notes(self) -> bool:
        """Notes of all members, ourselves included; whether one of them saw a transfer change."""
        nudged = False
        for done in self._finished():
            self._note(Done(member=0, step=self._step_of(done), result=done.result))
        for note in () if self._channel is None else self._channel.receive():
            if isinstance(note, Done):
                self._note(note)
            elif isinstance(note, Report):
                self.leader.report(note)
            else:
                nudged = True
        return nudged

    def _step_of(self, done: Computed) -> int:
        return done.result.step if done.result is not None else -(done.idle or 0)

    def _note(self, note: Done) -> None:
        if note.step < 0:
            self._idled.add(note.member)
            if len(self._idled) == self._parallel.members:
                self._round_over()
            return
        if self.leader.done(note) and self._round is not None and note.step == self._round_step:
            self._round_over()

    # -- rounds of DP attention

    def _rounds_news(self) -> bool:
        if self._rounds is not None:
            self._begun.extend(self._rounds.begun())
        return bool(self._begun)

    def _want_round(self) -> None:
        if self._rounds is None or self._wanted or self._futile or self._round is not None:
            return
        if _has_work(self._core):
            self._wanted = True
            self._rounds.want()

    def _round_over(self) -> None:
        assert self._rounds is not None and self._round is not None
        number, self._round = self._round, None
        self._rounds.over(number)

    # -- the loop

    def _sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        ends = (self._channel, self._rounds)
        return [end.socket for end in ends if end is not None and end.socket is not None]

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
        done = self._finished()
        for one in done:
            step = one.result.step if one.result is not None else -(one.idle or 0)
            wanted = one.result is not None and (
                self._place.member == self._parallel.speaker or one.result.failed is not None
            )
            self._channel.note(Done(member=self._place.member, step=step, result=one.result if wanted else None))
        if (changed or strays) and not self._nudged:
            self._nudged = True
            self._channel.note(Nudge(member=self._place.member))
        for entry in self._channel.receive():
            self._nudged = False
            self._gauges.position = entry.position
            self._replica.apply(entry)
        # Not when the app says so: a member that leaves before its leader looks like one that died.
        self._stopping = self._channel.over
        self._performer.flush()

    def _sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return [self._channel.socket]

    def _dues(self) -> list[Millis | None]:
        return []


def _has_work(core: PrefillCore | DecodeCore) -> bool:
    """Whether there may be something to compute; planning alone knows for sure."""
    if isinstance(core, PrefillCore):
        return bool(core.waiting.queue)
    return bool(core.batch.running or core.batch.arrived or core.batch.local)
