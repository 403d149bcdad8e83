"""One connection to a worker: HTTP/1.1 on httptools, one call at a time, the answer's body as it comes.

    idle -- send --> head awaited -- head --> body -- its end --> idle again, or closed where the worker says so
                          |                    |
                          +----- closed -------+-----> the reply fails, once

A reply that is cancelled before its end closes the connection: that is how a worker learns that nobody waits.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import httptools

from baton_router.upstream import UpstreamError, UpstreamLost

BUFFERED_BYTES_MAX = 1 << 20
"""A reply that its reader has left unread so far; above it the worker is made to wait."""
UNREAD_BYTES_MAX = 64 * 1024
"""Of a head, of a chunk's extensions, of trailers, beside what one read brings."""
JOINED_BYTES_MAX = 64 * 1024
"""Bodies up to this are copied behind their head, so that both leave in one packet."""

Release = Callable[["Connection"], None]


class Connection(asyncio.Protocol):
    """One connection. Asyncio sets TCP_NODELAY on it, so that small writes leave at once."""

    def __init__(self, release: Release, forget: Release) -> None:
        self._release = release  # it may serve the next call
        self._forget = forget  # it is closed
        self._pieces: list[bytes] = []  # of a body, since the packet began
        # httptools' call for each of them, and there is one to a token: the list's own method, no function of ours.
        self.on_body = self._pieces.append
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._fields: list[tuple[bytes, bytes]] = []  # of the head that comes
        self._unread_bytes = 0  # received since anything that came was complete
        self._fault = ""
        self._loop = asyncio.get_running_loop()
        self.idle_since_s = 0.0

    # -- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. Whoever waits is told once, of all that is in the packet."""
        reply = self._reply
        if reply is None:
            return self.close()  # nobody asked
        reply.heard_s = self._loop.time()
        self._unread_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fault = self._fault or f"the answer is not HTTP ({error})"
        if self._pieces:
            self._hand_over(reply)
        if self._unread_bytes > UNREAD_BYTES_MAX:
            self._fault = self._fault or _too_long("trailers are" if reply.has_begun else "head is")
        if self._fault:
            self._lose(self._fault)
        else:
            reply.tell()
        return None

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._forget(self)
        reply = self._reply
        if reply is not None and reply.ends_with_connection and error is None:
            self._reply = None
            reply.finished()
            reply.tell()
        else:
            self._lose(str(error) if error is not None else "it was closed")

    # -- httptools' calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is complete; one of a 1xx status announces another."""
        reply, status = self._reply, self._parser.get_status_code()
        assert reply is not None
        if self._unread_bytes > UNREAD_BYTES_MAX and _fields_bytes(self._fields) > UNREAD_BYTES_MAX:
            self._fault = _too_long("head is")  # though it came at once, perhaps with a body behind it
        elif status >= 200:
            reply.begun(status, self._fields)
        self._fields, self._unread_bytes = [], 0

    def on_message_complete(self) -> None:
        """The body is complete: the connection is free, whether or not its reader has taken everything."""
        reply = self._reply
        if reply is None or not reply.has_begun:
            return
        self._reply = None
        self.idle_since_s = reply.heard_s
        if self._pieces:
            self._hand_over(reply)
        reply.finished()
        transport = self._transport
        if transport is None:
            return
        transport.resume_reading()
        if self._parser.should_keep_alive() and transport.get_write_buffer_size() == 0:
            self._release(self)
        else:
            self.close()  # also where the worker answered before it took the whole request

    # -- the pool's and the reply's calls

    @property
    def is_open(self) -> bool:
        """Whether a call may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes, reply: "Reply") -> None:
        """Send a request whose answer fills `reply`; only on an open connection that has no call."""
        assert self._transport is not None and self._reply is None
        self._reply = reply
        reply.way = self
        self._unread_bytes = 0
        if len(body) <= JOINED_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def resume(self) -> None:
        """The reply was read: let the worker go on."""
        if self._transport is not None:
            self._transport.resume_reading()

    def drop(self, reply: "Reply") -> None:
        """Close, if that reply is still the one under way."""
        if self._reply is reply:
            self._reply = None
            self.close()

    def close(self) -> None:
        """Close at once; harmless when repeated."""
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """It was, at once."""

    def _hand_over(self, reply: "Reply") -> None:
        """What the packet brought of the body, as one piece."""
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._unread_bytes = 0
        if reply.extended(data) and self._transport is not None:
            self._transport.pause_reading()

    def _lose(self, text: str) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.lost(text)
        self.close()


def _fields_bytes(fields: Sequence[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) for name, value in fields)


def _too_long(what: str) -> str:
    return f"the answer's {what} longer than {UNREAD_BYTES_MAX} bytes"


class Way(Protocol):
    """What a reply comes by: its connection, or the attempt to make one."""

    def drop(self, reply: "Reply") -> None:
        """Nobody waits for that reply any more."""
        ...

    def resume(self) -> None:
        """The reply was read: let the worker go on."""
        ...

    async def closed(self) -> None:
        """After `drop`: wait until nothing is left."""
        ...


class Reply:
    """`Calling`, filled by its connection."""

    status = 0
    fields: Sequence[tuple[bytes, bytes]] = ()  # of the head, as they came
    on_news: Callable[[], None] | None = None
    _headers: dict[str, str] | None = None
    _held_bytes = 0
    _is_held_back = False
    _is_complete = False
    _error: UpstreamError | None = None
    _waiter: asyncio.Future[None] | None = None

    def __init__(self, way: Way, now_s: float) -> None:
        self.heard_s = now_s  # when the worker last sent something, or the call began
        self.way = way
        self._chunks: list[bytes] = []

    @property
    def has_begun(self) -> bool:
        """Whether the head is here."""
        return self.status != 0

    @property
    def headers(self) -> dict[str, str]:
        """See Answer. Made when it is asked for: of two answers to a request one is nearly always read for nobody."""
        if self._headers is None:
            self._headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self.fields}
        return self._headers

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the end of the connection tells where the body ends."""
        return self.has_begun and "content-length" not in self.headers and "transfer-encoding" not in self.headers

    @property
    def is_over(self) -> bool:
        """See Answer."""
        return self._is_complete and not self._chunks

    async def begin(self) -> None:
        """Wait for the head. Raises UpstreamError; closes the connection when cancelled."""
        try:
            while not self.has_begun:
                if self._error is not None:
                    raise self._error
                await self._wait()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def read(self) -> bytes:
        """See Answer."""
        while (data := self.take()) is None:
            await self._wait()
        return data

    def take(self) -> bytes | None:
        """See Calling."""
        if not self._chunks:
            if self._error is not None:
                raise self._error
            return b"" if self._is_complete else None
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._held_bytes = 0
        if self._is_held_back:
            self._is_held_back = False
            self.way.resume()
        return data

    def cancel(self) -> None:
        """See Answer."""
        if not self._is_complete and self._error is None:
            self._error, self._is_held_back = UpstreamLost("the call was cancelled"), False
            self.way.drop(self)

    def abandon(self, text: str) -> None:
        """See Answer."""
        if not self._is_complete and self._error is None:
            self._error, self._is_held_back = UpstreamLost(text), False
            self.way.drop(self)
            self.tell()

    async def closed(self) -> None:
        """See Calling."""
        await self.way.closed()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # -- the connection's calls

    def begun(self, status: int, fields: Sequence[tuple[bytes, bytes]]) -> None:
        """The head is complete. Of this, and what follows, `tell` tells."""
        self.status, self.fields = status, fields

    def extended(self, data: bytes) -> bool:
        """More of the body; whether the worker should wait until it was read."""
        self._chunks.append(data)
        self._held_bytes += len(data)
        self._is_held_back = self._held_bytes > BUFFERED_BYTES_MAX
        return self._is_held_back

    def finished(self) -> None:
        """The body is complete."""
        self._is_complete, self._is_held_back = True, False

    def lost(self, text: str) -> None:
        """Nothing more will come."""
        where = "broke within the answer" if self.has_begun else "ended before an answer"
        self.failed(UpstreamLost(f"the connection {where} ({text})"))

    def failed(self, error: UpstreamError) -> None:
        """Nothing more will come, for that reason."""
        self._error, self._is_held_back = error, False
        self.tell()

    def tell(self) -> None:
        """Whoever waits hears that something came."""
        if self.on_news is not None:
            self.on_news()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
