"""Runs a worker's HTTP servers in one event loop until the worker is over, and turns signals into a drain."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
import uvicorn
from starlette.types import ASGIApp

from baton_core.limits import Millis
from baton_io.http_guard import GuardedHttp

log = structlog.get_logger()

BACKLOG = 2_048
GRACE_SECONDS = 5
"""How long responses may take to leave once the worker is over."""


class Served(Protocol):
    """A worker, or its part on another node than the first."""

    over: asyncio.Event
    exit_code: int

    def terminate(self) -> None:
        """A signal asks for the end."""


@dataclass(frozen=True, slots=True)
class Site:
    """An app and the socket it is served on."""

    app: ASGIApp
    listener: socket.socket


class _Server(uvicorn.Server):
    """A server that leaves signals to us: several run in one process, and SIGTERM must drain before it stops them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture nothing."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def port_of(listener: socket.socket) -> int:
    """The port a socket is bound to."""
    return int(listener.getsockname()[1])


def monotonic_ms() -> Millis:
    """The clock of an app's drivers."""
    return time.monotonic_ns() // 1_000_000


async def serve(worker: Served, sites: Sequence[Site]) -> int:
    """Serve `sites` until the worker is over; the exit code of the process. The first site's app is the worker's."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.terminate)
    for site in sites:
        log.info("worker.listening", host=site.listener.getsockname()[0], port=port_of(site.listener))
    servers = [_Server(_config(site.app)) for site in sites]
    running = [
        asyncio.create_task(server.serve(sockets=[site.listener])) for server, site in zip(servers, sites, strict=True)
    ]
    over = asyncio.create_task(worker.over.wait())
    await asyncio.wait({over, *running}, return_when=asyncio.FIRST_COMPLETED)
    over.cancel()
    # One after the other: while the worker's app ends, it still takes leave of what the other sites serve.
    for server, task in zip(servers, running, strict=True):
        server.should_exit = True
        await task
    return worker.exit_code


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=GuardedHttp,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
        lifespan="on",
        backlog=BACKLOG,
    )
