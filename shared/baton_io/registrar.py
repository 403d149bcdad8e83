"""Keeps a prefill worker registered: every rank, its lease and the rooms still open, at every registry, for ever.

    NEW ── all ranks accepted ──> REGISTERED <── accepted again ── LOST
     └────── refused (4xx) ──> REFUSED <──────── refused ──────────┘
                                              REGISTERED ── unreachable, or it forgot us ──> LOST

One task per registry, so that a dead registry delays no other. A registry forgets when it restarts: it answers 404 to
a renewal, or under another incarnation; then every rank and every open room is registered again.
"""

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote

import aiohttp
import structlog

from baton_core.errors import Overloaded
from baton_core.events import RankEndpoint
from baton_core.limits import Millis, RegistrarLimits
from baton_core.registration import Endpoint, Layout, RankRegistration, registration_body
from baton_core.request import Incarnation, Room
from baton_core.room_news import RoomNews
from baton_io.registry_client import REGISTRY_INCARNATION, RegistryError, Reply, address_of, call

log = structlog.get_logger()

ROOMS_PER_CALL = 1_024
"""Rooms in one call; a registry reads bodies of at most 64 KiB. Between calls the lease is looked at."""


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

    def bodies(self, lease_ms: Millis, lost: Container[int] = ()) -> list[dict[str, object]]:
        """The PUT `/route` body of every rank, but for those of DP ranks that are `lost`."""
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
            if dp_rank not in lost
        ]


@dataclass(frozen=True, slots=True)
class _Room:
    """An open room: its DP rank, and the registries that are told."""

    dp_rank: int
    urls: tuple[str, ...]


class Registrar:
    """Registers one worker at every registry. `run` until cancelled, then `deregister`.

    `aliases` are other base URLs of a registry, by which a request may name it. `clock` is any monotonic clock;
    `jitter` draws from 0 to 1 and spreads the retries of many workers.
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
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._limits = limits
        self._rooms: dict[Room, _Room] = {}
        self._lost: dict[int, None] = {}  # DP ranks that are over
        urls = dict.fromkeys(url.rstrip("/") for url in registries)  # each once, in order
        self._urls = {address_of(url): url for url in urls}
        self._urls |= {address_of(alias): url.rstrip("/") for alias, url in (aliases or {}).items()}
        self._links = [
            _Link(url, registration, self._rooms, self._lost, session, limits, clock, jitter=jitter, token=token)
            for url in urls
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

    def open_room(self, room: Room, dp_rank: int, registry: str | None = None) -> None:
        """This room runs on this DP rank: tell until `close_room`, at `registry` if that is one of ours, else everywhere.

        Raises Overloaded when full.
        """
        if room not in self._rooms and len(self._rooms) >= self._limits.rooms_max:
            raise Overloaded(f"{self._limits.rooms_max} rooms are open on this prefill worker (rooms_max)")
        named = None if registry is None else self._urls.get(address_of(registry))
        urls = tuple(link.url for link in self._links) if named is None else (named,)
        self._rooms[room] = _Room(dp_rank, urls)
        for link in self._links:
            if link.url in urls:
                link.announce(room, dp_rank)

    def close_room(self, room: Room, *, went_well: bool) -> None:
        """The room is over: registries are to forget it, at once or, since decode's leg may still ask, after a while."""
        self._rooms.pop(room, None)
        for link in self._links:
            link.withdraw(room, went_well=went_well)

    def lose_unit(self, dp_rank: int) -> None:
        """A DP rank is over while the others serve on: its ranks leave every registry."""
        self._lost[dp_rank] = None
        for link in self._links:
            link.lose_unit(dp_rank)

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
        rooms: dict[Room, _Room],
        lost: dict[int, None],
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
        self._rooms = rooms  # shared with the registrar: the rooms that are open …
        self._lost = lost  # … and the DP ranks that are over
        self._session = session
        self._limits = limits
        self._clock = clock
        self._jitter = jitter
        self._token = token
        self._registry_incarnation: str | None = None
        self._since_ms = clock()
        self._problem = ""
        self._renew_due_ms: Millis = 0
        self._news = RoomNews(limits)
        self._leaving: dict[int, None] = {}  # DP ranks that the registry must be told to forget
        self._wake = asyncio.Event()

    def status(self) -> str:
        """One line for people."""
        seconds = (self._clock() - self._since_ms) / 1000
        return f"{self.state.value} for {seconds:.1f} s" + (f": {self._problem}" if self._problem else "")

    def announce(self, room: Room, dp_rank: int) -> None:
        """Register this room as soon as possible."""
        self._news.open(room, dp_rank)
        self._wake.set()

    def withdraw(self, room: Room, *, went_well: bool) -> None:
        """Renew this room no more, and take it back."""
        self._news.close(room, self._clock(), went_well=went_well)
        self._wake.set()

    def lose_unit(self, dp_rank: int) -> None:
        """Take the ranks of this DP rank out as soon as possible."""
        self._leaving[dp_rank] = None
        self._wake.set()

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
        while self._leaving:
            await self._leave(next(iter(self._leaving)))
        await self._announce_rooms()

    async def _register(self) -> None:
        for body in self._registration.bodies(self._limits.lease_ms, self._lost):
            reply = await self._call("PUT", "/route", body=body)
            if reply.status != 200:
                if 400 <= reply.status < 500:
                    self._move(State.REFUSED)
                raise RegistryError(f"{reply.url} answered {reply.status}: {reply.text}")
            self._registry_incarnation = reply.headers.get(REGISTRY_INCARNATION)
        self._renew_due_ms = self._clock() + self._limits.lease_ms // 3
        self._leaving |= self._lost
        self._news.forgotten()
        for room, one in self._rooms.items():
            if self.url in one.urls:
                self._news.open(room, one.dp_rank)
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

    async def _leave(self, dp_rank: int) -> None:
        path = f"/v1/instances/{quote(self._registration.instance, safe='')}"
        params = {"incarnation": self._registration.incarnation, "dp_rank": str(dp_rank)}
        reply = await self._call("DELETE", path, params=params)
        self._leaving.pop(dp_rank, None)
        if reply.status == 200:
            log.info("registrar.unit_left", registry=self.url, dp_rank=dp_rank)
        else:
            log.warning("registrar.unit_not_left", registry=self.url, dp_rank=dp_rank, cause=reply.text)

    async def _announce_rooms(self) -> None:
        plain = self._registry_incarnation is None  # SGLang's own registry takes one room a call, and none back
        told, over = self._news.take(self._clock(), 1 if plain else ROOMS_PER_CALL)
        if plain:
            self._news.heard({}, over, self._clock())
        if not told and (plain or not over):
            return
        ranks: dict[str, object] = {"dp_ranks": _by_text(told)}
        if over:
            ranks["over"] = _by_text(over)
        if plain:
            ranks = {"bootstrap_room": next(iter(told)), "dp_rank": next(iter(told.values()))}
        body = {"instance": self._registration.instance} | ranks
        reply = await self._call("POST", "/register_dp_rank", body=body)
        if reply.headers.get(REGISTRY_INCARNATION) != self._registry_incarnation:
            self._move(State.LOST)  # it knows these rooms now, but neither the ranks nor the other rooms
            return
        if reply.status != 200:
            # These rooms alone are in trouble; they are tried again when they are due.
            log.warning("registrar.rooms_refused", registry=self.url, status=reply.status, cause=reply.text)
        self._news.heard(told, over, self._clock())

    async def _wait(self) -> None:
        if self._news.has_any or self._leaving or self.state is not State.REGISTERED:
            return
        due_ms = min(due for due in (self._renew_due_ms, self._news.due()) if due is not None)
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


def _by_text(rooms: Mapping[Room, int]) -> dict[str, int]:
    """Keys of JSON are texts."""
    return {str(room): dp_rank for room, dp_rank in rooms.items()}
