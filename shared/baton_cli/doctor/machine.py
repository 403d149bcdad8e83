"""This machine: what it has (`look`), and what that means for a stack (`judge`, pure)."""

import ctypes
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from baton_cli.doctor.findings import Finding, fail, ok, warn

GIB = 1024**3
MIB = 1024**2
FILES_WANTED = 16_384
FILES_LEAST = 512
FILES_A_REQUEST = 3
"""Sockets of the router for one request: the client's and two legs."""
SHM_WANTED_BYTES = GIB
PYTHON_LEAST = (3, 11)
TIMEX_BYTES = 256  # struct timex has 208 on 64-bit Linux
TIME_ERROR = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What the kernel says. None: it does not say, or there is no limit where the name ends in `limit`."""

    python: tuple[int, int, int]
    executable: str
    cores: int  # that this process may use
    cores_limit: float | None  # of the cgroup
    memory_free_bytes: int
    memory_total_bytes: int
    shm_bytes: int | None
    locked_bytes_limit: int | None
    files_limit: int | None
    files_hard_limit: int | None
    clock_synchronised: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a planned stack asks of the machine; all 0 where none is planned."""

    ranks: int = 0
    memory_bytes: int = 0  # of the host, where that can be told
    uses_nccl: bool = False


def look(root: Path = Path("/")) -> MachineFacts:
    """Read everything. `root` is where /proc and /sys are found."""
    memory = _meminfo(root / "proc/meminfo")
    cgroup = root / "sys/fs/cgroup"
    files, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    return MachineFacts(
        python=sys.version_info[:3],
        executable=sys.executable,
        cores=len(os.sched_getaffinity(0)),
        cores_limit=_cores_limit(cgroup / "cpu.max"),
        memory_free_bytes=_free_bytes(memory.get("MemAvailable", 0), cgroup),
        memory_total_bytes=memory.get("MemTotal", 0),
        shm_bytes=_size(root / "dev/shm"),
        locked_bytes_limit=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        files_limit=files,
        files_hard_limit=hard,
        clock_synchronised=_synchronised(),
    )


def judge(facts: MachineFacts, demand: Demand) -> list[Finding]:
    """What the facts mean for a stack that asks for `demand`."""
    return [
        _python(facts),
        _cores(facts, demand),
        _memory(facts, demand),
        _shm(facts, demand),
        _locked(facts),
        _files(facts),
        _clock(facts),
    ]


def _python(facts: MachineFacts) -> Finding:
    text = f"{'.'.join(map(str, facts.python))} ({facts.executable})"
    if facts.python < PYTHON_LEAST:
        wanted = ".".join(map(str, PYTHON_LEAST))
        return fail("python", f"{text}: Baton needs {wanted} or later", f"make install PYTHON=python{wanted}")
    return ok("python", text)


def _cores(facts: MachineFacts, demand: Demand) -> Finding:
    usable = facts.cores if facts.cores_limit is None else min(facts.cores, facts.cores_limit)
    text = f"{usable:g}"
    if facts.cores_limit is not None and facts.cores_limit < facts.cores:
        text = f"{facts.cores_limit:g}, by the limit of this container (it sees {facts.cores})"
    if usable < demand.ranks:
        return warn(
            "cores",
            f"{text}, for {demand.ranks} ranks: they will take turns, and a long prompt will stall streams",
            "start fewer workers or ranks, or give this machine or container more cores",
        )
    return ok("cores", text if not demand.ranks else f"{text}, for {demand.ranks} ranks")


def _memory(facts: MachineFacts, demand: Demand) -> Finding:
    free, total = gib(facts.memory_free_bytes), gib(facts.memory_total_bytes)
    if not demand.memory_bytes:
        return ok("memory", f"{free} of {total} free")
    text = f"{free} of {total} free; the planned workers need about {gib(demand.memory_bytes)}"
    if demand.memory_bytes > facts.memory_free_bytes:
        return fail(
            "memory",
            f"{text}: some will refuse to start",
            "lower the pools (--set prefill.kv_tokens=8192 --set decode.kv_tokens=8192), start fewer workers, "
            "take a smaller model, or free memory",
        )
    if demand.memory_bytes > 0.9 * facts.memory_free_bytes:
        return warn("memory", f"{text}: little is left for anything else", "lower kv_tokens of one role")
    return ok("memory", text)


def _shm(facts: MachineFacts, demand: Demand) -> Finding:
    if facts.shm_bytes is None:
        if demand.uses_nccl:
            return fail("/dev/shm", "not there: NCCL cannot connect the ranks of one host", "mount a tmpfs at /dev/shm")
        return ok("/dev/shm", "not there, and not needed: KV pools are memory files without a name")
    size = gib(facts.shm_bytes)
    if demand.uses_nccl and facts.shm_bytes < SHM_WANTED_BYTES:
        return warn(
            "/dev/shm",
            f"{size}: NCCL connects the ranks of one host through it and may fail for lack of room",
            "docker run --shm-size=1g, `shm_size: 1gb` in compose, an emptyDir with medium Memory in Kubernetes",
        )
    return ok("/dev/shm", f"{size} (KV pools do not count: they are memory files without a name)")


def _locked(facts: MachineFacts) -> Finding:
    if facts.locked_bytes_limit is None:
        return ok("locked memory", "without limit")
    text = f"limited to {gib(facts.locked_bytes_limit)}"
    return ok("locked memory", f"{text}; only RDMA (nixl) wants more: `ulimit -l unlimited` there")


def _files(facts: MachineFacts) -> Finding:
    limit, hard = facts.files_limit, facts.files_hard_limit
    if limit is None or limit >= FILES_WANTED:
        return ok("open files", "without limit" if limit is None else f"{limit:,}")
    text = f"{limit:,}: the router uses up to {FILES_A_REQUEST} a request, so {limit // FILES_A_REQUEST:,} at once"
    best = 65_536 if hard is None else min(65_536, hard)
    advice = f"ulimit -n {best}" if best > limit else "raise the hard limit (limits.conf, LimitNOFILE=, ulimits:)"
    return (fail if limit < FILES_LEAST else warn)("open files", text, advice)


def _clock(facts: MachineFacts) -> Finding:
    match facts.clock_synchronised:
        case True:
            return ok("clock", "synchronised")
        case False:
            text = "the kernel says it is not synchronised; deadlines do not depend on it, logs of several hosts do"
            return ok("clock", text)
        case None:
            return ok("clock", "the kernel does not say whether it is synchronised")


def gib(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB / 10 else f"{nbytes / MIB:.0f} MiB"


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _meminfo(path: Path) -> dict[str, int]:
    lines = (line.partition(":") for line in path.read_text(encoding="ascii").splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.strip().endswith("kB")}


def _free_bytes(available: int, cgroup: Path) -> int:
    """As `baton_engine.sealed_memory` counts it, which a process without torch cannot ask."""
    limit, used = _text(cgroup / "memory.max"), _text(cgroup / "memory.current")
    if not limit.isdecimal() or not used.isdecimal():
        return available
    stat = dict(line.split(" ", 1) for line in _text(cgroup / "memory.stat").splitlines() if " " in line)
    return min(available, max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0))))


def _cores_limit(path: Path) -> float | None:
    quota, _, period = _text(path).partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _size(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _synchronised() -> bool | None:
    """What the kernel's clock discipline says; asking changes nothing, because no mode is set."""
    try:
        state: int = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR
