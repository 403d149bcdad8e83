"""`baton-bootstrap`: the registry that prefill workers register with and decode workers ask."""

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import aiohttp
import structlog
import uvicorn

from baton_bootstrap.app import create_app
from baton_bootstrap.config import BootstrapConfig
from baton_core.limits import Millis
from baton_core.registry import RegistryTable
from baton_io.config import describe, load
from baton_io.http_guard import GuardedHttp
from baton_io.logs import configure_logs
from baton_io.registry_routes import RegistryRoutes, health_probe
from baton_io.registry_store import OwnStore, Store
from baton_io.registry_token import read_token


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. The exit status; non-zero if the port or the token cannot be had."""
    arguments = sys.argv[1:] if argv is None else argv
    config = load(
        BootstrapConfig,
        "bootstrap",
        arguments,
        os.environ,
        program="baton-bootstrap",
        description="Baton bootstrap registry: prefill workers register here, decode workers look them up.",
    )
    configure_logs("bootstrap", log_format=config.log_format, level=config.log_level)
    log = structlog.get_logger()
    try:
        token = read_token(config.token_file)
    except (OSError, ValueError) as error:
        log.error("bootstrap.token_unreadable", token_file=config.token_file, cause=str(error))
        return 1
    try:
        store = open_store(config)
    except (OSError, ValueError) as error:
        log.error("bootstrap.without_store", redis=config.redis, cause=str(error))
        return 1
    log.info("bootstrap.starting", config=describe(config))
    # uvicorn stops cleanly on these signals and then raises them again; that must not look like a crash.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        runner.run(serve(config, token, store))
    log.info("bootstrap.stopped")
    return 0


async def serve(config: BootstrapConfig, token: str | None, store: Store) -> None:
    """Build the registry and answer until uvicorn is told to stop. Raises SystemExit if the port is taken."""
    follower = asyncio.create_task(store.follow()) if isinstance(store, Followed) else None
    async with aiohttp.ClientSession() as session:
        routes = RegistryRoutes(store, probe=health_probe(session), token=token)
        app = create_app(routes, store.now, (lambda: store.has_loaded) if isinstance(store, Followed) else lambda: True)
        server = uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=GuardedHttp,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=5,
        )
        await uvicorn.Server(server).serve()
    if follower is not None:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)


@runtime_checkable
class Followed(Protocol):
    """A store that replicas share."""

    @property
    def has_loaded(self) -> bool:
        """Whether it has ever been read."""
        ...

    async def follow(self) -> None:
        """Keep up with it, until cancelled."""
        ...


def open_store(config: BootstrapConfig) -> Store:
    """The store of this registry. Raises OSError, and ValueError, where it cannot be had as configured."""
    if config.redis is None:
        return OwnStore(RegistryTable(secrets.token_hex(8), config.limits), monotonic_ms)
    try:
        from baton_io.registry_redis import RedisStore
    except ImportError as error:
        raise ValueError(f"redis needs the extra redis (pip install 'baton[redis]'): {error}") from error
    return RedisStore(config.redis, read_token(config.redis_password_file), config.limits)


def monotonic_ms() -> Millis:
    """Milliseconds of the clock that all leases are measured with."""
    return time.monotonic_ns() // 1_000_000


if __name__ == "__main__":
    sys.exit(main())
