"""Decode's view of the prefill workers: from a room's bootstrap address to one life's DP rank and its endpoints.

    LookUp ──> _setup_bootstrap_infos ──> Resolved(infos) | LookupFailed(verdict)
                 │  topology   GET /route with four −1           cached by (registry, instance)
                 │  DP rank    _resolve_prefill_dp_rank, or where that does not know, POST /query_dp_ranks
                 └  endpoints  GET /route, all ranks at once     cached by (registry, instance, DP rank), complete only

Infos name a unit by its leader (`ranks.member_name`), with its endpoints in the order of members. Look-ups of the same
thing share one fetch. What is cached outlives the registry: an entry goes only when the link to
that life is lost or refused (`forget`). So a registry may die without failing the pairs that know each other.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from baton_core.decode.resolve import _resolve_prefill_dp_rank
from baton_core.effects import LookUp
from baton_core.errors import BatonError, ClientError, Reason, Verdict
from baton_core.events import BootstrapInfos, LookupFailed, RankEndpoint, Resolved
from baton_core.limits import Limits, Millis
from baton_core.ranks import member_name, worker_of
from baton_core.registration import Endpoint, Layout, RankKey, parse_endpoint, parse_topology, synthetic_incarnation
from baton_core.request import FAKE_HOST, Bootstrap, Incarnation, Room
from baton_io.lookups import RETRY_PAUSE_MS, RoomQuery, SharedCache
from baton_io.registry_client import INCARNATION, RegistryError, Reply, call, is_loopback, url_of

TOPOLOGIES_MAX = 1_024
UNITS_MAX = 8_192
"""Cached entries; the least recently used goes first, and is fetched anew when it is wanted."""

RANK_FETCHES_MAX = 32
"""Endpoints fetched at the same time for one look-up."""

V = TypeVar("V")

Address = tuple[str, str | None]
"""(registry URL, instance name or None)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What a registry told about one instance. `incarnation` None: a plain SGLang registry, which does not say."""

    layout: Layout
    incarnation: Incarnation | None


class Handshake:
    """The look-up of one request: `infos` once it is complete, `failure` once it failed; the first of them stands."""

    def __init__(self) -> None:
        self.waiting_for = "the layout of the prefill worker"  # for the text of a time-out
        self.infos: BootstrapInfos | None = None
        self.failure: Verdict | None = None

    def complete(self, infos: BootstrapInfos) -> None:
        """Record success, unless the look-up has failed already."""
        if self.failure is None:
            self.infos = infos

    def fail(self, verdict: Verdict) -> None:
        """Record the cause; what comes later does not overwrite it."""
        if self.failure is None:
            self.failure = verdict
            self.infos = None


class Peers:
    """Prefill workers as decode knows them. One object per decode app, on one event loop."""

    def __init__(self, session: aiohttp.ClientSession, limits: Limits, *, forced: bool = False) -> None:
        """`forced`: ask for the DP rank of every room (BATON_FORCE_QUERY_PREFILL_DP_RANK)."""
        self._session = session
        self._forced = forced
        self._lookup_ms = limits.lookup_ms
        self._topologies: SharedCache[Address, Topology] = SharedCache(TOPOLOGIES_MAX, limits.lookup_ms)
        self._units: SharedCache[tuple[str, str | None, int], BootstrapInfos] = SharedCache(UNITS_MAX, limits.lookup_ms)
        self._rooms: dict[Address, RoomQuery] = {}
        self._notes: dict[Address, str] = {}  # why the look-ups there are still waiting

    async def resolve(self, lookup: LookUp) -> Resolved | LookupFailed:
        """Find the prefill worker of this room, within `lookup_ms`; never raises for a fault of the world."""
        handshake = await self._setup_bootstrap_infos(lookup.bootstrap)
        if handshake.infos is None:
            assert handshake.failure is not None, "a look-up ends with infos or with a cause"
            return LookupFailed(rid=lookup.rid, verdict=handshake.failure)
        return Resolved(rid=lookup.rid, infos=handshake.infos)

    def forget(self, peer: Incarnation) -> None:
        """The link to a rank of this life was lost or refused: the next look-up asks the registry again."""
        life = worker_of(peer)
        for url, instance, _ in self._units.drop_where(lambda infos: worker_of(infos.incarnation) == life):
            self._topologies.drop((url, instance))
        self._topologies.drop_where(lambda topology: topology.incarnation == life)

    # -- one look-up

    async def _setup_bootstrap_infos(self, bootstrap: Bootstrap) -> Handshake:
        """Topology, DP rank and endpoints of this room, or the cause of the failure."""
        handshake = Handshake()
        address = (url_of(bootstrap.host, bootstrap.port), bootstrap.instance)
        try:
            async with asyncio.timeout(self._lookup_ms / 1000):
                handshake.complete(await self._infos(address, bootstrap, handshake))
        except TimeoutError:
            text = f"registry {address[0]} did not name {handshake.waiting_for} within {self._lookup_ms} ms"
            handshake.fail(_lookup_failed(text, self._notes.get(address, "")))
        except RegistryError as error:
            handshake.fail(_lookup_failed(f"look-up at registry {address[0]} failed", str(error)))
        except BatonError as error:
            handshake.fail(error.verdict)
        return handshake

    async def _infos(self, address: Address, bootstrap: Bootstrap, handshake: Handshake) -> BootstrapInfos:
        for _ in range(2):
            topology = await self._topology(address)
            dp_rank = await self._dp_rank(address, bootstrap, topology.layout, handshake)
            handshake.waiting_for = f"the addresses of DP rank {dp_rank}"
            infos = await self._unit(address, topology, dp_rank)
            if topology.incarnation in (None, worker_of(infos.incarnation)):
                return infos
            # The worker restarted between the two answers, and its layout may be another: once more, from the start.
            self._topologies.drop(address)
            self._units.drop((*address, dp_rank))
        raise RegistryError(f"the worker at {address[0]} restarts again and again")

    async def _dp_rank(self, address: Address, bootstrap: Bootstrap, layout: Layout, handshake: Handshake) -> int:
        known = _resolve_prefill_dp_rank(bootstrap, layout, force_query=self._forced)
        if known is not None:
            return known
        handshake.waiting_for = f"the DP rank of room {bootstrap.room}"
        dp_rank = await self._ask_dp_rank(address, bootstrap.room, layout)
        _check_dp_rank(dp_rank, layout, f"registry {address[0]} says that room {bootstrap.room} runs on")
        return dp_rank

    async def _topology(self, address: Address) -> Topology:
        return await self._topologies.get(address, lambda: self._fetch_topology(address))

    async def _unit(self, address: Address, topology: Topology, dp_rank: int) -> BootstrapInfos:
        return await self._units.get((*address, dp_rank), lambda: self._fetch_unit(address, topology.layout, dp_rank))

    async def _ask_dp_rank(self, address: Address, room: Room, layout: Layout) -> int:
        query = self._rooms.get(address)
        if query is None:
            query = self._rooms[address] = RoomQuery(address[0], address[1], self._session, self._lookup_ms)
        # Only this side was told to ask. Prefill follows and registers nothing: what the registry does not know at once
        # runs where the room says, or has failed there.
        fallback = room % layout.dp_size if layout.follow_bootstrap_room else None
        try:
            return await query.dp_rank(room, fallback)
        finally:
            if query.idle and self._rooms.get(address) is query:
                del self._rooms[address]

    # -- fetches: shared, so they outlive the request that began them

    async def _fetch_topology(self, address: Address) -> Topology:
        reply = await self._get_route(address, (-1, -1, -1, -1))
        return Topology(
            layout=_parsed(reply, parse_topology),
            incarnation=reply.headers.get(INCARNATION),
        )

    async def _fetch_unit(self, address: Address, layout: Layout, dp_rank: int) -> BootstrapInfos:
        ranks = [
            (cp, tp, pp)
            for pp in range(layout.pp_size)
            for cp in range(layout.attn_cp_size)
            for tp in range(layout.attn_tp_size)
        ]
        gate = asyncio.Semaphore(RANK_FETCHES_MAX)

        async def fetch(cp: int, tp: int, pp: int) -> tuple[Endpoint, str | None]:
            async with gate:
                reply = await self._get_route(address, (dp_rank, cp, tp, pp))
            return _parsed(reply, parse_endpoint), reply.headers.get(INCARNATION)

        found = await asyncio.gather(*(fetch(*rank) for rank in ranks))
        lives = sorted({life or "" for _, life in found})
        if len(lives) > 1:
            raise RegistryError(f"{address[0]}: the worker restarted during the look-up ({' then '.join(lives)})")
        life = lives[0] or synthetic_incarnation(endpoint for endpoint, _ in found)
        return BootstrapInfos(
            incarnation=member_name(life, dp_rank, 0),
            dp_rank=dp_rank,
            endpoints=tuple(
                RankEndpoint(host=endpoint.rank_ip, port=endpoint.rank_port, cp_rank=cp, tp_rank=tp, pp_rank=pp)
                for (endpoint, _), (cp, tp, pp) in zip(found, ranks, strict=True)
            ),
        )

    async def _get_route(self, address: Address, rank: RankKey) -> Reply:
        url, instance = address
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        params = dict(zip(names, map(str, rank), strict=True)) | ({} if instance is None else {"instance": instance})
        while True:
            reply = await call(self._session, "GET", f"{url}/route", limit_ms=self._lookup_ms, params=params)
            self._notes.pop(address, None)
            if reply.status == 200:
                return reply
            answer = f"{reply.url} answered {reply.status}: {reply.text}"
            if reply.status != 503:
                raise RegistryError(answer)
            self._note(address, answer)
            await asyncio.sleep(RETRY_PAUSE_MS / 1000)

    def _note(self, address: Address, answer: str) -> None:
        if len(self._notes) >= TOPOLOGIES_MAX:
            self._notes.clear()  # they only make texts better
        self._notes[address] = answer


def _lookup_failed(what: str, cause: str) -> Verdict:
    advice = "check that the prefill worker runs and is registered there, and bootstrap_host and bootstrap_port"
    return Verdict(reason=Reason.LOOKUP_FAILED, text="; ".join(part for part in (what, cause, advice) if part))


def _check_dp_rank(dp_rank: int, layout: Layout, who: str) -> None:
    if not 0 <= dp_rank < layout.dp_size:
        raise ClientError(f"{who} {dp_rank}, but the prefill worker has {layout.dp_size} DP ranks (dp_size)")


def _parsed(reply: Reply, parse: Callable[[object], V]) -> V:
    """Raises RegistryError: a wrong answer is the registry's fault, not the client's."""
    try:
        return parse(reply.json())
    except ClientError as error:
        raise RegistryError(f"{reply.url} answered with something else than expected: {error}") from error


class BootstrapAllow:
    """Hosts that a request may name as `bootstrap_host`; without such a list any client could point decode anywhere.

    Allowed: loopback, the hosts of `registries`, what is registered there (`learn`), and `extra`: a host, host:port, a
    network such as 10.0.0.0/8, or `*`. Raises ValueError for an entry that is none of these.
    """

    def __init__(self, registries: Sequence[str], extra: Sequence[str] = ()) -> None:
        self._hosts = {_registry_host(url) for url in registries} | {FAKE_HOST}
        self._learned: dict[str, frozenset[str]] = {}  # by registry URL
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._any = False
        for entry in extra:
            self._add(entry.strip())

    def check(self, host: str, port: int) -> Verdict | None:
        """None where the host is allowed, else the verdict of the 400."""
        bare = host.strip("[]").lower()
        if self._any or is_loopback(bare) or bare in self._hosts or f"{bare}:{port}" in self._hosts:
            return None
        if any(bare in hosts for hosts in self._learned.values()) or self._in_a_network(bare):
            return None
        text = f"bootstrap_host {host}:{port} is not allowed here; start this worker with --bootstrap-allow {host}"
        return Verdict(reason=Reason.INVALID_REQUEST, text=text)

    def learn(self, registry: str, hosts: Iterable[str]) -> None:
        """From now on these are the hosts registered at `registry`."""
        self._learned[registry] = frozenset(host.strip("[]").lower() for host in hosts)

    def _in_a_network(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def _add(self, entry: str) -> None:
        if entry == "*":
            self._any = True
        elif "/" in entry:
            self._networks.append(ipaddress.ip_network(entry, strict=False))
        elif entry:
            self._hosts.add(entry.lower() if entry.count(":") == 1 else entry.strip("[]").lower())
        else:
            raise ValueError("bootstrap_allow has an empty entry")


async def learn_registered_hosts(
    allow: BootstrapAllow, registries: Sequence[str], session: aiohttp.ClientSession, *, interval_ms: Millis = 2_000
) -> None:
    """For ever: teach `allow` the hosts registered at each registry. A registry that fails keeps what it taught."""
    while True:
        await asyncio.gather(*(_learn_from(allow, url, session, interval_ms) for url in registries))
        await asyncio.sleep(interval_ms / 1000)


async def _learn_from(allow: BootstrapAllow, registry: str, session: aiohttp.ClientSession, limit_ms: Millis) -> None:
    try:
        reply = await call(session, "GET", f"{registry.rstrip('/')}/v1/instances", limit_ms=limit_ms)
        body = reply.json() if reply.status == 200 else None
    except RegistryError:
        return
    instances = body.get("instances") if isinstance(body, dict) else None
    if isinstance(instances, list):
        entries = [entry for entry in instances if isinstance(entry, dict)]
        hosts = [entry.get(key) for entry in entries for key in ("http_host", "bootstrap_host")]
        allow.learn(registry, [host for host in hosts if isinstance(host, str)])


def _registry_host(url: str) -> str:
    host = urlsplit(url).hostname
    if not host:
        raise ValueError(f"registry {url!r} is not a URL such as http://127.0.0.1:8990")
    return host
