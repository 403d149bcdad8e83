"""What only the first rank of a unit does: links, inputs, look-ups, answers, and writing the log.

It does what the engine's driver does: drain the inbox, note what members report, and when there is something new (or a
deadline is due) write an entry, publish it and apply it like everybody else. It sleeps until something arrives or a
deadline passes; and while it is in the middle of an entry it does nothing else.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton_core import effects as fx
from baton_core.effects import Effect
from baton_core.errors import Reason, Verdict
from baton_core.events import PeerGone, PeerSaid
from baton_core.limits import Millis
from baton_core.link import Frame, Switchboard
from baton_core.request import Incarnation
from baton_core.rounds import Part
from baton_core.unit_log import Done, Idled, LogEntry, Report, UnitLeader
from simulation.invariants import Broken
from simulation.rank import Nudge, Rank

if TYPE_CHECKING:
    from simulation.unit import Unit


class Reset:
    """The operating system says that a peer's process is gone, or refuses the connection."""

    def __init__(self, peer: Incarnation) -> None:
        self.peer = peer


class Leader:
    """The leading rank's other half."""

    def __init__(self, unit: "Unit", rank: Rank) -> None:
        self.unit, self.rank, self.world = unit, rank, unit.world
        self.name = rank.name
        self.address = f"{unit.worker.name}/{unit.dp_rank}"
        self.log = UnitLeader(unit.parallel, rank.rows)
        self.switchboard = Switchboard(self.name, self.world.shape.limits)
        self.routes: dict[Incarnation, str] = {}
        self.inbox: list[object] = []
        self.nudged = False
        self.skew = self.world.random.randrange(1_000)
        self._wake_at: int | None = None
        # What the core and the links said when the loop last went to sleep: asking again tells nothing new.
        self._core_due: Millis | None = None
        self._links_due: Millis | None = None
        # DP attention: rounds to begin, and our part in them.
        self._begun: deque[int] = deque()
        self._part = Part(unit.parallel.members)
        self._steps = 0

    def __repr__(self) -> str:
        return self.name

    @property
    def alive(self) -> bool:
        """Whether its unit lives."""
        return self.unit.alive

    @property
    def now(self) -> Millis:
        """The unit's monotonic clock."""
        return self.world.now + self.skew

    def unacknowledged(self) -> int:
        """Messages on live links that the peer has not acknowledged."""
        return sum(len(link._unacked) for link in self.switchboard._links.values())

    # -- the loop

    def put(self, item: object) -> None:
        """Something arrives; the loop turns soon."""
        if self.alive:
            self.inbox.append(item)
            self.wake(int(self.world.random.random() * self.world.shape.turn_ms) * self.rank.slowness)

    def note(self, item: object) -> None:
        """A member of this unit says something; the loop turns at once."""
        if not self.alive:
            return
        if isinstance(item, Nudge):
            self.nudged = True
        else:
            self.inbox.append(item)
        self.wake(0)

    def wake(self, delay: Millis) -> None:
        """Turn the loop in `delay` ms, or earlier."""
        due = self.world.now + delay
        if self._wake_at is None or due < self._wake_at:
            self._wake_at = due
            self.world.at(delay, self._due, due)

    def _due(self, due: Millis) -> None:
        if due == self._wake_at:
            self._wake_at = None
            if self.unit.alive and not self.rank.paused and not self.rank.busy:
                self.turn()

    def turn(self) -> None:
        """One turn of the loop."""
        now = self.now
        inbox, self.inbox = self.inbox, []
        for item in inbox:
            self._take(item, now)
        if self._links_due is not None and self._links_due <= now:
            self._tick_links(now)
        due = self._core_due
        number = self._begun.popleft() if self._begun else None
        if self.nudged or self.log.wants or number is not None or (due is not None and due <= now):
            self._write(number, now)
        else:
            self._sleep()

    def _write(self, number: int | None, now: Millis) -> None:
        self.nudged = False
        self._steps = self.rank.core.steps.count
        entry = self.log.next_entry(now, number)
        self.world.note(self.rank, entry)
        self.unit.publish(entry)
        self.rank.take(entry)

    def applied(self, entry: LogEntry) -> None:
        """The leading rank has applied its entry."""
        self._core_due = self.rank.core.next_deadline()
        steps = self.rank.core.steps.count
        if entry.round is None:
            self._part.changed()
        else:
            self._part.began(entry.round, steps if steps != self._steps else None)
        self._sleep()

    def _want_round(self) -> None:
        conductor = self.unit.worker.conductor
        if conductor is not None and self._part.wants(self.rank.core.has_work):
            self.unit.worker.begin(conductor.want())

    def begin(self, number: int) -> None:
        """A round begins in all units."""
        self._begun.append(number)
        self.wake(0)

    def _done(self, note: Done | Idled) -> None:
        conductor = self.unit.worker.conductor
        if isinstance(note, Idled):
            over = self._part.idled(note.member)
        else:
            over = self._part.computed(note.step) if self.log.done(note) else None
        if over is not None:
            assert conductor is not None
            self.unit.worker.begin(conductor.over(self.unit.dp_rank, over))

    def _sleep(self) -> None:
        """Until when is there nothing to do?"""
        self._want_round()
        due = links_due = self._links_due = self.switchboard.next_due()
        if self._core_due is not None and (links_due is None or self._core_due < links_due):
            due = self._core_due
        if self.nudged or self.inbox or self._begun:
            self.wake(0)
        elif due is not None:
            now = self.now
            self.wake(due - now if due > now else 1)

    def _take(self, item: object, now: Millis) -> None:
        if isinstance(item, tuple):
            self._frame(item[0], item[1], now)
        elif isinstance(item, Done | Idled):
            self._done(item)
        elif isinstance(item, Report):
            self.log.report(item)
        elif isinstance(item, Reset):
            if self.switchboard.knows(item.peer):
                self.switchboard.hang_up(item.peer)
                self._peer_gone(item.peer, "connection reset")
        else:
            self.log.put(item)  # type: ignore[arg-type]

    # -- links

    def _frame(self, address: str, frame: Frame, now: Millis) -> None:
        heard = self.switchboard.receive(frame, now)
        for answer in heard.answers:
            self.world.network.send(self, address, answer)
        if heard.lost is not None:
            self._peer_gone(heard.peer, heard.lost)
        if heard.payloads:
            if frame.target != self.name:
                raise Broken("old life", f"{self} obeys a message to {frame.target}")
            self.routes[heard.peer] = address
            for payload in heard.payloads:
                self.log.put(PeerSaid(peer=heard.peer, message=self.world.messages[int(payload)]))

    def _peer_gone(self, peer: Incarnation, text: str) -> None:
        self.routes.pop(peer, None)
        if self.world.fleet is not None:
            self.world.fleet.peer_gone(self.unit.worker, peer)
        self.log.put(PeerGone(peer=peer, verdict=Verdict(reason=Reason.PEER_LOST, text=text)))

    def _tick_links(self, now: Millis) -> None:
        frames, lost = self.switchboard.tick(now)
        for frame in frames:
            address = self.routes.get(frame.target)
            if address is not None:
                self.world.network.send(self, address, frame)
        for peer, text in lost:
            self._peer_gone(peer, text)

    # -- effects that only a leader performs

    def perform(self, effect: Effect, now: Millis) -> None:
        """Emit, tell, look up, connect."""
        _PERFORM[type(effect)](self, effect)

    def _tell(self, effect: fx.Tell) -> None:
        world = self.world
        payload = str(len(world.messages)).encode()
        world.messages.append(effect.message)
        for frame in self.switchboard.send(effect.peer, payload, self.now):
            world.network.send(self, self.routes[effect.peer], frame)

    def _connect(self, effect: fx.Connect) -> None:
        self.routes[effect.infos.leader] = effect.infos.endpoints[0].host
        self.switchboard.dial(effect.infos.leader, self.now)

    def _emit(self, effect: fx.Emit) -> None:
        self.world.clients.emitted(self.unit, effect)

    def _look_up(self, effect: fx.LookUp) -> None:
        self.world.registry.look_up(self, effect)

    def _register(self, effect: fx.RegisterRank) -> None:
        self.world.registry.register(self, effect)


_PERFORM: dict[type[Any], Callable[[Any, Any], None]] = {
    fx.Emit: Leader._emit,
    fx.Tell: Leader._tell,
    fx.LookUp: Leader._look_up,
    fx.RegisterRank: Leader._register,
    fx.Connect: Leader._connect,
}
