"""One life of one worker: a driver shell around a real core, and everything that dies with it.

The shell does what the engine's driver does: drain the inbox, agree on observations, let deadlines fire, perform
effects in order, start the next plan. It sleeps until something arrives or a deadline passes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton_core import effects as fx
from baton_core.agreement import GateArgs, SoloGroup, agreed_polls, poll_and_all_reduce
from baton_core.decode.core import DecodeCore
from baton_core.effects import Effect
from baton_core.errors import Reason, Verdict
from baton_core.events import Event, Observed, PeerGone, PeerSaid, Submit
from baton_core.ledger import Ledger
from baton_core.link import Frame, Switchboard
from baton_core.messages import MetadataRow
from baton_core.plan import SequenceResult, SequenceSlice, StepPlan, StepResult
from baton_core.prefill.core import PrefillCore
from baton_core.request import Incarnation, RequestId
from simulation.invariants import check_books, check_moves, check_peer_gone, check_step, require
from simulation.oracle import forward, logprob_of
from simulation.transfer import FakeReceiver, FakeSender, Receiver, Sender, Transfer

if TYPE_CHECKING:
    from simulation.world import World

_SOLO = SoloGroup()
FINGERPRINT = '{"kv":"one"}'
OTHER_FINGERPRINT = '{"kv":"two"}'


class Reset:
    """The operating system says that a peer's process is gone, or refuses the connection."""

    def __init__(self, peer: Incarnation) -> None:
        self.peer = peer


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


class Process:
    """One life of one worker."""

    def __init__(self, world: "World", name: str, side: str, life: int) -> None:
        self.world, self.name, self.side, self.life = world, name, side, life
        self.incarnation: Incarnation = f"{name}#{life}"
        shape, random = world.shape, world.random
        self.skew = random.randrange(1_000)
        self.alive, self.paused, self.draining = True, False, False
        self.slowness = 1
        self.inbox: list[object] = []
        self.phases: dict[RequestId, str] = {}
        self.routes: dict[Incarnation, str] = {}
        fingerprint = OTHER_FINGERPRINT if shape.other_layouts and name == "D0" else FINGERPRINT
        pages = shape.prefill_pages if side == "prefill" else shape.decode_pages
        self.memory = [random.randrange(1 << 60) for _ in range(pages)]
        self.rows: list[MetadataRow | None] = []
        self.core: PrefillCore | DecodeCore
        self.transfer: Transfer
        if side == "prefill":
            self.core = PrefillCore(
                limits=shape.limits,
                pool_pages=pages,
                page_tokens=shape.page_tokens,
                context_tokens=shape.context_tokens,
                fingerprint=fingerprint,
                prefix_cache=shape.prefix_cache,
                dp_rank=1 if shape.other_ranks and name == "P0" else 0,
            )
            self.transfer = FakeSender(self) if shape.backend == "fake" else Sender(self)
        else:
            self.core = DecodeCore(
                limits=shape.limits,
                pool_pages=pages,
                page_tokens=shape.page_tokens,
                context_tokens=shape.context_tokens,
                fingerprint=fingerprint,
            )
            self.rows = [None] * shape.limits.metadata_rows
            self.transfer = FakeReceiver(self) if shape.backend == "fake" else Receiver(self)
        self.switchboard = Switchboard(self.incarnation, shape.limits)
        self._gate = (Rows(self.rows), GateArgs(backend=shape.backend)) if side == "decode" else (None, None)
        self._wake_at: int | None = None
        table = self.ledger.table
        self.legal_moves = {(source.value, target.value) for source, target in table.edges()}

    def __repr__(self) -> str:
        return self.incarnation

    @property
    def ledger(self) -> Ledger:
        """The core's books."""
        return self.core.ledger

    @property
    def now(self) -> int:
        """This process's own monotonic clock."""
        return self.world.now + self.skew

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

    def unacknowledged(self) -> int:
        """Messages on live links that the peer has not acknowledged."""
        return sum(len(link._unacked) for link in self.switchboard._links.values())

    # -- the loop

    def put(self, item: object) -> None:
        """Something arrives; the loop turns soon."""
        if self.alive:
            self.inbox.append(item)
            self.wake(int(self.world.random.random() * self.world.shape.turn_ms) * self.slowness)

    def wake(self, delay: int) -> None:
        """Turn the loop in `delay` ms, or earlier."""
        due = self.world.now + delay
        if self._wake_at is None or due < self._wake_at:
            self._wake_at = due
            self.world.at(delay, self._due, due)

    def _due(self, due: int) -> None:
        if due == self._wake_at:
            self._wake_at = None
            if self.alive and not self.paused:
                self.turn()

    def turn(self) -> None:
        """One turn of the loop."""
        core, now = self.core, self.now
        inbox, self.inbox = self.inbox, []
        for item in inbox:
            self._take(item, now)
        if self.transfer.dirty:
            self._observe()
        due = core.next_deadline()
        if due is not None and due <= now:
            self.perform(core.tick(now), now)
        due_links = self.switchboard.next_due()
        if due_links is not None and due_links <= now:
            self._tick_links(now)
        self._plan()
        check_books(self)
        dues = [due for due in (core.next_deadline(), self.switchboard.next_due()) if due is not None]
        if self.transfer.dirty:
            self.wake(0)
        elif dues:
            self.wake(max(1, min(dues) - now))

    def _plan(self) -> None:
        random, shape = self.world.random.random, self.world.shape
        if shape.plan_late and random() < shape.plan_late:
            self.wake(1 + int(random() * 4))
            return
        plan = self.core.plan()
        if plan is not None:
            self.perform(self.ledger.take_effects(), self.now)  # planning moves requests too
            self.world.at(1 + int(random() * shape.step_ms) * self.slowness, self._computed, plan)

    def _take(self, item: object, now: int) -> None:
        if isinstance(item, tuple):
            self._frame(item[0], item[1], now)
        elif isinstance(item, StepResult):
            self.world.note(self, item)
            self.perform(self.core.commit(item, now), now)
        elif isinstance(item, Reset):
            if self.switchboard.knows(item.peer):
                self.switchboard.hang_up(item.peer)
                self._peer_gone(item.peer, "connection reset", now)
        else:
            self.step(item, now)  # type: ignore[arg-type]

    def step(self, event: Event, now: int) -> None:
        """Hand an event to the core and perform what it asks for."""
        self.world.note(self, event)
        if isinstance(event, Submit):
            self.phases[event.request.rid] = "intake"
        self.perform(self.core.step(event, now), now)
        if isinstance(event, PeerGone):
            check_peer_gone(self, event.peer)

    def _frame(self, address: str, frame: Frame, now: int) -> None:
        heard = self.switchboard.receive(frame, now)
        for answer in heard.answers:
            self.world.network.send(self, address, answer)
        if heard.lost is not None:
            self._peer_gone(heard.peer, heard.lost, now)
        if heard.payloads:
            require(frame.target == self.incarnation, "old life", f"{self} obeys a message to {frame.target}")
            self.routes[heard.peer] = address
            for payload in heard.payloads:
                self.step(PeerSaid(peer=heard.peer, message=self.world.messages[int(payload)]), now)

    def _peer_gone(self, peer: Incarnation, text: str, now: int) -> None:
        self.routes.pop(peer, None)
        self.step(PeerGone(peer=peer, verdict=Verdict(reason=Reason.PEER_LOST, text=text)), now)

    def _tick_links(self, now: int) -> None:
        frames, lost = self.switchboard.tick(now)
        for frame in frames:
            address = self.routes.get(frame.target)
            if address is not None:
                self.world.network.send(self, address, frame)
        for peer, text in lost:
            self._peer_gone(peer, text, now)

    def _observe(self) -> None:
        self.transfer.dirty = False
        watches = self.core.watched()
        if not watches:
            return
        pollers = [self.transfer.poller(watch) for watch in watches]
        rows, args = self._gate
        reduced = poll_and_all_reduce(pollers, _SOLO, watches if rows else None, rows, args)
        self.step(Observed(polls=agreed_polls(watches, reduced, rows)), self.now)

    def _computed(self, plan: StepPlan) -> None:
        if not self.alive:
            return
        if self.paused:
            self.world.at(40, self._computed, plan)
            return
        check_step(self, plan)
        world = self.world
        if world.rates.step_failed and world.random.random() < world.rates.step_failed:
            world.fault("step_failed", self, [piece.rid for piece in plan.slices])
            verdict = Verdict(reason=Reason.DEVICE_FAULT, text="the step failed")
            self.put(StepResult(step=plan.step, results=(), failed=verdict))
            return
        page_tokens = world.shape.page_tokens
        drawn = [(piece, forward(self.memory, piece, page_tokens)) for piece in plan.slices]
        results = tuple(_result(piece, token) for piece, token in drawn if piece.sample or piece.score)
        self.put(StepResult(step=plan.step, results=results))

    # -- effects

    def perform(self, effects: list[Effect], now: int) -> None:
        """Do what the core asks for, in order."""
        for effect in effects:
            self.world.note(self, effect)
            _PERFORM[type(effect)](self, effect, now)

    def _tell(self, effect: fx.Tell, now: int) -> None:
        world = self.world
        payload = str(len(world.messages)).encode()
        world.messages.append(effect.message)
        for frame in self.switchboard.send(effect.peer, payload, now):
            world.network.send(self, self.routes[effect.peer], frame)

    def _connect(self, effect: fx.Connect, now: int) -> None:
        self.routes[effect.infos.incarnation] = effect.infos.endpoints[0].host
        self.switchboard.dial(effect.infos.incarnation, now)

    def _moved(self, effect: fx.Moved, now: int) -> None:
        check_moves(self, effect)
        self.world.tally.edges[self.side, effect.source, effect.target] += 1

    def _emit(self, effect: fx.Emit, now: int) -> None:
        self.world.clients.emitted(self, effect)

    def _look_up(self, effect: fx.LookUp, now: int) -> None:
        self.world.registry.look_up(self, effect)


def _result(piece: SequenceSlice, token: int) -> SequenceResult:
    return SequenceResult(
        rid=piece.rid,
        token=token if piece.sample else None,
        logprob=logprob_of(token) if piece.sample and piece.sampling.logprobs is not None else None,
        scored=tuple(logprob_of(scored) for scored in piece.score),
    )


_PERFORM: dict[type[Any], Callable[[Any, Any, int], None]] = {
    fx.Emit: Process._emit,
    fx.Tell: Process._tell,
    fx.LookUp: Process._look_up,
    fx.Connect: Process._connect,
    fx.Moved: Process._moved,
    fx.Expect: lambda process, effect, now: process.transfer.expect(effect),
    fx.Offer: lambda process, effect, now: process.transfer.offer(effect),
    fx.Push: lambda process, effect, now: process.transfer.push(effect),
    fx.Revoke: lambda process, effect, now: process.transfer.revoke(effect),
    fx.Fence: lambda process, effect, now: process.transfer.fence(effect),
    fx.Forget: lambda process, effect, now: process.transfer.forget(effect),
}
