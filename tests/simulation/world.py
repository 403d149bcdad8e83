"""A seeded world: one heap of events, one random generator, workers, a network, clients and chaos.

`World(seed).run()` plays it to rest and raises `Broken` (or whatever the core raised) where something is wrong. The
same seed always plays the same way, whatever the hash seed.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush
from logging import CRITICAL
from random import Random

import structlog

from baton_core.messages import RoomMessage
from simulation.clients import Clients
from simulation.customers import Customers
from simulation.faults import Chaos
from simulation.fleet import RECOVERED_MS, Fleet, is_fleet, with_routers
from simulation.invariants import Broken, check_rest
from simulation.leader import Leader
from simulation.loop import VirtualLoop
from simulation.memory import Pressure, tightened
from simulation.network import Network
from simulation.rank import Rank
from simulation.registry import Registry
from simulation.shape import Rates, draw_shape
from simulation.tally import Tally
from simulation.unit import Unit
from simulation.wire import Wire
from simulation.worker import Worker

TRACE_LENGTH = 40
EVENTS_MAX = 400_000


class World:
    """One seed."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callable[..., object], tuple[object, ...]]] = []
        self.trace: deque[tuple[int, Rank, object]] = deque(maxlen=None if traced else TRACE_LENGTH)
        self.tally = Tally()
        self.messages: list[RoomMessage] = []
        self.shape = with_routers(tightened(draw_shape(seed, self.random), seed), seed)
        self.rates = self.shape.rates
        self.workers: dict[str, Worker] = {}
        self.ranks: dict[str, Rank] = {}  # of all lives, by name
        self.network = Network(self)
        self.loop, self.wire = VirtualLoop(self), Wire(self)
        self.healed = False
        self.fleet = Fleet(self) if is_fleet(seed) else None
        self.registry = self.fleet or Registry(self)
        for name in self.shape.parallels:
            self.start(name, "prefill" if name[0] == "P" else "decode", 1)
        if self.fleet is None:
            self.clients = Clients(self)
        else:
            self.fleet.begin()
            self.clients = self.fleet.customers = Customers(self, self.fleet, RECOVERED_MS)
        self.chaos = Chaos(self)
        self.pressure = Pressure(self)
        if self.shape.other_layouts:
            self.fault("layout_differs", None)

    def start(self, name: str, side: str, life: int) -> None:
        """A worker begins a life."""
        parallel = self.shape.parallels[name]
        self.workers[name] = Worker(self, name, side, life, parallel)
        if self.fleet is not None:
            self.fleet.started(self.workers[name])
        for unit in self.workers[name].units:
            self.ranks.update((rank.name, rank) for rank in unit.ranks)

    # -- what everybody uses

    def at(self, delay: int, call: Callable[..., object], *args: object) -> None:
        """Call in `delay` ms; calls due at once keep their order."""
        self.events = number = self.events + 1
        heappush(self._heap, (self.now + delay, number, call, args))

    def note(self, rank: Rank, what: object) -> None:
        """One line of the trace."""
        self.trace.append((self.now, rank, what))

    def living(self) -> list[Unit]:
        """Units that are alive (perhaps with a rank that is paused)."""
        return [unit for worker in self.workers.values() for unit in worker.units if unit.alive]

    def leader_at(self, address: str) -> Leader:
        """Who leads the unit at this address now; perhaps nobody alive."""
        name, _, dp_rank = address.partition("/")
        units = self.workers[name].units
        return units[min(int(dp_rank), len(units) - 1)].leader

    def fault(self, kind: str, rank: Rank | None, about: object = None) -> None:
        """Count a fault, and the phases of the requests it hits."""
        self.tally.faults[kind] += 1
        if rank is None:
            return
        for rid in self._hit(rank, about):
            phase = rank.phases.get(rid)
            if phase is not None:
                self.tally.fault_phases[kind, f"{rank.side}.{phase}"] += 1

    def _hit(self, rank: Rank, about: object) -> list[str]:
        if isinstance(about, bytes):
            room = self.messages[int(about)].room if about else -1
            holder = rank.ledger.rooms.holder(room)
            return [] if holder is None else [holder]
        if isinstance(about, list):
            return about
        return list(rank.phases) if about is None else [str(about)]

    def told_within_ms(self) -> int:
        """How soon one leg hears of the other's failure where links are well: messages, look-up, turns of loops."""
        return 50 + 6 * self.shape.latency_ms + 6 * self.shape.turn_ms + self.shape.unit_lag_ms

    # -- from the first event to rest

    def run(self) -> None:
        """Play to rest. Raises Broken where an invariant does not hold."""
        before, logs = asyncio._get_running_loop(), structlog.get_config()
        asyncio._set_running_loop(self.loop)
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))
        try:
            self._play()
        finally:
            if self.fleet is not None:
                self.fleet.unwind()
            asyncio._set_running_loop(before)
            structlog.configure(**logs)

    def _play(self) -> None:
        self.at(self.shape.heal_ms, self._heal)
        last, events_max = self._latest(), EVENTS_MAX * (10 if self.shape.requests > 100 else 1)
        heap = self._heap
        while heap:
            self.now, _, call, args = heappop(heap)
            call(*args)
            if self.healed and (self.events > events_max or self.now > last):
                raise Broken("liveness", f"still busy after {self.events} events, at {self.now} ms: {self._busy()}")
        self.tally.events = self.events
        if self.fleet is not None:
            self.fleet.check_end()
        self.clients.check_end()
        check_rest(self.living())

    def _latest(self) -> int:
        limits = self.shape.limits
        waits = limits.lookup_ms + limits.other_leg_ms + limits.transfer_stall_ms + limits.revoking_ms
        return self.shape.heal_ms + 60_000 + limits.request_budget_ms + waits + 3 * limits.link_silent_ms

    def _heal(self) -> None:
        """No new faults from now on, and those that last end."""
        self.rates = Rates()
        for worker in list(self.workers.values()):
            for rank in (rank for unit in worker.units for rank in unit.ranks):
                rank.slowness = 1
            if worker.alive and (worker.draining or not all(unit.alive for unit in worker.units)):
                worker.kill()
            if not worker.alive:
                self.chaos.restart(worker)
            for rank in (rank for unit in worker.units for rank in unit.ranks):
                self.chaos.resume(rank)
        if self.fleet is not None:
            self.fleet.heal()
        self.healed = True
        self.at(100, self._rest)

    def _busy(self) -> list[str]:
        live = [
            f"{rank} {one.rid} {one.phase.value}"
            for unit in self.living()
            for rank in unit.ranks
            for one in rank.ledger.live.values()
        ]
        return [*live, f"{self.clients.open} legs without an answer"]

    def _rest(self) -> None:
        """End the world when nobody waits for anything any more: heartbeats alone would go on for ever."""
        quiet = not self.clients.open and not self.wire.is_busy() and all(unit.quiet for unit in self.living())
        if quiet:
            self._heap.clear()
        else:
            self.at(100, self._rest)

    def digest(self) -> str:
        """What happened, in 16 bytes; needs a full trace."""
        told = blake2b(digest_size=16)
        for when, rank, what in self.trace:
            told.update(f"{when} {rank} {what!r}\n".encode())
        return told.hexdigest()


def tell(world: World) -> str:
    """The trace, for people."""
    return "\n".join(f"  {when:7} {rank!r:10} {what!r}" for when, rank, what in world.trace)
