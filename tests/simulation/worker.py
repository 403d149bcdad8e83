"""One life of one worker: its app, which gives requests to its units, and the supervision that ends it with them."""

from dataclasses import replace
from typing import TYPE_CHECKING

from baton_core.events import DrainBegan
from baton_core.prefill.rules import misplaced
from baton_core.ranks import Parallel
from baton_core.registration import FOLLOW
from baton_core.request import FAKE_HOST, Incarnation, Request
from baton_core.rounds import Conductor
from simulation.unit import Unit

if TYPE_CHECKING:
    from simulation.world import World


class Worker:
    """One life of one worker."""

    def __init__(self, world: "World", name: str, side: str, life: int, parallel: Parallel) -> None:
        self.world, self.name, self.side, self.life, self.parallel = world, name, side, life, parallel
        self.incarnation: Incarnation = f"{name}-{life}"
        self.alive, self.draining = True, False
        self._turn = 0
        self.conductor = Conductor(parallel.dp) if parallel.dp_attention and parallel.dp > 1 else None
        self.units = [Unit(self, dp_rank, parallel) for dp_rank in range(parallel.dp)]

    def __repr__(self) -> str:
        return self.incarnation

    def place(self, request: Request, routed: int | None) -> tuple[Request, Unit]:
        """The unit that takes a request: where it is routed to; else prefill follows the room, decode takes turns.

        Where decode looks for it elsewhere it is refused, and there, so that decode hears of it at once (S3).
        """
        size, bootstrap = self.parallel.dp, request.bootstrap
        self._turn += 1
        in_turn = self._turn % size
        if self.side == "decode" or bootstrap is None or bootstrap.host == FAKE_HOST:
            return request, self.units[in_turn]
        follows = self.world.shape.balance == FOLLOW
        chosen = routed if routed is not None else bootstrap.room % size if follows else in_turn
        found = misplaced(bootstrap, dp_rank=chosen, dp_size=size, registers=size > 1 and not follows)
        if found is None or found.looked_for_on is None:
            return request, self.units[chosen]
        return replace(request, rejected=request.rejected or found.verdict), self.units[found.looked_for_on]

    def begin(self, number: int | None) -> None:
        """DP attention: a round begins in all units."""
        if number is not None:
            for unit in self.units:
                self.world.at(
                    int(self.world.random.random() * (self.world.shape.step_ms + 3)), unit.leader.begin, number
                )

    def drain(self) -> None:
        """No new requests."""
        self.draining = True
        for unit in self.units:
            unit.leader.put(DrainBegan())

    def kill(self) -> None:
        """The worker is gone: memory, pages, connections."""
        self.alive = False
        if self.world.fleet is not None:
            self.world.fleet.killed(self)
        for unit in self.units:
            self._end(unit)

    def unit_died(self, unit: Unit) -> None:
        """A rank of a unit is gone, and the unit with it. The others finish what they have; then the worker ends.

        With DP attention no unit can go on without the others.
        """
        if not self.alive:
            return
        self._end(unit)
        random = self.world.random.random
        if self.conductor is None and any(other.alive for other in self.units):
            self.drain()
            if self.world.fleet is not None:
                self.world.fleet.unit_lost(self, unit.dp_rank)
            self.world.at(int(random() * 2_000), self._exit)
        else:
            self._exit()

    def _exit(self) -> None:
        if self.alive:
            self.kill()
            self.world.at(self.world.random.randrange(1, 700), self.world.chaos.restart, self)

    def _end(self, unit: Unit) -> None:
        if unit.alive:
            unit.alive = False
            self.world.network.reset(unit)
            self.world.clients.unit_died(unit)
