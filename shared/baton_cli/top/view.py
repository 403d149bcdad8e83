"""From scrapes to the figures of one frame. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from baton_cli.top.series import Histogram, Window

RUNNING = ("running", "computing", "forwarding")
ENDED = ("done", "failed", "revoking")
STAGES = {
    "prefill": ("bootstrapping", "accepted", "queued", "forwarding", "inflight"),
    "decode": ("resolving", "greeting", "prealloc", "transferring", "arrived", "running", "local", "computing"),
}
"""In the order of a request's way; others follow."""
POLLS = ("Bootstrapping", "WaitingForInput", "Transferring", "Success", "Failed")
BETWEEN_TOKENS = {"itl_seconds": "ITL", "tpot_seconds": "TPOT", "step_seconds": "STEP"}
"""Histograms that tell how fast tokens follow each other, the best first, and what the column is then called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Percentiles in seconds; None: nothing was observed."""

    p50: float | None = None
    p99: float | None = None

    @staticmethod
    def of(found: Histogram) -> "Times":
        return Times(p50=found.quantile(0.5), p99=found.quantile(0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A worker, or one DP rank of it (`rank`). None: it does not say."""

    role: str
    name: str
    rank: str = ""
    state: str = ""
    breaker: str = "closed"
    running: int | None = None
    waiting: int | None = None
    polls: tuple[int, ...] = ()
    pages: int | None = None
    pages_free: int | None = None
    quarantined: int = 0
    tokens_per_s: float | None = None
    ttft: Times = Times()
    between: Mapping[str, Times] = field(default_factory=dict)  # by the histogram's name
    tick_p99_s: float | None = None
    hit_share: float | None = None
    rejected: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the handoff, over all workers of a role."""

    role: str
    name: str
    now: int
    per_s: float | None
    times: Times


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFigures:
    """What the router says; `fault`: why it says nothing."""

    url: str
    fault: str = ""
    usable: str = ""  # workers of each role
    requests_per_s: float | None = None
    errors: float = 0.0
    under_way: int | None = None
    queued: int | None = None
    open_breakers: int | None = None
    retries: float = 0.0
    broken: float = 0.0
    ttft: Times = Times()
    itl: Times = Times()
    whole: Times = Times()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One frame."""

    clock: str
    seconds: float  # that rates and percentiles cover; 0: since each process started
    router: RouterFigures
    rows: tuple[Row, ...]
    stages: tuple[Stage, ...]
    rejections: Mapping[str, float]
    failures: Mapping[str, float]
    between: str = "step_seconds"  # of BETWEEN_TOKENS, what is shown
    history: Sequence[float] = field(default_factory=tuple)  # decode's tokens a second, oldest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A worker as the router (or the command line) names it, and its scrapes. `window` None: it does not answer."""

    url: str
    role: str
    state: str = ""
    breaker: str = "closed"
    window: Window | None = None


def rows_of(known: Known) -> list[Row]:
    """One row; with several DP ranks one more for each."""
    name = urlsplit(known.url).netloc
    if known.window is None:
        return [Row(role=known.role, name=name, state="no answer", breaker=known.breaker)]
    ranks = known.window.now.values_of(f"baton_{known.role}_queue_requests", "dp_rank")
    whole = _row(known, name, "", known.window)
    if len(ranks) < 2:
        return [whole]
    return [whole, *(_row(known, name, rank, known.window, dp_rank=rank) for rank in ranks)]


def _row(known: Known, name: str, rank: str, window: Window, **labels: str) -> Row:
    prefix = f"baton_{known.role}_"
    now = window.now
    queues = now.by(f"{prefix}queue_requests", "queue", **labels)
    polls = now.by(f"{prefix}poll_state_requests", "state", **labels)
    asked = window.increase(f"{prefix}prefix_asked_tokens_total", **labels)
    hit = window.increase(f"{prefix}prefix_hit_tokens_total", **labels)
    ready = now.total(f"{prefix}ready")
    return Row(
        role=known.role,
        name=name,
        rank=rank,
        state=known.state or ("" if ready is None else "ready" if ready else "unready"),
        breaker=known.breaker,
        running=_sum(queues, lambda queue: queue in RUNNING),
        waiting=_sum(queues, lambda queue: queue not in (*RUNNING, *ENDED)),
        polls=tuple(int(polls.get(state, 0)) for state in POLLS) if polls else (),
        pages=_whole(now.total(f"{prefix}pages", **labels)),
        pages_free=_whole(now.total(f"{prefix}pages_free", **labels)),
        quarantined=int(now.total(f"{prefix}quarantined_pages", **labels) or 0),
        tokens_per_s=window.rate(f"{prefix}step_tokens_total", **labels),
        ttft=Times.of(window.histogram(f"{prefix}first_token_seconds", **labels)),
        between={name: Times.of(window.histogram(prefix + name, **labels)) for name in BETWEEN_TOKENS},
        tick_p99_s=window.histogram(f"{prefix}control_tick_lag_seconds", **labels).quantile(0.99),
        hit_share=hit / asked if asked and hit is not None else None,
        rejected=window.increase(f"{prefix}admission_rejections_total", **labels),
    )


def stages_of(workers: Sequence[Known]) -> list[Stage]:
    """Every stage that somebody is in, or was in during the window."""
    found = []
    for role, order in STAGES.items():
        windows = [one.window for one in workers if one.role == role and one.window is not None]
        seen = {name for window in windows for name in window.now.values_of(f"baton_{role}_queue_requests", "queue")}
        for name in (*order, *sorted(seen - set(order) - {"intake", "done", "failed"})):
            total, now = Histogram(), 0
            for window in windows:
                total = total.plus(window.histogram(f"baton_{role}_handoff_stage_seconds", stage=name))
                now += int(window.now.total(f"baton_{role}_queue_requests", queue=name) or 0)
            if not total.count and not now:
                continue
            seconds = max((window.seconds for window in windows), default=0.0)
            rate = total.count / seconds if seconds else None
            found.append(Stage(role=role, name=name, now=now, per_s=rate, times=Times.of(total)))
    return found


def counts_by_reason(workers: Sequence[Known], router: Window | None, kind: str) -> dict[str, float]:
    """`role reason` → how many in the window, most first; of the counter `baton_<role>_<kind>_total`."""
    sums: dict[str, float] = {}
    windows = [(one.role, one.window) for one in workers] + [("router", router)]
    for role, window in windows:
        if window is None:
            continue
        for reason, grown in window.increases(f"baton_{role}_{kind}_total", "reason").items():
            key = f"{role} {reason}"
            sums[key] = sums.get(key, 0.0) + grown
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def router_figures(url: str, window: Window | None, fault: str, info: Mapping[str, Any]) -> RouterFigures:
    """Of the router."""
    if window is None:
        return RouterFigures(url=url, fault=fault or "no answer")
    now, prefix = window.now, "baton_router_"
    by_status = window.increases(f"{prefix}requests_total", "status")
    usable = dict.fromkeys(("prefill", "decode"), 0)
    for worker in info.get("workers") or []:
        if worker.get("state") == "ready" and worker.get("role") in usable:
            usable[worker["role"]] += 1
    return RouterFigures(
        url=url,
        fault=fault,
        usable=f"{usable['prefill']} prefill and {usable['decode']} decode workers usable",
        requests_per_s=window.rate(f"{prefix}requests_total"),
        errors=sum(grown for status, grown in by_status.items() if status.startswith("5")),
        under_way=_whole(now.total(f"{prefix}inflight_requests")),
        queued=_whole(now.total(f"{prefix}queue_requests")),
        open_breakers=_whole(now.total(f"{prefix}open_breakers")),
        retries=window.increase(f"{prefix}retries_total") or 0.0,
        broken=window.increase(f"{prefix}broken_streams_total") or 0.0,
        ttft=Times.of(window.histogram(f"{prefix}ttft_seconds")),
        itl=Times.of(window.histogram(f"{prefix}itl_seconds")),
        whole=Times.of(window.histogram(f"{prefix}request_seconds")),
    )


def view_of(
    *,
    clock: str,
    router: RouterFigures,
    router_window: Window | None,
    workers: Sequence[Known],
    history: Sequence[float],
) -> View:
    """The frame of one moment."""
    windows = [one.window for one in workers if one.window is not None]
    longest = max((window.seconds for window in windows), default=0.0)
    ordered = sorted(workers, key=lambda one: (one.role != "prefill", one.role, one.url))
    decodes = [one.window for one in workers if one.role == "decode" and one.window is not None]
    best = [name for name in BETWEEN_TOKENS if any(w.histogram(f"baton_decode_{name}").bounds for w in decodes)]
    return View(
        clock=clock,
        seconds=longest,
        router=router,
        rows=tuple(row for one in ordered for row in rows_of(one)),
        stages=tuple(stages_of(workers)),
        rejections=counts_by_reason(workers, router_window, "admission_rejections"),
        failures=counts_by_reason(workers, None, "failures"),
        between=best[0] if best else "step_seconds",
        history=tuple(history),
    )


def _sum(queues: Mapping[str, float], holds: Any) -> int | None:
    return int(sum(count for queue, count in queues.items() if holds(queue))) if queues else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
