"""The road of one prompt: choose a pair, draw a room, send both legs at once, pass decode's answer on.

    pair (503) -> room -> both legs -> decode's first bytes -> client, as they come -> finished
        ^                     |
        +--- another pair, another room: refused, lost or busy, nothing was sent to the client, and the budget allows

The client's status is settled with decode's first *bytes*, not its head: until then prefill may still say that the
request is wrong, and another pair may still be tried.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from baton_core.errors import Reason, Verdict
from baton_core.limits import Limits, Millis
from baton_core.request import Bootstrap
from baton_core.routing.breaker import RetryBudget
from baton_core.routing.pair import Draws, NoPair, Pair, Policies
from baton_core.routing.policies import Ask
from baton_core.routing.rooms import ROOM_BITS, draw_room
from baton_core.routing.workers import Role, Target
from baton_router.directory import Directory
from baton_router.exchange import Exchange, Fields, Ranks, body_for_workers
from baton_router.failures import RETRYABLE, Failure, FailureKind, leg_failure, own_failure
from baton_router.legs import Attempt, Call, FirstBytes
from baton_router.merged import merged
from baton_router.merging import asks_for_scores
from baton_router.metrics import RouterMetrics
from baton_router.upstream import Upstream, UpstreamError, UpstreamLost, read_all

DRAW_BITS = 32
REGISTER_MS: Millis = 2_000
REGISTER_ANSWER_BYTES_MAX = 64 * 1024
WORKERS_FAULT = 500
"""The one status by which a worker blames itself; 502 and 504 blame another, 503 is only full."""


class DpMode(Enum):
    """How the rank that the router chose reaches the workers."""

    OFF = "off"  # workers choose their ranks themselves
    FOLLOW = "follow"  # prefill's rank is the room modulo dp_size: no worker needs to know of it
    INJECT = "inject"  # `routed_dp_rank`, and `disagg_prefill_dp_rank` for decode
    REGISTER = "register"  # as inject, and the rank is published at the registry, where decode looks it up


@dataclass(frozen=True, slots=True, kw_only=True)
class RoadSettings:
    """The parts of the configuration that the road depends on."""

    limits: Limits
    retries: int
    registry: tuple[str, int] | None  # where both legs meet; None: at the prefill worker itself
    dp_mode: DpMode = DpMode.OFF
    is_degrading: bool = False  # without a usable prefill worker decode serves alone
    local_prompt_tokens: int = 0  # prompts estimated below this stay on decode
    worker_key: str | None = None


@dataclass(slots=True, kw_only=True)
class Trip:
    """What one prompt's road has come to know, for its log line and its deadline."""

    exchange: Exchange
    began_s: float
    deadline_s: float
    ask: Ask = field(default_factory=Ask)
    first_room: int = 0  # of the first attempt, where it is not to be drawn: one of a batch
    first_byte_s: float | None = None
    room: int = 0
    pair: Pair | None = None
    attempts: int = 0


class Road:
    """Takes prompts to workers."""

    def __init__(
        self,
        *,
        directory: Directory,
        upstream: Upstream,
        policies: Policies,
        metrics: RouterMetrics,
        settings: RoadSettings,
        budget: RetryBudget,
        draw: Callable[[int], int],
    ) -> None:
        self._directory = directory
        self._upstream = upstream
        self._policies = policies
        self._metrics = metrics
        self._settings = settings
        self._budget = budget
        self._draw = draw  # a random integer of that many bits

    async def serve(self, trip: Trip, fields: Fields) -> Failure | None:
        """Try pairs until one answers (None: it did, to the end) or a failure stands."""
        self._budget.earn()
        pair = self._choose(trip, ())
        avoid: tuple[str, ...] = ()
        while isinstance(pair, Pair):
            failure = await self._attempt(trip, fields, pair)
            if failure is None or trip.exchange.began or failure.kind not in RETRYABLE:
                return failure
            if trip.attempts > self._settings.retries or not self._budget.spend():
                return failure
            avoid += (failure.url,)
            pair = self._choose(trip, avoid)
            if isinstance(pair, NoPair) and failure.kind is FailureKind.LOST:
                pair = self._choose(trip, ())  # a broken connection says little about the worker
            if isinstance(pair, NoPair) and failure.kind is not FailureKind.REFUSED:
                return failure  # its own words, and its own Retry-After
            if isinstance(pair, Pair):
                self._metrics.retried(failure.kind)
        verdict = Verdict(reason=Reason.NO_USABLE_PAIR, text=f"no usable pair of workers: {pair.reason}")
        return own_failure(verdict, retry_after_ms=self._settings.limits.retry_after_ms)

    def room(self) -> int:
        """A fresh room."""
        return draw_room(self._draw(ROOM_BITS))

    def _choose(self, trip: Trip, avoid: tuple[str, ...]) -> Pair | NoPair:
        settings, ask = self._settings, trip.ask
        blocked = self._directory.blocked()
        avoided = (lambda url: url in blocked or url in avoid) if blocked or avoid else None
        is_local = 0 < ask.prompt_tokens < settings.local_prompt_tokens
        draws = Draws(prefill=self._draw(DRAW_BITS), decode=self._draw(DRAW_BITS))
        fleet, loads = self._directory.fleet, self._directory.loads
        pair = fleet.choose(self._policies, ask, loads, draws, avoid=avoided, alone=is_local)
        if isinstance(pair, NoPair) and pair.missing is Role.PREFILL and settings.is_degrading:
            pair = fleet.choose(self._policies, ask, loads, draws, avoid=avoided, alone=True)
            if isinstance(pair, Pair):
                self._metrics.degraded()
        return pair

    async def _attempt(self, trip: Trip, fields: Fields, pair: Pair) -> Failure | None:
        """One pair, one room. On return nothing of a failed attempt is left open."""
        call = self._prepare(trip, fields, pair)
        if self._settings.dp_mode is DpMode.REGISTER and pair.prefill is not None:
            unregistered = await self._register(trip.room, pair.prefill)
            if unregistered is not None:
                return unregistered
        attempt = Attempt(pair, call, upstream=self._upstream, directory=self._directory)
        try:
            outcome = await attempt.outcome()
            if isinstance(outcome, FirstBytes) and call.wants_scores:
                outcome = await self._merged(trip, attempt, outcome)
            failure = await self._relay(trip, outcome) if isinstance(outcome, FirstBytes) else outcome
            if failure is None:
                attempt.leave(trip.deadline_s)
                self._praise(pair)
                return None
        finally:
            attempt.end()
        await attempt.ended()
        self._blame(pair, failure)
        return failure

    def _prepare(self, trip: Trip, fields: Fields, pair: Pair) -> Call:
        exchange, settings = trip.exchange, self._settings
        trip.attempts += 1
        trip.pair = pair
        bootstrap = self._bootstrap(trip, pair)
        trip.room = 0 if bootstrap is None else bootstrap.room
        decode_url = pair.decode.worker.url
        who = decode_url if pair.prefill is None else f"{decode_url} (prefill {pair.prefill.worker.url})"
        exchange.stage = f"waiting for the first bytes of {who}"
        left_ms: Millis = max(1, int((trip.deadline_s - asyncio.get_running_loop().time()) * 1000))
        # A worker may still be burying the leg this one replaces, and would refuse the same id as a duplicate.
        rid = exchange.rid if trip.attempts == 1 else f"{exchange.rid}~{trip.attempts}"
        headers = {"content-type": "application/json", "x-request-id": rid, "x-baton-budget-ms": str(left_ms)}
        if settings.worker_key is not None:
            headers["authorization"] = f"Bearer {settings.worker_key}"
        prefill_ranks, decode_ranks = self._ranks(pair)
        decode_body = body_for_workers(fields, bootstrap, decode_ranks)
        same = prefill_ranks == decode_ranks
        return Call(
            path=exchange.route,
            prefill_body=decode_body if same else body_for_workers(fields, bootstrap, prefill_ranks),
            decode_body=decode_body,
            headers=headers,
            wants_scores=asks_for_scores(exchange.route, fields),
        )

    def _ranks(self, pair: Pair) -> tuple[Ranks | None, Ranks | None]:
        """What prefill's and decode's bodies say about ranks."""
        if self._settings.dp_mode not in (DpMode.INJECT, DpMode.REGISTER):
            return None, None
        prefill = None if pair.prefill is None else pair.prefill.dp_rank
        decode = pair.decode.dp_rank
        return (
            None if prefill is None else Ranks(routed=prefill),
            None if prefill is None and decode is None else Ranks(routed=decode, prefill=prefill),
        )

    def _bootstrap(self, trip: Trip, pair: Pair) -> Bootstrap | None:
        if pair.prefill is None:
            return None
        prefill, rank = pair.prefill.worker, pair.prefill.dp_rank
        if self._settings.dp_mode is DpMode.FOLLOW and rank is not None:
            room = draw_room(self._draw(ROOM_BITS), dp_size=prefill.dp_size, dp_rank=rank)
        else:
            room = trip.first_room if trip.first_room and trip.attempts == 1 else self.room()
        if self._settings.registry is None:
            return Bootstrap(host=prefill.bootstrap_host, port=prefill.bootstrap_port, room=room)
        host, port = self._settings.registry
        return Bootstrap(host=host, port=port, room=room, instance=prefill.instance or None)

    async def _register(self, room: int, prefill: Target) -> Failure | None:
        """Publish the rank of a room where decode will look it up."""
        if prefill.dp_rank is None:
            return None
        worker = prefill.worker
        host, port = self._settings.registry or (worker.bootstrap_host, worker.bootstrap_port)
        told: dict[str, object] = {"bootstrap_room": room, "dp_rank": prefill.dp_rank}
        if self._settings.registry is not None and worker.instance:
            told["instance"] = worker.instance
        url = f"http://{host}:{port}/register_dp_rank"
        try:
            async with asyncio.timeout(REGISTER_MS / 1000):
                headers = {"content-type": "application/json"}
                answer = await self._upstream.post(url, msgspec.json.encode(told), headers)
                await read_all(answer, REGISTER_ANSWER_BYTES_MAX)
        except UpstreamError as error:
            return leg_failure(FailureKind.LOST, f"registering the rank at {url}: {error.text}", worker.url)
        except TimeoutError:
            text = f"registering the rank at {url}: no answer within {REGISTER_MS} ms"
            return leg_failure(FailureKind.LOST, text, worker.url)
        if answer.status != 200:
            text = f"registering the rank at {url}: it answered {answer.status}"
            return leg_failure(FailureKind.ANSWERED, text, worker.url)
        return None

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
            while chunk and not first.answer.is_over:
                await exchange.pass_on(chunk)
                chunk = await first.answer.read()
        except UpstreamLost as lost:
            assert trip.pair is not None
            return _lost(trip.pair, lost)
        await exchange.end(chunk)
        return None

    def _praise(self, pair: Pair) -> None:
        for target in (pair.prefill, pair.decode):
            if target is not None:
                self._directory.served(target.worker)

    def _blame(self, pair: Pair, failure: Failure) -> None:
        """Tell the directory what a failed leg says about its worker."""
        for target in (pair.prefill, pair.decode):
            if target is None or target.worker.url != failure.url:
                continue
            worker = target.worker
            if failure.kind is FailureKind.REFUSED:
                self._directory.refused(worker, failure.text)
            elif failure.kind is FailureKind.LOST or failure.kind is FailureKind.BUSY:
                self._directory.doubt(worker)
            if failure.kind in (FailureKind.REFUSED, FailureKind.LOST) or failure.status == WORKERS_FAULT:
                self._directory.failed(worker)
            elif failure.is_root_cause:
                self._directory.served(worker)  # it judged a wrong request, as it should


def _lost(pair: Pair, lost: UpstreamLost) -> Failure:
    url = pair.decode.worker.url
    return leg_failure(FailureKind.LOST, f"decode worker {url}: {lost.text}", url)
