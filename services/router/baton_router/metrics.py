"""The router's metrics. Every label is a bounded set; every closed set is present from the first scrape, at zero."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton_core.routing.workers import Role, Worker, WorkerState
from baton_router.failures import MOVABLE, RETRYABLE, FailureKind, Rejection

STATUSES = frozenset({200, 400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 499, 500, 502, 503, 504})
"""Statuses with a series of their own; what else a worker may answer counts as `other`."""

WORDS = {status: str(status) for status in STATUSES}
OTHER = "other"

GENERATING_ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")

ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TTFT_STAGES = ("router", "decode", "unattributed")
STAGE_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 600.0)
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFigures:
    """One target at the time of a scrape; `dp_rank` is empty where a worker is chosen as a whole."""

    role: str
    worker: str
    dp_rank: str
    in_flight: int
    load: int
    is_open: bool
    served: int
    failed: int


class _Targets(Collector):
    """Load, breaker and legs of each (worker, DP rank), read when scraped: a request pays nothing for them."""

    def __init__(self, figures: Callable[[], Iterable[TargetFigures]]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        """Nothing: there is no target yet when this is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The series of every known target."""
        names = ("role", "worker", "dp_rank")
        legs = CounterMetricFamily(
            "baton_router_target_legs",
            "Legs that ended well, or by the target's own fault",
            labels=(*names, "outcome"),
        )
        inflight = GaugeMetricFamily(
            "baton_router_target_inflight_requests", "Legs of this router at a target", labels=names
        )
        load = GaugeMetricFamily(
            "baton_router_target_load_requests", "Requests at a target, those of other routers too", labels=names
        )
        breaker = GaugeMetricFamily("baton_router_target_breaker_open", "1: the breaker is open", labels=names)
        for one in self._figures():
            labels = (one.role, one.worker, one.dp_rank)
            legs.add_metric((*labels, "served"), one.served)
            legs.add_metric((*labels, "failed"), one.failed)
            inflight.add_metric(labels, one.in_flight)
            load.add_metric(labels, one.load)
            breaker.add_metric(labels, one.is_open)
        return legs, inflight, load, breaker


class Durations(Collector):
    """A histogram counted by hand, for what happens with every request or token.

    A lock and a walk over the buckets cost a router of one thread more than the count.
    """

    def __init__(self, name: str, meaning: str, buckets: tuple[float, ...]) -> None:
        self._name, self._meaning, self._buckets = name, meaning, buckets
        self._counts = [0] * (len(buckets) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """It happened once."""
        self._counts[bisect_left(self._buckets, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many were not above them."""
        bounds = [*map(str, self._buckets), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))

    def collect(self) -> Iterable[Metric]:
        """The one histogram."""
        yield HistogramMetricFamily(self._name, self._meaning, buckets=self.buckets(), sum_value=self.sum_s)


class Shares(Collector):
    """What a time to first token consists of: each share is told by who spent it, and the rest is nobody's."""

    def __init__(self, name: str, meaning: str, buckets: tuple[float, ...]) -> None:
        self._name, self._meaning, self._buckets = name, meaning, buckets
        self._shares = {stage: Durations(name, meaning, buckets) for stage in TTFT_STAGES}

    def observe(self, ttft_s: float, router_s: float, decode_s: float) -> None:
        """One answer began. No worker took longer than there was, whatever it says: sums of durations only grow."""
        decode_s = min(decode_s, ttft_s - router_s)
        self._shares["router"].observe(router_s)
        self._shares["decode"].observe(decode_s)
        self._shares["unattributed"].observe(ttft_s - router_s - decode_s)

    def collect(self) -> Iterable[Metric]:
        """One histogram, a series each."""
        family = HistogramMetricFamily(self._name, self._meaning, labels=("stage",))
        for stage, durations in self._shares.items():
            family.add_metric((stage,), durations.buckets(), durations.sum_s)
        yield family


class Gaps(Durations):
    """How long clients wait between two pieces of a stream."""

    def since(self, before_s: float | None, now_s: float) -> float:
        """A piece came, after one at `before_s`; the time of this one."""
        if before_s is not None:
            self.observe(now_s - before_s)
        return now_s


class Endings(Collector):
    """Requests that ended, by what the client saw; counted by hand, like durations."""

    def __init__(self) -> None:
        words = (*map(str, sorted(STATUSES)), OTHER)
        self._counts = {(route, word): 0 for route in GENERATING_ROUTES for word in words}

    def count(self, route: str, status: int) -> None:
        """One more."""
        word = WORDS.get(status, OTHER)
        self._counts[route, word] = self._counts.get((route, word), 0) + 1

    def collect(self) -> Iterable[Metric]:
        """The one counter."""
        family = CounterMetricFamily(
            "baton_router_requests", "Requests that ended, by the status the client saw", labels=("route", "status")
        )
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class RouterMetrics:
    """One router's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(namespace="baton_router", registry=registry)
        self._retries = Counter("baton_router_retries", "Further pairs tried, by why", ("reason",), registry=registry)
        self._migrations = Counter(
            "baton_router_migrations",
            "Further pairs tried for an answer that had begun, by why",
            ("reason",),
            registry=registry,
        )
        self._rejections = Counter(
            "baton_router_admission_rejections", "Requests refused by the router itself", ("reason",), registry=registry
        )
        self._local_quotas = Counter(
            "baton_router_local_quotas",
            "Calls for a shared quota that this router answered by its own count, since Redis was away",
            registry=registry,
        )
        self._degraded = Counter(
            "baton_router_degraded", "Choices of a decode worker alone for want of a prefill worker", registry=registry
        )
        self._first_token_waiting = Gauge(
            "baton_router_first_token_waiting_requests", "Requests that wait for their first token", registry=registry
        )
        self._first_token_wait = Gauge(
            "baton_router_first_token_expected_seconds",
            "How long one more request would wait for its first token (0: too few wait to say)",
            registry=registry,
        )
        self._open_breakers = Gauge(
            "baton_router_open_breakers", "Targets whose breaker lets nothing through now", registry=registry
        )
        self.queued = Gauge("baton_router_queue_requests", "Requests waiting to be let in", registry=registry)
        self._broken_streams = Counter(
            "baton_router_broken_streams", "Answers that had begun and ended with an error", registry=registry
        )
        self._endings = Endings()
        self._ttft = Durations(
            "baton_router_ttft_seconds",
            "From the request's head to the first body byte of a streaming answer",
            TTFT_BUCKETS,
        )
        self._ttft_shares = Shares(
            "baton_router_ttft_stage_seconds",
            "What the time to the first body byte of a streaming answer consists of",
            STAGE_BUCKETS,
        )
        self._seconds = Durations(
            "baton_router_request_seconds", "From the request's head to the end of its answer", TTFT_BUCKETS
        )
        self.itl = Gaps("baton_router_itl_seconds", "Between two pieces of a stream", ITL_BUCKETS)
        for counted in (self._endings, self._ttft, self._ttft_shares, self._seconds, self.itl):
            registry.register(counted)
        self._workers = Gauge("baton_router_workers", "Workers known", ("role", "state"), registry=registry)
        self._inflight = Gauge("baton_router_inflight_requests", "Requests under way", registry=registry)
        self._show_closed_sets()

    def _show_closed_sets(self) -> None:
        for kind in FailureKind:
            if kind in RETRYABLE:
                self._retries.labels(kind.value)
        for kind in FailureKind:
            if kind in MOVABLE:
                self._migrations.labels(kind.value)
        for rejection in Rejection:
            self._rejections.labels(rejection.value)
        self.count_workers(())

    def finished(self, route: str, status: int, took_s: float) -> None:
        """A request ended; `status` is what the client saw."""
        self._endings.count(route, status)
        self._seconds.observe(took_s)

    def first_byte(self, ttft_s: float, router_s: float, decode_s: float | None) -> None:
        """A streaming answer began; `router_s` of that this router took itself, `decode_s` decode, where it says so."""
        self._ttft.observe(ttft_s)
        if decode_s is not None:
            self._ttft_shares.observe(ttft_s, router_s, decode_s)

    def broke(self) -> None:
        """An answer that had begun ended with an error."""
        self._broken_streams.inc()

    def under_way_from(self, count: Callable[[], float]) -> None:
        """Where a scrape learns how many requests are under way."""
        self._inflight.set_function(count)

    def open_breakers_from(self, count: Callable[[], float]) -> None:
        """Where a scrape learns how many breakers are open."""
        self._open_breakers.set_function(count)

    def waits_from(self, waiting: Callable[[], float], expected_s: Callable[[], float]) -> None:
        """Where a scrape learns how many wait for a first token, and how long one more would."""
        self._first_token_waiting.set_function(waiting)
        self._first_token_wait.set_function(expected_s)

    def targets_from(self, figures: Callable[[], Iterable[TargetFigures]]) -> None:
        """Where a scrape learns about each target."""
        self._registry.register(_Targets(figures))

    def migrated(self, kind: FailureKind) -> None:
        """Another pair is tried for an answer that had begun."""
        self._migrations.labels(kind.value).inc()

    def counted_alone(self) -> None:
        """Redis did not answer about a quota."""
        self._local_quotas.inc()

    def degraded(self) -> None:
        """A decode worker serves alone, since no prefill worker can."""
        self._degraded.inc()

    def retried(self, kind: FailureKind) -> None:
        """Another pair is tried."""
        self._retries.labels(kind.value).inc()

    def rejected(self, rejection: Rejection) -> None:
        """The router itself refused a request."""
        self._rejections.labels(rejection.value).inc()

    def count_workers(self, workers: tuple[Worker, ...]) -> None:
        """Show how many workers of each role are in each state."""
        for role in Role:
            for state in WorkerState:
                held = sum(1 for worker in workers if worker.role is role and worker.state is state)
                self._workers.labels(role.value, state.value).set(held)

    def export(self) -> bytes:
        """The text a scrape gets."""
        return generate_latest(self._registry)
