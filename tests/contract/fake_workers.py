"""A prefill and a decode worker that speak the wire surface over real HTTP, without a model, plus a router to drive.

The two legs of a room really meet: decode streams only once prefill's leg of that room has arrived. What a worker does
with a request is its `script`, so that a test says in one line how a worker misbehaves.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web

from baton_router.app import build
from baton_router.config import RouterConfig

TOKENS = ("The ", "capital ", "is ", "Paris.")
PATIENCE_S = 5.0


@dataclass
class Rooms:
    """Where the legs of this test's rooms meet."""

    arrived: dict[int, asyncio.Event] = field(default_factory=dict)

    def room(self, number: int) -> asyncio.Event:
        """Set once prefill's leg of that room has arrived."""
        return self.arrived.setdefault(number, asyncio.Event())


@dataclass
class Received:
    """One request as a worker saw it."""

    body: dict[str, Any]
    headers: dict[str, str]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)  # the connection closed under the handler


Script = Callable[["FakeWorker", web.Request, Received], Awaitable[web.StreamResponse]]


class FakeWorker:
    """One worker on an ephemeral port of the loopback."""

    def __init__(self, role: str, rooms: Rooms, script: Script, **info: Any) -> None:
        self.role = role
        self.rooms = rooms
        self.script = script
        self.info: dict[str, Any] = {
            "role": role,
            "incarnation": "life-1",
            "instance": f"{role}-1",
            "fingerprint": "same",
            "bootstrap_host": "127.0.0.1" if role == "prefill" else None,
            "bootstrap_port": 8998 if role == "prefill" else None,
            "dp_size": 1,
            "context_tokens": 2048,
            "model": "fake",
        } | info
        self.ready_answer: tuple[int, dict[str, Any]] = (200, {"ready": True, "reasons": []})
        self.loads: list[dict[str, Any]] = []  # what /v1/loads tells; nothing: 404
        self.received: list[Received] = []
        self.registered: list[dict[str, Any]] = []  # bodies of /register_dp_rank
        self.topology: dict[str, Any] = {}  # what its registry says of it as a whole; nothing: 404
        self.topology_asked: list[str] = []  # for which instance
        self.is_frozen = False  # answers no probe
        self.probed = 0
        self.arrival = asyncio.Event()
        self.release = asyncio.Event()  # scripts that hold something wait for it
        self.url = ""

    async def __aenter__(self) -> "FakeWorker":
        app = web.Application(client_max_size=64 << 20)
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/register_dp_rank", self._register)
        app.router.add_get("/route", self._route)
        # A handler is cancelled when its client goes away: that is how a worker notices.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await self._site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Close everything: from now on connections are refused."""
        self.release.set()
        await self._runner.cleanup()

    async def refuse(self) -> None:
        """New connections are refused; those that are open stay."""
        await self._site.stop()

    async def kill(self) -> None:
        """Every connection is reset, all at once, and new ones are refused."""
        server = self._runner.server
        assert server is not None
        await self.refuse()
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def _ready(self, _request: web.Request) -> web.Response:
        self.probed += 1
        if self.is_frozen:
            await asyncio.Event().wait()
        status, body = self.ready_answer
        return web.json_response(body, status=status)

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _loads(self, _request: web.Request) -> web.Response:
        return web.json_response({"loads": self.loads}, status=200 if self.loads else 404)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _register(self, request: web.Request) -> web.Response:
        self.registered.append(await request.json())
        return web.Response(text="OK")

    async def _route(self, request: web.Request) -> web.Response:
        assert request.query["prefill_dp_rank"] == "-1"
        self.topology_asked.append(request.query.get("instance", ""))
        return web.json_response(self.topology, status=200 if self.topology else 404)

    async def _flush(self, _request: web.Request) -> web.Response:
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        received = Received(await request.json(), {name.lower(): value for name, value in request.headers.items()})
        self.received.append(received)
        self.arrival.set()
        try:
            return await self.script(self, request, received)
        except asyncio.CancelledError:
            received.cancelled.set()
            raise

    async def saw_its_connection_closed(self) -> None:
        """Wait, less than a second, until the first request's connection was closed under its handler."""
        await asyncio.wait_for(self.arrival.wait(), PATIENCE_S)
        await asyncio.wait_for(self.received[0].cancelled.wait(), 1.0)


# -- scripts


async def prefills(worker: FakeWorker, _request: web.Request, received: Received) -> web.StreamResponse:
    """A good prefill leg: joins the room and answers one token."""
    worker.rooms.room(received.body["bootstrap_room"]).set()
    return web.json_response({"text": TOKENS[0], "meta_info": {"finish_reason": {"type": "length", "length": 0}}})


async def prefills_and_holds_its_body(
    worker: FakeWorker, request: web.Request, received: Received
) -> web.StreamResponse:
    """Joins the room, sends its head, and keeps its body open until released."""
    worker.rooms.room(received.body["bootstrap_room"]).set()
    response = web.StreamResponse(headers={"content-type": "application/json"})
    await response.prepare(request)
    await response.write(b"{")
    await worker.release.wait()
    await response.write(b"}")
    return response


async def decodes(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
    """A good decode leg: waits for prefill's leg of its room, if it has one, then streams or answers."""
    if "bootstrap_room" in received.body:
        await worker.rooms.room(received.body["bootstrap_room"]).wait()
    if not received.body.get("stream"):
        return web.json_response({"text": "".join(TOKENS)})
    response = await stream_head(request)
    for token in TOKENS:
        await response.write(event({"text": token}))
    await response.write(b"data: [DONE]\n\n")
    return response


async def decodes_slowly(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
    """Streams one token and the next only when released."""
    await worker.rooms.room(received.body["bootstrap_room"]).wait()
    response = await stream_head(request)
    await response.write(event({"text": TOKENS[0]}))
    await worker.release.wait()
    await response.write(event({"text": TOKENS[1]}))
    return response


async def is_silent(worker: FakeWorker, _request: web.Request, _received: Received) -> web.StreamResponse:
    """Takes the request and never answers, unless released."""
    await worker.release.wait()
    return web.json_response({"text": "late"})


async def resets(_worker: FakeWorker, request: web.Request, _received: Received) -> web.StreamResponse:
    """Closes the connection without an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def answers(status: int, body: object = None, **headers: str) -> Script:
    """A worker that does not take the request, in the workers' envelope unless `body` says otherwise."""
    said = {"error": {"message": f"because {status}", "type": "t", "code": status, "reason": "R"}}

    async def script(_worker: FakeWorker, _request: web.Request, _received: Received) -> web.StreamResponse:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response(said if body is None else body, status=status, headers=names)

    return script


def dies_after(*pieces: bytes) -> Script:
    """A decode worker whose connection breaks after these bytes of its stream."""

    async def script(_worker: FakeWorker, request: web.Request, _received: Received) -> web.StreamResponse:
        response = await stream_head(request)
        for piece in pieces:
            await response.write(piece)
        assert request.transport is not None
        request.transport.close()
        return response

    return script


def tells(*, dies_at: int = 0, gives_up: int = 0, ignores: bool = False, tokens: tuple[str, ...] = TOKENS) -> Script:
    """A decode worker of ours: each token with its record, from where a continuation left off.

    Before token `dies_at` (0: never) its connection breaks within an event, or, with `gives_up`, it ends the answer
    with an error of that status. `ignores`: it knows nothing of continuations.
    """

    async def script(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        body, is_asked = received.body, received.headers.get("x-baton-token-ids") == "1" and not ignores
        if "bootstrap_room" in body:
            await worker.rooms.room(body["bootstrap_room"]).wait()
        past = [] if ignores else [token for part in body.get("baton_continuation", []) for token in part["tokens"]]
        assert past == list(range(len(past))), "the tokens told, in their order, each once"
        response = await stream_head(request, {"x-baton-token-ids": str(len(past))} if is_asked else {})
        for number in range(len(past), len(tokens)):
            is_last = number == len(tokens) - 1
            events = told(request.path, tokens, number) + (b"data: [DONE]\n\n" if is_last else b"")
            if number == dies_at > 0 and gives_up:
                error = event({"error": {"message": "the rank is gone", "code": gives_up, "reason": "worker_lost"}})
                await response.write(record(error, b"fail", gives_up))
                return response
            if number == dies_at > 0:
                await response.write(events[:-1])
                assert request.transport is not None
                request.transport.close()
                return response
            await response.write(
                record(events, b"last" if is_last else b"part", {"tokens": [number]}) if is_asked else events
            )
        return response

    return script


def told(path: str, tokens: tuple[str, ...], number: int) -> bytes:
    """The event of token `number`: all text so far on `/generate`, what is new elsewhere."""
    if path == "/generate":
        return event({"text": "".join(tokens[: number + 1]), "meta_info": {"input_token_logprobs": []}})
    return event({"choices": [{"index": 0, "text": tokens[number]}]})


def record(events: bytes, kind: bytes, value: object) -> bytes:
    """`events` with a record in the last of them."""
    return events[:-1] + b"baton-" + kind + b": " + json.dumps(value).encode() + b"\n\n"


async def stream_head(request: web.Request, headers: dict[str, str] | None = None) -> web.StreamResponse:
    """The head of an event stream, sent."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"} | (headers or {}))
    await response.prepare(request)
    return response


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


# -- the router under test


class Client:
    """A client of one running router."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    def post(self, path: str = "/generate", **options: Any) -> Any:
        """An aiohttp request context; `json=` defaults to a streaming prompt."""
        if "data" not in options:
            options.setdefault("json", {"text": "What is the capital?", "stream": True})
        return self.session.post(self.url + path, timeout=aiohttp.ClientTimeout(total=PATIENCE_S * 2), **options)

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON (or text) of a GET."""
        async with self.session.get(self.url + path) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()

    async def up(self, lives: Callable[[], bool]) -> None:
        """Wait until the router answers at all."""
        async with asyncio.timeout(PATIENCE_S * 2):
            while True:
                assert lives(), "the router ended"
                try:
                    await self.get("/health")
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.01)
                else:
                    return

    async def until(self, path: str, holds: Callable[[int, Any], bool]) -> Any:
        """Ask again until the answer satisfies `holds`; that is what a real operator's probe does."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status, body = await self.get(path)
                if holds(status, body):
                    return body
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(config: RouterConfig) -> AsyncIterator[Client]:
    """A router served by uvicorn as in production, and a client of it. Rooms are drawn 1, 2, 3, …"""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    draws = iter(range(1_000_000))
    app = build(config, lambda _bits: next(draws))
    server = uvicorn.Server(
        uvicorn.Config(app, http=app.http, access_log=False, log_config=None, timeout_graceful_shutdown=1)
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with aiohttp.ClientSession() as session:
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", session)
        try:
            await client.up(lambda: not serving.done())
            yield client
        finally:
            server.should_exit = True
            await serving


# -- both together

LONG_MS = 600_000


class World:
    """A router and its workers."""

    def __init__(self, client: Client, prefill: list[FakeWorker], decode: list[FakeWorker]) -> None:
        self.client = client
        self.prefill = prefill
        self.decode = decode

    async def idle(self) -> None:
        """Wait until the router counts no leg of its own anywhere and no request under way."""

        def nothing_in_flight(_status: int, body: Any) -> bool:
            return all(worker["in_flight"] == 0 for worker in body["workers"])

        await self.client.until("/server_info", nothing_in_flight)
        await self.client.until("/metrics", lambda _status, text: "baton_router_inflight_requests 0.0" in text)


@asynccontextmanager
async def world(
    prefill: tuple[Script, ...] = (prefills,),
    decode: tuple[Script, ...] = (decodes,),
    *,
    prepare: Callable[[list[FakeWorker]], None] | None = None,
    wait_ready: bool = True,
    **settings: Any,
) -> AsyncIterator[World]:
    """Workers with these scripts and a router that knows them, all usable; `settings` go to the router's config."""
    rooms = Rooms()
    async with AsyncExitStack() as stack:
        ps = [await stack.enter_async_context(FakeWorker("prefill", rooms, script)) for script in prefill]
        ds = [await stack.enter_async_context(FakeWorker("decode", rooms, script)) for script in decode]
        if prepare is not None:
            prepare(ps + ds)
        urls = {"prefill": tuple(p.url for p in ps), "decode": tuple(d.url for d in ds)}
        config = RouterConfig(**(urls | {"probe_interval_ms": LONG_MS} | settings))
        client = await stack.enter_async_context(running(config))
        if wait_ready:
            await client.until("/ready", lambda _, body: all(worker["state"] == "ready" for worker in body["workers"]))
        yield World(client, ps, ds)


async def texts(response: Any) -> list[str]:
    """The texts of a whole event stream, `[DONE]` left out."""
    events = (await response.read()).decode().split("\n\n")
    return [json.loads(one.removeprefix("data: "))["text"] for one in events if one.startswith('data: {"text')]


def error_of(body: Any) -> tuple[int, str]:
    return body["error"]["code"], body["error"]["reason"]
