"""What happened in the last minute and which requests failed last: for the status page, in bounded memory."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton_router.exchange import Exchange
from baton_router.failures import Failure

WINDOW_S = 60
FAILURES_MAX = 20
TTFT_MAX = 512
"""Times to first token kept; of more, the latest."""
TEXT_CHARS_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureNote:
    """One request that failed."""

    at_s: float  # since 1970
    rid: str
    route: str
    status: int
    worker: str
    text: str


@dataclass(slots=True)
class _Second:
    number: int
    requests: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of the last minute, or of the time since the start if that is shorter."""

    requests_per_s: float
    failures_per_s: float
    ttft_s: dict[float, float] = field(default_factory=dict)  # by quantile; empty where no answer streamed


class Recent:
    """Filled by the dispatch, once a request. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S)
        self._ttft: deque[tuple[float, float]] = deque(maxlen=TTFT_MAX)
        self.under_way = 0  # requests
        self.failures: deque[FailureNote] = deque(maxlen=FAILURES_MAX)  # the latest last

    def finished(self, exchange: Exchange, ttft_s: float | None) -> None:
        """A request ended. A client that left, or asked for what cannot be, is no failure of ours."""
        now_s = self._clock()
        if not self._seconds or self._seconds[-1].number != int(now_s):
            self._seconds.append(_Second(int(now_s)))
        second = self._seconds[-1]
        second.requests += 1
        if ttft_s is not None:
            self._ttft.append((now_s, ttft_s))
        failure = exchange.failure
        if failure is not None and (failure.status >= 500 or exchange.status < 400):
            second.failures += 1
            self.failures.append(_noted(exchange, failure))

    def rates(self) -> Rates:
        """How it goes now."""
        now_s = self._clock()
        seconds = [one for one in self._seconds if one.number > now_s - WINDOW_S]
        span_s = max(1.0, min(WINDOW_S, now_s - self._began_s))
        ttft = sorted(ttft_s for at_s, ttft_s in self._ttft if at_s > now_s - WINDOW_S)
        return Rates(
            requests_per_s=sum(one.requests for one in seconds) / span_s,
            failures_per_s=sum(one.failures for one in seconds) / span_s,
            ttft_s={share: ttft[min(len(ttft) - 1, int(share * len(ttft)))] for share in (0.5, 0.95) if ttft},
        )


def _noted(exchange: Exchange, failure: Failure) -> FailureNote:
    return FailureNote(
        at_s=time.time(),
        rid=exchange.rid,
        route=exchange.route,
        status=failure.status,
        worker=failure.url,
        text=failure.text[:TEXT_CHARS_MAX],
    )
