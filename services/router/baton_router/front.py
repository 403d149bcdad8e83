"""The clients' connections: uvicorn's HTTP/1.1 with our guard, and a shorter way for the requests that generate.

    POST of a generating route ──► HttpCaller ──► dispatch          no scope, no messages, one write for head and body
    everything else ─────────────► uvicorn's cycle ──► ASGI         health, metrics, control, other methods, queries

What a connection may do (heads, bodies, silence, pipelining, keep-alive, draining) is uvicorn's and the guard's on both
ways. Only what one request costs differs: the ASGI in between took as long as the choice of the pair and the legs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from baton_core.limits import Millis
from baton_io.http_guard import GuardedHttp
from baton_router.caller import Caller, Headers, Message, Receive, Scope, Send, check_declared, read_body, too_large
from baton_router.metrics import GENERATING_ROUTES

ROUTES = {route.encode("ascii"): route for route in GENERATING_ROUTES}
"""By what stands in the request's first line: one with a query, or spelled otherwise, goes the longer way."""


AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Generating(Protocol):
    """What a request that generates is given to, by either way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer it through ASGI."""
        ...

    async def serve(self, caller: Caller, route: str, headers: dict[bytes, bytes]) -> None:
        """Answer it."""
        ...


class RouterApp:
    """A whole router: an ASGI application, and the connections on which its shorter way leads past ASGI."""

    def __init__(self, dispatch: Generating, control: AsgiApp) -> None:
        self._dispatch = dispatch
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        generating = scope["type"] == "http" and scope["path"] in GENERATING_ROUTES and scope["method"] == "POST"
        await (self._dispatch if generating else self._control)(scope, receive, send)

    @property
    def http(self) -> type[asyncio.Protocol]:
        """What uvicorn makes for each connection."""
        return cast("type[asyncio.Protocol]", partial(Front, self._dispatch))


class Front(GuardedHttp):
    """One connection of a client."""

    def __init__(self, generating: Generating, **given: Any) -> None:
        super().__init__(**given)
        self._generating = generating
        self._idle_since_s = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if isinstance(self.cycle, HttpCaller):
            self.cycle.left()

    # -- what uvicorn does, with one timer for all the times that a connection is idle

    def on_response_complete(self) -> None:
        """An answer is complete: the next request that came early, or patience."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since_s = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._let_go)

    def _let_go(self) -> None:
        """It may have been idle for too long; else the timer goes on."""
        now_s = self.loop.time()
        if self._in_head or self._in_body or not self.cycle.response_complete:
            self._idle_since_s = now_s
        left_s = self._idle_since_s + self.timeout_keep_alive - now_s
        if left_s > 0:
            self._idle_timer = self.loop.call_later(left_s, self._let_go)
        else:
            self.timeout_keep_alive_handler()

    # -- httptools' calls

    def on_message_begin(self) -> None:
        """A request begins. What uvicorn needs of it is made only where uvicorn serves it."""
        self._in_head = True
        self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_headers_complete(self) -> None:
        """Its head is complete: whose is it?"""
        route = ROUTES.get(self.url)
        parser = self.parser
        if route is None or self.access_log or parser.get_method() != b"POST" or parser.should_upgrade():
            self._make_scope()
            super().on_headers_complete()
            return
        self._unread_bytes = 0
        self._in_head, self._in_body = False, True
        before, caller = self.cycle, HttpCaller(self, self._generating, route)
        self.cycle = caller
        if before is None or before.response_complete:
            self._start_asgi_task(caller, caller.run)
        else:  # it was sent before its connection's last answer was: it waits, as uvicorn has it
            self.flow.pause_reading()
            self.pipeline.appendleft((caller, caller.run))

    def _make_scope(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        HttpToolsProtocol.on_message_begin(self)
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)  # the list is the scope's, too


class HttpCaller(RequestResponseCycle):
    """`Caller` on its connection: uvicorn's cycle, which says what the connection does, with shorter ways to and fro."""

    def __init__(self, front: Front, generating: Generating, route: str) -> None:
        parser = front.parser
        super().__init__(
            scope={"type": "http", "method": "POST", "path": route},  # type: ignore[typeddict-item]
            transport=front.transport,
            flow=front.flow,
            logger=front.logger,
            access_logger=front.access_logger,
            access_log=False,
            default_headers=front.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=front.expect_100_continue,
            keep_alive=parser.get_http_version() != "1.0" and parser.should_keep_alive(),
            on_response=front.on_response_complete,
        )
        self._generating = generating
        self._route = route
        self._headers = front.headers
        self._head = b""  # of the answer, until it leaves
        self._on_leave: Callable[[], None] | None = None

    def run(self, *_asgi: object) -> Awaitable[None]:
        """Have the request answered; to be called in place of an ASGI application."""
        return self._generating.serve(self, self._route, dict(self._headers))

    def left(self) -> None:
        """The connection is closed."""
        if self.disconnected and self._on_leave is not None:
            self._on_leave()

    # -- Caller

    async def whole_body(self, headers: Mapping[bytes, bytes], bytes_max: int, silence_ms: Millis) -> bytes:
        """See Caller."""
        if self.more_body or self.waiting_for_100_continue or self.disconnected:
            return await read_body(headers, self._receive, bytes_max, silence_ms)
        # It came with its head, as nearly every one does: there is nothing to wait for.
        check_declared(headers, bytes_max)
        if len(self.body) > bytes_max:
            raise too_large(bytes_max)
        body, self.body = bytes(self.body), bytearray()
        self.flow.resume_reading()
        return body

    async def _receive(self) -> Message:
        return cast(Message, await self.receive())

    def watch(self, on_leave: Callable[[], None]) -> None:
        """See Caller."""
        self._on_leave = on_leave
        if self.disconnected:  # since the last of its body came; not at once, for nobody waits yet who could be ended
            asyncio.get_running_loop().call_soon(self.left)

    def unwatch(self) -> None:
        """See Caller."""
        self._on_leave = None

    async def begin(self, status: int, headers: Headers) -> None:
        """See Answering. What becomes of a body that does not fit its length is what uvicorn does."""
        self.response_started, self.waiting_for_100_continue = True, False
        lines = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            if name == b"content-length":
                self.expected_content_length, self.chunked_encoding = int(value), False
            lines += (name, b": ", value, b"\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding is None and status not in (204, 304):
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    async def write(self, chunk: bytes) -> None:
        """See Answering."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self.disconnected:
            self._write(self._framed(chunk) if chunk else b"")

    async def end(self, chunk: bytes) -> None:
        """See Answering."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        framed = self._framed(chunk) if chunk else b""
        self._write(framed + b"0\r\n\r\n" if self.chunked_encoding else framed)
        if self.expected_content_length:
            raise RuntimeError("Response content shorter than Content-Length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def _framed(self, chunk: bytes) -> bytes:
        if self.chunked_encoding:
            return b"%x\r\n%b\r\n" % (len(chunk), chunk)
        self.expected_content_length -= len(chunk)
        if self.expected_content_length < 0:
            raise RuntimeError("Response content longer than Content-Length")
        return chunk

    def _write(self, data: bytes) -> None:
        """Send it, with the head before it where that is still here: a write costs as much as all else here."""
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            self.transport.write(data)
