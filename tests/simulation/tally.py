"""What a run of seeds reached: legal transitions, faults and the phases they hit."""

from collections import Counter
from dataclasses import dataclass, field

from baton_core.decode.phases import DECODE
from baton_core.machine import PhaseTable
from baton_core.prefill.phases import PREFILL

FAULTS = (
    "crash",
    "restart",
    "drain",
    "abort_all",
    "pause",
    "slow_worker",
    "cache_flushed",
    "clock_jump",
    "partition",
    "frame_lost",
    "frame_repeated",
    "frame_late",
    "transfer_slow",
    "transfer_error",
    "writer_stuck",
    "reader_stuck",
    "row_late",
    "row_never",
    "row_corrupt",
    "step_failed",
    "lookup_failed",
    "lookup_slow",
    "lookup_stale",
    "leg_missing",
    "leg_repeated",
    "room_reused",
    "prompt_differs",
    "layout_differs",
    "rank_differs",
    "client_abort",
    "intake_reject",
)
"""Every fault kind that the simulation can inject."""

TABLES: tuple[PhaseTable, ...] = (PREFILL, DECODE)
TRANSITIONS_LEAST = 20
"""A run of at least `SEEDS_FOR_COVERAGE` seeds must reach every legal transition this often."""
SEEDS_FOR_COVERAGE = 1_000


@dataclass(slots=True)
class Tally:
    """Counts of one seed or of many; plain data, so that it crosses process borders."""

    edges: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    fault_phases: Counter[tuple[str, str]] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    events: int = 0

    def add(self, other: "Tally") -> None:
        """Take another tally's counts into this one."""
        self.edges.update(other.edges)
        self.faults.update(other.faults)
        self.fault_phases.update(other.fault_phases)
        self.outcomes.update(other.outcomes)
        self.events += other.events


def legal_edges() -> tuple[tuple[str, str, str], ...]:
    """Every legal transition of both tables, as counted."""
    return tuple((table.side, source.value, target.value) for table in TABLES for source, target in table.edges())


def shortfalls(tally: Tally) -> list[str]:
    """What a run of `SEEDS_FOR_COVERAGE` seeds should have reached and did not."""
    missing = [
        f"transition {side} {source} -> {target}: {tally.edges[side, source, target]} times"
        for side, source, target in legal_edges()
        if tally.edges[side, source, target] < TRANSITIONS_LEAST
    ]
    return missing + [f"fault {kind}: never" for kind in FAULTS if not tally.faults[kind]]


def report(tally: Tally) -> str:
    """The coverage table."""
    lines = ["transitions"]
    for side, source, target in legal_edges():
        lines.append(f"  {side:8} {source:>13} -> {target:13} {tally.edges[side, source, target]:9}")
    lines.append("faults, and the phases they hit")
    for kind in FAULTS:
        phases = sorted((phase, count) for (name, phase), count in tally.fault_phases.items() if name == kind)
        where = " ".join(f"{phase}:{count}" for phase, count in phases)
        lines.append(f"  {kind:15} {tally.faults[kind]:9}  {where}")
    lines.append("outcomes of legs")
    lines += [f"  {outcome:32} {count:9}" for outcome, count in sorted(tally.outcomes.items())]
    return "\n".join(lines)
