"""One leg of an attempt: a call to a worker, looked at as its answer comes, ended once."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from baton_core.errors import Reason, Verdict
from baton_core.limits import Millis
from baton_core.routing.workers import Target, Worker
from baton_router.directory import Directory
from baton_router.exchange import EVENT_STREAM
from baton_router.failures import (
    JSON_TYPE,
    Failure,
    FailureKind,
    envelope,
    kind_of_answer,
    leg_failure,
)
from baton_router.merging import Scores, scores_in
from baton_router.streamed_errors import StreamedError, first_piece, may_be_error, whole_piece
from baton_router.upstream import Answer, Calling, Upstream, UpstreamError, UpstreamLost, UpstreamRefused, read_all

ERROR_BODY_MS: Millis = 1_000
ERROR_BODY_BYTES_MAX = 1 << 20
DROPPED_BYTES_MAX = 64 << 20
SCORES_BYTES_MAX = 128 << 20

T = TypeVar("T")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What the legs send. With `wants_scores` prefill's answer is kept: it holds the prompt's logprobs.

    `continues`: the answer is to begin where another worker's broke off.
    """

    path: str
    prefill_body: bytes
    decode_body: bytes
    lines: bytes  # of both heads
    wants_scores: bool = False
    continues: bool = False
    streams: bool = False


class FirstBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Decode's answer has begun: its head, and the first bytes of its body (empty: there are none)."""

    answer: Answer
    chunk: bytes


class Leg(ABC, Generic[T]):
    """One upstream call, begun when built, counted as in flight on its worker until it is ended.

    What comes is looked at as it comes, by whoever brings it, so that a leg that goes well costs no task. Only what a
    look cannot settle (an error's words, an error within a stream, the prompt's logprobs) is read by one.
    """

    is_done = False  # `result` is known
    _value: Any = None
    _reading: "asyncio.Task[T | Failure] | None" = None
    _ended = False
    _ends_when_done = False
    _timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        target: Target,
        call: Call,
        body: bytes,
        on_result: Callable[[], None],
        *,
        upstream: Upstream,
        directory: Directory,
    ) -> None:
        self.target = target
        self.worker = target.worker
        self._call = call
        self._on_result = on_result
        self._directory = directory
        directory.began(target, self)
        self._answer = upstream.call(target.worker.url, call.path, body, call.lines)
        self._answer.on_news = self._news

    @property
    def result(self) -> T | Failure:
        """What became of it. To be asked when it is done."""
        return self._value if self._reading is None else self._reading.result()

    @property
    def went_well(self) -> bool:
        """Whether it is done, and a look was enough to see that it is no failure."""
        return self.is_done and self._reading is None and not isinstance(self._value, Failure)

    def _news(self) -> None:
        """Something of the answer came, or it is certain that no more will."""
        if self.is_done or self._reading is not None:
            return
        status = self._answer.status
        try:
            if 200 <= status < 300:
                self._look(self._answer)
            elif status:
                self._read_on(partial(_told, self.worker, self._answer))
            else:
                self._answer.take()  # says why there will be no head
        except UpstreamError as error:
            self._settle(_missed(self.worker, error))

    @abstractmethod
    def _look(self, answer: Calling) -> None:
        """Some of a good answer is here: settle the leg, or read on, or wait. Raises UpstreamError."""

    def _settle(self, value: T | Failure) -> None:
        self._value = value
        self._done()

    def _read_on(self, rest: Callable[[], Awaitable[T | Failure]]) -> None:
        """Let a task find out what becomes of it."""
        self._reading = asyncio.create_task(_read(self.worker, rest))
        self._reading.add_done_callback(lambda task: None if task.cancelled() else self._done())

    def _done(self) -> None:
        self.is_done = True
        if self._timer is not None:
            self._timer.cancel()
        on_result = self._on_result
        if self._ends_when_done:
            self.end()
        on_result()

    @property
    def heard_s(self) -> float:
        """See LiveLeg."""
        return self._answer.heard_s

    def give_up(self, text: str) -> None:
        """See LiveLeg."""
        self._answer.abandon(text)

    def end(self) -> None:
        """Close the call unless its answer was read to the end. Harmless when repeated."""
        if self._ended:
            return
        self._ended = True
        # Nothing is to be heard any more; and what refers to itself in a circle would live until it is searched for.
        self._answer.on_news, self._on_result = None, _unheard
        self._answer.cancel()
        if self._reading is not None:
            self._reading.cancel()
        self._directory.ended(self.target, self)

    def end_when_done(self) -> None:
        """End by itself as soon as there is nothing more to read."""
        self._ends_when_done = True
        if self.is_done:
            self.end()

    def end_at(self, deadline_s: float) -> None:
        """End at `deadline_s` of the loop's clock at the latest."""
        if not self.is_done:  # it nearly always is: prefill has said its one token long before decode's last
            self._timer = asyncio.get_running_loop().call_at(deadline_s, self.end)

    async def closed(self) -> None:
        """After `end`: wait until nothing of it is left."""
        if self._reading is not None:
            await asyncio.wait([self._reading])
        await self._answer.closed()


class DecodeLeg(Leg[FirstBytes]):
    """Comes to the first bytes of decode's answer."""

    def _look(self, answer: Calling) -> None:
        chunk = answer.take()
        if chunk is None:
            return
        if may_be_error(answer, chunk):
            self._read_on(partial(_first_bytes, answer, chunk))
        else:
            self._settle(FirstBytes(answer=answer, chunk=chunk))


class PrefillLeg(Leg["Scores | None"]):
    """Comes to the end of prefill's answer, read for nobody: only that it is no error and ends well matters.

    With `wants_scores` the prompt's logprobs are taken from it.
    """

    _dropped_bytes = 0

    def _look(self, answer: Calling) -> None:
        if self._call.wants_scores:
            self._read_on(partial(_read_scores, answer))
            return
        while chunk := answer.take():
            if not self._dropped_bytes and may_be_error(answer, chunk):
                self._read_on(partial(_drop, answer, chunk))
                return
            self._dropped_bytes += len(chunk)
            if self._dropped_bytes > DROPPED_BYTES_MAX:
                answer.cancel()
                chunk = b""
                break
        if chunk is not None:
            self._settle(None)


def _unheard() -> None:
    """Nobody waits for this leg."""


async def _read(worker: Worker, rest: Callable[[], Awaitable[T | Failure]]) -> T | Failure:
    """What a leg comes to after its `rest`."""
    try:
        return await rest()
    except StreamedError as error:
        return _said(worker, error)
    except UpstreamError as error:
        return _missed(worker, error)


async def _first_bytes(answer: Answer, chunk: bytes) -> FirstBytes:
    return FirstBytes(answer=answer, chunk=await whole_piece(answer, chunk))


async def _read_scores(answer: Answer) -> Scores | None:
    """Prefill's logprobs of the prompt, from a body that is JSON or, where the client streams, events."""
    is_event_stream = answer.headers.get("content-type", "").startswith(EVENT_STREAM)
    body = await first_piece(answer) + await read_all(answer, SCORES_BYTES_MAX)
    return scores_in(body, is_event_stream=is_event_stream)


async def _drop(answer: Answer, chunk: bytes) -> None:
    """Read prefill's stream, which may begin with an error, to its end."""
    size = len(await whole_piece(answer, chunk))
    while more := await answer.read():
        size += len(more)
        if size > DROPPED_BYTES_MAX:
            answer.cancel()
            return


def _missed(worker: Worker, error: UpstreamError) -> Failure:
    """A call that ended without an answer."""
    kind = FailureKind.REFUSED if isinstance(error, UpstreamRefused) else FailureKind.LOST
    return leg_failure(kind, f"{named(worker)}: {error.text}", worker.url)


def _said(worker: Worker, error: StreamedError) -> Failure:
    """What a worker says in the first event of a stream."""
    return Failure(
        kind=kind_of_answer(error.status, error.body),
        status=error.status,
        body=error.body,
        url=worker.url,
        text=f"{named(worker)} began a stream with error {error.status}",
    )


async def _told(worker: Worker, answer: Answer) -> Failure:
    """What a worker says that did not take the request, in its own words, as far as they come."""
    text = f"{named(worker)} answered {answer.status}"
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


def named(worker: Worker) -> str:
    """For people."""
    return f"{worker.role.value} worker {worker.url}"
