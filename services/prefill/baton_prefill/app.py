"""A prefill worker's app: the common one, a registry of its own beside it, and its registration at every registry."""

import random
import secrets
from dataclasses import dataclass

import aiohttp
import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp

from baton_core.effects import LookUp, RegisterRank
from baton_core.errors import EngineError, Overloaded, Reason, Verdict
from baton_core.events import LookupFailed, RankEndpoint, Resolved
from baton_core.limits import RegistrarLimits
from baton_core.ranks import Parallel
from baton_core.registration import Layout
from baton_core.registry import RegistryTable
from baton_core.request import Incarnation, Room
from baton_io.ipc import RankReady
from baton_io.registrar import Registrar, Registration
from baton_io.registry_client import url_of
from baton_io.registry_routes import RegistryFront, RegistryRoutes, health_probe, registry_router
from baton_io.registry_token import read_token
from baton_worker.app import create_app
from baton_worker.config import PrefillConfig, follows
from baton_worker.materials import Materials
from baton_worker.node_app import run_node
from baton_worker.serving import Site, listen, monotonic_ms, port_of, serve
from baton_worker.worker import Worker

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Ports as they were bound."""

    http_port: int
    bootstrap_port: int


class PrefillCompanion:
    """What a prefill app adds to the common worker: it is its `Companion` and its `Announcer`."""

    def __init__(
        self,
        config: PrefillConfig,
        incarnation: Incarnation,
        addresses: Addresses,
        session: aiohttp.ClientSession,
        token: str | None,
    ) -> None:
        self._config = config
        self._token = token
        self._incarnation = incarnation
        self._addresses = addresses
        self._session = session
        self._registrar: Registrar | None = None

    def check_host(self, _host: str, _port: int) -> Verdict | None:
        """Prefill never calls the host that a request names."""
        return None

    def unready(self) -> list[str]:
        """Registries that do not know this worker yet."""
        if self._registrar is None:
            return ["registration has not begun"]
        if self._registrar.registered():
            return []
        return [f"registry {url}: {status}" for url, status in self._registrar.status().items()]

    async def attend(self, readies: tuple[RankReady, ...]) -> None:
        """Keep this worker registered; leave the registries at the end."""
        port = self._addresses.bootstrap_port
        own = url_of(self._config.local_host, port)
        registrar = self._registrar = Registrar(
            (own, *self._config.registry),
            self._registration(readies),
            self._session,
            RegistrarLimits(),
            monotonic_ms,
            jitter=random.random,
            token=self._token,
            aliases={url_of(self._config.reachable_host, port): own},
        )
        try:
            await registrar.run()
        finally:
            await registrar.deregister()

    async def look_up(self, lookup: LookUp) -> Resolved | LookupFailed:
        """Prefill looks nobody up."""
        text = f"a prefill worker was asked to look up room {lookup.bootstrap.room}"
        return LookupFailed(rid=lookup.rid, verdict=Verdict(reason=Reason.LOOKUP_FAILED, text=text))

    def forget(self, peers: tuple[Incarnation, ...]) -> None:
        """Nothing is kept about decode workers."""

    def register(self, rooms: tuple[RegisterRank, ...]) -> None:
        """Tell the registry that each request names, if that is one of ours, else all of ours."""
        if self._registrar is None:
            return
        for one in rooms:
            registry = url_of(one.bootstrap.host, one.bootstrap.port)
            try:
                self._registrar.open_room(one.room, one.dp_rank, registry)
            except Overloaded as error:
                log.warning("room.not_registered", rid=one.rid, room=one.room, cause=error.verdict.text)

    def close_room(self, room: Room, *, went_well: bool) -> None:
        """The room is over."""
        if self._registrar is not None:
            self._registrar.close_room(room, went_well=went_well)

    def unit_lost(self, dp_rank: int) -> None:
        """Take the ranks of a dead unit out of the registries."""
        if self._registrar is not None:
            self._registrar.lose_unit(dp_rank)

    def _registration(self, readies: tuple[RankReady, ...]) -> Registration:
        config, parallel, first = self._config, self._config.parallel, readies[0]
        return Registration(
            instance=self._incarnation,
            incarnation=self._incarnation,
            fingerprint=first.fingerprint,
            layout=Layout(
                attn_tp_size=parallel.tp,
                attn_cp_size=parallel.cp,
                dp_size=parallel.dp,
                pp_size=parallel.pp,
                page_size=first.page_tokens,
                kv_cache_dtype=first.kv_dtype,
                follow_bootstrap_room=follows(config.load_balance_method, forced=config.force_query_prefill_dp_rank),
            ),
            ranks=tuple((parallel.place(ready.rank).dp_rank, _endpoint(parallel, ready)) for ready in readies),
            http_host=self._config.reachable_host,
            http_port=self._addresses.http_port,
            bootstrap_host=self._config.reachable_host,
            bootstrap_port=self._addresses.bootstrap_port,
        )


async def run(config: PrefillConfig, materials: Materials) -> int:
    """Serve until the worker is over; the exit status. Raises OSError when a port cannot be had."""
    if config.node_rank > 0:
        return await run_node(config, materials)
    try:
        token = read_token(config.registry_token_file)
    except (OSError, ValueError) as error:
        raise EngineError(f"registry_token_file: {error}") from error
    listener, registry_listener = listen(config.host, config.port), listen(config.host, config.bootstrap_port)
    addresses = Addresses(http_port=port_of(listener), bootstrap_port=port_of(registry_listener))
    async with aiohttp.ClientSession() as session:
        companion = PrefillCompanion(config, materials.incarnation, addresses, session, token)
        worker = Worker(
            config=config,
            materials=materials,
            own_bootstrap=(config.reachable_host, addresses.bootstrap_port),
            companion=companion,
            announcer=companion,
            clock=monotonic_ms,
        )
        registry = Site(_registry_app(session, token), registry_listener)
        return await serve(worker, [Site(create_app(worker), listener), registry])


def _endpoint(parallel: Parallel, ready: RankReady) -> RankEndpoint:
    place = parallel.place(ready.rank)
    return RankEndpoint(
        host=ready.rank_host,
        port=ready.rank_port,
        tp_rank=place.tp_rank,
        cp_rank=place.cp_rank,
        pp_rank=place.pp_rank,
    )


def _registry_app(session: aiohttp.ClientSession, token: str | None) -> ASGIApp:
    table = RegistryTable(secrets.token_hex(8))
    routes = RegistryRoutes.alone(table, clock=monotonic_ms, probe=health_probe(session), token=token)
    app = FastAPI(title="Baton registry of a prefill worker", openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(registry_router(routes))
    return RegistryFront(routes, app)
