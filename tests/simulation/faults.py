"""Registry look-ups that may fail, and what happens to whole processes: crash, pause, partition, drain, time."""

from typing import TYPE_CHECKING

from baton_core.effects import LookUp
from baton_core.errors import Reason, Verdict
from baton_core.events import AbortAll, BootstrapInfos, DrainBegan, FlushCache, LookupFailed, RankEndpoint, Resolved

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.world import World


class Registry:
    """Knows which incarnation lives at a prefill's address, sometimes late, sometimes wrongly, sometimes not at all."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def look_up(self, process: "Process", effect: LookUp) -> None:
        """Answer a look-up, after a while."""
        world = self.world
        random, rates = world.random.random, world.rates
        delay = 1 + int(random() * 20)
        if rates.lookup_slow and random() < rates.lookup_slow:
            world.fault("lookup_slow", process, effect.rid)
            world.clients.look_up_failed(process, effect.rid)
            delay = int(random() * 1.5 * world.shape.limits.lookup_ms)
        failed = rates.lookup_failed and random() < rates.lookup_failed
        if failed:
            world.fault("lookup_failed", process, effect.rid)
            world.clients.look_up_failed(process, effect.rid)
        world.at(delay, self._answer, process, effect, bool(failed))

    def _answer(self, process: "Process", effect: LookUp, failed: bool) -> None:
        world = self.world
        prefill = world.processes[effect.bootstrap.host]
        life, rates = prefill.life, world.rates
        if life > 1 and rates.lookup_stale and world.random.random() < rates.lookup_stale:
            world.fault("lookup_stale", process, effect.rid)
            life -= 1
        if failed or (not prefill.alive and world.random.random() < 0.5):
            text = f"registry {effect.bootstrap.host}: not known"
            process.put(LookupFailed(rid=effect.rid, verdict=Verdict(reason=Reason.LOOKUP_FAILED, text=text)))
            return
        endpoint = RankEndpoint(host=prefill.name, port=1)
        infos = BootstrapInfos(incarnation=f"{prefill.name}#{life}", dp_rank=0, endpoints=(endpoint,))
        process.put(Resolved(rid=effect.rid, infos=infos))


class Chaos:
    """Plans a seed's process faults, and undoes them when the world heals."""

    KINDS = (
        "crash",
        "crash",
        "pause",
        "pause",
        "partition",
        "partition",
        "slow_worker",
        "clock_jump",
        "drain",
        "abort_all",
    )

    def __init__(self, world: "World") -> None:
        self.world = world
        for _ in range(world.shape.flushes):
            world.at(world.random.randrange(world.shape.arrivals_ms), self._flush)
        for _ in range(world.shape.process_faults):
            kind = world.random.choice(self.KINDS)
            world.at(world.random.randrange(world.shape.heal_ms), getattr(self, f"_{kind}"))

    def _victim(self) -> "Process | None":
        living = self.world.living()
        return self.world.random.choice(living) if living else None

    def _crash(self) -> None:
        victim = self._victim()
        if victim is not None:
            self.world.fault("crash", victim)
            self.kill(victim)
            self.world.at(self.world.random.randrange(1, 700), self.restart, victim)

    def kill(self, victim: "Process") -> None:
        """The process is gone: memory, pages, connections."""
        victim.alive = False
        self.world.network.reset(victim)
        self.world.clients.process_died(victim)

    def restart(self, dead: "Process") -> None:
        """A new life at the same address."""
        if self.world.processes[dead.name] is dead and not dead.alive:
            self.world.start(dead.name, dead.side, dead.life + 1)
            self.world.fault("restart", None)

    def _pause(self) -> None:
        victim = self._victim()
        if victim is not None and not victim.paused:
            self.world.fault("pause", victim)
            victim.paused = True
            most = self.world.random.choice((300, 1_500, 8_000))
            self.world.at(self.world.random.randrange(1, most), self.resume, victim)

    def resume(self, victim: "Process") -> None:
        """SIGCONT."""
        if victim.paused:
            victim.paused = False
            victim.wake(0)

    def _slow_worker(self) -> None:
        victim = self._victim()
        if victim is not None:
            self.world.fault("slow_worker", victim)
            victim.slowness = self.world.random.choice((5, 30))

    def _clock_jump(self) -> None:
        victim = self._victim()
        if victim is not None:
            self.world.fault("clock_jump", victim)
            victim.skew += self.world.random.choice((100, 2_000, 20_000))
            victim.wake(0)

    def _partition(self) -> None:
        world, names = self.world, list(self.world.processes)
        ways = []
        one, two = world.random.sample(names, 2)
        for source, target in ((one, two), (two, one)):
            if world.random.random() < 0.8:
                ways.append((source, target))
                world.network.cut(source, target)
        world.fault("partition", world.processes[one])
        world.at(world.random.randrange(1, world.random.choice((500, 9_000))), self._heal, ways)

    def _heal(self, ways: list[tuple[str, str]]) -> None:
        for source, target in ways:
            self.world.network.heal(source, target)

    def _drain(self) -> None:
        victim = self._victim()
        if victim is not None:
            self.world.fault("drain", victim)
            victim.draining = True
            victim.put(DrainBegan())

    def _flush(self) -> None:
        victim = self._victim()
        if victim is not None:
            self.world.fault("cache_flushed", victim)
            victim.put(FlushCache())

    def _abort_all(self) -> None:
        victim = self._victim()
        if victim is not None:
            self.world.fault("abort_all", victim)
            victim.put(AbortAll(verdict=Verdict(reason=Reason.ABORTED, text="everything is aborted")))
