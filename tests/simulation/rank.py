"""One rank: a real core behind a real `Replica`, its own KV memory, metadata rows and transfer ends.

A rank applies its unit's log, entry by entry. Where the replica asks its stage for an agreement the rank stops, and goes
on when the last of the stage has come to the same question (`stage`). Who leads emits, tells and looks up; nobody else.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from baton_core import effects as fx
from baton_core.agreement import GateArgs, MetadataRows, Observation, Watch
from baton_core.decode.core import DecodeCore
from baton_core.decode.phases import DECODE
from baton_core.effects import Effect
from baton_core.events import FlushCache, Input, Pause, PauseMode, PeerGone, PeerSaid, Resolved, Submit
from baton_core.ledger import Ledger, copy_of
from baton_core.limits import Millis
from baton_core.messages import MetadataRow
from baton_core.plan import StepPlan
from baton_core.prefill.core import PrefillCore
from baton_core.prefill.phases import PREFILL
from baton_core.ranks import Member, member_name
from baton_core.request import Incarnation, RequestId
from baton_core.unit_log import Applying, Done, Idled, LogEntry, Replica, Report
from simulation.copies import Copies
from simulation.invariants import check_books, check_moves, check_peer_gone
from simulation.oracle import Memory
from simulation.receiver import FakeReceiver, Receiver
from simulation.sender import FakeSender, Sender
from simulation.transfer import Transfer

if TYPE_CHECKING:
    from simulation.unit import Unit
    from simulation.world import World


_LEGAL_MOVES = {
    table.side: {(source.value, target.value) for source, target in table.edges()} for table in (PREFILL, DECODE)
}
_FLUSHES = FlushCache(), Pause(mode=PauseMode.RETRACT)


class Nudge:
    """A rank to its leader: what I see of some transfer has changed."""


class Rows:
    """`MetadataRows` over a list."""

    def __init__(self, rows: list[MetadataRow | None]) -> None:
        self._rows = rows

    def room_word(self, row: int) -> int:
        """0 while nothing is written."""
        found = self._rows[row]
        return 0 if found is None else found.room + 1

    def read(self, row: int) -> MetadataRow | None:
        """The row, or None."""
        return self._rows[row]


class Rank:
    """One member of one unit, for one life."""

    def __init__(self, unit: "Unit", member: Member) -> None:
        self.unit, self.member = unit, member
        self.world: World = unit.world
        self.side, self.worker = unit.side, unit.worker
        self.name = member_name(self.worker.incarnation, unit.dp_rank, member)
        self.stage = member // unit.parallel.stage_members
        self.leads = member == 0  # it writes the log
        self.paused = False
        self.slowness = 1
        self.phases: dict[RequestId, str] = {}
        self.entries: deque[LogEntry] = deque()
        self.entry: LogEntry | None = None
        self.asked = 0
        self._asking: Applying | None = None
        self._answers: list[object] = []  # came while it was paused
        self._nudged = False
        shape = self.world.shape
        decode = self.side == "decode"
        self.memory = Memory(unit.layout, member, unit.pages, self.world.random)
        self.metadata: list[MetadataRow | None] = [None] * shape.limits.metadata_rows if decode else []
        self._rows = Rows(self.metadata) if decode else None
        self.gate_args = GateArgs(backend=shape.backend) if decode else None
        self.core: PrefillCore | DecodeCore = unit.new_core()
        self.ledger: Ledger = self.core.ledger  # its books
        self.copies = Copies(self)
        self.transfer: Transfer
        fake = shape.backend == "fake"
        if decode:
            self.transfer = FakeReceiver(self) if fake else Receiver(self)
        else:
            self.transfer = FakeSender(self) if fake else Sender(self)
        self.replica = Replica(self.core, self, unit.parallel, member)
        self.pages_born: dict[int, int] = {}  # by page: how often the cache had been flushed when it was handed out
        self.flushes = 0
        self._watch_pool()
        self.legal_moves = _LEGAL_MOVES[self.side]

    def __repr__(self) -> str:
        return self.name

    @property
    def alive(self) -> bool:
        """Whether its unit lives."""
        return self.unit.alive

    @property
    def busy(self) -> bool:
        """Whether it is in the middle of a log entry."""
        return self._asking is not None

    def queue_sizes(self) -> tuple[int, int]:
        """Running sequences and kept hellos."""
        if isinstance(self.core, DecodeCore):
            return len(self.core.batch.running), 0
        return 0, len(self.core.orphans)

    def memories(self) -> tuple[int, ...]:
        """What the core remembers about rooms that are over, or not yet begun."""
        if isinstance(self.core, DecodeCore):
            return (len(self.core.farewells),)
        return (len(self.core.orphans),)

    def _watch_pool(self) -> None:
        pool = self.ledger.pool
        allocate = pool.allocate

        def noted(count: int) -> tuple[int, ...] | None:
            pages = allocate(count)
            self.pages_born.update(dict.fromkeys(pages or (), self.flushes))
            return pages

        pool.allocate = noted  # type: ignore[method-assign]

    # -- the log

    def take(self, entry: LogEntry) -> None:
        """The next entry is here."""
        self.entries.append(entry)
        self.pump()

    def pump(self) -> None:
        """Begin with the next entry, if there is one and nothing hinders."""
        if self._asking is None and self.entries and self.alive and not self.paused:
            self.entry = self.entries.popleft()
            self.asked = 0
            self._nudged = False
            for event in self.entry.inputs:
                if isinstance(event, Submit):
                    self.phases[event.request.rid] = "intake"
                self.flushes += event in _FLUSHES
            self._asking = self.replica.applying(self.entry)
            self._go(None)

    def answer(self, answer: object) -> None:
        """The stage agreed."""
        if self.paused:
            self._answers.append(answer)
        elif self.alive:
            self._go(answer)

    def resume(self) -> None:
        """SIGCONT."""
        self.paused = False
        if self._answers:
            self._go(self._answers.pop())
        self.pump()
        if self.leads:
            self.unit.leader.wake(0)

    def _go(self, answer: object) -> None:
        assert self._asking is not None
        try:
            question = self._asking.send(answer)
        except StopIteration:
            self._applied()
            return
        self.asked += 1
        self.unit.stages[self.stage].meet(self, question)

    def _applied(self) -> None:
        entry = self.entry
        assert entry is not None
        self._asking = None
        if self.leads:
            check_books(self, entry.now)  # the others' are the same: `Unit.applied` compares digests
        for index, event in enumerate(entry.inputs):
            if isinstance(event, PeerGone) and not any(_of(event.peer, later) for later in entry.inputs[index + 1 :]):
                check_peer_gone(self, event.peer)
        self.unit.applied(self, entry)
        self.pump()

    # -- what a replica needs (`Site`)

    @property
    def rows(self) -> MetadataRows | None:
        """This rank's metadata rows (decode)."""
        return self._rows

    def flush(self) -> None:
        """Tokens have left already."""

    def start(self, plan: StepPlan) -> None:
        """Compute this plan after those that were started before."""
        self.unit.tensors.start(self, plan)

    def idle(self) -> None:
        """Take part in the other units' layers."""
        self.unit.tensors.idle(self)

    def report(self, report: Report) -> None:
        """What this stage sees."""
        self.unit.to_leader(self, report)

    def done(self, note: Done | Idled) -> None:
        """A step is computed here."""
        self.unit.to_leader(self, note)

    def poll(self, watches: Sequence[Watch]) -> list[Observation]:
        """What this rank alone sees of these handoffs, right now."""
        self._nudged = False
        return [
            self.copies.observe(copy) if (copy := copy_of(watch)) else self.transfer.poller(watch).poll()
            for watch in watches
        ]

    def nudge(self) -> None:
        """What this rank sees has changed: the leader should write an entry."""
        if not self._nudged and self.alive:
            self._nudged = True
            self.unit.to_leader(self, Nudge())

    # -- effects

    def perform(self, effects: Sequence[Effect], now: Millis) -> None:
        """Do what the core asks for, in order."""
        leads, note = self.leads, self.world.note
        for effect in effects:
            if leads:
                note(self, effect)
            _PERFORM[type(effect)](self, effect, now)

    def _moved(self, effect: fx.Moved, now: Millis) -> None:
        check_moves(self, effect)
        if self.leads:
            self.world.tally.edges[self.side, effect.source, effect.target] += 1

    def _lead(self, effect: Effect, now: Millis) -> None:
        if self.leads:
            self.unit.leader.perform(effect, now)


def _of(peer: Incarnation, event: Input) -> bool:
    """Whether this is a new beginning with that peer."""
    said = isinstance(event, PeerSaid) and event.peer == peer
    return said or (isinstance(event, Resolved) and event.infos.leader == peer)


_PERFORM: dict[type[Any], Callable[[Any, Any, Millis], None]] = {
    fx.Emit: Rank._lead,
    fx.Tell: Rank._lead,
    fx.LookUp: Rank._lead,
    fx.RegisterRank: Rank._lead,
    fx.Connect: Rank._lead,
    fx.Moved: Rank._moved,
    fx.Expect: lambda rank, effect, now: rank.transfer.expect(effect),
    fx.Offer: lambda rank, effect, now: rank.transfer.offer(effect),
    fx.Push: lambda rank, effect, now: rank.transfer.push(effect),
    fx.Revoke: lambda rank, effect, now: rank.transfer.revoke(effect),
    fx.Fence: lambda rank, effect, now: rank.transfer.fence(effect),
    fx.Forget: lambda rank, effect, now: rank.transfer.forget(effect),
    fx.Backup: lambda rank, effect, now: rank.copies.start(effect),
    fx.Restore: lambda rank, effect, now: rank.copies.start(effect),
}
