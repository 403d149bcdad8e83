"""A circuit breaker for one worker, and the budget of retries of a whole router; time comes in as an argument.

    CLOSED -- failures_max failures in a row --> OPEN -- open_ms later --> HALF_OPEN -- its trial does well --> CLOSED
                                                  ^                          |
                                                  +------ the trial fails ---+

Half open means that one request at a time is let through. Only what a worker itself is to blame for counts.
"""

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from baton_core.limits import Millis

RETRIES = 2
RETRIES_PER_REQUEST = 0.2
RETRIES_BURST = 256
BREAKER_FAILURES_MAX = 5
BREAKER_OPEN_MS: Millis = 5_000
"""The router's defaults, here because the simulated router of `baton bench route` has the same."""


class BreakerState(Enum):
    """What a breaker lets through."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing
    HALF_OPEN = "half_open"  # one trial at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """When a breaker opens, and for how long."""

    failures_max: int = BREAKER_FAILURES_MAX  # in a row
    open_ms: Millis = BREAKER_OPEN_MS

    def __post_init__(self) -> None:
        if self.failures_max < 1 or self.open_ms < 1:
            raise ValueError(f"failures_max {self.failures_max} and open_ms {self.open_ms} must be positive")


class Breaker:
    """The breaker of one worker."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._opened_at: Millis = 0
        self._trial_since: Millis | None = None

    def state(self, now: Millis) -> BreakerState:
        """The state at that time."""
        if self._state is BreakerState.OPEN and now - self._opened_at >= self._limits.open_ms:
            return BreakerState.HALF_OPEN
        return self._state

    def admits(self, now: Millis) -> bool:
        """Whether a request may go to the worker. Changes nothing."""
        match self.state(now):
            case BreakerState.CLOSED:
                return True
            case BreakerState.OPEN:
                return False
            case BreakerState.HALF_OPEN:
                # A trial that never comes back (its client left) must not keep the worker out for ever.
                return self._trial_since is None or now - self._trial_since >= self._limits.open_ms
            case other:
                assert_never(other)

    def sent(self, now: Millis) -> None:
        """A request goes to the worker; in a half-open breaker it is the trial."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._state = BreakerState.HALF_OPEN
            self._trial_since = now

    def succeeded(self) -> None:
        """The worker answered well."""
        self._state, self._failures, self._trial_since = BreakerState.CLOSED, 0, None

    def failed(self, now: Millis) -> None:
        """The worker failed a request, by its own fault."""
        self._failures += 1
        if self._state is not BreakerState.CLOSED or self._failures >= self._limits.failures_max:
            self._state, self._opened_at, self._trial_since = BreakerState.OPEN, now, None


class RetryBudget:
    """Retries are a share of the requests, so that an overloaded fleet is not given a multiple of its work."""

    def __init__(self, *, per_request: float, burst: int) -> None:
        if not 0 <= per_request <= 10 or burst < 0:
            raise ValueError(f"retries per request {per_request} and burst {burst}: out of range")
        self._per_request = per_request
        self._burst = float(burst)
        self._left = float(burst)

    def earn(self) -> None:
        """A request came in."""
        self._left = min(self._burst, self._left + self._per_request)

    def spend(self) -> bool:
        """Take one retry, if there is one."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
