"""From an HTTP request to its answer, for all inference routes: intake, then either one body or a stream.

Nothing is sent before the scheduler's first word, so that a failure up to there has its own HTTP status. One task a
request watches for the client leaving; whatever ends an answer early also ends it in the scheduler.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol

import structlog
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton_core.errors import BatonError, ClientError, Reason, Verdict
from baton_core.limits import Millis
from baton_core.request import Bootstrap, RequestId
from baton_worker.answer import Answer
from baton_worker.config import Role
from baton_worker.continuation import TOKEN_IDS_HEADER, Past, Scribe
from baton_worker.http import (
    BUDGET_HEADER,
    FIRST_TOKEN_HEADER,
    REQUEST_ID_HEADER,
    BodyTooLong,
    encode_json,
    error_body,
    failure,
    read_body,
    request_id_header,
)
from baton_worker.intake import Ask, Intake, check_rid
from baton_worker.schemas import Body, Leg, decode, decode_leg
from baton_worker.streams import Delivery, RequestStream
from baton_worker.traces import RequestTrace
from baton_worker.worker import Worker

log = structlog.get_logger()

GUARD_MS: Millis = 2_000
"""The scheduler keeps every deadline; the app steps in only this long after the request's whole budget."""

FAREWELL_MS: Millis = 1_000
"""How long the guard tries to tell a client that may not read any more."""

CLIENT_CLOSED_REQUEST = 499
EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class Renderer(Protocol):
    """How a route writes an answer."""

    def whole(self, answer: Answer) -> bytes:
        """The body of an answer that is complete."""

    def chunk(self, answer: Answer, text: str) -> bytes:
        """Events for what just arrived; `text` is what became visible. May be empty."""

    def skip(self, answer: Answer, text: str) -> None:
        """Another worker has written the chunk for what just arrived."""

    def tail(self, answer: Answer) -> bytes:
        """Events after the last chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Generic[Body]):
    """One inference route."""

    name: str
    body: type[Body]
    ask: Callable[[Body, Leg, Intake], Ask]
    renderer: Callable[[Body, Worker, float], Renderer]


async def respond(worker: Worker, route: Route[Body], http: HttpRequest) -> Response:
    """Answer one HTTP request."""
    started = time.perf_counter()
    rid = http.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex
    raw = b""
    trace = worker.traces.begin(route.name, rid, http.headers, started)
    try:
        check_rid(rid)
        raw = await read_body(http, worker.limits.body_bytes_max)
        return await _open(worker, route, http, raw, rid, trace, started)
    except ClientDisconnect:
        _end(trace, CLIENT_CLOSED_REQUEST)
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except BatonError as error:
        bootstrap, rid = _room_of_refused(worker.intake, raw, rid)
        worker.refuse(rid, bootstrap, error.verdict)
        status = error.status if isinstance(error, BodyTooLong) else error.verdict.status
        _record(worker, route.name, status, started)
        _end(trace, status, error.verdict)
        log.info("request.refused", rid=rid, room=bootstrap and bootstrap.room, status=status, error=str(error))
        return failure(error.verdict, worker.limits, rid=rid, status=status)


async def _open(
    worker: Worker,
    route: Route[Body],
    http: HttpRequest,
    raw: bytes,
    rid: RequestId,
    trace: RequestTrace | None,
    started: float,
) -> "LiveResponse":
    worker.check_open()
    body = decode(raw, route.body)
    assert isinstance(body, Leg), "every inference body is a leg"
    rid = check_rid(body.rid) if body.rid is not None else rid
    ask = route.ask(body, body, worker.intake)
    budget_ms = worker.intake.budget_ms(http.headers.get(BUDGET_HEADER))
    prepared = await worker.intake.prepare(ask, worker.context_tokens)
    parts = body.baton_continuation
    past = None if parts is None else Past(parts, worker.intake.tokenizer.vocab_size)
    answer = Answer(
        rid=rid if past is None else past.start.rid,
        prompt=prepared.prompt,
        tokenizer=worker.intake.tokenizer,
        stop=prepared.stop,
        skip_special=prepared.skip_special,
        keep_stop=prepared.keep_stop,
        judged=prepared.sampling.logprobs is not None,
        created=int(time.time()) if past is None else past.start.created,
    )
    renderer = route.renderer(body, worker, started)
    if past is not None:
        prompt, sampling = past.prompt(prepared.prompt), past.sampling(prepared.sampling)
        prepared = replace(prepared, prompt=prompt, sampling=sampling)
        if worker.role is Role.DECODE:
            replay(past, answer, renderer)
    scribe = None
    if ask.stream and worker.role is Role.DECODE and http.headers.get(TOKEN_IDS_HEADER) == "1":
        scribe = Scribe(answer, prepared.sampling, is_fresh=past is None)
    stream = worker.submit(prepared, rid, budget_ms)
    answer.dp_rank = stream.dp_rank
    worker.traces.follow(trace, stream.scheduler_rid)
    return LiveResponse(
        worker=worker,
        route=route.name,
        stream=stream,
        answer=answer,
        renderer=renderer,
        scribe=scribe,
        room=0 if prepared.bootstrap is None else prepared.bootstrap.room,
        streaming=ask.stream,
        guard_ms=budget_ms + GUARD_MS,
        trace=trace,
        started=started,
    )


class LiveResponse(Response):
    """The answer of a request the scheduler has. Must be called: from construction on it owns the stream."""

    def __init__(
        self,
        *,
        worker: Worker,
        route: str,
        stream: RequestStream,
        answer: Answer,
        renderer: Renderer,
        scribe: Scribe | None,
        room: int,
        streaming: bool,
        guard_ms: Millis,
        trace: RequestTrace | None,
        started: float,
    ) -> None:
        super().__init__()
        self._worker, self._route, self._stream = worker, route, stream
        self._answer, self._renderer, self._scribe = answer, renderer, scribe
        self._room, self._streaming = room, streaming
        self._guard_ms, self._trace, self._started = guard_ms, trace, started
        self._begun = False  # whether headers are out
        self._first: tuple[float, int] | None = None  # when the first tokens of ours came, and how many there were

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, then make sure that nothing of the request lives on."""
        watch = asyncio.create_task(self._watch_client(receive))
        status = CLIENT_CLOSED_REQUEST
        try:
            async with asyncio.timeout(self._guard_ms / 1000):
                status = await self._respond(scope, receive, send)
        except TimeoutError:
            status = await self._give_up(scope, receive, send)
        finally:
            watch.cancel()
            if self._answer.ending is None:
                self._worker.abort(self._stream, Verdict(reason=Reason.CLIENT_GONE, text="the client left"))
            self._finished(status)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> int:
        text = await self._advance()
        while not self._streaming and self._answer.ending is None:
            await self._advance()
        if self._answer.failure is not None:
            return await self._fail(self._answer.failure, scope, receive, send)
        if self._streaming:
            return await self._stream_events(text, send)
        body = self._renderer.whole(self._answer)
        headers = request_id_header(self._answer.rid)
        await Response(body, headers=headers, media_type="application/json")(scope, receive, send)
        return 200

    async def _stream_events(self, text: str, send: Send) -> int:
        headers = EVENT_STREAM | request_id_header(self._answer.rid)
        scribe = self._scribe
        if scribe is not None:
            headers[TOKEN_IDS_HEADER] = str(scribe.given)
        headers[FIRST_TOKEN_HEADER] = str(int((time.perf_counter() - self._started) * 1e6))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        while self._answer.failure is None:
            events = self._renderer.chunk(self._answer, text)
            over = self._answer.ending is not None
            if over:
                events += self._renderer.tail(self._answer)
            if scribe is not None:
                events = scribe.last(events) if over else scribe.part(events)
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": not over})
            if over:
                return 200
            text = await self._advance()
        failed = error_event(self._answer.failure)
        if scribe is not None:
            failed = scribe.failed(failed, self._answer.failure.status)
        await send({"type": "http.response.body", "body": failed, "more_body": False})
        return self._answer.failure.status

    async def _advance(self) -> str:
        """Wait for the scheduler's next words and take them in."""
        given = len(self._answer.output_ids)
        delivery = await self._stream.take()
        text = self._answer.feed(delivery)
        tokens = len(self._answer.output_ids)
        if self._first is None and tokens > given:
            now = time.perf_counter()
            self._first = now, tokens
            if not given:
                self._worker.metrics.observe("first_token_seconds", now - self._started)
        if self._answer.ending is not None and delivery.finish is None:
            self._worker.stop_here(self._stream)  # a stop string: the scheduler cannot know
        return text

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        verdict = Verdict(reason=Reason.CLIENT_GONE, text="the client closed the connection")
        if not self._stream.ended:
            self._worker.abort(self._stream, verdict)
            self._stream.end(verdict)

    async def _fail(self, verdict: Verdict, scope: Scope, receive: Receive, send: Send) -> int:
        await failure(verdict, self._worker.limits, rid=self._answer.rid)(scope, receive, send)
        return verdict.status

    async def _give_up(self, scope: Scope, receive: Receive, send: Send) -> int:
        """The last guard: the budget is long over, and the scheduler said nothing or the client reads nothing."""
        text = f"the request's budget is over since {GUARD_MS} ms, and it has not ended"
        verdict = Verdict(reason=Reason.DEADLINE, text=text)
        log.warning("request.guard", rid=self._answer.rid, room=self._room, text=text)
        self._worker.abort(self._stream, verdict)
        self._stream.end(verdict)
        try:
            async with asyncio.timeout(FAREWELL_MS / 1000):
                if not self._begun:
                    return await self._fail(verdict, scope, receive, send)
                await send({"type": "http.response.body", "body": error_event(verdict), "more_body": False})
        except TimeoutError:
            log.warning("request.client_not_reading", rid=self._answer.rid, room=self._room)
        return verdict.status

    def _finished(self, status: int) -> None:
        _record(self._worker, self._route, status, self._started)
        verdict = self._answer.failure
        later = 0 if self._first is None else len(self._answer.output_ids) - self._first[1]
        if self._first is not None and later > 0:
            self._worker.metrics.observe("tpot_seconds", (time.perf_counter() - self._first[0]) / later)
        _end(self._trace, status, verdict)
        log.info(
            "request.answered",
            rid=self._answer.rid,
            room=self._room,
            dp_rank=self._stream.dp_rank,
            status=status,
            reason=None if verdict is None else verdict.reason.name.lower(),
            prompt_tokens=len(self._answer.prompt),
            completion_tokens=len(self._answer.output_ids),
            took_ms=round((time.perf_counter() - self._started) * 1000, 1),
        )


def replay(past: Past, answer: Answer, renderer: Renderer) -> None:
    """Bring `answer` and `renderer` to where the worker before left them. Raises ClientError if it left nothing open."""
    for part in past.parts:
        text = answer.feed(
            Delivery(
                tokens=tuple(part.tokens),
                finish=None,
                cached_tokens=0,
                logprobs=tuple(part.logprobs),
                prompt_logprobs=tuple(part.prompt_logprobs),
            )
        )
        if answer.ending is not None:
            raise ClientError("baton_continuation: the answer is complete, a stop string ends it")
        renderer.skip(answer, text)
    answer.resume(past.start.cached_tokens)


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


def error_event(verdict: Verdict) -> bytes:
    """The event that ends a stream which failed. No [DONE] follows: the answer is not complete."""
    return event(error_body(verdict))


def _room_of_refused(intake: Intake, raw: bytes, rid: RequestId) -> tuple[Bootstrap | None, RequestId]:
    """Room and id of a body that was refused, as far as they can be read."""
    leg = decode_leg(raw) if raw else None
    if leg is None:
        return None, rid[:256] or "unreadable"
    try:
        rid = check_rid(leg.rid) if leg.rid is not None else rid
        return intake.bootstrap(leg), rid
    except BatonError:
        return None, rid


def _end(trace: RequestTrace | None, status: int, verdict: Verdict | None = None) -> None:
    if trace is not None:
        trace.end(status, "" if verdict is None else verdict.reason.name.lower())


def _record(worker: Worker, route: str, status: int, started: float) -> None:
    worker.metrics.count(f"requests_total{{route={route},status={status}}}")
    worker.metrics.observe(f"request_seconds{{route={route}}}", time.perf_counter() - started)
