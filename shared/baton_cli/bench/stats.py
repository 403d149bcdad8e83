"""From samples to figures: percentiles, throughput, goodput. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from baton_cli.bench.sample import Sample
from baton_cli.errors import UsageError

OUT_OF_TIME = "not finished in the time limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of a duration in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a good request keeps; `itl_ms` bounds the 99th percentile of its own gaps."""

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    itl_ms: float = math.inf
    e2e_ms: float = math.inf

    def holds(self, sample: Sample) -> bool:
        """Whether a request was answered in full and within the bounds."""
        if sample.failure is not None:
            return False
        gaps = sample.gaps_ms
        seen = (
            (sample.ttft_ms, self.ttft_ms),
            (sample.tpot_ms, self.tpot_ms),
            (percentile(gaps, 0.99) if gaps else None, self.itl_ms),
            (sample.e2e_ms, self.e2e_ms),
        )
        return all(value is None or value <= bound for value, bound in seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """How many requests kept the bounds; an infinite bound is None here, because JSON has no infinity."""

    bounds_ms: dict[str, float]
    share: float
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one run. Distributions are over complete requests only; None where there is nothing to show."""

    requests: int
    completed: int
    failures: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    goodput: Goodput | None
    tokens_per_event: float | None
    prompt_tokens: int
    cached_tokens: int
    late_ms_max: float
    client_cpu_share: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lies, interpolated linearly between neighbours."""
    assert values and 0 <= share <= 1
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(values: Sequence[float]) -> Distribution | None:
    """None for no values."""
    if not values:
        return None
    return Distribution(
        count=len(values),
        mean=sum(values) / len(values),
        p50=percentile(values, 0.5),
        p90=percentile(values, 0.9),
        p99=percentile(values, 0.99),
        max=max(values),
    )


def summarise(
    samples: Sequence[Sample], *, client_cpu_share: float, unfinished: int = 0, bounds: Bounds | None = None
) -> Summary:
    """The figures of a run of which `unfinished` requests did not come to an end."""
    complete = [sample for sample in samples if sample.failure is None]
    failures = Counter(sample.failure for sample in samples if sample.failure is not None)
    if unfinished:
        failures[OUT_OF_TIME] += unfinished
    duration_s = _duration_s(samples)
    events = sum(len(sample.event_times_s) for sample in complete)
    tokens = sum(sample.output_tokens for sample in complete)
    return Summary(
        requests=len(samples) + unfinished,
        completed=len(complete),
        failures=dict(sorted(failures.items())),
        duration_s=duration_s,
        requests_per_s=len(complete) / duration_s if duration_s else 0.0,
        output_tokens_per_s=tokens / duration_s if duration_s else 0.0,
        ttft_ms=distribution([sample.ttft_ms for sample in complete if sample.ttft_ms is not None]),
        tpot_ms=distribution([sample.tpot_ms for sample in complete if sample.tpot_ms is not None]),
        itl_ms=distribution([gap for sample in complete for gap in sample.gaps_ms]),
        e2e_ms=distribution([sample.e2e_ms for sample in complete]),
        goodput=None if bounds is None else _goodput(samples, bounds, duration_s, len(samples) + unfinished),
        tokens_per_event=tokens / events if events else None,
        prompt_tokens=sum(sample.prompt_tokens for sample in complete),
        cached_tokens=sum(sample.cached_tokens for sample in complete),
        late_ms_max=max((sample.late_s * 1000 for sample in samples), default=0.0),
        client_cpu_share=client_cpu_share,
    )


def parse_bounds(text: str) -> Bounds:
    """`ttft_ms=200,itl_ms=50` as given to `--goodput`. Raises UsageError."""
    known = [field.name for field in fields(Bounds)]
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            bounds[name] = float(value)
        except ValueError as error:
            raise UsageError(f"--goodput {text}: write it as ttft_ms=200,itl_ms=50") from error
        if name not in known or not bounds[name] > 0:
            raise UsageError(f"--goodput {text}: {part!r} is none of {', '.join(known)} with a number above 0")
    return Bounds(**bounds)


def _goodput(samples: Sequence[Sample], bounds: Bounds, duration_s: float, requests: int) -> Goodput:
    good = sum(1 for sample in samples if bounds.holds(sample))
    said = {field.name: getattr(bounds, field.name) for field in fields(bounds)}
    return Goodput(
        bounds_ms={name: value for name, value in said.items() if math.isfinite(value)},
        share=good / requests if requests else 0.0,
        requests_per_s=good / duration_s if duration_s else 0.0,
    )


def _duration_s(samples: Sequence[Sample]) -> float:
    if not samples:
        return 0.0
    return max(sample.ended_s for sample in samples) - min(sample.sent_s for sample in samples)
