"""What is asked for and what came back: one `Load`, many `Sample`s."""

from dataclasses import dataclass
from itertools import pairwise

from baton_cli.errors import UsageError

REQUESTS_MAX = 100_000
TOKENS_MAX = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests arrive and how long they are: `concurrency` closes the loop, `rate_per_s` opens it. Raises UsageError."""

    requests: int
    input_tokens: int
    output_tokens: int
    seed: int
    concurrency: int | None = None
    rate_per_s: float | None = None
    warmup_requests: int = 0
    time_limit_seconds: float = 600.0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate_per_s is None):
            raise UsageError("give one of --concurrency C (closed loop) and --rate R (open loop)")
        if not 0 < self.requests <= REQUESTS_MAX:
            raise UsageError(f"--requests must be 1 to {REQUESTS_MAX}, not {self.requests}")
        for name, tokens in (("input", self.input_tokens), ("output", self.output_tokens)):
            if not 0 < tokens <= TOKENS_MAX:
                raise UsageError(f"--{name}-tokens must be 1 to {TOKENS_MAX}, not {tokens}")
        if self.concurrency is not None and not 0 < self.concurrency <= REQUESTS_MAX:
            raise UsageError(f"--concurrency must be 1 to {REQUESTS_MAX}, not {self.concurrency}")
        if self.rate_per_s is not None and not self.rate_per_s > 0:
            raise UsageError(f"--rate must be above 0 requests a second, not {self.rate_per_s:g}")
        if not 0 <= self.warmup_requests <= REQUESTS_MAX:
            raise UsageError(f"--warmup must be 0 to {REQUESTS_MAX}, not {self.warmup_requests}")
        if not self.time_limit_seconds > 0:
            raise UsageError(f"--time-limit-seconds must be above 0, not {self.time_limit_seconds:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request as its client saw it; times are seconds since the run began.

    `event_times_s` has one entry for each event that brought new tokens. With `failure` the rest is what was seen until
    then.
    """

    prompt_tokens: int
    sent_s: float
    ended_s: float
    event_times_s: tuple[float, ...] = ()
    output_tokens: int = 0
    cached_tokens: int = 0
    late_s: float = 0.0  # sent this much after its time in the schedule
    failure: str | None = None  # a short, bounded word: it is counted by

    @property
    def ttft_ms(self) -> float | None:
        """From sending to the first token; None where none came."""
        return (self.event_times_s[0] - self.sent_s) * 1000 if self.event_times_s else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of a token after the first; None below two tokens."""
        if self.output_tokens < 2 or len(self.event_times_s) < 2:
            return None
        return (self.event_times_s[-1] - self.event_times_s[0]) * 1000 / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Between one event and the next."""
        times = self.event_times_s
        return [(later - earlier) * 1000 for earlier, later in pairwise(times)]

    @property
    def e2e_ms(self) -> float:
        """From sending to the end of the answer."""
        return (self.ended_s - self.sent_s) * 1000
