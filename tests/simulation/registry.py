"""The bootstrap registry, as decode sees it: it may be late, wrong, or not answer at all."""

from typing import TYPE_CHECKING

from baton_core.effects import LookUp, RegisterRank
from baton_core.errors import Reason, Verdict
from baton_core.events import BootstrapInfos, LookupFailed, RankEndpoint, Resolved
from baton_core.registration import FOLLOW
from baton_core.request import Room

if TYPE_CHECKING:
    from simulation.leader import Leader
    from simulation.worker import Worker
    from simulation.world import World

TOLD_MS = 20
"""A registration is with the registry within this time."""


class Registry:
    """Knows who lives at a prefill's address, and on which DP rank a room runs: late, wrongly, or not at all."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self._ranks: dict[tuple[str, Room], int] = {}
        self._waiting: dict[tuple[str, Room], list[tuple[Leader, LookUp]]] = {}

    def register(self, leader: "Leader", effect: RegisterRank) -> None:
        """A prefill unit says that this room runs there."""
        self.world.at(1 + int(self.world.random.random() * TOLD_MS), self._registered, leader.unit.worker.name, effect)

    def _registered(self, name: str, effect: RegisterRank) -> None:
        self._ranks[name, effect.room] = effect.dp_rank
        for leader, look_up in self._waiting.pop((name, effect.room), []):
            self._answer(leader, look_up, False)

    def close(self, name: str, room: Room) -> None:
        """That room of that prefill worker went well and is over: it is taken back, later than it was told."""
        self.world.at(TOLD_MS + 1, self._ranks.pop, (name, room), None)

    def look_up(self, leader: "Leader", effect: LookUp) -> None:
        """Answer a look-up, after a while."""
        world = self.world
        random, rates = world.random.random, world.rates
        delay = 1 + int(random() * 20)
        if rates.lookup_slow and random() < rates.lookup_slow:
            world.fault("lookup_slow", leader.rank, effect.rid)
            world.clients.look_up_failed(leader.unit, effect.rid)
            delay = int(random() * 1.5 * world.shape.limits.lookup_ms)
        failed = rates.lookup_failed and random() < rates.lookup_failed
        if failed:
            world.fault("lookup_failed", leader.rank, effect.rid)
            world.clients.look_up_failed(leader.unit, effect.rid)
        world.at(delay, self._answer, leader, effect, bool(failed))

    def _answer(self, leader: "Leader", effect: LookUp, failed: bool) -> None:
        world = self.world
        prefill = world.workers[effect.bootstrap.host]
        life, rates = prefill.life, world.rates
        if life > 1 and rates.lookup_stale and world.random.random() < rates.lookup_stale:
            world.fault("lookup_stale", leader.rank, effect.rid)
            life -= 1
        if failed or (not prefill.alive and world.random.random() < 0.5):
            text = f"registry {effect.bootstrap.host}: not known"
            verdict = Verdict(reason=Reason.LOOKUP_FAILED, text=text)
            leader.put(LookupFailed(rid=effect.rid, verdict=verdict))
            return
        dp_rank = self._rank(prefill, effect)
        if dp_rank is None:
            self._waiting.setdefault((prefill.name, effect.bootstrap.room), []).append((leader, effect))
            world.at(world.shape.limits.lookup_ms, self._give_up, leader, effect)
            return
        address = f"{prefill.name}/{dp_rank}"
        endpoints = tuple(RankEndpoint(host=address, port=1 + rank) for rank in range(prefill.parallel.members))
        infos = BootstrapInfos(incarnation=f"{prefill.name}-{life}", dp_rank=dp_rank, endpoints=endpoints)
        leader.put(Resolved(rid=effect.rid, infos=infos))

    def _rank(self, prefill: "Worker", effect: LookUp) -> int | None:
        """Where the room runs: what the request says, what follows from the room, or what was registered (S3)."""
        bootstrap, size = effect.bootstrap, prefill.parallel.dp
        if bootstrap.prefill_dp_rank is not None:
            return bootstrap.prefill_dp_rank
        if size == 1:
            return 0
        if self.world.shape.balance == FOLLOW:
            return bootstrap.room % size
        return self._ranks.get((prefill.name, bootstrap.room))

    def _give_up(self, leader: "Leader", effect: LookUp) -> None:
        waiting = self._waiting.get((effect.bootstrap.host, effect.bootstrap.room), [])
        if (leader, effect) in waiting:
            waiting.remove((leader, effect))
            self._answer_failed(leader, effect)

    def _answer_failed(self, leader: "Leader", effect: LookUp) -> None:
        self.world.clients.look_up_failed(leader.unit, effect.rid)
        text = f"registry {effect.bootstrap.host}: no DP rank is registered for room {effect.bootstrap.room}"
        leader.put(LookupFailed(rid=effect.rid, verdict=Verdict(reason=Reason.LOOKUP_FAILED, text=text)))
