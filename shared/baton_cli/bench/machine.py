"""The machine a figure comes from, and how much of it other programs used meanwhile: a loaded machine must show."""

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

QUIET_CORES = 0.1
"""Other programs may use this much of one core before a figure is marked."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where and when a run was made. `foreign_cores`: mean number of cores kept busy by others; None if unknown."""

    when: str
    cpu: str
    cores: int
    python: str
    foreign_cores: float | None

    @property
    def loaded(self) -> bool:
        return self.foreign_cores is not None and self.foreign_cores > QUIET_CORES

    @property
    def text(self) -> str:
        """One line for people."""
        head = f"{self.when}, {self.cores} cores ({self.cpu})"
        if self.foreign_cores is None:
            return head
        mark = "LOADED MACHINE: " if self.loaded else ""
        return f"{head}; {mark}other programs used {self.foreign_cores:.2f} cores"


class Watch:
    """Measures what others use: everything busy, less this process and `leaders` with their descendants."""

    def __init__(self, leaders: Sequence[int] = ()) -> None:
        self._leaders = frozenset(leaders)
        self._began_s = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), self._own_cpu_s()

    def machine(self) -> Machine:
        """The machine, with what others used since this watch began."""
        elapsed_s = time.monotonic() - self._began_s
        foreign_s = (_busy_s() - self._busy_s) - (self._own_cpu_s() - self._own_s)
        return describe(max(0.0, foreign_s) / elapsed_s if elapsed_s else None)

    def _own_cpu_s(self) -> float:
        return time.process_time() + cpu_s_of_trees(self._leaders)


def describe(foreign_cores: float | None = None) -> Machine:
    """This machine, now."""
    return Machine(
        when=time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC",
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        foreign_cores=foreign_cores,
    )


def _busy_s() -> float:
    """Seconds that cores of this machine were not idle, since boot."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def cpu_s_of_trees(roots: frozenset[int]) -> float:
    """CPU seconds of processes and of everything that descends from them: a worker's ranks lead sessions of their own."""
    parents: dict[int, int] = {}
    used_s: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat") if roots else ():
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        pid = int(path.parent.name)
        parents[pid], used_s[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return sum(seconds for pid, seconds in used_s.items() if _descends(pid, roots, parents))


def _descends(pid: int, roots: frozenset[int], parents: Mapping[int, int]) -> bool:
    while pid not in roots and pid in parents:
        pid = parents[pid]
    return pid in roots


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
