"""The road of one request: read, choose a pair, draw a room, send both legs at once, pass decode's answer on.

    body (413, 400) -> pair (503) -> room -> both legs -> decode's first bytes -> client, as they come -> finished
                         ^                      |
                         +--- another pair, another room: refused, lost or busy, and nothing was sent to the client

The client's status is settled with decode's first *bytes*, not its head: until then prefill may still say that the
request is wrong, and another pair may still be tried. The request's deadline and the client's leaving end the road
anywhere, and close both legs.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from baton_core.errors import Reason, Verdict
from baton_core.limits import Limits, Millis
from baton_core.request import Bootstrap
from baton_core.routing.pair import Draws, NoPair, Pair, Policies, choose_pair
from baton_core.routing.rooms import ROOM_BITS, draw_room
from baton_core.routing.workers import Role
from baton_router.directory import Directory
from baton_router.exchange import (
    ClientGone,
    ClientWatch,
    Exchange,
    Fields,
    Receive,
    Refused,
    Scope,
    Send,
    body_for_workers,
    budget_ms,
    parse_fields,
    read_body,
    request_id,
)
from baton_router.failures import CLIENT_GONE_STATUS, RETRYABLE, Failure, FailureKind, leg_failure, own_failure
from baton_router.legs import Attempt, Call, FirstBytes
from baton_router.merged import merged
from baton_router.merging import asks_for_scores
from baton_router.metrics import RouterMetrics
from baton_router.upstream import Upstream, UpstreamLost

DRAW_BITS = 32

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """The parts of the configuration that the road depends on."""

    limits: Limits
    retries: int
    registry: tuple[str, int] | None  # where both legs meet; None: at the prefill worker itself


@dataclass(slots=True, kw_only=True)
class Trip:
    """What one request's road has come to know, for its log line and its deadline."""

    exchange: Exchange
    began_s: float
    deadline_s: float
    first_byte_s: float | None = None
    room: int = 0
    pair: Pair | None = None
    attempts: int = 0


class Dispatch:
    """ASGI application of the generating routes."""

    def __init__(
        self,
        *,
        directory: Directory,
        upstream: Upstream,
        policies: Policies,
        metrics: RouterMetrics,
        settings: DispatchSettings,
        draw: Callable[[int], int],
    ) -> None:
        self._directory = directory
        self._upstream = upstream
        self._policies = policies
        self._metrics = metrics
        self._settings = settings
        self._draw = draw  # a random integer of that many bits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        began_s = asyncio.get_running_loop().time()
        exchange = Exchange(route=scope["path"], rid=request_id(headers), send=send)
        trip = Trip(exchange=exchange, began_s=began_s, deadline_s=began_s)
        self._metrics.inflight.inc()
        try:
            await self._bounded(trip, headers, receive)
        except ClientGone:
            exchange.status = exchange.status or CLIENT_GONE_STATUS
        finally:
            self._metrics.inflight.dec()
            self._finished(trip)

    async def _bounded(self, trip: Trip, headers: dict[bytes, bytes], receive: Receive) -> None:
        """The road within the request's budget. Raises ClientGone."""
        exchange, budget = trip.exchange, self._settings.limits.request_budget_ms
        try:
            budget = budget_ms(headers, budget)
            trip.deadline_s = trip.began_s + budget / 1000
            async with asyncio.timeout_at(trip.deadline_s):
                body = await read_body(headers, receive, self._settings.limits.body_bytes_max)
                fields = parse_fields(body)
                async with ClientWatch(receive):
                    failure = await self._serve(trip, fields)
        except Refused as refused:
            failure = refused.failure
        except TimeoutError:
            text = f"the request's budget of {budget} ms ran out while {exchange.stage}"
            failure = self._own(Reason.DEADLINE, text)
        if failure is not None:
            await self._fail(exchange, failure)

    async def _serve(self, trip: Trip, fields: Fields) -> Failure | None:
        """Try pairs until one answers (None: it did, to the end) or a failure stands."""
        pair = self._choose(())
        avoid: tuple[str, ...] = ()
        while isinstance(pair, Pair):
            failure = await self._attempt(trip, fields, pair)
            if failure is None or trip.exchange.began or failure.kind not in RETRYABLE:
                return failure
            if trip.attempts > self._settings.retries:
                return failure
            avoid += (failure.url,)
            pair = self._choose(avoid)
            if isinstance(pair, NoPair) and failure.kind is FailureKind.LOST:
                pair = self._choose(())  # a broken connection says little about the worker
            if isinstance(pair, NoPair) and failure.kind is not FailureKind.REFUSED:
                return failure  # its own words, and its own Retry-After
            if isinstance(pair, Pair):
                self._metrics.retried(failure.kind)
        return self._own(Reason.NO_USABLE_PAIR, f"no usable pair of workers: {pair.reason}")

    def _choose(self, avoid: tuple[str, ...]) -> Pair | NoPair:
        return choose_pair(
            self._directory.workers(Role.PREFILL),
            self._directory.workers(Role.DECODE),
            self._policies,
            Draws(prefill=self._draw(DRAW_BITS), decode=self._draw(DRAW_BITS)),
            avoid=avoid,
        )

    async def _attempt(self, trip: Trip, fields: Fields, pair: Pair) -> Failure | None:
        """One pair, one room. On return nothing of a failed attempt is left open."""
        call = self._prepare(trip, fields, pair)
        attempt = Attempt(pair, call, upstream=self._upstream, directory=self._directory)
        try:
            outcome = await attempt.outcome()
            if isinstance(outcome, FirstBytes) and call.wants_scores:
                outcome = await self._merged(trip, attempt, outcome)
            failure = await self._relay(trip, outcome) if isinstance(outcome, FirstBytes) else outcome
            if failure is None:
                attempt.leave(trip.deadline_s)
                return None
        finally:
            attempt.end()
        await attempt.ended()
        self._report(pair, failure)
        return failure

    def _prepare(self, trip: Trip, fields: Fields, pair: Pair) -> Call:
        exchange = trip.exchange
        trip.attempts += 1
        trip.pair = pair
        bootstrap = self._bootstrap(pair)
        trip.room = 0 if bootstrap is None else bootstrap.room
        who = pair.decode.url if pair.prefill is None else f"{pair.decode.url} (prefill {pair.prefill.url})"
        exchange.stage = f"waiting for the first bytes of {who}"
        left_ms: Millis = max(1, int((trip.deadline_s - asyncio.get_running_loop().time()) * 1000))
        # A worker may still be burying the leg this one replaces, and would refuse the same id as a duplicate.
        rid = exchange.rid if trip.attempts == 1 else f"{exchange.rid}~{trip.attempts}"
        return Call(
            path=exchange.route,
            body=body_for_workers(fields, bootstrap),
            headers={"content-type": "application/json", "x-request-id": rid, "x-baton-budget-ms": str(left_ms)},
            wants_scores=asks_for_scores(exchange.route, fields),
        )

    def _bootstrap(self, pair: Pair) -> Bootstrap | None:
        if pair.prefill is None:
            return None
        room = draw_room(self._draw(ROOM_BITS))
        if self._settings.registry is None:
            return Bootstrap(host=pair.prefill.bootstrap_host, port=pair.prefill.bootstrap_port, room=room)
        host, port = self._settings.registry
        return Bootstrap(host=host, port=port, room=room, instance=pair.prefill.instance or None)

    async def _merged(self, trip: Trip, attempt: Attempt, first: FirstBytes) -> FirstBytes | Failure:
        """Decode's answer with the prompt's logprobs; prefill has them at the time of decode's first token."""
        trip.exchange.stage = "waiting for the prompt's logprobs"
        scores = await attempt.prompt_scores()
        if isinstance(scores, Failure):
            return scores
        if scores is None or not any(scores.values()):
            return first  # nothing to put in: bytes pass as they are
        try:
            return await merged(first, scores)
        except UpstreamLost as lost:
            return _lost(attempt.pair, lost)

    async def _relay(self, trip: Trip, first: FirstBytes) -> Failure | None:
        """Pass decode's answer on to its end; a failure when it breaks off."""
        exchange = trip.exchange
        chunk = first.chunk
        trip.first_byte_s = asyncio.get_running_loop().time()
        exchange.stage = "passing the answer on"
        await exchange.begin(first.answer)
        if exchange.is_event_stream:
            self._metrics.first_byte(trip.first_byte_s - trip.began_s)
        try:
            while chunk:
                await exchange.pass_on(chunk)
                chunk = await first.answer.read()
        except UpstreamLost as lost:
            assert trip.pair is not None
            return _lost(trip.pair, lost)
        await exchange.end()
        return None

    def _report(self, pair: Pair, failure: Failure) -> None:
        """Tell the directory what a failed leg says about its worker."""
        for worker in (pair.prefill, pair.decode):
            if worker is None or worker.url != failure.url:
                continue
            if failure.kind is FailureKind.REFUSED:
                self._directory.refused(worker, failure.text)
            elif failure.kind is FailureKind.LOST or failure.kind is FailureKind.BUSY:
                self._directory.doubt(worker)

    async def _fail(self, exchange: Exchange, failure: Failure) -> None:
        if failure.rejection is not None:
            self._metrics.rejected(failure.rejection)
        if exchange.began:
            self._metrics.broke()
        await exchange.fail(failure)

    def _own(self, reason: Reason, text: str) -> Failure:
        retry_after_ms = self._settings.limits.retry_after_ms
        return own_failure(Verdict(reason=reason, text=text), retry_after_ms=retry_after_ms)

    def _finished(self, trip: Trip) -> None:
        exchange, pair = trip.exchange, trip.pair
        took_s = asyncio.get_running_loop().time() - trip.began_s
        self._metrics.finished(exchange.route, exchange.status, took_s)
        log.info(
            "router.finished",
            rid=exchange.rid,
            room=trip.room,
            route=exchange.route,
            prefill=None if pair is None or pair.prefill is None else pair.prefill.url,
            decode=None if pair is None else pair.decode.url,
            status=exchange.status,
            attempts=trip.attempts,
            took_ms=round(took_s * 1000, 1),
            ttft_ms=None if trip.first_byte_s is None else round((trip.first_byte_s - trip.began_s) * 1000, 1),
            failure=None if exchange.failure is None else exchange.failure.text,
        )


def _lost(pair: Pair, lost: UpstreamLost) -> Failure:
    url = pair.decode.url
    return leg_failure(FailureKind.LOST, f"decode worker {url}: {lost.text}", url)
