"""`Upstream` of our own: a pool of keep-alive connections for each worker.

There is no total timeout: a long prompt is not an error, and the request's own deadline ends the call by cancelling it.
"""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from urllib.parse import urlsplit

from baton_core.limits import Millis
from baton_router.connection import Connection, Reply
from baton_router.upstream import UpstreamError, UpstreamLost, UpstreamRefused, head_lines, read_within

IDLE_CONNECTION_S = 4.0
"""Below the 5 s after which uvicorn closes an idle connection: a request is rarely sent into a closing one."""
PROBE_BODY_BYTES_MAX = 1 << 20
ORIGINS_MAX = 8_192
"""Workers whose connections are kept; the one known for longest loses its idle ones, no more than that."""
HOST = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?|[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]{1,44}(%[A-Za-z0-9._-]{1,32})?"
)
"""A host name, as DNS has it, or an IP address."""

Connect = Callable[[], Awaitable[Connection]]


@dataclass(slots=True, kw_only=True, eq=False)
class _Origin:
    """Where one worker listens, and the connections to it that no call uses, the latest used last."""

    host: str
    port: int
    is_secure: bool
    path: str  # before that of each call
    lines: bytes  # of each head
    idle: dict[Connection, None] = field(default_factory=dict)

    def release(self, connection: Connection) -> None:
        """Its call is over."""
        self.idle[connection] = None

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self.idle.pop(connection, None)

    def take(self, now_s: float) -> Connection | None:
        """An idle connection that the worker is not about to close."""
        while self.idle:
            connection, _ = self.idle.popitem()
            if connection.is_open and now_s - connection.idle_since_s < IDLE_CONNECTION_S:
                return connection
            connection.close()
        return None

    def close_stale(self, now_s: float) -> None:
        """Close what has been idle for too long: nobody may ever ask that worker again."""
        for connection in [one for one in self.idle if now_s - one.idle_since_s >= IDLE_CONNECTION_S]:
            connection.close()

    def close(self) -> None:
        """Close what is idle."""
        for connection in tuple(self.idle):
            connection.close()
        self.idle.clear()


class _Connecting:
    """The way of a call for which a connection is still to be made: the one case that takes a task."""

    def __init__(self, connect: Connect, head: bytes, body: bytes, now_s: float) -> None:
        self.reply = Reply(self, now_s)
        self._task = asyncio.create_task(self._send(connect, head, body))

    async def _send(self, connect: Connect, head: bytes, body: bytes) -> None:
        try:
            connection = await connect()
        except UpstreamError as error:
            self.reply.failed(error)
        except Exception as error:  # ours; nobody may wait for ever
            self.reply.failed(UpstreamLost(f"no connection ({error!r})"))
            raise
        else:
            connection.send(head, body, self.reply)

    def drop(self, reply: Reply) -> None:
        """See Way."""
        self._task.cancel()

    def resume(self) -> None:
        """Nothing was read."""

    async def closed(self) -> None:
        """See Way."""
        await asyncio.wait([self._task])


class HttpUpstream:
    """`Upstream` over connections that are kept; leave it inside the event loop that used it."""

    def __init__(self, *, connect_timeout_ms: Millis) -> None:
        self._connect_timeout_s = connect_timeout_ms / 1000
        self._origins: dict[str, _Origin] = {}
        self._tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> "HttpUpstream":
        self._loop = asyncio.get_running_loop()
        self._sweep()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sweeping.cancel()
        for origin in self._origins.values():
            origin.close()

    def _sweep(self) -> None:
        """Now and then: a worker that was removed is not asked again, so no call would find its connections stale."""
        now_s = self._loop.time()
        for origin in self._origins.values():
            origin.close_stale(now_s)
        self._sweeping = self._loop.call_later(IDLE_CONNECTION_S, self._sweep)

    def call(self, origin: str, path: str, body: bytes, lines: bytes) -> Reply:
        """See Upstream."""
        return self._call(b"POST", origin, path, body, lines)

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """See Upstream."""
        return await _begun(self._call(b"POST", *_parted(url), body, head_lines(headers)))

    async def get(self, url: str, timeout_ms: Millis) -> tuple[int, bytes]:
        """See Upstream."""
        call = _begun(self._call(b"GET", *_parted(url), b"", b""))
        return await read_within(timeout_ms, PROBE_BODY_BYTES_MAX, call)

    def _call(self, method: bytes, base: str, target: str, body: bytes, lines: bytes) -> Reply:
        now_s = self._loop.time()
        try:
            origin = self._origins.get(base) or self._origin(base)
        except UpstreamError as error:
            return _failed(error, now_s)
        head = b"%b %b HTTP/1.1\r\n%b%bcontent-length: %d\r\n\r\n" % (
            method,
            (origin.path + target).encode("utf-8"),
            origin.lines,
            lines,
            len(body),
        )
        connection = origin.take(now_s)
        if connection is None:
            return _Connecting(partial(self._connect, origin), head, body, now_s).reply
        reply = Reply(connection, now_s)
        connection.send(head, body, reply)
        return reply

    async def _connect(self, origin: _Origin) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(origin.release, origin.forget),
                    origin.host,
                    origin.port,
                    ssl=self._context() if origin.is_secure else None,
                )
        except TimeoutError as error:
            raise UpstreamRefused(f"no connection within {round(self._connect_timeout_s * 1000)} ms") from error
        except OSError as error:
            raise UpstreamRefused(f"no connection ({error.strerror or error})") from error
        if not connection.is_open:
            raise UpstreamLost("the connection ended before an answer (it was closed)")
        return connection

    def _origin(self, base: str) -> _Origin:
        try:
            parts = urlsplit(base)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            # What no resolver and no head takes: neither says so with an OSError, and one such address would end the
            # watch over all workers.
            if not HOST.fullmatch(parts.hostname or ""):
                raise ValueError("no host name")
        except ValueError as error:
            raise UpstreamError(f"not an address: {base!r} ({error})") from error
        if len(self._origins) >= ORIGINS_MAX:
            self._origins.pop(next(iter(self._origins))).close()
        origin = _Origin(
            host=parts.hostname or "",
            port=port,
            is_secure=parts.scheme == "https",
            path=parts.path.rstrip("/"),
            # Nothing on this path wants another encoding: bytes are passed on as they come.
            lines=head_lines(
                {
                    "host": parts.netloc.rpartition("@")[2],
                    "accept-encoding": "identity",
                    "user-agent": "baton-router",
                }
            ),
        )
        self._origins[base] = origin
        return origin

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _parted(url: str) -> tuple[str, str]:
    """Whom an address names, and what of theirs: all paths there share their connections."""
    cut = url.find("/", url.index("://") + 3)
    return (url, "/") if cut < 0 else (url[:cut], url[cut:])


async def _begun(reply: Reply) -> Reply:
    """The reply, once its head is here. Raises UpstreamError; closes the connection when cancelled."""
    await reply.begin()
    return reply


class _Nowhere:
    """The way of a call that failed before it began."""

    def drop(self, reply: Reply) -> None:
        """See Way."""

    def resume(self) -> None:
        """See Way."""

    async def closed(self) -> None:
        """See Way."""


def _failed(error: UpstreamError, now_s: float) -> Reply:
    """Of a call that cannot be made: it says so as all others do, once its caller can hear it."""
    reply = Reply(_Nowhere(), now_s)
    asyncio.get_running_loop().call_soon(reply.failed, error)
    return reply
