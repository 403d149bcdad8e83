"""What the scheduler says about each live request, from the one reader of the ipc to the handlers that answer.

One producer (the link's loop) and one consumer (the request's handler) on one event loop: no locks, no task a token. A
stream's buffer is bounded by the request's own output length, because all that is pending is handed over at once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton_core.effects import Emit
from baton_core.errors import ClientError, Overloaded, Reason, Verdict
from baton_core.request import Finish, FinishType, RequestId, TokenLogprob

REMEMBERED_IDS_MAX = 65_536
"""Ids used lately: the scheduler may hold one a while after its answer, until nobody can touch its pages."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """New tokens since the last delivery, and the end if it has come; logprobs, one a token, for who asked for them."""

    tokens: tuple[int, ...]
    finish: Finish | None
    cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class RequestStream:
    """Tokens of one request, until its end. `rid` is the id the client knows, `scheduler_rid` the scheduler's.

    `dp_rank` is the unit that serves it.
    """

    __slots__ = (
        "_cached_tokens",
        "_finish",
        "_logprobs",
        "_prompt_logprobs",
        "_tokens",
        "_waiter",
        "dp_rank",
        "rid",
        "scheduler_rid",
    )

    def __init__(self, rid: RequestId, scheduler_rid: RequestId, dp_rank: int = 0) -> None:
        self.rid = rid
        self.scheduler_rid = scheduler_rid
        self.dp_rank = dp_rank
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._finish: Finish | None = None
        self._cached_tokens = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the end has come (delivered or not)."""
        return self._finish is not None

    @property
    def went_well(self) -> bool:
        """Whether it ended with its answer."""
        return self._finish is not None and self._finish.type is not FinishType.ABORT

    def push(self, emit: Emit) -> None:
        """The scheduler said something. Ignored after the end."""
        if self._finish is not None:
            return
        if emit.logprobs:
            # A token that came without (its prefill leg was not asked) must not shift those of the others.
            self._logprobs += map(unjudged, self._tokens[len(self._logprobs) :])
            self._logprobs += emit.logprobs
        self._prompt_logprobs += emit.prompt_logprobs
        self._tokens += emit.tokens
        self._finish = emit.finish
        self._cached_tokens = emit.cached_tokens or self._cached_tokens
        self._wake()

    def end(self, verdict: Verdict) -> None:
        """End the stream from this side; what the scheduler still says is ignored."""
        self.push(Emit(rid=self.scheduler_rid, finish=Finish(type=FinishType.ABORT, verdict=verdict)))

    async def take(self) -> Delivery:
        """All that is pending, waiting for something if nothing is. Call by one consumer, not again after the end."""
        if not self._tokens and self._finish is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delivery = Delivery(
            tokens=tuple(self._tokens),
            finish=self._finish,
            cached_tokens=self._cached_tokens,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )
        self._tokens, self._logprobs, self._prompt_logprobs = [], [], []
        return delivery

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def unjudged(token: int) -> TokenLogprob:
    """What is said of a token whose logprob is not known."""
    return TokenLogprob(token=token, logprob=None)


class Streams:
    """The streams of all requests the schedulers have not ended, by the scheduler's id."""

    def __init__(self, *, live_max: int, on_close: Callable[[RequestStream], None] = lambda _: None) -> None:
        """`live_max` bounds the requests of one unit; `on_close` is told of each stream that is over."""
        self._live_max = live_max
        self._on_close = on_close
        self._live: dict[int, int] = {}  # by unit
        self._by_scheduler_rid: dict[RequestId, RequestStream] = {}
        self._by_rid: dict[RequestId, RequestStream] = {}
        self._remembered: OrderedDict[RequestId, int] = OrderedDict()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._by_scheduler_rid)

    def live(self, dp_rank: int) -> int:
        """How many requests one unit has."""
        return self._live.get(dp_rank, 0)

    def open(self, rid: RequestId, dp_rank: int = 0) -> RequestStream:
        """A stream for a new request. Raises ClientError when `rid` is live, Overloaded when too many are."""
        if rid in self._by_rid:
            raise ClientError(f"request id {rid!r} is in use by a live request; choose another", Reason.DUPLICATE_RID)
        if self.live(dp_rank) >= self._live_max:
            raise Overloaded(f"{self._live_max} requests are live here (waiting_max); retry later")
        stream = RequestStream(rid, self.scheduler_rid(rid), dp_rank)
        self._by_scheduler_rid[stream.scheduler_rid] = self._by_rid[rid] = stream
        self._live[dp_rank] = self.live(dp_rank) + 1
        self._empty.clear()
        return stream

    def scheduler_rid(self, rid: RequestId) -> RequestId:
        """An id for the scheduler: `rid` itself, with a count behind it where `rid` was used before."""
        used = self._remembered.pop(rid, 0)
        self._remembered[rid] = used + 1
        if len(self._remembered) > REMEMBERED_IDS_MAX:
            self._remembered.popitem(last=False)
        return f"{rid}#{used + 1}" if used else rid

    def is_live(self, scheduler_rid: RequestId) -> bool:
        """Whether the scheduler's request of this id has not ended."""
        return scheduler_rid in self._by_scheduler_rid

    def find(self, rid: RequestId) -> RequestStream | None:
        """The live request the client calls `rid`."""
        return self._by_rid.get(rid)

    def deliver(self, emits: Iterable[Emit]) -> None:
        """Hand what the scheduler says to its streams; an id without one was answered here already."""
        for emit in emits:
            stream = self._by_scheduler_rid.get(emit.rid)
            if stream is not None:
                stream.push(emit)
                if emit.finish is not None:
                    self.close(stream)

    def close(self, stream: RequestStream) -> None:
        """The scheduler ended this request, or never got it."""
        if self._by_scheduler_rid.pop(stream.scheduler_rid, None) is not None:
            del self._by_rid[stream.rid]
            self._live[stream.dp_rank] -= 1
            self._on_close(stream)
        if not self._by_scheduler_rid:
            self._empty.set()

    def end_all(self, verdict: Verdict, dp_rank: int | None = None) -> None:
        """The schedulers are gone, or the unit `dp_rank` is: everybody there gets `verdict`."""
        for stream in list(self._by_scheduler_rid.values()):
            if dp_rank in (None, stream.dp_rank):
                stream.end(verdict)
                self.close(stream)

    async def empty(self) -> None:
        """Wait until no request is live."""
        await self._empty.wait()
