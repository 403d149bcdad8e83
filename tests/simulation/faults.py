"""What happens to whole processes: crash, pause, partition, drain, time."""

from typing import TYPE_CHECKING

from baton_core.errors import Reason, Verdict
from baton_core.events import AbortAll, FlushCache
from simulation.tally import LIVE_PHASES, RARE_PHASES

if TYPE_CHECKING:
    from simulation.rank import Rank
    from simulation.unit import Unit
    from simulation.worker import Worker
    from simulation.world import World


IDLE = ("prefill.forwarding.idle", "prefill.forwarding.idle", "decode.computing.idle", "decode.running.idle")
"""Phases of requests that own their pages alone: no transfer is open and no step is running (between two rounds)."""


class Chaos:
    """Plans a seed's process faults, and undoes them when the world heals.

    Some strike at a time, whatever goes on then; most are aimed: they strike a unit that holds a request in some phase.
    """

    KINDS = ("crash", "pause", "partition", "slow_rank", "clock_jump", "drain", "abort_all")
    AIMED = 0.85  # most of these never see their phase
    TARGETS = (*LIVE_PHASES, *RARE_PHASES)

    def __init__(self, world: "World") -> None:
        self.world = world
        random, shape = world.random, world.shape
        self._aims: list[tuple[str, str]] = []  # a phase with its side, and what strikes
        for _ in range(shape.flushes):
            self._aims.append((random.choice(self.TARGETS), "cache_flushed"))
        for _ in range(shape.aimed_aborts):
            self._aims.append((random.choice((*self.TARGETS, *IDLE * 8)), "client_abort"))
        for _ in range(shape.process_faults):
            kind = random.choice(self.KINDS)
            if random.random() < self.AIMED:
                self._aims.append((random.choice(self.TARGETS), kind))
            else:
                world.at(random.randrange(shape.heal_ms), self.strike, kind, None, "")

    def look(self, unit: "Unit") -> None:
        """A unit has come to a new state: does anything aim at it?"""
        if self._aims and unit.phases and not self.world.healed:
            phases = {f"{unit.side}.{phase}" for phase in unit.phases.values()}
            phases |= {f"{unit.side}.{phase}.idle" for phase in unit.idle.values()}
            for aim in [aim for aim in self._aims if aim[0] in phases]:
                self._aims.remove(aim)
                self.world.at(0, self.strike, aim[1], unit, aim[0].split(".", 1)[1])

    def strike(self, kind: str, unit: "Unit | None", phase: str) -> None:
        """A fault strikes this unit, or any, because of a request in that phase."""
        living = self.world.living()
        if not living or self.world.healed:
            return
        if unit is None or not unit.alive:
            unit = self.world.random.choice(living)
        if kind == "client_abort":
            self.world.clients.leave(unit, phase)
        else:
            getattr(self, f"_{kind}")(unit)

    def _crash(self, unit: "Unit") -> None:
        """A rank dies, and its unit with it."""
        self.world.fault("crash", unit.ranks[0])
        unit.worker.unit_died(unit)

    def restart(self, dead: "Worker") -> None:
        """A new life at the same address."""
        if self.world.workers[dead.name] is dead and not dead.alive:
            self.world.start(dead.name, dead.side, dead.life + 1)
            self.world.fault("restart", None)

    def _pause(self, unit: "Unit") -> None:
        victim = self.world.random.choice(unit.ranks)
        if not victim.paused:
            self.world.fault("pause", victim)
            victim.paused = True
            most = self.world.random.choice((300, 1_500, 8_000))
            self.world.at(self.world.random.randrange(1, most), self.resume, victim)

    def resume(self, victim: "Rank") -> None:
        """SIGCONT."""
        if victim.paused:
            victim.resume()

    def _slow_rank(self, unit: "Unit") -> None:
        victim = self.world.random.choice(unit.ranks)
        self.world.fault("slow_rank", victim)
        victim.slowness = self.world.random.choice((5, 30))

    def _clock_jump(self, unit: "Unit") -> None:
        self.world.fault("clock_jump", unit.ranks[0])
        unit.leader.skew += self.world.random.choice((100, 2_000, 20_000))
        unit.leader.wake(0)

    def _partition(self, unit: "Unit") -> None:
        world, one = self.world, unit.worker.name
        two = world.random.choice([name for name in world.workers if name != one])
        ways = [way for way in ((one, two), (two, one)) if world.random.random() < 0.8]
        for source, target in ways:
            world.network.cut(source, target)
        world.fault("partition", unit.ranks[0])
        world.at(world.random.randrange(1, world.random.choice((500, 9_000))), self._heal, ways)

    def _heal(self, ways: list[tuple[str, str]]) -> None:
        for source, target in ways:
            self.world.network.heal(source, target)

    def _drain(self, unit: "Unit") -> None:
        self.world.fault("drain", unit.ranks[0])
        unit.worker.drain()

    def _cache_flushed(self, unit: "Unit") -> None:
        self.world.fault("cache_flushed", unit.ranks[0])
        unit.leader.put(FlushCache())

    def _abort_all(self, unit: "Unit") -> None:
        self.world.fault("abort_all", unit.ranks[0])
        unit.leader.put(AbortAll(verdict=Verdict(reason=Reason.ABORTED, text="everything is aborted")))
