"""A decode worker's app: the common one, and the look-up of prefill workers at their registries."""

import asyncio

import aiohttp

from baton_core.effects import LookUp
from baton_core.errors import EngineError, Verdict
from baton_core.events import LookupFailed, Resolved
from baton_core.request import Incarnation
from baton_io.ipc import RankReady
from baton_io.peers import BootstrapAllow, Peers, learn_registered_hosts
from baton_worker.app import create_app
from baton_worker.config import DecodeConfig
from baton_worker.materials import Materials
from baton_worker.node_app import run_node
from baton_worker.serving import Site, listen, monotonic_ms, serve
from baton_worker.worker import Worker

BOOTSTRAP_PORT = 8998
"""What a leg that names no bootstrap port means: the default of prefill workers, here and in SGLang."""


class DecodeCompanion:
    """What a decode app adds to the common worker."""

    def __init__(self, config: DecodeConfig, session: aiohttp.ClientSession) -> None:
        """Raises EngineError for an entry of the allow-list that means nothing."""
        self._registries = config.registry
        self._session = session
        try:
            self._allow = BootstrapAllow(config.registry, config.bootstrap_allow)
        except ValueError as error:
            raise EngineError(f"registry or bootstrap_allow: {error}") from error
        self._peers = Peers(session, config.limits, forced=config.force_query_prefill_dp_rank)

    def check_host(self, host: str, port: int) -> Verdict | None:
        """Only known hosts, or any client could make this worker call anybody."""
        return self._allow.check(host, port)

    def unready(self) -> list[str]:
        """Decode needs nobody to be ready: it can answer alone."""
        return []

    async def attend(self, _readies: tuple[RankReady, ...]) -> None:
        """Keep learning which hosts are registered."""
        if self._registries:
            await learn_registered_hosts(self._allow, self._registries, self._session)
        await asyncio.Event().wait()

    async def look_up(self, lookup: LookUp) -> Resolved | LookupFailed:
        """Ask the room's registry."""
        return await self._peers.resolve(lookup)

    def forget(self, peers: tuple[Incarnation, ...]) -> None:
        """The next look-up asks the registry again."""
        for peer in peers:
            self._peers.forget(peer)


async def run(config: DecodeConfig, materials: Materials) -> int:
    """Serve until the worker is over; the exit status. Raises OSError when the port cannot be had."""
    if config.node_rank > 0:
        return await run_node(config, materials)
    listener = listen(config.host, config.port)
    async with aiohttp.ClientSession() as session:
        worker = Worker(
            config=config,
            materials=materials,
            own_bootstrap=("", BOOTSTRAP_PORT),
            companion=DecodeCompanion(config, session),
            clock=monotonic_ms,
        )
        return await serve(worker, [Site(create_app(worker), listener)])
