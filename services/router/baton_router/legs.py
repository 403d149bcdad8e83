"""The two legs of one attempt: opened at once, ended together, unless prefill only has its own end left to say.

Which failure the client sees: a wrong request (4xx) at once, whichever leg says it first. Any other failure that a
worker put into words may be the echo of the other leg's, so the other leg gets a moment to name the cause.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton_core.errors import Reason, Verdict
from baton_core.limits import Millis
from baton_core.routing.pace import Waiter
from baton_core.routing.pair import Pair
from baton_core.routing.workers import Target, Worker
from baton_router.directory import Directory
from baton_router.exchange import EVENT_STREAM
from baton_router.failures import (
    CAUSES,
    JSON_TYPE,
    Failure,
    FailureKind,
    envelope,
    kind_of_answer,
    leg_failure,
    prefer,
)
from baton_router.merging import Scores, scores_in
from baton_router.streamed_errors import StreamedError, first_piece
from baton_router.upstream import Answer, Upstream, UpstreamError, UpstreamLost, UpstreamRefused, read_all

CAUSE_GRACE_MS: Millis = 50
ERROR_BODY_MS: Millis = 1_000
ERROR_BODY_BYTES_MAX = 1 << 20
DROPPED_BYTES_MAX = 64 << 20
SCORES_BYTES_MAX = 128 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the legs send. With `wants_scores` prefill's answer is kept: it holds the prompt's logprobs.

    `continues`: the answer is to begin where another worker's broke off.
    """

    path: str
    prefill_body: bytes
    decode_body: bytes
    headers: Mapping[str, str]
    wants_scores: bool = False
    continues: bool = False
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstBytes:
    """Decode's answer has begun: its head, and the first bytes of its body (empty: there are none)."""

    answer: Answer
    chunk: bytes


class Leg(Generic[T]):
    """One upstream call, opened when built, counted as in flight on its worker until it is ended."""

    def __init__(
        self,
        target: Target,
        call: Call,
        body: bytes,
        consume: Callable[[Answer], Awaitable[T]],
        *,
        upstream: Upstream,
        directory: Directory,
    ) -> None:
        self.target = target
        self.worker = target.worker
        self._upstream = upstream
        self._directory = directory
        self._answer: Answer | None = None
        self._ended = False
        self._began_s = asyncio.get_running_loop().time()
        self._given_up = ""
        directory.began(target, self)
        self.task = asyncio.create_task(self._run(call, body, consume))

    async def _run(self, call: Call, body: bytes, consume: Callable[[Answer], Awaitable[T]]) -> T | Failure:
        worker = self.worker
        try:
            self._answer = await self._upstream.post(worker.url + call.path, body, call.headers)
            if 200 <= self._answer.status < 300:
                return await consume(self._answer)
            return await _told(worker, self._answer)
        except StreamedError as error:
            return _said(worker, error)
        except UpstreamRefused as error:
            return leg_failure(FailureKind.REFUSED, _blame(worker, error), worker.url)
        except UpstreamLost as error:
            return leg_failure(FailureKind.LOST, _blame(worker, error), worker.url)
        except asyncio.CancelledError:
            if not self._given_up:
                raise
            return leg_failure(FailureKind.LOST, f"{_named(worker)}: {self._given_up}", worker.url)

    @property
    def heard_s(self) -> float:
        """See LiveLeg."""
        return self._began_s if self._answer is None else self._answer.heard_s

    def give_up(self, text: str) -> None:
        """See LiveLeg. Before the answer's head only the task waits, after it a reader, in it or elsewhere."""
        if self._answer is not None:
            self._answer.abandon(text)
        elif not self._ended:
            self._given_up = text
            self.task.cancel()

    def end(self) -> None:
        """Close the call unless its answer was read to the end. Harmless when repeated."""
        if self._ended:
            return
        self._ended = True
        self.task.cancel()
        if self._answer is not None:
            self._answer.cancel()
        self._directory.ended(self.target, self)

    def end_when_done(self) -> None:
        """End by itself as soon as there is nothing more to read."""
        self.task.add_done_callback(lambda _task: self.end())

    def end_at(self, deadline_s: float) -> None:
        """End at `deadline_s` of the loop's clock at the latest."""
        if self.task.done():
            return  # nearly always: prefill has said its one token long before decode's last
        # The timer also holds the only lasting reference to this leg: a loop keeps its tasks weakly.
        timer = asyncio.get_running_loop().call_at(deadline_s, self.end)
        self.task.add_done_callback(lambda _task: timer.cancel())


class Attempt:
    """Both legs of one room. `end` or `leave` must follow."""

    def __init__(
        self, pair: Pair, call: Call, *, upstream: Upstream, directory: Directory, waiter: Waiter | None = None
    ) -> None:
        self.pair = pair
        self._waiter = waiter  # for a first token
        self._prefill: Leg[Scores | None] | None = None
        if pair.prefill is not None:
            consume = _read_scores if call.wants_scores else _drop
            self._prefill = Leg(pair.prefill, call, call.prefill_body, consume, upstream=upstream, directory=directory)
            self._prefill.end_when_done()
        self._decode = Leg(pair.decode, call, call.decode_body, _first_bytes, upstream=upstream, directory=directory)

    async def outcome(self) -> FirstBytes | Failure:
        """Decode's first bytes, or the failure that the client should see."""
        pending: list[asyncio.Task[FirstBytes | Failure] | asyncio.Task[Scores | Failure | None]] = [self._decode.task]
        if self._prefill is not None:
            pending.append(self._prefill.task)
        failure: Failure | None = None
        while pending:
            grace_s = None if failure is None else CAUSE_GRACE_MS / 1000
            await asyncio.wait(pending, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            finished = [task for task in pending if task.done()]
            pending = [task for task in pending if not task.done()]
            for task in finished:
                result = task.result()
                if self._waiter is not None and not isinstance(result, Failure):
                    self._waiter.came(_now_ms())  # prefill's answer is its end, and decode's begins with it
                if isinstance(result, FirstBytes):
                    return result
                if isinstance(result, Failure):
                    failure = result if failure is None else prefer(failure, result)
            if failure is not None and (not finished or _stands(failure)):
                break
        assert failure is not None, "decode ended with neither an answer nor a failure"
        return failure

    async def prompt_scores(self) -> Scores | Failure | None:
        """What prefill says about the prompt, with `wants_scores`; None where no prefill worker takes part.

        An answer without them is a failure: the client would take what is left for all that it asked for.
        """
        if self._prefill is None:
            return None
        await asyncio.wait([self._prefill.task])
        result, worker = self._prefill.task.result(), self._prefill.worker
        if result is not None:
            return result
        text = f"{_named(worker)} answered without the prompt's logprobs"
        return leg_failure(FailureKind.ANSWERED, text, worker.url)

    def end(self) -> None:
        """Close both legs. Harmless when repeated."""
        if self._waiter is not None:
            self._waiter.gave_up(_now_ms())
        self._decode.end()
        if self._prefill is not None:
            self._prefill.end()

    async def ended(self) -> None:
        """After `end`: wait until both connections are closed, so that a retry never overlaps what it replaces."""
        legs = [leg.task for leg in (self._decode, self._prefill) if leg is not None]
        await asyncio.wait(legs)

    def leave(self, deadline_s: float) -> None:
        """Decode's answer was complete, so prefill's work is done: let it say so and keep its connection."""
        self._decode.end()
        if self._prefill is not None:
            self._prefill.end_at(deadline_s)
            self._prefill = None


async def _first_bytes(answer: Answer) -> FirstBytes:
    return FirstBytes(answer=answer, chunk=await first_piece(answer))


async def _read_scores(answer: Answer) -> Scores | None:
    """Prefill's logprobs of the prompt, from a body that is JSON or, where the client streams, events."""
    is_event_stream = answer.headers.get("content-type", "").startswith(EVENT_STREAM)
    body = await first_piece(answer) + await read_all(answer, SCORES_BYTES_MAX)
    return scores_in(body, is_event_stream=is_event_stream)


async def _drop(answer: Answer) -> None:
    """Read prefill's body to its end, for nobody: only that it is no error and ends well matters."""
    size = len(await first_piece(answer))
    while size and (chunk := await answer.read()):
        size += len(chunk)
        if size > DROPPED_BYTES_MAX:
            answer.cancel()
            return


def _said(worker: Worker, error: StreamedError) -> Failure:
    """What a worker says in the first event of a stream."""
    return Failure(
        kind=kind_of_answer(error.status, error.body),
        status=error.status,
        body=error.body,
        url=worker.url,
        text=f"{_named(worker)} began a stream with error {error.status}",
    )


async def _told(worker: Worker, answer: Answer) -> Failure:
    """What a worker says that did not take the request, in its own words, as far as they come."""
    text = f"{_named(worker)} answered {answer.status}"
    content_type = answer.headers.get("content-type", "application/octet-stream").encode("latin-1")
    try:
        async with asyncio.timeout(ERROR_BODY_MS / 1000):
            body = await read_all(answer, ERROR_BODY_BYTES_MAX)
    except (UpstreamLost, TimeoutError):
        body = b""
    kind = kind_of_answer(answer.status, body)
    if not body:
        reason = Reason.INVALID_REQUEST if answer.status < 500 else Reason.PEER_LOST
        body, content_type = envelope(Verdict(reason=reason, text=text), answer.status), JSON_TYPE
    retry_after = answer.headers.get("retry-after")
    return Failure(
        kind=kind,
        status=answer.status,
        body=body,
        content_type=content_type,
        retry_after=None if retry_after is None else retry_after.encode("latin-1"),
        url=worker.url,
        text=text,
    )


def _stands(failure: Failure) -> bool:
    """Whether no other leg's failure could explain this one better."""
    return failure.is_root_cause or failure.kind in CAUSES


def _now_ms() -> float:
    return asyncio.get_running_loop().time() * 1000


def _blame(worker: Worker, error: UpstreamError) -> str:
    return f"{_named(worker)}: {error.text}"


def _named(worker: Worker) -> str:
    return f"{worker.role.value} worker {worker.url}"
