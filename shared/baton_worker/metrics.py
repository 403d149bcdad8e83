"""What `/metrics` shows: the app's own numbers and the last snapshot of each unit's leader, under one role prefix.

A key is a metric name without that prefix, with its labels in braces: `queue_requests{queue=waiting}`. What a scheduler
says gets the label `dp_rank`, except `UNLABELLED`: what both the app and the schedulers count is shown as their sum.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest

from baton_io.ipc import Snapshot
from baton_worker.config import Role

SERIES_MAX = 4_096
"""Distinct keys of one kind; more are dropped and counted, because labels must be bounded sets."""

UNLABELLED = ("admission_rejections_total",)

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 600.0)
SPEED_BUCKETS = (1e7, 2.5e7, 5e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 5e10, 1e11, 2.5e11)
OTHER_BUCKETS = tuple(float(4**power) for power in range(16))

ROUTES = ("generate", "completions", "chat")
STATUSES = (200, 400, 409, 499, 500, 502, 503, 504)
"""Statuses of requests that are shown at zero from the start."""

OF_EVERY_RANK = "transfer_"
"""Metrics whose names begin so are told by all ranks of a unit, each about its own share; others by its leader alone."""

HELP = {
    "requests_total": "Answered requests by route and HTTP status.",
    "request_seconds": "Time from a request's arrival at this worker to its last byte.",
    "first_token_seconds": "Time from a request's arrival at this worker to its first token.",
    "ready": "1 while this worker takes requests.",
    "app_live_requests": "Requests the app has handed to the scheduler and that have not ended.",
    "admission_rejections_total": "Requests refused at the door, by reason.",
    "bad_frames_total": "Frames on the ipc that were dropped because they were not valid.",
    "dropped_series_total": "Metric updates dropped because there were too many series.",
    "rank_progress_age_seconds": "Time since the slowest scheduler was last seen to make progress.",
    "agreement_seconds": "Time in which the ranks of a stage agreed on what they observe.",
    "control_tick_lag_seconds": "How long after it was due a turn of the scheduler's loop began.",
    "poll_state_requests": "Handoffs by KVPoll state.",
    "tpot_seconds": "Mean time of an answer's tokens after the first.",
    "transfer_bytes_total": "Bytes of KV pages moved.",
    "transfer_seconds": "Time in which a finished share of a handoff had its pages touched.",
    "transfer_bytes_per_second": "Speed of a finished share of a handoff.",
    "transfer_bad_frames_total": "What came in where pages come in and was no frame of a writer's, by way.",
    "transfer_failures_total": "Transfers that failed, by reason and way.",
}


class Histogram:
    """Observations of one series."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value


class WorkerMetrics:
    """Collects, and renders for Prometheus. `prefix` is `baton_prefill_` or `baton_decode_`."""

    def __init__(self, role: Role) -> None:
        self.snapshots: dict[int, Snapshot] = {}  # by DP rank
        self._members: dict[int, tuple[int, dict[str, float]]] = {}  # by rank that leads no unit: DP rank, counters
        self._prefix = f"baton_{role.value}_"
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._show_closed_sets()

    def _show_closed_sets(self) -> None:
        for route in ROUTES:
            self._histogram(f"request_seconds{{route={route}}}")
            for status in STATUSES:
                self._counters[f"requests_total{{route={route},status={status}}}"] = 0
        self._histogram("first_token_seconds")

    def count(self, key: str, by: float = 1.0) -> None:
        """Add to a counter; the name ends in `_total`."""
        if self._has_place(self._counters, key):
            self._counters[key] = self._counters.get(key, 0.0) + by

    def set_count(self, key: str, value: float) -> None:
        """Set a counter that somebody else counts."""
        if self._has_place(self._counters, key):
            self._counters[key] = value

    def gauge(self, key: str, value: float) -> None:
        """Set a current value."""
        if self._has_place(self._gauges, key):
            self._gauges[key] = value

    def observe(self, key: str, value: float) -> None:
        """Add an observation to a histogram; the name ends in its unit."""
        if not self._has_place(self._histograms, key) or not math.isfinite(value):
            return
        self._histogram(key).observe(value)

    def _histogram(self, key: str) -> Histogram:
        """That of `key`, a new one where there is none."""
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = Histogram(_buckets(key.partition("{")[0]))
        return found

    def apply(self, dp_rank: int, snapshot: Snapshot) -> None:
        """Take over the numbers of a unit, as its leader tells them."""
        self.snapshots[dp_rank] = snapshot
        self._take_samples(dp_rank, snapshot.samples)

    def apply_member(self, dp_rank: int, snapshot: Snapshot) -> None:
        """Another rank of a unit: of its numbers only those count that differ from its leader's."""
        own = {key: value for key, value in snapshot.counters.items() if key.startswith(OF_EVERY_RANK)}
        self._members[snapshot.rank] = (dp_rank, own)
        self._take_samples(
            dp_rank, {key: values for key, values in snapshot.samples.items() if key.startswith(OF_EVERY_RANK)}
        )

    def _take_samples(self, dp_rank: int, samples: dict[str, list[float]]) -> None:
        for key, values in samples.items():
            labelled = with_dp_rank(key, dp_rank)
            if self._has_place(self._histograms, labelled):
                self._histogram(labelled)  # also where nothing was observed yet
            for value in values:
                self.observe(labelled, value)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All families, for `CollectorRegistry`."""
        gauges, counters = dict(self._gauges), dict(self._counters)
        for dp_rank, snapshot in self.snapshots.items():
            for key, value in (snapshot.gauges | snapshot.counters).items():
                labelled = with_dp_rank(key, dp_rank)
                # The name says what it is: one family must not be shown as two kinds.
                if key.partition("{")[0].endswith("_total"):
                    counters[labelled] = counters.get(labelled, 0.0) + value
                else:
                    gauges[labelled] = value
        for dp_rank, own in self._members.values():
            for key, value in own.items():
                labelled = with_dp_rank(key, dp_rank)
                counters[labelled] = counters.get(labelled, 0.0) + value
        yield from self._families(gauges.items(), "gauge")
        yield from self._families(counters.items(), "counter")
        yield from self._histogram_families()

    def _families(self, series: Iterable[tuple[str, float]], kind: str) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for key, value in series:
            name, labels = parse_key(key)
            base = name.removesuffix("_total") if kind == "counter" else name
            family = families.setdefault(base, self._family(name, base, kind))
            suffix = "_total" if kind == "counter" else ""
            family.add_sample(f"{self._prefix}{base}{suffix}", labels, value)
        yield from families.values()

    def _histogram_families(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for key, histogram in self._histograms.items():
            name, labels = parse_key(key)
            family = families.setdefault(name, self._family(name, name, "histogram"))
            so_far = 0
            for bound, count in zip((*histogram.buckets, math.inf), histogram.counts, strict=True):
                so_far += count
                edge = "+Inf" if bound == math.inf else repr(bound)
                family.add_sample(f"{self._prefix}{name}_bucket", labels | {"le": edge}, so_far)
            family.add_sample(f"{self._prefix}{name}_count", labels, so_far)
            family.add_sample(f"{self._prefix}{name}_sum", labels, histogram.total)
        yield from families.values()

    def _family(self, name: str, base: str, kind: str) -> Metric:
        return Metric(self._prefix + base, HELP.get(name, "Reported by the scheduler."), kind)

    def _has_place(self, table: dict[str, float] | dict[str, Histogram], key: str) -> bool:
        if key in table or len(table) < SERIES_MAX:
            return True
        self._counters["dropped_series_total"] = self._counters.get("dropped_series_total", 0.0) + 1
        return False


def _buckets(name: str) -> tuple[float, ...]:
    if name.endswith("_bytes_per_second"):
        return SPEED_BUCKETS
    return SECONDS_BUCKETS if name.endswith("_seconds") else OTHER_BUCKETS


def with_dp_rank(key: str, dp_rank: int) -> str:
    """The key with the label `dp_rank`, unless it has one or must not have any."""
    name, _, braced = key.partition("{")
    labels = braced.rstrip("}")
    if name in UNLABELLED or "dp_rank=" in labels:
        return key
    return f"{name}{{{labels}{',' if labels else ''}dp_rank={dp_rank}}}"


def parse_key(key: str) -> tuple[str, dict[str, str]]:
    """Name and labels of a key such as `queue_requests{queue=waiting,dp_rank=0}`."""
    name, _, braced = key.partition("{")
    pairs = (pair.partition("=") for pair in braced.rstrip("}").split(",") if pair)
    return name, {label: value.strip('"') for label, _, value in pairs}
