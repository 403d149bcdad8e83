"""The road of one prompt: choose a pair, draw a room, send both legs at once, pass decode's answer on.

    pair (503) -> room -> both legs -> decode's first bytes -> client, as they come -> finished
        ^                     |                                       |
        |                     |                                       +--- decode is lost: the stream is continued
        +--- another pair, another room: refused, lost or busy, and the budget allows <---+

The client's status is settled with decode's first *bytes*, not its head: until then prefill may still say that the
request is wrong, and another pair may still be tried from the beginning. After that only a stream whose decode worker
told its tokens goes on elsewhere, from the prompt and what the client has seen.
"""

import time
from collections.abc import Callable

from baton_core.errors import Reason, Verdict
from baton_core.routing.breaker import RetryBudget
from baton_core.routing.pace import Pace, Waiter
from baton_core.routing.pair import Draws, NoPair, Pair, Policies
from baton_core.routing.workers import Role
from baton_io.tracing import Span
from baton_router.attempt import Attempt
from baton_router.calls import Calls, RoadSettings
from baton_router.directory import Directory
from baton_router.exchange import Fields
from baton_router.failures import RETRYABLE, Failure, FailureKind, leg_failure, own_failure
from baton_router.journal import TOKEN_IDS_HEADER, Journal
from baton_router.legs import Call, FirstBytes
from baton_router.merged import merged
from baton_router.metrics import RouterMetrics
from baton_router.trip import Trip
from baton_router.upstream import Upstream, UpstreamLost

DRAW_BITS = 32
FIRST_TOKEN_HEADER = "x-baton-first-token-us"
"""Of decode's stream: from the leg's arrival there to its first token."""
FIRST_TOKEN_DIGITS_MAX = 12
WORKERS_FAULT = 500
"""The one status by which a worker blames itself; 502 and 504 blame another, 503 is only full."""


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
        pace: Pace,
        draw: Callable[[int], int],
    ) -> None:
        self._directory = directory
        self._upstream = upstream
        self._policies = policies
        self._metrics = metrics
        self._settings = settings
        self._budget = budget
        self._pace = pace
        self._draw = draw  # a random integer of that many bits
        self._calls = Calls(settings=settings, upstream=upstream, draw=draw)

    async def serve(self, trip: Trip, fields: Fields) -> Failure | None:
        """Try pairs until one answers (None: it did, to the end) or a failure stands."""
        self._budget.earn()
        pair = self._choose(trip, ())
        avoid: tuple[str, ...] = ()
        while isinstance(pair, Pair):
            if trip.span is None:
                failure = await self._attempt(trip, fields, pair, None)
            else:
                failure = await self._traced(trip, fields, pair, trip.span)
            if failure is None:
                return None
            stands = self._stands(trip, failure)
            if stands is not None:
                return stands
            avoid += (failure.url,)
            pair = self._another(trip, failure, pair, avoid)
            if isinstance(pair, NoPair) and trip.exchange.began:
                return failure.because(f"nobody can continue the answer: {pair.reason}")
            if isinstance(pair, NoPair) and failure.kind is not FailureKind.REFUSED:
                return failure  # its own words, and its own Retry-After
            if isinstance(pair, Pair):
                self._note_another(trip, failure)
        verdict = Verdict(reason=Reason.NO_USABLE_PAIR, text=f"no usable pair of workers: {pair.reason}")
        return own_failure(verdict, retry_after_ms=self._settings.limits.retry_after_ms)

    def room(self) -> int:
        """A fresh room."""
        return self._calls.room()

    # -- which pair

    def _choose(self, trip: Trip, avoid: tuple[str, ...]) -> Pair | NoPair:
        settings, ask = self._settings, trip.ask
        blocked = self._directory.records.blocked()
        avoided = (lambda name: name in blocked or name in avoid) if blocked or avoid else None
        is_local = 0 < ask.prompt_tokens < settings.local_prompt_tokens
        draws = Draws(prefill=self._draw(DRAW_BITS), decode=self._draw(DRAW_BITS))
        fleet, loads = self._directory.fleet, self._directory.records.loads
        pair = fleet.choose(self._policies, ask, loads, draws, avoid=avoided, alone=is_local)
        if isinstance(pair, NoPair) and pair.missing is Role.PREFILL and settings.is_degrading:
            pair = fleet.choose(self._policies, ask, loads, draws, avoid=avoided, alone=True)
            if isinstance(pair, Pair):
                self._metrics.degraded()
        return pair

    def _stands(self, trip: Trip, failure: Failure) -> Failure | None:
        """What the client is to be told; None where another pair may be tried, which spends from the budget."""
        settings, journal = self._settings, trip.journal
        if not trip.exchange.began:
            may = failure.kind in RETRYABLE and trip.attempts <= settings.retries and self._budget.spend()
            return None if may else failure
        if not failure.is_movable or not settings.migrations or not trip.exchange.is_event_stream:
            return failure
        if journal is None:
            return failure.because("the answer cannot be continued elsewhere: the worker told no token ids")
        if trip.migrations >= settings.migrations:
            return failure.because(f"the answer was to be continued {trip.migrations} times already (migrations)")
        if not self._budget.spend():
            return failure.because("the answer is not continued elsewhere: the budget of retries is spent")
        return None

    def _another(self, trip: Trip, failure: Failure, failed: Pair, avoid: tuple[str, ...]) -> Pair | NoPair:
        """A pair without the workers that failed; where there is none, one with what may well be sound of them."""
        pair = self._choose(trip, avoid)
        is_heard = failure.kind is FailureKind.PEER and failure.status != WORKERS_FAULT
        if isinstance(pair, NoPair) and (failure.kind is FailureKind.LOST or is_heard):
            return self._choose(trip, ())  # a broken connection says little about the worker, nor do another's troubles
        ranks = tuple(
            target.key
            for target in (failed.prefill, failed.decode)
            if target is not None and target.worker.url == failure.url and target.dp_rank is not None
        )
        if isinstance(pair, NoPair) and ranks and failure.kind is not FailureKind.REFUSED:
            return self._choose(trip, (*avoid[:-1], *ranks))  # one rank spoke, and only for itself
        return pair

    def _note_another(self, trip: Trip, failure: Failure) -> None:
        if not trip.exchange.began:
            self._metrics.retried(failure.kind)
            return
        trip.migrations += 1
        self._metrics.migrated(failure.kind)

    # -- one pair

    async def _traced(self, trip: Trip, fields: Fields, pair: Pair, whole: Span) -> Failure | None:
        """An attempt with a span of its own in that of the whole request."""
        span = whole.child("attempt", {"baton.decode": pair.decode.key})
        failure: Failure | None = None
        try:
            failure = await self._attempt(trip, fields, pair, span)
        finally:
            prefill = {} if pair.prefill is None else {"baton.prefill": pair.prefill.key}
            told = {"baton.room": str(trip.room)} | prefill  # a text: rooms do not fit the numbers of JSON
            span.end(told, failure=None if failure is None else failure.text)
        return failure

    async def _attempt(self, trip: Trip, fields: Fields, pair: Pair, span: Span | None) -> Failure | None:
        """One pair, one room. On return nothing of a failed attempt is left open. `span`: of this attempt."""
        call = self._calls.prepare(trip, fields, pair, span)
        if self._calls.registers(pair):
            unregistered = await self._calls.register(trip.room, pair)
            if unregistered is not None:
                return unregistered
        waiter = self._waiter(trip, call, pair)
        trip.sent_s = time.monotonic()  # before: a write may wake decode at this process's expense
        attempt = Attempt(pair, call, upstream=self._upstream, directory=self._directory, loop=trip.loop, waiter=waiter)
        try:
            outcome = await attempt.outcome()
            if waiter is not None and isinstance(outcome, Failure) and outcome.is_root_cause:
                waiter.refused(trip.loop.time() * 1000)
            if isinstance(outcome, FirstBytes) and call.wants_scores:
                outcome = await self._scored(trip, attempt, outcome)
            elif isinstance(outcome, FirstBytes) and call.continues and _is_new(outcome):
                outcome = _began_anew(pair)
            elif isinstance(outcome, FirstBytes) and trip.scores is not None:
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

    def _waiter(self, trip: Trip, call: Call, pair: Pair) -> Waiter | None:
        """One more that waits for a first token; None where its coming is not seen, or it came before."""
        if call.continues or (pair.prefill is None and not call.streams):
            return None
        return self._pace.begin(trip.ask.prompt_tokens, trip.loop.time() * 1000)

    async def _scored(self, trip: Trip, attempt: Attempt, first: FirstBytes) -> FirstBytes | Failure:
        """Decode's answer with the prompt's logprobs; prefill has them at the time of decode's first token."""
        trip.exchange.stage = "waiting for the prompt's logprobs"
        scores = await attempt.prompt_scores()
        if isinstance(scores, Failure):
            return scores
        if scores is None or not any(scores.values()):
            return first  # nothing to put in: bytes pass as they are
        trip.scores = scores
        return await self._merged(trip, attempt, first)

    async def _merged(self, trip: Trip, attempt: Attempt, first: FirstBytes) -> FirstBytes | Failure:
        assert trip.scores is not None
        try:
            return await merged(first, trip.scores)
        except UpstreamLost as lost:
            return _lost(attempt.pair, lost)

    async def _relay(self, trip: Trip, first: FirstBytes) -> Failure | None:
        """Pass decode's answer on to its end; a failure when it breaks off."""
        exchange, answer, chunk = trip.exchange, first.answer, first.chunk
        if not exchange.began:
            await self._begin(trip, first)
        elif TOKEN_IDS_HEADER not in answer.headers:
            trip.journal = None  # nothing had passed, and this worker tells no tokens
        exchange.stage = "passing the answer on"
        journal = trip.journal
        assert trip.pair is not None
        if journal is not None:
            journal.resume()
        gaps = self._metrics.itl if exchange.is_event_stream else None
        try:
            while chunk and not answer.is_over:
                if gaps is not None:
                    trip.heard_s = gaps.since(trip.heard_s, time.monotonic())
                await exchange.pass_on(chunk if journal is None else journal.take(chunk))
                if journal is not None and journal.error is not None:
                    return _broke(trip.pair, *journal.error)
                chunk = await answer.read()
            if journal is not None:
                chunk = journal.take(chunk) + journal.rest()
                if journal.error is not None:
                    await exchange.pass_on(chunk)
                    return _broke(trip.pair, *journal.error)
        except UpstreamLost as lost:
            if not (exchange.has_all if journal is None else journal.is_complete):
                return _lost(trip.pair, lost)
            chunk = b""  # only the end of the body is missing: the client has the whole answer
        await exchange.end(chunk)
        return None

    async def _begin(self, trip: Trip, first: FirstBytes) -> None:
        trip.first_byte_s = time.monotonic()
        await trip.exchange.begin(first.answer)
        if trip.exchange.is_event_stream:
            began_s, sent_s = trip.began_s, trip.sent_s
            self._metrics.first_byte(trip.first_byte_s - began_s, sent_s - began_s, _decode_s(first))
            if TOKEN_IDS_HEADER in first.answer.headers:
                trip.journal = Journal()

    # -- what an attempt says about its workers

    def _praise(self, pair: Pair) -> None:
        for target in (pair.prefill, pair.decode):
            if target is not None:
                self._directory.served(target)

    def _blame(self, pair: Pair, failure: Failure) -> None:
        """Tell the directory what a failed leg says about its worker."""
        for target in (pair.prefill, pair.decode):
            if target is None or target.worker.url != failure.url:
                continue
            worker = target.worker
            if failure.kind is FailureKind.REFUSED:
                self._directory.refused(worker, failure.text)
            elif failure.kind in (FailureKind.LOST, FailureKind.BUSY, FailureKind.BROKE, FailureKind.PEER):
                self._directory.doubt(worker)
            if failure.kind in (FailureKind.REFUSED, FailureKind.LOST) or failure.status == WORKERS_FAULT:
                self._directory.failed(target)
            elif failure.is_root_cause:
                self._directory.served(target)  # it judged a wrong request, as it should


def _lost(pair: Pair, lost: UpstreamLost) -> Failure:
    url = pair.decode.worker.url
    return leg_failure(FailureKind.LOST, f"decode worker {url}: {lost.text}", url)


def _decode_s(first: FirstBytes) -> float | None:
    """What decode says that it took to the first token; None where it does not."""
    told = first.answer.headers.get(FIRST_TOKEN_HEADER, "")
    return int(told) / 1e6 if told.isascii() and told.isdigit() and len(told) <= FIRST_TOKEN_DIGITS_MAX else None


def _is_new(first: FirstBytes) -> bool:
    """Whether an answer does not say that it begins with the tokens it was given."""
    return first.answer.headers.get(TOKEN_IDS_HEADER, "0") == "0"


def _began_anew(pair: Pair) -> Failure:
    url = pair.decode.worker.url
    text = f"decode worker {url} began a new answer instead of continuing one"
    return leg_failure(FailureKind.ANSWERED, text, url)


def _broke(pair: Pair, status: int, words: bytes) -> Failure:
    """A worker's own end of an answer that had begun."""
    url = pair.decode.worker.url
    text = f"decode worker {url} ended the answer with status {status}"
    return Failure(kind=FailureKind.BROKE, status=status, body=words, url=url, text=text)
