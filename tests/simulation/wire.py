"""HTTP between processes: what each end says arrives at the other in order, late, or, where the way is cut, not yet.

A call that finds nobody is refused; one whose other end dies is lost, as soon as that can be seen; one into a cut is
silent. Clients are the router's `Upstream`, with its real `Reply`, and the session that registrars and look-ups use.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode

from baton_core.limits import Millis
from baton_router.connection import Reply
from baton_router.upstream import UpstreamLost, UpstreamRefused, read_all, read_within
from simulation.loop import Process

if TYPE_CHECKING:
    from simulation.world import World

RETRY_MS = 40
CONNECT_MS = 1_000
BODY_BYTES_MAX = 1 << 20
NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request as it arrives."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes


class Server(Protocol):
    """Who listens at an address."""

    process: Process

    def accept(self, ask: Ask, exchange: "Exchange") -> None:
        """A request is here; it is answered through the exchange, now or later."""
        ...


class Wire:
    """All HTTP of a world; addresses are `host:port`."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.servers: dict[str, Server] = {}
        self._open: dict[Exchange, None] = {}

    def is_cut(self, one: str, other: str) -> bool:
        """Whether something is lost on the way there or back."""
        network = self.world.network
        return network.is_cut(one, other) or network.is_cut(other, one)

    def refusal_ms(self, client: Process, address: str) -> Millis | None:
        """How long until it is clear that nobody can be reached there; None: somebody listens."""
        server = self.servers.get(address)
        if self.is_cut(client.host, address.partition(":")[0]) and self.world.random.random() < 0.7:
            return CONNECT_MS  # the others still have a connection, and hear nothing
        if server is None or not server.process.alive:
            return self.world.network.latency()
        return None

    def send(self, client: Process, address: str, ask: Ask) -> "Exchange":
        """Put a request on its way to somebody who listens."""
        exchange = Exchange(self, client, self.servers[address], ask)
        self._open[exchange] = None
        return exchange

    def is_busy(self) -> bool:
        """Whether a request is being served somewhere."""
        return any(exchange.ask.path == "/generate" for exchange in self._open)

    def over(self, exchange: "Exchange") -> None:
        """Nothing more will be said."""
        self._open.pop(exchange, None)

    def reset(self, dead: Process) -> None:
        """A process is gone, and its connections break."""
        for exchange in list(self._open):
            exchange.end_died(dead)


class Exchange:
    """One call. On the client's side it fills a `Reply`, whose connection it is; the server answers through it."""

    def __init__(self, wire: Wire, client: Process, server: Server, ask: Ask) -> None:
        self._wire, self._client, self._server, self.ask = wire, client, server, ask
        self._queues: dict[bool, deque[tuple[Callable[..., None], tuple[Any, ...]]]] = {True: deque(), False: deque()}
        self._pumping = {True: False, False: False}
        self.reply = Reply(self, wire.world.now / 1000)
        self.is_closed = False  # by the client
        self.client_left = False  # as far as the server knows
        self.on_leave: Callable[[], None] | None = None
        self.on_answer: Callable[[int], None] | None = None  # the client has heard the whole of it
        self._post(True, server.accept, ask, self)

    # -- what the server says

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """The head of the answer."""
        self._post(False, self._begun, status, headers)

    def write(self, chunk: bytes) -> None:
        """Some of the body."""
        self._post(False, self._extended, chunk)

    def end(self) -> None:
        """The body is complete."""
        self._post(False, self._finished)

    def whole(self, status: int, body: bytes, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """All at once."""
        self._post(False, self._whole, status, body, headers)

    # -- what a Reply wants of its connection

    def drop(self, reply: Reply) -> None:
        """The client hangs up."""
        self.is_closed = True
        self._wire.over(self)
        self._post(True, self._left)

    def resume(self) -> None:
        """Nobody is held back here."""

    async def closed(self) -> None:
        """It was, at once."""

    # -- the way

    def end_died(self, dead: Process) -> None:
        """One end is gone; the other hears it when it can."""
        if dead is self._server.process:
            self._queues[False].clear()
            self._put(False, self._lost, ())
        elif dead is self._client:
            self.is_closed = True
            self._wire.over(self)
            self._put(True, self._left, ())

    def _post(self, to_server: bool, call: Callable[..., None], *args: Any) -> None:
        source = self._client if to_server else self._server.process
        if source.alive:
            self._put(to_server, call, args)

    def _put(self, to_server: bool, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._queues[to_server].append((call, args))
        if not self._pumping[to_server]:
            self._pumping[to_server] = True
            self._wire.world.at(self._wire.world.network.latency(), self._deliver, to_server)

    def _deliver(self, to_server: bool) -> None:
        queue, world = self._queues[to_server], self._wire.world
        source, target = self._client, self._server.process
        if not to_server:
            source, target = target, source
        if not target.alive or not queue:
            self._pumping[to_server] = False
            return
        if target.paused or world.network.is_cut(source.host, target.host):
            world.at(RETRY_MS, self._deliver, to_server)
            return
        call, args = queue.popleft()
        target.run(call, *args)
        self._pumping[to_server] = bool(queue)
        if queue:
            world.at(world.network.latency(), self._deliver, to_server)

    # -- what arrives

    def _left(self) -> None:
        self.client_left = True
        if self.on_leave is not None:
            self.on_leave()

    def _begun(self, status: int, headers: Mapping[str, str]) -> None:
        if not self.is_closed:
            self._heard()
            self.reply.begun(status, [(name.encode(), value.encode()) for name, value in headers.items()])
            self.reply.tell()

    def _extended(self, chunk: bytes) -> None:
        if not self.is_closed:
            self._heard()
            self.reply.extended(chunk)
            self.reply.tell()

    def _finished(self) -> None:
        if not self.is_closed:
            self._heard()
            self.is_closed = True
            self._wire.over(self)
            self.reply.finished()
            self.reply.tell()
            if self.on_answer is not None:
                self.on_answer(self.reply.status)

    def _whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._begun(status, headers)
        if body:
            self._extended(body)
        self._finished()

    def _lost(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._wire.over(self)
            self.reply.lost("reset")
            if self.on_answer is not None:
                self.on_answer(0)

    def _heard(self) -> None:
        self.reply.heard_s = self._wire.world.now / 1000


class SimulatedUpstream:
    """`Upstream` of one process. `watch` sees each call as it leaves: its path, its headers, and the exchange or None."""

    def __init__(self, wire: Wire, process: Process, watch: Callable[[str, Ask, Exchange | None], None]) -> None:
        self._wire, self._process, self._watch = wire, process, watch

    def call(self, origin: str, path: str, body: bytes, lines: bytes) -> Reply:
        """See Upstream."""
        pairs = (line.split(": ", 1) for line in lines.decode().splitlines())
        return self._call("POST", origin + path, body, dict(pairs))

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """See Upstream."""
        reply = self._call("POST", url, body, headers)
        await reply.begin()
        return reply

    async def get(self, url: str, timeout_ms: Millis) -> tuple[int, bytes]:
        """See Upstream."""
        return await read_within(timeout_ms, BODY_BYTES_MAX, self._get(url))

    async def _get(self, url: str) -> Reply:
        reply = self._call("GET", url, b"", NO_HEADERS)
        await reply.begin()
        return reply

    def _call(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        address, ask = ask_of(method, url, headers, body)
        after_ms = self._wire.refusal_ms(self._process, address)
        if after_ms is not None:
            return _Refusing(after_ms, self._wire.world.now / 1000, partial(self._watch, address, ask, None)).reply
        exchange = self._wire.send(self._process, address, ask)
        self._watch(address, ask, exchange)
        return exchange.reply


class _Refusing:
    """The way of a call that finds nobody, which shows in a while."""

    def __init__(self, after_ms: Millis, now_s: float, watch: Callable[[], None]) -> None:
        self.reply = Reply(self, now_s)
        self._watch = watch
        self._timer = asyncio.get_running_loop().call_later(after_ms / 1000, self._refuse)

    def _refuse(self) -> None:
        self._watch()
        self.reply.failed(UpstreamRefused("no connection"))

    def drop(self, reply: Reply) -> None:
        """The client gave up before."""
        self._timer.cancel()

    def resume(self) -> None:
        """Nothing was said."""

    async def closed(self) -> None:
        """Nothing was open."""


class Session:
    """What `baton_io.registry_client.call` asks of an HTTP session, for one process."""

    def __init__(self, wire: Wire, process: Process) -> None:
        self._wire, self._process = wire, process

    def request(self, method: str, url: str, **options: Any) -> "_Calling":
        """A call, made when it is entered."""
        return _Calling(self._wire, self._process, method, url, options)


class _Calling:
    def __init__(self, wire: Wire, process: Process, method: str, url: str, options: dict[str, Any]) -> None:
        self._wire, self._process, self._timeout_s = wire, process, options["timeout"].total
        query = f"?{urlencode(options['params'])}" if options["params"] else ""
        self._address, self._ask = ask_of(method, url + query, options["headers"], options["data"] or b"")
        self.status, self.headers, self._body = 0, NO_HEADERS, b""
        self.content = self

    async def __aenter__(self) -> "_Calling":
        exchange: Exchange | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                after_ms = self._wire.refusal_ms(self._process, self._address)
                if after_ms is not None:
                    await asyncio.sleep(after_ms / 1000)
                    raise ConnectionRefusedError(f"nobody listens at {self._address}")
                exchange = self._wire.send(self._process, self._address, self._ask)
                await exchange.reply.begin()
                self._body = await read_all(exchange.reply, BODY_BYTES_MAX)
        except UpstreamLost as error:
            raise ConnectionResetError(error.text) from error
        finally:
            if exchange is not None:
                exchange.reply.cancel()
        self.status, self.headers = exchange.reply.status, exchange.reply.headers
        return self

    async def __aexit__(self, *_: object) -> None:
        """Everything was read."""

    async def iter_any(self) -> AsyncIterator[bytes]:
        """The body."""
        yield self._body


def ask_of(method: str, url: str, headers: Mapping[str, str], body: bytes) -> tuple[str, Ask]:
    """An address and what is asked there."""
    address, _, target = url.removeprefix("http://").partition("/")
    path, _, query = target.partition("?")
    return address, Ask(method=method, path=f"/{path}", query=query, headers=headers, body=body)
