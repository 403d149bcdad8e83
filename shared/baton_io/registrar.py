"""Keeps a prefill worker registered: every rank, its lease and the rooms still open, at every registry, for ever.

    NEW ── all ranks accepted ──> REGISTERED <── accepted again ── LOST
     └────── refused (4xx) ──> REFUSED <──────── refused ──────────┘
                                              REGISTERED ── unreachable, or it forgot us ──> LOST

One task per registry, so that a dead registry delays no other. A registry forgets when it restarts: it answers 404 to
a renewal, or under another incarnation; then every rank and every open room is registered again.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote

import aiohttp
import structlog

from baton_core.errors import Overloaded
from baton_core.events import RankEndpoint
from baton_core.limits import Millis
from baton_core.registration import Endpoint, Layout, RankRegistration, registration_body
from baton_core.request import Incarnation, Room
from baton_io.registry_client import REGISTRY_INCARNATION, RegistryError, Reply, call

log = structlog.get_logger()

ROOMS_PER_TURN = 256
"""Rooms registered before the lease is looked at again, so that many rooms cannot let it run out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrarLimits:
    """Times and bounds of registering. Raises ValueError when a value is not positive."""

    lease_ms: Millis = 10_000  # renewed three times in this time
    call_ms: Millis = 1_500  # one HTTP call; longer than a registry's probe of the worker we supersede
    retry_first_ms: Millis = 100  # pause after a failure, doubled each time …
    retry_max_ms: Millis = 2_000  # … up to this; attempts never end
    room_renew_ms: Millis = 40_000  # an open room is registered again; registries keep rooms for 120 s
    rooms_max: int = 65_536  # open rooms; more: `Overloaded`
    deregister_ms: Millis = 1_000  # all registries together, at shutdown

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Who this worker is: one life, its layout, and where each rank listens."""

    instance: str
    incarnation: Incarnation
    fingerprint: str
    layout: Layout
    ranks: tuple[tuple[int, RankEndpoint], ...]  # (DP rank, endpoint), every rank once
    http_host: str
    http_port: int
    bootstrap_host: str | None = None  # the registry that this worker serves itself
    bootstrap_port: int | None = None

    def __post_init__(self) -> None:
        keys = {(dp_rank, rank.cp_rank, rank.tp_rank, rank.pp_rank) for dp_rank, rank in self.ranks}
        if len(keys) != self.layout.ranks_total or len(self.ranks) != len(keys):
            raise ValueError(f"a layout of {self.layout.ranks_total} ranks needs each once, not {len(self.ranks)}")

    def bodies(self, lease_ms: Millis) -> list[dict[str, object]]:
        """The PUT `/route` body of every rank."""
        return [
            registration_body(
                RankRegistration(
                    layout=self.layout,
                    dp_rank=dp_rank,
                    cp_rank=rank.cp_rank,
                    tp_rank=rank.tp_rank,
                    pp_rank=rank.pp_rank,
                    endpoint=Endpoint(rank_ip=rank.host, rank_port=rank.port),
                    prefill_http_port=self.http_port,
                    http_host=self.http_host,
                    instance=self.instance,
                    incarnation=self.incarnation,
                    fingerprint=self.fingerprint,
                    lease_ms=lease_ms,
                    bootstrap_host=self.bootstrap_host,
                    bootstrap_port=self.bootstrap_port,
                )
            )
            for dp_rank, rank in self.ranks
        ]


class Registrar:
    """Registers one worker at every registry. `run` until cancelled, then `deregister`.

    `clock` is any monotonic clock; `jitter` draws from 0 to 1 and spreads the retries of many workers.
    """

    def __init__(
        self,
        registries: Sequence[str],
        registration: Registration,
        session: aiohttp.ClientSession,
        limits: RegistrarLimits,
        clock: Callable[[], Millis],
        *,
        jitter: Callable[[], float],
        token: str | None = None,
    ) -> None:
        self._limits = limits
        self._rooms: dict[Room, int] = {}
        urls = dict.fromkeys(url.rstrip("/") for url in registries)  # each once, in order
        self._links = [
            _Link(url, registration, self._rooms, session, limits, clock, jitter=jitter, token=token) for url in urls
        ]

    async def run(self) -> None:
        """Keep everything registered; returns only by cancellation."""
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.run(), name=f"registrar {link.url}")

    def registered(self) -> bool:
        """Whether every registry accepted all ranks and none has refused them since.

        A registry that died later does not make the worker unready: whoever knows the worker can go on using it.
        """
        return all(link.state in (State.REGISTERED, State.LOST) for link in self._links)

    def status(self) -> dict[str, str]:
        """For `/ready`: per registry, how registration stands and since when."""
        return {link.url: link.status() for link in self._links}

    def open_room(self, room: Room, dp_rank: int) -> None:
        """This room runs on this DP rank: tell every registry until `close_room`. Raises Overloaded when full."""
        if room not in self._rooms and len(self._rooms) >= self._limits.rooms_max:
            raise Overloaded(f"{self._limits.rooms_max} rooms are open on this prefill worker (rooms_max)")
        self._rooms[room] = dp_rank
        for link in self._links:
            link.announce(room)

    def close_room(self, room: Room) -> None:
        """The room is over: registries forget it by themselves."""
        self._rooms.pop(room, None)
        for link in self._links:
            link.withdraw(room)

    async def deregister(self) -> None:
        """Leave every registry, within one limit in all; a registry that does not answer lets the lease run out."""
        await asyncio.gather(*(link.deregister() for link in self._links))


class State(Enum):
    """How registration at one registry stands; see the drawing at the top."""

    NEW = "not registered yet"
    REGISTERED = "registered"
    LOST = "registered before, now registering again"
    REFUSED = "refused"


class _Link:
    """One registry. Only `run` and what it calls assign `state`."""

    def __init__(
        self,
        url: str,
        registration: Registration,
        rooms: dict[Room, int],
        session: aiohttp.ClientSession,
        limits: RegistrarLimits,
        clock: Callable[[], Millis],
        *,
        jitter: Callable[[], float],
        token: str | None,
    ) -> None:
        self.url = url
        self.state = State.NEW
        self._registration = registration
        self._rooms = rooms  # shared with the registrar: the rooms that are open
        self._session = session
        self._limits = limits
        self._clock = clock
        self._jitter = jitter
        self._token = token
        self._registry_incarnation: str | None = None
        self._since_ms = clock()
        self._problem = ""
        self._renew_due_ms: Millis = 0
        # Ordered dictionaries, because both are consumed from the front.
        self._unannounced: OrderedDict[Room, None] = OrderedDict()
        self._room_due_ms: OrderedDict[Room, Millis] = OrderedDict()  # oldest first: every room waits equally long
        self._wake = asyncio.Event()

    def status(self) -> str:
        """One line for people."""
        seconds = (self._clock() - self._since_ms) / 1000
        return f"{self.state.value} for {seconds:.1f} s" + (f": {self._problem}" if self._problem else "")

    def announce(self, room: Room) -> None:
        """Register this room as soon as possible."""
        self._unannounced[room] = None
        self._wake.set()

    def withdraw(self, room: Room) -> None:
        """Renew this room no more."""
        self._unannounced.pop(room, None)
        self._room_due_ms.pop(room, None)

    async def run(self) -> None:
        """For ever: do what is due, then wait for what is due next; pause longer after each failure."""
        failures = 0
        while True:
            try:
                await self._do_what_is_due()
            except RegistryError as error:
                self._failed(error)
                await asyncio.sleep(self._pause_ms(failures) / 1000)
                failures += 1
                continue
            failures = 0
            await self._wait()

    async def deregister(self) -> None:
        url = f"{self.url}/v1/instances/{quote(self._registration.instance, safe='')}"
        try:
            await call(
                self._session,
                "DELETE",
                url,
                limit_ms=self._limits.deregister_ms,
                params={"incarnation": self._registration.incarnation},
                token=self._token,
            )
        except RegistryError as error:
            log.warning("registrar.deregister_failed", registry=self.url, cause=str(error))
        else:
            log.info("registrar.deregistered", registry=self.url, instance=self._registration.instance)

    # -- one turn

    async def _do_what_is_due(self) -> None:
        if self.state is not State.REGISTERED:
            await self._register()
        elif self._clock() >= self._renew_due_ms:
            await self._renew()
        await self._announce_rooms()

    async def _register(self) -> None:
        for body in self._registration.bodies(self._limits.lease_ms):
            reply = await self._call("PUT", "/route", body=body)
            if reply.status != 200:
                if 400 <= reply.status < 500:
                    self._move(State.REFUSED)
                raise RegistryError(f"{reply.url} answered {reply.status}: {reply.text}")
            self._registry_incarnation = reply.headers.get(REGISTRY_INCARNATION)
        self._renew_due_ms = self._clock() + self._limits.lease_ms // 3
        self._unannounced = OrderedDict.fromkeys(self._rooms)
        self._problem = ""
        self._move(State.REGISTERED)
        ranks = len(self._registration.ranks)
        log.info("registrar.registered", registry=self.url, instance=self._registration.instance, ranks=ranks)

    async def _renew(self) -> None:
        path = f"/v1/instances/{quote(self._registration.instance, safe='')}/lease"
        reply = await self._call("PUT", path, params={"incarnation": self._registration.incarnation})
        if reply.status == 200 and reply.headers.get(REGISTRY_INCARNATION) == self._registry_incarnation:
            self._renew_due_ms = self._clock() + self._limits.lease_ms // 3
            self._problem = ""
        elif reply.status in (200, 404):
            log.warning("registrar.forgotten", registry=self.url, instance=self._registration.instance)
            self._move(State.LOST)
            await self._register()
        else:
            raise RegistryError(f"{reply.url} answered {reply.status}: {reply.text}")

    async def _announce_rooms(self) -> None:
        now = self._clock()
        while self._room_due_ms and next(iter(self._room_due_ms.values())) <= now:
            room, _ = self._room_due_ms.popitem(last=False)
            self._unannounced[room] = None
        for _ in range(min(ROOMS_PER_TURN, len(self._unannounced))):
            if not self._unannounced:  # withdrawn meanwhile
                return
            room = next(iter(self._unannounced))
            dp_rank = self._rooms.get(room)
            if dp_rank is not None:
                await self._announce_room(room, dp_rank)
            if self._rooms.get(room) == dp_rank:  # else it was opened anew meanwhile
                self._unannounced.pop(room, None)

    async def _announce_room(self, room: Room, dp_rank: int) -> None:
        body = {"bootstrap_room": room, "dp_rank": dp_rank, "instance": self._registration.instance}
        reply = await self._call("POST", "/register_dp_rank", body=body)
        if reply.status != 200:
            # This room alone is in trouble; it is tried again when it is due.
            log.warning("registrar.room_refused", registry=self.url, room=room, status=reply.status, cause=reply.text)
        if room in self._rooms:
            self._room_due_ms[room] = self._clock() + self._limits.room_renew_ms
            self._room_due_ms.move_to_end(room)

    async def _wait(self) -> None:
        if self._unannounced:
            return
        due_ms = min([self._renew_due_ms, *list(self._room_due_ms.values())[:1]])
        try:
            async with asyncio.timeout(max(0, due_ms - self._clock()) / 1000):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    # -- inside

    async def _call(
        self, method: str, path: str, *, body: object = None, params: dict[str, str] | None = None
    ) -> Reply:
        return await call(
            self._session,
            method,
            self.url + path,
            limit_ms=self._limits.call_ms,
            params=params,
            body=body,
            token=self._token,
        )

    def _failed(self, error: RegistryError) -> None:
        problem = str(error)
        if self.state is State.REGISTERED:
            self._move(State.LOST)
        if problem != self._problem:  # one line a change, not one a retry
            log.warning("registrar.failed", registry=self.url, state=self.state.name, cause=problem)
        self._problem = problem

    def _pause_ms(self, failures: int) -> float:
        longest: Millis = min(self._limits.retry_max_ms, self._limits.retry_first_ms << min(failures, 20))
        return longest * (0.5 + 0.5 * self._jitter())

    def _move(self, state: State) -> None:
        if state is not self.state:
            self.state = state
            self._since_ms = self._clock()
