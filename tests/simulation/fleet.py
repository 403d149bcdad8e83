"""Worlds with routers: the real router, registry, registrar and look-ups between clients and workers, on the world's clock.

    clients ──► router R0, R1 … (dispatch, road, legs, directory) ──► app of P or D ──► unit
                                                registry ◄── registrar of P, look-ups of D

Processes of all kinds crash, stop and are cut off. When that is over every new request must succeed.
"""

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from baton_core.effects import LookUp, RegisterRank
from baton_core.registration import FOLLOW
from baton_core.request import Room
from baton_core.routing.fairness import FairQueue
from baton_core.routing.pace import Pace
from baton_core.routing.policies import PolicyName
from baton_router.app import _directory, _followed, _road
from baton_router.config import RouterConfig
from baton_router.dispatch import Dispatch
from baton_router.door import Door
from baton_router.facts import needs_of
from baton_router.metrics import RouterMetrics
from baton_router.recent import Recent
from simulation.bootstrap import RegistryServer
from simulation.customers import START_MS, Customer, Customers
from simulation.front import HTTP_PORT, App
from simulation.invariants import Broken
from simulation.loop import Process
from simulation.shape import Shape
from simulation.wire import Ask, Exchange, SimulatedUpstream

if TYPE_CHECKING:
    from simulation.leader import Leader
    from simulation.worker import Worker
    from simulation.world import World

FLEET_SHARE = 0.15
REGISTRY = "registry:8990"
REQUESTS_MAX = 14
RECOVERED_MS = 12_000
"""So long after the last fault every new request succeeds: probes, breakers and leases have seen that all is well."""
KINDS = (
    "router_crash",
    "router_pause",
    "registry_crash",
    "registry_pause",
    "hop_cut",
    "hop_cut",
    *("stream_broken",) * 3,
)
AIM_MS = 10


def is_fleet(seed: int) -> bool:
    """Whether this world has routers."""
    return Random(f"fleet {seed}").random() < FLEET_SHARE


def with_routers(shape: Shape, seed: int) -> Shape:
    """Leave to the clients only what they can do behind a router, and time enough for another try."""
    if not is_fleet(seed):
        return shape
    limits, parallels = shape.limits, dict(shape.parallels)
    for name, first in (("P1", "P0"), ("D1", "D0")):
        if name not in parallels and Random(f"fleet {name} {seed}").random() < 0.6:
            parallels[name] = parallels[first]
    return replace(
        shape,
        parallels=parallels,
        heal_ms=shape.heal_ms + START_MS,
        requests=min(shape.requests, REQUESTS_MAX),
        backend="tcp",
        other_layouts=False,
        context_tokens=max(shape.context_tokens, 3 * shape.prompt_most),
        limits=replace(
            limits,
            request_budget_ms=max(limits.request_budget_ms, 3_000),
            lookup_ms=2_000,
            other_leg_ms=max(limits.other_leg_ms, 2_000),
        ),
    )


class Router(Process):
    """One life of one router."""

    def __init__(self, fleet: "Fleet", number: int, life: int) -> None:
        super().__init__(fleet.world, f"R{number}")
        self.number, self.life = number, life
        self.requests = 0
        self.guests: list[Customer] = []
        self.further = 0  # attempts beyond the first of each request
        self.answered: dict[str, tuple[int, int]] = {}  # by request: the 4xx of a worker that it has heard, and when
        self.failed_at: dict[str, int] = {}  # by request: when a leg last failed otherwise
        self.config = config = fleet.config
        upstream = SimulatedUpstream(fleet.world.wire, self, self._sends)
        metrics = RouterMetrics()
        self.directory = _directory(config, upstream, metrics)
        self.queue = FairQueue(running_max=config.concurrent_max, waiting_max=config.queue_max)
        door = Door(
            queue=self.queue,
            keys=None,
            queue_ms=config.queue_ms,
            retry_after_ms=config.limits.retry_after_ms,
            on_queue=metrics.queued.set,
        )
        pace = Pace(longest_ms=config.first_token_ms)
        self.dispatch = Dispatch(
            road=_road(config, self.directory, upstream, metrics, pace, fleet.world.random.getrandbits),
            door=door,
            pace=pace,
            metrics=metrics,
            recent=Recent(),
            limits=config.limits,
            silence_ms=config.client_silence_ms,
            needs=needs_of(PolicyName(config.prefill_policy), PolicyName(config.decode_policy), tokens=True),
        )
        self.spawn(self.directory.watch())
        for follow in _followed(config, self.directory, upstream):
            self.spawn(follow())

    def serve(self, customer: Customer) -> None:
        """A client's request arrives."""
        self.requests += 1
        self.guests.append(customer)
        self.spawn(customer.served_by(self))

    def kill(self) -> None:
        """Its clients' connections break."""
        super().kill()
        for customer in self.guests:
            customer.end("broken")

    def _sends(self, address: str, ask: Ask, exchange: Exchange | None) -> None:
        """A call leaves: was it right to make it?"""
        if ask.path != "/generate":
            return
        attempt = ask.headers["x-request-id"]
        rid, tilde, _ = attempt.partition("~")
        heard = self.answered.get(rid)
        if heard is not None and self.failed_at.get(rid) != heard[1]:
            if heard[1] != self.world.now or tilde:
                text = f"{self} sends {attempt} to {address} although a worker had answered {heard[0]} at {heard[1]}"
                raise Broken("retry", text)
        if tilde and address[0] == "D":
            self.further += 1
            self.world.tally.faults["router_retry"] += 1
            if b"baton_continuation" in ask.body:
                self.world.tally.faults["router_migration"] += 1
        if exchange is None:
            self.failed_at[rid] = self.world.now
        else:
            exchange.on_answer = lambda status: self._hears(rid, status)

    def _hears(self, rid: str, status: int) -> None:
        if 400 <= status < 499:
            self.answered[rid] = status, self.world.now
        elif status != 200:
            self.failed_at[rid] = self.world.now

    def check_rest(self) -> None:
        """Nobody is served: so nothing is counted, and the budget was held."""
        config = self.config
        legs = {key: load.in_flight for key, load in self.directory.records.loads.items() if load.in_flight}
        if legs:
            raise Broken("router rest", f"{self}: legs in flight {legs}")
        held = [worker.url for worker in self.directory.all() if self.directory.in_flight(worker)]
        if held:
            raise Broken("router rest", f"{self}: legs kept of {held}")
        if self.queue.running:
            raise Broken("router rest", f"{self}: {self.queue.running} let in and not gone")
        most = config.retries_burst + config.retries_per_request * self.requests
        text = f"{self}: {self.further} further attempts of {self.requests} requests, budget {most}"
        if self.further > most:
            raise Broken("retry budget", text)


class Fleet:
    """What a world with routers has beyond others."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.random = Random(f"fleet of {world.seed}")
        random, shape = self.random, world.shape
        self.has_registry = random.random() < 0.7
        self.config = self._draw_config()
        self.apps: dict[str, App] = {}  # the newest life of each worker
        self.routers: list[Router] = []
        self.registry: RegistryServer | None = None
        self.customers: Customers
        self.cuts: list[tuple[str, str]] = []
        if self.has_registry:
            self.start_registry(1)
        if shape.profile not in ("free", "calm"):
            for _ in range(random.choice((1, 2, 4, 6))):
                world.at(random.randrange(shape.heal_ms), self._strike, random.choice(KINDS))

    def _draw_config(self) -> RouterConfig:
        random, shape = self.random, self.world.shape
        policies = [one.value for one in PolicyName]
        names = list(shape.parallels)
        modes = ["auto", "off", "inject", "register"] + (["follow"] if shape.balance == FOLLOW else [])
        return RouterConfig(
            prefill=tuple(f"http://{name}:{HTTP_PORT}" for name in names if name[0] == "P"),
            decode=tuple(f"http://{name}:{HTTP_PORT}" for name in names if name[0] == "D"),
            registry=REGISTRY if self.has_registry else None,
            registry_discovery=self.has_registry and random.random() < 0.3,
            prefill_policy=random.choice(policies),  # type: ignore[arg-type]
            decode_policy=random.choice(policies),  # type: ignore[arg-type]
            dp_mode=random.choice(modes),  # type: ignore[arg-type]
            degrade=random.random() < 0.3,
            local_prompt_tokens=random.choice((0, 0, 3)),
            retries=random.choice((0, 1, 2, 2)),
            retries_per_request=random.choice((0.0, 0.0, 0.2, 1.0)),
            retries_burst=random.choice((0, 0, 1, 64)),
            migrations=random.choice((0, 3, 3)),
            breaker_failures_max=random.choice((1, 5)),
            breaker_open_ms=random.choice((500, 5_000)),
            probe_interval_ms=random.choice((1_000, 3_000)),
            worker_silence_ms=random.choice((3_000, 10_000)),
            limits=shape.limits,
        )

    def begin(self) -> None:
        """Workers are there: let routers and clients begin."""
        for number in range(self.random.choice((1, 1, 2))):
            self.routers.append(Router(self, number, 1))

    def shared_registry(self) -> tuple[str, ...]:
        """The registry that all workers register at, besides their own."""
        return (f"http://{REGISTRY}",) if self.has_registry else ()

    # -- what workers tell

    def started(self, worker: "Worker") -> None:
        """A worker begins a life: so does its app."""
        self.apps[worker.name] = App(self, worker)

    def killed(self, worker: "Worker") -> None:
        """A worker is gone."""
        app = self.apps.get(worker.name)
        if app is not None and app.worker is worker:
            app.kill()

    def unit_lost(self, worker: "Worker", dp_rank: int) -> None:
        """A unit is gone while others go on."""
        app = self.apps[worker.name]
        if app.registrar is not None:
            app.run(app.registrar.lose_unit, dp_rank)

    def peer_gone(self, worker: "Worker", peer: str) -> None:
        """A link of that worker is lost."""
        app = self.apps.get(worker.name)
        if app is not None and app.worker is worker:
            app.peer_gone(peer)

    def register(self, leader: "Leader", effect: RegisterRank) -> None:
        """See Registry."""
        self.apps[leader.unit.worker.name].register(leader, effect)

    def look_up(self, leader: "Leader", effect: LookUp) -> None:
        """See Registry."""
        self.apps[leader.unit.worker.name].look_up(leader, effect)

    def close(self, name: str, room: Room) -> None:
        """See Registry; here each app's registrar takes its rooms back."""

    # -- faults

    def start_registry(self, life: int) -> None:
        """A life of the shared registry, with an empty table."""
        process = Process(self.world, "registry")
        self.registry = RegistryServer(self.world.wire, process, f"registry-{life}")
        self.world.wire.servers[REGISTRY] = self.registry

    def _strike(self, kind: str) -> None:
        world, random = self.world, self.random
        router = random.choice(self.routers)
        registry = self.registry
        if world.healed or (kind.startswith("registry") and registry is None):
            return
        if kind == "stream_broken":
            self._break_a_stream()
            return
        world.fault(kind, None)
        away_ms = random.choice((50, 1_500, 5_000))
        if kind == "router_crash":
            router.kill()
            world.at(away_ms, self._restart, router)
        elif kind == "registry_crash":
            assert registry is not None
            registry.process.kill()
            world.at(away_ms, self._restart_registry, registry)
        elif kind == "hop_cut":
            hosts = [router.host, *world.workers, *(["registry"] if registry else [])]
            one, other = random.sample(hosts, 2)
            if random.random() < 0.5:
                one, other = router.host, random.choice(list(world.workers))
            ways = [way for way in ((one, other), (other, one)) if random.random() < 0.8]
            for source, target in ways:
                world.network.cut(source, target)
            world.at(away_ms, self._mend, ways)
        else:
            process = router if kind == "router_pause" else registry.process  # type: ignore[union-attr]
            process.pause()
            world.at(away_ms, process.resume)

    def _break_a_stream(self) -> None:
        """A decode worker dies in the middle of an answer, as soon as there is one."""
        world = self.world
        running = [unit for unit in world.living() if unit.side == "decode" and "running" in unit.phases.values()]
        if running:
            world.chaos.strike("crash", self.random.choice(running), "")
        else:
            world.at(AIM_MS, self._strike, "stream_broken")

    def _restart(self, router: Router) -> None:
        if self.routers[router.number] is router and not router.alive:
            self.routers[router.number] = Router(self, router.number, router.life + 1)

    def _restart_registry(self, dead: RegistryServer) -> None:
        if self.registry is dead:
            self.start_registry(int(dead.table.incarnation.rpartition("-")[2]) + 1)

    def _mend(self, ways: list[tuple[str, str]]) -> None:
        for source, target in ways:
            self.world.network.heal(source, target)

    def heal(self) -> None:
        """All processes are well from now on."""
        if self.registry is not None:
            self.registry.process.resume()
            if not self.registry.process.alive:
                self._restart_registry(self.registry)
        for router in list(self.routers):
            router.resume()
            self._restart(router)

    # -- the end

    def check_end(self) -> None:
        """Everybody was answered; nothing is counted; the registry knows who lives, and nobody else."""
        self.customers.check_customers()
        if self.world.loop.faults:
            raise Broken("process", "; ".join(self.world.loop.faults))
        for router in self.routers:
            router.check_rest()
        for app in self.apps.values():
            if app.registrar is not None:
                rooms = list(app.registrar._rooms)
                if rooms:
                    raise Broken("rooms", f"{app}: rooms {rooms} are still registered")
        if self.registry is not None:
            world = self.world
            known = {one.name for one in self.registry.table.instances(world.now) if one.ready}
            living = {worker.incarnation for worker in world.workers.values() if worker.side == "prefill"}
            if known != living:
                raise Broken("registry", f"it knows {sorted(known)}, alive are {sorted(living)}")

    def unwind(self) -> None:
        """Unwind everything that still waits."""
        for process in (*self.routers, *self.apps.values()):
            process.end()
        if self.registry is not None:
            self.registry.process.end()
        self.world.loop.drain()
