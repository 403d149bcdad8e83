"""What a run of seeds reached: legal transitions, faults and the phases they hit."""

from collections import Counter
from dataclasses import dataclass, field

from baton_core.decode.phases import DECODE
from baton_core.machine import Phase, PhaseTable
from baton_core.prefill.phases import PREFILL

FAULTS = (
    "crash",
    "restart",
    "drain",
    "abort_all",
    "pause",
    "slow_rank",
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
    "copy_failed",
    "lookup_failed",
    "lookup_slow",
    "lookup_stale",
    "leg_missing",
    "leg_repeated",
    "room_reused",
    "prompt_differs",
    "layout_differs",
    "rank_differs",
    "route_conflict",
    "collective_timeout",
    "client_abort",
    "intake_reject",
    "router_crash",
    "router_pause",
    "registry_crash",
    "registry_pause",
    "hop_cut",
    "leg_cancelled",
    "router_retry",
    "router_migration",
)
"""Every fault kind that the simulation can inject; and that routers cancelled a leg, tried again, continued a stream."""

TABLES: tuple[PhaseTable, ...] = (PREFILL, DECODE)
LIVE_PHASES = tuple(
    f"{table.side}.{phase.value}"
    for table in TABLES
    for phase, targets in table.transitions.items()
    if targets and phase is not Phase.INTAKE
)
"""Phases in which a request waits or works, by side."""
RARE_PHASES = (
    *("decode.arrived",) * 20,
    *("decode.prealloc",) * 6,
    *("decode.running",) * 4,
    *("prefill.revoking", "decode.revoking", "prefill.inflight", "prefill.queued", "decode.local") * 2,
)
"""Of these, the ones that chance finds too seldom: the more often, the rarer."""
_PREFILL = tuple(phase for phase in LIVE_PHASES if phase.startswith("prefill."))
_SENDING = ("prefill.forwarding", "prefill.inflight")
_GREETED = ("decode.greeting", "prefill.accepted")
_ARRIVING = ("decode.transferring",)
FAULT_PHASES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("crash", "pause", "slow_rank", "clock_jump", "partition", "drain", "abort_all"), LIVE_PHASES),
    "client_abort": tuple(phase for phase in LIVE_PHASES if not phase.endswith(".revoking")),
    "cache_flushed": _PREFILL,
    **dict.fromkeys(("frame_lost", "frame_repeated", "frame_late"), _GREETED),
    **dict.fromkeys(("transfer_slow", "transfer_error", "reader_stuck"), _SENDING),
    **dict.fromkeys(("writer_stuck", "row_late", "row_never", "row_corrupt"), _ARRIVING),
    "step_failed": ("prefill.forwarding", "decode.computing", "decode.running"),
    "copy_failed": ("decode.backing_up", "decode.restoring"),
    **dict.fromkeys(("lookup_failed", "lookup_slow", "lookup_stale"), ("decode.resolving",)),
}
"""Where each fault of a process, link or transfer applies: a run must hit requests in all of these phases."""
GROUPS = range(1, 9)
"""Units of so many ranks must take part."""
TRANSITIONS_LEAST = GROUPS_LEAST = 20
"""A run of at least `SEEDS_FOR_COVERAGE` seeds must reach every legal transition this often."""
SEEDS_FOR_COVERAGE = 1_000


@dataclass(slots=True)
class Tally:
    """Counts of one seed or of many; plain data, so that it crosses process borders."""

    edges: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    fault_phases: Counter[tuple[str, str]] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    groups: Counter[int] = field(default_factory=Counter)  # units by how many ranks they have
    events: int = 0

    def add(self, other: "Tally") -> None:
        """Take another tally's counts into this one."""
        self.edges.update(other.edges)
        self.faults.update(other.faults)
        self.fault_phases.update(other.fault_phases)
        self.outcomes.update(other.outcomes)
        self.groups.update(other.groups)
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
    missing += [f"fault {kind}: never" for kind in FAULTS if not tally.faults[kind]]
    missing += [
        f"fault {kind} in phase {phase}: never"
        for kind, phases in FAULT_PHASES.items()
        for phase in phases
        if not tally.fault_phases[kind, phase]
    ]
    few = [f"units of {ranks} ranks: {tally.groups[ranks]}" for ranks in GROUPS if tally.groups[ranks] < GROUPS_LEAST]
    return missing + few


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
    lines.append("units, by how many ranks they have")
    lines.append("  " + " ".join(f"{ranks}:{tally.groups[ranks]}" for ranks in GROUPS))
    lines.append("outcomes of legs")
    lines += [f"  {outcome:32} {count:9}" for outcome, count in sorted(tally.outcomes.items())]
    return "\n".join(lines)
