"""What a rank tells its app about itself, once a second: gauges, counters, and new samples of histograms."""

from collections import Counter, deque
from collections.abc import Callable

from baton_core.decode.core import DecodeCore
from baton_core.effects import Moved
from baton_core.errors import Reason
from baton_core.ledger import Ledger
from baton_core.limits import Millis
from baton_core.machine import Phase
from baton_core.plan import StepPlan
from baton_core.prefill.core import PrefillCore
from baton_core.request import RequestId
from baton_io.ipc import Snapshot, Stage, Timeline
from baton_io.links import Links

SAMPLES_MAX = 4_096
"""Samples of one histogram kept between two snapshots; more are dropped and counted."""

TIMELINES_MAX = 4_096
"""Timelines of requests kept between two snapshots; the oldest are dropped first."""

STAGES_MAX = 64
"""Stages kept of one request, which may be retracted many times."""

Transfers = Callable[[], tuple[dict[str, float], dict[str, list[float]]]]
"""What the transfers of this rank have come to: counters, and new samples."""


class Gauges:
    """Collects on the loop's thread; `snapshot` hands over and starts afresh."""

    def __init__(self, rank: int, transfers: Transfers, *, traces: bool = False) -> None:
        """With `traces` the stages of every request that ended go along, for spans."""
        self._rank = rank
        self._transfers = transfers
        self._traces = traces
        self._turns = 0
        self.position = 0  # of the unit's log
        self.stray_frames = 0  # at the ports of the unit's own
        self._counters: Counter[str] = Counter()
        self._samples: dict[str, deque[float]] = {}
        self._entered: dict[RequestId, tuple[str, float]] = {}
        self._stages: dict[RequestId, list[Stage]] = {}
        self._timelines: deque[Timeline] = deque(maxlen=TIMELINES_MAX)
        self._steps_began_s: dict[int, float] = {}

    def tick_lag(self, lag_ms: Millis) -> None:
        """A turn began `lag_ms` after it was due."""
        self._turns += 1
        self._sample("control_tick_lag_seconds", lag_ms / 1000)

    def agreed(self, seconds: float) -> None:
        """The ranks of the stage agreed on what they observe."""
        self._sample("agreement_seconds", seconds)

    def step_began(self, plan: StepPlan, now_s: float) -> None:
        """A plan went to the compute thread."""
        self._steps_began_s[plan.step] = now_s
        self._counters["step_tokens_total"] += sum(len(piece.tokens) for piece in plan.slices)
        self._counters["steps_total"] += 1

    def step_over(self, step: int, now_s: float) -> None:
        """The running plan was committed."""
        self._sample("step_seconds", now_s - self._steps_began_s.pop(step))

    def moved(self, effect: Moved, now_s: float) -> None:
        """A request changed its phase: the time it spent in the old one is a stage sample."""
        source, since_s = self._entered.pop(effect.rid, (effect.source, now_s))
        self._sample(f"handoff_stage_seconds{{stage={source}}}", now_s - since_s)
        if self._traces:
            self._trace(effect, Stage(name=source, began_s=since_s, ended_s=now_s))
        if effect.target in (Phase.DONE.value, Phase.FAILED.value):
            self._counters[f"handoffs_total{{outcome={effect.target}}}"] += 1
        else:
            self._entered[effect.rid] = (effect.target, now_s)
        if effect.reason is not None and effect.target in (Phase.FAILED.value, Phase.REVOKING.value):
            if effect.source != Phase.REVOKING.value:
                self._counters[f"failures_total{{reason={effect.reason.name.lower()}}}"] += 1

    def snapshot(self, core: PrefillCore | DecodeCore, links: Links) -> Snapshot:
        """Everything since the last snapshot, and how the core stands now. The app exports the leaders' only."""
        samples = {name: list(values) for name, values in self._samples.items()}
        for values in self._samples.values():
            values.clear()
        counters, moved = self._transfers()
        timelines = tuple(self._timelines)
        self._timelines.clear()
        self._turns += 1
        return Snapshot(
            rank=self._rank,
            progress=self._turns,
            gauges=_gauges(core, links),
            counters={**_zeros(), **self._counters, **_counters(core, links, self.stray_frames), **counters},
            samples={**{key: [] for key in _histograms(core)}, **samples, **moved},
            timelines=timelines,
        )

    def _trace(self, effect: Moved, stage: Stage) -> None:
        stages = self._stages.setdefault(effect.rid, [])
        if len(stages) < STAGES_MAX:
            stages.append(stage)
        if effect.target in (Phase.DONE.value, Phase.FAILED.value):
            del self._stages[effect.rid]
            reason = "" if effect.reason is None else effect.reason.name.lower()
            self._timelines.append(Timeline(rid=effect.rid, stages=tuple(stages), reason=reason))

    def _sample(self, name: str, value: float) -> None:
        samples = self._samples.setdefault(name, deque(maxlen=SAMPLES_MAX))
        if len(samples) == SAMPLES_MAX:
            self._counters["samples_dropped_total"] += 1
        samples.append(value)


def _zeros() -> dict[str, float]:
    """Counters over closed sets, so that each is there before its first event: `rate` sees only what follows a zero."""
    reasons = [reason.name.lower() for reason in Reason]
    return {
        "step_tokens_total": 0,
        "steps_total": 0,
        **{f"handoffs_total{{outcome={phase.value}}}": 0 for phase in (Phase.DONE, Phase.FAILED)},
        **{f"failures_total{{reason={reason}}}": 0 for reason in reasons},
        **{f"admission_rejections_total{{reason={reason}}}": 0 for reason in reasons},
    }


def _histograms(core: PrefillCore | DecodeCore) -> list[str]:
    """Histograms that every scheduler has, likewise."""
    phases = [phase.value for phase, following in core.ledger.table.transitions.items() if following]
    return ["step_seconds", "control_tick_lag_seconds", *(f"handoff_stage_seconds{{stage={one}}}" for one in phases)]


def _gauges(core: PrefillCore | DecodeCore, links: Links) -> dict[str, float]:
    ledger = core.ledger
    gauges: dict[str, float] = {
        "pages": ledger.pool.total,
        "pages_free": ledger.pool.free,
        "pages_cached": 0 if ledger.cache is None else ledger.cache.pages,
        "live_requests": len(ledger.live),
        "tombstones": ledger.rooms.tombstones,
        "links": len(links.peers),
        "paused": float(bool(core.paused)),
        "running_steps": len(core.steps.running),
        "quarantined_pages": sum(len(one.pages) for one in ledger.live.values() if one.fenced),
    }
    for phase in ledger.table.polls:
        gauges[f"queue_requests{{queue={phase.value}}}"] = 0
        gauges[_poll_state(ledger, phase)] = 0
    for one in ledger.live.values():
        gauges[f"queue_requests{{queue={one.phase.value}}}"] += 1
        gauges[_poll_state(ledger, one.phase)] += 1
    if ledger.rows is not None:
        gauges["rows"] = ledger.rows.total
        gauges["rows_free"] = ledger.rows.free
    if isinstance(core, PrefillCore):
        gauges["orphan_hellos"] = len(core.orphans)
    else:
        gauges["farewells"] = len(core.farewells)
        gauges["running_requests"] = len(core.batch.running)
        gauges["backup_pages"] = ledger.slots.total
        gauges["backup_pages_free"] = ledger.slots.free
        gauges["expected_answer_ratio"] = core.memory.share.used / core.memory.share.allowed
    return gauges


def _poll_state(ledger: Ledger, phase: Phase) -> str:
    """Where a request stands, and how that shows as a `KVPoll`."""
    return f"poll_state_requests{{queue={phase.value},state={ledger.table.polls[phase].name}}}"


def _counters(core: PrefillCore | DecodeCore, links: Links, stray_frames: int) -> dict[str, float]:
    counters: dict[str, float] = {
        "link_bad_frames_total": links.bad_frames + stray_frames,
        "link_dropped_frames_total": links.dropped_frames,
    }
    if core.ledger.cache is not None:
        counters["prefix_hit_tokens_total"] = core.ledger.cache.hit_tokens
        counters["prefix_asked_tokens_total"] = core.ledger.cache.asked_tokens
    if isinstance(core, DecodeCore):
        counters["retractions_total{way=backup}"] = core.memory.backups
        counters["retractions_total{way=recompute}"] = core.memory.recomputations
        counters["rebootstraps_total{outcome=done}"] = core.reentry.arrivals
        counters["rebootstraps_total{outcome=fallback}"] = core.memory.fallbacks
    else:
        counters["rebootstraps_total"] = core.rebootstraps
    for reason, count in core.ledger.rejections.items():
        counters[f"admission_rejections_total{{reason={reason.name.lower()}}}"] = count
    return counters
