"""Real registries and workers on ephemeral ports of 127.0.0.1, for the contract tests of the registry."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp

from baton_bootstrap.app import create_app
from baton_core.limits import Millis
from baton_core.registry import RegistryTable
from baton_io.registry_client import INCARNATION
from baton_io.registry_routes import RegistryRoutes, health_probe


def monotonic_ms() -> Millis:
    return time.monotonic_ns() // 1_000_000


def listening_socket(port: int = 0) -> socket.socket:
    """Bound but not yet listening; `port` 0 draws one."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


@asynccontextmanager
async def serving(app: ASGIApp, port: int = 0) -> AsyncIterator[int]:
    """Serve `app` while the block runs; yields the port. Leaving the block kills it: connections are cut."""
    bound = listening_socket(port)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    server.force_exit = True  # when told to stop: at once
    task = asyncio.create_task(server._serve([bound]))  # `serve` would take over the test's signal handlers
    while not server.started:
        assert not task.done(), "the server ended before it started"
        await asyncio.sleep(0.005)
    try:
        yield bound.getsockname()[1]
    finally:
        _cut(server)
        server.should_exit = True
        await task
        _cut(server)  # who came back meanwhile
        bound.close()


def _cut(server: uvicorn.Server) -> None:
    for connection in list(server.server_state.connections):
        connection.transport.abort()


@asynccontextmanager
async def registry(life: str = "registry-1", port: int = 0, token: str | None = None) -> AsyncIterator[int]:
    """The bootstrap service, empty."""
    async with aiohttp.ClientSession() as session:
        routes = RegistryRoutes.alone(RegistryTable(life), clock=monotonic_ms, probe=health_probe(session), token=token)
        async with serving(create_app(routes, monotonic_ms), port) as bound_port:
            yield bound_port


def worker_app(incarnation: str | None) -> FastAPI:
    """The part of a prefill app that the registry's probe asks."""
    app = FastAPI()

    @app.get("/health")
    async def health() -> PlainTextResponse:
        return PlainTextResponse("OK", headers={} if incarnation is None else {INCARNATION: incarnation})

    return app
