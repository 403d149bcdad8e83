"""One request from the client's connection to its log line: read under limits, served, ended once.

    key (401) -> quota (429) -> body (413, 400) -> queue (503) -> the road of each prompt -> answer -> finished

The request's deadline and the client's leaving end it anywhere, and close every leg.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress

import structlog

from baton_core.errors import Reason, Verdict
from baton_core.limits import Limits, Millis
from baton_core.routing.pace import Pace
from baton_core.routing.pair import Pair
from baton_io.tracing import TRACEPARENT, TRACESTATE, Span, Tracing
from baton_router.caller import AsgiCaller, Bounds, Caller, ClientGone, Receive, Refused, Scope, Send
from baton_router.door import Door
from baton_router.exchange import Exchange, Fields, budget_ms, parse_fields, request_id
from baton_router.facts import Needs, ask_of
from baton_router.failures import CLIENT_GONE_STATUS, Failure, Rejection, own_failure, turned_away
from baton_router.fanout import serve_parts
from baton_router.metrics import RouterMetrics
from baton_router.parts import split
from baton_router.recent import Recent
from baton_router.road import Road
from baton_router.trip import Trip

FAREWELL_MS: Millis = 1_000
"""How long a client may take to accept the words that its request ends with."""

log = structlog.get_logger()


class Dispatch:
    """ASGI application of the generating routes."""

    def __init__(
        self,
        *,
        road: Road,
        door: Door,
        pace: Pace,
        metrics: RouterMetrics,
        recent: Recent,
        limits: Limits,
        needs: Needs,
        silence_ms: Millis,
        tracing: Tracing | None = None,
    ) -> None:
        self._road = road
        self._door = door
        self._pace = pace
        self._metrics, self._recent = metrics, recent
        self._limits = limits
        self._needs = needs
        self._silence_ms = silence_ms
        self._tracing = tracing
        self._is_logging = log.is_enabled_for(logging.INFO)  # else a line's fields are made for nobody

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as an ASGI application."""
        await self.serve(AsgiCaller(receive, send), scope["path"], dict(scope["headers"]))

    async def serve(self, caller: Caller, route: str, headers: dict[bytes, bytes]) -> None:
        """Serve one request."""
        loop = asyncio.get_running_loop()
        began_s = time.monotonic()
        exchange = Exchange(route=route, rid=request_id(headers), client=caller)
        trip = Trip(exchange=exchange, loop=loop, began_s=began_s, deadline_s=loop.time())
        if self._tracing is not None:
            trip.span = self._tracing.begin(f"router {exchange.route}", began_s, _caller(headers))
        self._recent.under_way += 1
        try:
            await self._bounded(trip, headers, caller)
        except ClientGone:
            exchange.status = exchange.status or CLIENT_GONE_STATUS
        finally:
            self._recent.under_way -= 1
            self._finished(trip)

    async def _bounded(self, trip: Trip, headers: dict[bytes, bytes], caller: Caller) -> None:
        """The request within its budget. Raises ClientGone."""
        exchange, budget = trip.exchange, self._limits.request_budget_ms
        try:
            with Bounds(trip.loop) as bounds:
                budget = budget_ms(headers, budget)
                trip.deadline_s += budget / 1000
                bounds.expire_at(trip.deadline_s)
                failure = await self._admitted(trip, headers, caller, bounds)
        except Refused as refused:
            failure = refused.failure
        except TimeoutError:
            text = f"the request's budget of {budget} ms ran out while {exchange.stage}"
            verdict = Verdict(reason=Reason.DEADLINE, text=text)
            failure = own_failure(verdict, retry_after_ms=self._limits.retry_after_ms)
        if failure is not None:
            await self._fail(exchange, failure)

    async def _admitted(
        self, trip: Trip, headers: dict[bytes, bytes], caller: Caller, bounds: Bounds
    ) -> Failure | None:
        guest = await self._door.knock(headers)  # before the body: a stranger's is not read
        try:
            body = await caller.whole_body(headers, self._limits.body_bytes_max, self._silence_ms)
            caller.watch(bounds.leave)
            fields = parse_fields(body)
            trip.exchange.stage = "waiting in the router's queue"
            arrived_s = time.monotonic()
            await self._door.enter(guest, fields)
            if trip.span is not None:
                trip.span.note("queue", arrived_s, time.monotonic())
            return self._overload(trip.loop.time() * 1000) or await self._served(trip, headers, fields)
        finally:
            caller.unwatch()
            self._door.leave(guest)

    def _served(self, trip: Trip, headers: dict[bytes, bytes], fields: Fields) -> Awaitable[Failure | None]:
        """The request's road, or those of its parts. Raises Refused."""
        parts = split(trip.exchange.route, fields, trip.exchange.rid)
        if parts is not None:
            return serve_parts(self._road, trip, parts, lambda part: ask_of(part, headers, self._needs))
        trip.ask = ask_of(fields, headers, self._needs)
        return self._road.serve(trip, fields)

    def _overload(self, now_ms: float) -> Failure | None:
        """The refusal of a request that would wait too long, before it costs any worker anything."""
        too_long_by_ms = self._pace.too_long_by_ms(now_ms)
        if not too_long_by_ms:
            return None
        expected_ms = self._pace.expected_ms(now_ms)
        text = (
            f"{self._pace.waiting} requests wait for their first token; one more would wait about {expected_ms:.0f} ms, "
            f"and the most is {self._pace.longest_ms} ms (first_token_ms)"
        )
        return turned_away(Rejection.OVERLOADED, text, retry_after_s=too_long_by_ms / 1000)

    async def _fail(self, exchange: Exchange, failure: Failure) -> None:
        if failure.rejection is not None:
            self._metrics.rejected(failure.rejection)
        if exchange.began:
            self._metrics.broke()
        # One that has not read for a whole budget will not read this either: the connection closes without a word.
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_MS / 1000):
                await exchange.fail(failure)

    def _finished(self, trip: Trip) -> None:
        exchange, pair = trip.exchange, trip.pair
        took_s = time.monotonic() - trip.began_s
        self._metrics.finished(exchange.route, exchange.status, took_s)
        self._recent.finished(exchange, None if trip.first_byte_s is None else trip.first_byte_s - trip.began_s)
        if trip.span is not None:
            _end(trip.span, trip)
        if not self._is_logging:
            return
        log.info(
            "router.finished",
            rid=exchange.rid,
            room=trip.room,
            route=exchange.route,
            prefill=_prefill(pair),
            decode=None if pair is None else pair.decode.key,
            status=exchange.status,
            attempts=trip.attempts,
            migrations=trip.migrations,
            took_ms=round(took_s * 1000, 1),
            ttft_ms=None if trip.first_byte_s is None else round((trip.first_byte_s - trip.began_s) * 1000, 1),
            failure=None if exchange.failure is None else exchange.failure.text,
        )


def _caller(headers: dict[bytes, bytes]) -> dict[str, str]:
    """Whose span ours is a child of."""
    return {
        name: headers[name.encode()].decode("latin-1") for name in (TRACEPARENT, TRACESTATE) if name.encode() in headers
    }


def _end(span: Span, trip: Trip) -> None:
    exchange, ttft = trip.exchange, {}
    if trip.first_byte_s is not None:
        ttft = {"baton.ttft_ms": round((trip.first_byte_s - trip.began_s) * 1000, 1)}
    told: dict[str, str | int | float] = {
        "baton.rid": exchange.rid,
        "http.response.status_code": exchange.status,
        "baton.attempts": trip.attempts,
        "baton.migrations": trip.migrations,
    }
    span.end(told | ttft, failure=None if exchange.failure is None else exchange.failure.text)


def _prefill(pair: Pair | None) -> str | None:
    return None if pair is None or pair.prefill is None else pair.prefill.key
