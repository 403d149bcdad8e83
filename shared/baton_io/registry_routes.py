"""The registry's HTTP routes: SGLang's, exactly, and ours beside them. Every prefill app and the service mount them.

Handlers are plain functions from (query, body) to `Answer`; one small ASGI endpoint reads the body and writes the
answer. That keeps a look-up cheap: no request or response objects, no validation models. `RegistryFront` also spares
it the middleware of the app, and answers to GET `/route` are kept ready to send until the table changes.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import structlog
from fastapi import APIRouter
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton_core.errors import ClientError
from baton_core.limits import Millis
from baton_core.registration import RankKey, parse_registration
from baton_core.registry import Accepted, Instance, NeedsProbe, Refused, RegistryTable
from baton_core.request import Incarnation
from baton_io.registry_api import registry_document
from baton_io.registry_client import INCARNATION, INSTANCE, REGISTRY_INCARNATION, RegistryError, call, url_of
from baton_io.registry_http import (
    BODY_BYTES_MAX,
    Answer,
    Call,
    dp_rank_of,
    incarnation_of,
    instance_field,
    integer_field,
    integer_of,
    json_of,
    object_of,
    over_field,
    parse_query,
    read_body,
    rooms_field,
)
from baton_io.registry_store import Deregister, Drop, Outcome, OwnStore, PutRooms, Register, Renew, Store, StoreAway

log = structlog.get_logger()

PROBE_MS: Millis = 1_000
"""How long a superseded worker has to answer that it is still there."""

TOPOLOGY: RankKey = (-1, -1, -1, -1)
"""The four ranks by which SGLang asks for the layout instead of an address."""

CACHED_ANSWERS_MAX = 20_000
"""Answers to GET `/route` kept ready to send; when full, all are dropped."""

CACHED_QUERY_BYTES_MAX = 512
"""A longer query is no decode worker's, and its answer is not kept."""

_RANKS = (b"prefill_dp_rank", b"prefill_cp_rank", b"target_tp_rank", b"target_pp_rank")

Probe = Callable[[NeedsProbe], Awaitable[bool]]
"""Whether the life named in the question still answers at its address."""

Messages = tuple[dict[str, Any], dict[str, Any]]
"""ASGI's two messages of one answer: start and body."""


Handler = Callable[[Call], Awaitable[Answer]]


def health_probe(session: aiohttp.ClientSession) -> Probe:
    """The probe over HTTP: GET `/health`, and whose `x-baton-incarnation` answers."""

    async def probe(question: NeedsProbe) -> bool:
        url = url_of(question.host, question.port) + "/health"
        try:
            reply = await call(session, "GET", url, limit_ms=PROBE_MS)
        except RegistryError:
            return False
        return reply.headers.get(INCARNATION) == question.incarnation

    return probe


class RegistryRoutes:
    """Handlers over one store. `counts` is the number of answers by (route, status), for metrics."""

    def __init__(self, store: Store, *, probe: Probe, token: str | None) -> None:
        self.store = store
        self.counts: dict[tuple[str, int], int] = {}
        self._clock = store.now
        self._probe = probe
        self._token = token
        self._probing: dict[tuple[str, Incarnation | None], asyncio.Task[bool]] = {}

    @staticmethod
    def alone(
        table: RegistryTable, *, clock: Callable[[], Millis], probe: Probe, token: str | None
    ) -> "RegistryRoutes":
        """A registry without replicas."""
        return RegistryRoutes(OwnStore(table, clock), probe=probe, token=token)

    @property
    def table(self) -> RegistryTable:
        """For reading."""
        return self.store.table

    def endpoints(self) -> list[Route]:
        """Every route of a registry."""
        return [
            self._route("GET", "/health", self.health),
            Route("/route", _LookUps(self), methods=["GET"], name="registry GET /route", include_in_schema=False),
            self._route("PUT", "/route", self.put_route, writes=True),
            self._route("POST", "/register_dp_rank", self.register_dp_rank, writes=True),
            self._route("POST", "/query_dp_ranks", self.query_dp_ranks, reads_body=True),
            self._route("GET", "/openapi.json", self.describe),
            self._route("GET", "/v1/instances", self.list_instances),
            self._route("PUT", "/v1/instances/{instance}/lease", self.renew, writes=True),
            self._route("DELETE", "/v1/instances/{instance}", self.deregister, writes=True),
        ]

    # -- SGLang's routes

    async def health(self, call: Call) -> Answer:
        """GET /health: somebody listens; says nothing about readiness."""
        return Answer(200, b"OK")

    async def get_route(self, call: Call) -> Answer:
        """GET /route: the layout (four −1), or the address of one rank."""
        query = parse_query(call.query)
        wanted = [query.get(name) for name in _RANKS]
        if not all(wanted):
            return Answer(400, b"Missing inputs for bootstrap server.")
        dp, cp, tp, pp = (integer_of(name, value or b"") for name, value in zip(_RANKS, wanted, strict=True))
        name = query.get(b"instance")
        instance = self.table.select(name.decode("utf-8", "replace") if name else None, self._clock())
        if isinstance(instance, Refused) and instance.status == 400:
            return _refuse(instance)
        if not isinstance(instance, Instance) or not instance.ready:
            return _not_ready(instance)
        if (dp, cp, tp, pp) == TOPOLOGY:
            return Answer(200, msgspec.json.encode(instance.topology), json=True, about=instance)
        endpoint = instance.endpoints.get((dp, cp, tp, pp))
        if endpoint is None:
            text = f"Bootstrap info not found for dp_rank={dp} cp_rank={cp} tp_rank={tp} pp_rank={pp}"
            return Answer(404, text.encode(), about=instance)
        return Answer(200, msgspec.json.encode(endpoint), json=True, about=instance)

    async def put_route(self, call: Call) -> Answer:
        """PUT /route: one rank registers."""
        rank = parse_registration(json_of(call.body))
        outcome = await self.store.write(Register(rank=rank))
        # Two questions at most: who holds the name, who holds the address.
        for _ in range(2):
            if not isinstance(outcome, NeedsProbe):
                break
            if await self._still_alive(outcome):
                return _refuse(outcome.still_alive)
            if await self.store.write(Drop(instance=outcome.instance, incarnation=outcome.incarnation)):
                log.info("registry.superseded", instance=outcome.instance, incarnation=outcome.incarnation)
            outcome = await self.store.write(Register(rank=rank))
        if isinstance(outcome, NeedsProbe):  # others keep claiming the same name at this moment: the caller tries again
            return _refuse(outcome.still_alive)
        return _written(outcome)

    async def register_dp_rank(self, call: Call) -> Answer:
        """POST /register_dp_rank: a room runs on a rank; ours also tell many at once (`dp_ranks`), and what is `over`."""
        body = object_of(call.body)
        rooms, over = tuple(rooms_field(body)), tuple(over_field(body))
        return _written(await self.store.write(PutRooms(instance=instance_field(body), rooms=rooms, over=over)))

    async def query_dp_ranks(self, call: Call) -> Answer:
        """POST /query_dp_ranks: ranks of rooms; unknown rooms are absent."""
        body = object_of(call.body)
        rooms = body.get("bootstrap_rooms")
        if not isinstance(rooms, list):
            raise ClientError("bootstrap_rooms must be a list of integers")
        numbers = [integer_field({"bootstrap_rooms": room}, "bootstrap_rooms") for room in rooms]
        found = self.table.dp_ranks(numbers, instance_field(body), self._clock())
        if isinstance(found, Refused):
            return _refuse(found)
        return Answer(200, msgspec.json.encode({str(room): rank for room, rank in found.items()}), json=True)

    # -- ours

    async def describe(self, call: Call) -> Answer:
        """GET /openapi.json: this registry, for tools."""
        return Answer(200, registry_document(), json=True)

    async def list_instances(self, call: Call) -> Answer:
        """GET /v1/instances: who is registered, with `instance=` only that one."""
        now = self._clock()
        name = parse_query(call.query).get(b"instance")
        views = [
            _view(instance, now)
            for instance in self.table.instances(now)
            if not name or instance.name == name.decode("utf-8", "replace")
        ]
        body = {"registry_incarnation": self.table.incarnation, "instances": views}
        return Answer(200, msgspec.json.encode(body), json=True)

    async def renew(self, call: Call) -> Answer:
        """PUT /v1/instances/{instance}/lease?incarnation=: 404 means that the worker must register again."""
        return _written(await self.store.write(Renew(instance=call.path["instance"], incarnation=incarnation_of(call))))

    async def deregister(self, call: Call) -> Answer:
        """DELETE /v1/instances/{instance}?incarnation=: the worker leaves; with `dp_rank=` only that DP rank of it."""
        name, life = call.path["instance"], incarnation_of(call)
        return _written(await self.store.write(Deregister(instance=name, incarnation=life, dp_rank=dp_rank_of(call))))

    # -- inside

    async def _still_alive(self, question: NeedsProbe) -> bool:
        """Ask once, however many ranks of the newcomer wait for the answer."""
        key = (question.instance, question.incarnation)
        task = self._probing.get(key)
        if task is None:
            task = asyncio.ensure_future(self._probe(question))
            self._probing[key] = task
            task.add_done_callback(lambda _: self._probing.pop(key, None))
        return await asyncio.shield(task)

    def _route(
        self, method: str, path: str, handler: Handler, *, writes: bool = False, reads_body: bool = False
    ) -> Route:
        endpoint = _Endpoint(self, f"{method} {path}", handler, writes=writes, reads_body=writes or reads_body)
        return Route(path, endpoint, methods=[method], name=f"registry {method} {path}", include_in_schema=False)

    def count(self, route: str, status: int) -> None:
        """One more answer with this status."""
        self.counts[(route, status)] = self.counts.get((route, status), 0) + 1

    def answers_version(self) -> tuple[int, int]:
        """Grows whenever a look-up may be answered otherwise than before; leases are checked on the way."""
        self.table.expire(self._clock())
        return self.store.generation, self.table.version

    def messages(self, answer: Answer) -> Messages:
        """The answer as ASGI wants it, with our headers."""
        headers = [
            (b"content-type", b"application/json; charset=utf-8" if answer.json else b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(answer.body)),
            (REGISTRY_INCARNATION.encode(), self.table.incarnation.encode()),
        ]
        if answer.about is not None:
            headers.append((INSTANCE.encode(), answer.about.name.encode()))
            headers.append((INCARNATION.encode(), answer.about.life.encode()))
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        return start, {"type": "http.response.body", "body": answer.body}

    def may_write(self, scope: Scope) -> bool:
        """Whether the caller holds the token, where one is set."""
        if self._token is None:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, b"Bearer " + self._token.encode())


def registry_router(routes: RegistryRoutes) -> APIRouter:
    """The routes, ready for `app.include_router`."""
    router = APIRouter()
    router.routes.extend(routes.endpoints())
    return router


class _Endpoint:
    """One route as an ASGI application."""

    def __init__(self, routes: RegistryRoutes, name: str, handler: Handler, *, writes: bool, reads_body: bool) -> None:
        self._routes = routes
        self._name = name
        self._handler = handler
        self._writes = writes
        self._reads_body = reads_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self.answer(scope, receive)
        self._routes.count(self._name, answer.status)
        start, body = self._routes.messages(answer)
        await send(start)
        await send(body)

    async def answer(self, scope: Scope, receive: Receive) -> Answer:
        if self._writes and not self._routes.may_write(scope):
            return Answer(401, b"this registry takes writes only with its token (authorization: Bearer ...)")
        try:
            body = await read_body(scope, receive) if self._reads_body else b""
            if body is None:
                return Answer(413, b"the body is longer than %d bytes" % BODY_BYTES_MAX)
            return await self._handler(Call(query=scope["query_string"], body=body, path=scope.get("path_params", {})))
        except StoreAway as error:
            return Answer(503, error.verdict.text.encode())
        except ClientError as error:
            return Answer(error.verdict.status, error.verdict.text.encode())


class _LookUps(_Endpoint):
    """GET `/route`: as any endpoint, with the answers of 200 kept by query until the table changes."""

    def __init__(self, routes: RegistryRoutes) -> None:
        super().__init__(routes, "GET /route", routes.get_route, writes=False, reads_body=False)
        self._version = (-1, -1)
        self._ready: dict[bytes, Messages] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        version = self._routes.answers_version()
        if version != self._version or len(self._ready) > CACHED_ANSWERS_MAX:
            self._version = version
            self._ready.clear()
        query = scope["query_string"]
        messages = self._ready.get(query)
        status = 200
        if messages is None:
            answer = await self.answer(scope, receive)
            messages = self._routes.messages(answer)
            status = answer.status
            if status == 200 and len(query) <= CACHED_QUERY_BYTES_MAX:
                self._ready[query] = messages
        self._routes.count(self._name, status)
        start, body = messages
        # A copy: middleware may add headers to what passes through it.
        await send({**start, "headers": [*start["headers"]]})
        await send(body)


class RegistryFront:
    """An ASGI application that answers the registry's fixed paths itself and leaves the rest to `app`.

    Half of a look-up's time would otherwise go to the middleware and the route matching of FastAPI.
    """

    def __init__(self, routes: RegistryRoutes, app: ASGIApp) -> None:
        self._app = app
        self._endpoints: dict[tuple[str, str], ASGIApp] = {
            (method, route.path): route.app
            for route in routes.endpoints()
            if "{" not in route.path
            for method in sorted(route.methods or ())
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        await (self._app if endpoint is None else endpoint)(scope, receive, send)


def _view(instance: Instance, now: Millis) -> dict[str, object]:
    return {
        "instance": instance.name,
        "incarnation": instance.life,
        "layout": instance.topology,
        "fingerprint": instance.fingerprint,
        "ranks_registered": len(instance.endpoints),
        "ranks_total": instance.layout.ranks_total,
        "ready": instance.ready,
        "lease_left_ms": None if instance.expires_at is None else instance.expires_at - now,
        "http_host": instance.http_host,
        "http_port": instance.http_port,
        "bootstrap_host": instance.bootstrap_host,
        "bootstrap_port": instance.bootstrap_port,
    }


def _not_ready(instance: Instance | Refused | None) -> Answer:
    known = instance if isinstance(instance, Instance) else None
    registered = 0 if known is None else len(known.endpoints)
    text = f"Prefill server not fully registered yet ({registered} workers registered)."
    if isinstance(instance, Refused):
        # A named worker that is not here yet is not ready yet: after a restart of the registry it will come back.
        text += f" {instance.text}"
    return Answer(503, text.encode(), about=known)


def _written(outcome: Outcome) -> Answer:
    """What a write came to."""
    match outcome:
        case Refused():
            return _refuse(outcome)
        case Accepted():
            return Answer(200, b"OK", about=outcome.instance)
        case Instance():
            return Answer(200, b"OK", about=outcome)
        case _:
            return Answer(200, b"OK")


def _refuse(refused: Refused) -> Answer:
    return Answer(refused.status, refused.text.encode())
