"""Who asks: the body of its request, the way back to it, and what may end its request from outside.

A caller is reached through ASGI (`AsgiCaller`), or through the server's own connection (`front`), which costs less.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Protocol

from baton_core.limits import Millis
from baton_router.failures import Failure, Rejection, refusal, turned_away

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Refused(Exception):
    """The request is wrong in itself, or may not come in now; carries what the client is told."""

    def __init__(self, rejection: Rejection, text: str, failure: Failure | None = None) -> None:
        super().__init__(text)
        self.failure = failure or refusal(rejection, text)


class ClientGone(Exception):
    """Nobody waits for an answer any more."""


class Answering(Protocol):
    """Where an answer goes. Each call waits until the one before it has been taken."""

    async def begin(self, status: int, headers: Headers) -> None:
        """The head. It may leave only with the bytes of the next call, which must follow at once."""
        ...

    async def write(self, chunk: bytes) -> None:
        """Some of the body; empty: whatever was held back leaves now."""
        ...

    async def end(self, chunk: bytes) -> None:
        """The last of the body."""
        ...


class Caller(Answering, Protocol):
    """One client that waits for one answer."""

    async def whole_body(self, headers: Mapping[bytes, bytes], bytes_max: int, silence_ms: Millis) -> bytes:
        """See `read_body`."""
        ...

    def watch(self, on_leave: Callable[[], None]) -> None:
        """Call that as soon as the client goes away. To be called once its body was read."""
        ...

    def unwatch(self) -> None:
        """It may leave."""
        ...


class AsgiCaller:
    """`Caller` of an ASGI application."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None

    async def whole_body(self, headers: Mapping[bytes, bytes], bytes_max: int, silence_ms: Millis) -> bytes:
        """See Caller."""
        return await read_body(headers, self._receive, bytes_max, silence_ms)

    def watch(self, on_leave: Callable[[], None]) -> None:
        """See Caller."""
        self._watcher = asyncio.create_task(self._watch(on_leave))

    def unwatch(self) -> None:
        """See Caller."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def begin(self, status: int, headers: Headers) -> None:
        """See Answering."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        """See Answering."""
        if chunk:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, chunk: bytes) -> None:
        """See Answering."""
        await self._send({"type": "http.response.body", "body": chunk})

    async def _watch(self, on_leave: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_leave()


class Bounds:
    """Ends the enclosed block from outside: with TimeoutError at `deadline_s`, with ClientGone when the client leaves.

    One for the whole request: a timeout and a watcher for each of its steps would cost as much as the steps.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._cause: type[Exception] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def expire_at(self, deadline_s: float) -> None:
        """By the loop's clock. To be called once, inside."""
        self._timer = self._loop.call_at(deadline_s, self._end, TimeoutError)

    def leave(self) -> None:
        """The client has left."""
        self._end(ClientGone)

    def __enter__(self) -> "Bounds":
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task, self._cancelled = task, task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        cause, self._cause = self._cause, ClientGone  # from now on nothing is ended
        if cause is None:
            return
        # Another's cancellation that came as well goes on: the server stops.
        is_ours = self._task.uncancel() <= self._cancelled
        if is_ours and isinstance(error, asyncio.CancelledError):
            raise cause from error

    def _end(self, cause: type[Exception]) -> None:
        if self._cause is None:
            self._cause = cause
            self._task.cancel()


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, bytes_max: int, silence_ms: Millis) -> bytes:
    """The whole request body, however slowly it comes. Raises Refused above the limit, before reading it where its
    length is declared, where it is compressed, and where nothing of it comes for `silence_ms`; ClientGone."""
    check_declared(headers, bytes_max)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(loop.time() + silence_ms / 1000) as silence:
            return await _read_parts(receive, bytes_max, lambda: silence.reschedule(loop.time() + silence_ms / 1000))
    except TimeoutError as error:
        text = f"nothing of the request body came for {silence_ms} ms"
        raise Refused(Rejection.SILENT_CLIENT, text, turned_away(Rejection.SILENT_CLIENT, text)) from error


def check_declared(headers: Mapping[bytes, bytes], bytes_max: int) -> None:
    """What the head says about the body. Raises Refused where it need not be read."""
    declared = headers.get(b"content-length", b"0")
    if len(declared) > 18 or (declared.isdigit() and int(declared) > bytes_max):
        raise too_large(bytes_max)
    encoding = headers.get(b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        shown = encoding[:32].decode("ascii", "replace")
        raise Refused(
            Rejection.INVALID_REQUEST, f"the request body must not be compressed (content-encoding {shown!r})"
        )


def too_large(bytes_max: int) -> Refused:
    """Of a body."""
    return Refused(Rejection.BODY_TOO_LARGE, f"the request body is larger than {bytes_max} bytes")


async def _read_parts(receive: Receive, bytes_max: int, on_part: Callable[[], None]) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            raise too_large(bytes_max)
        parts.append(part)
        more = message.get("more_body", False)
        if more:
            on_part()
    return parts[0] if len(parts) == 1 else b"".join(parts)
