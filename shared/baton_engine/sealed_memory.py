"""Shared memory that cannot surprise its users: a memfd, allocated whole at start and sealed against resizing.

A memfd has no name to leak or to unlink, so nothing is left behind when a process dies; allocated at start, no later
touch can end in a bus error; sealed, no peer that got the descriptor can shrink it under us.
"""

import errno
import fcntl
import mmap
import os
from pathlib import Path

from baton_core.errors import EngineError

_GIB = 1024**3
_MADV_POPULATE_WRITE = 23  # not named by the mmap module before Python 3.14
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class SealedMemory:
    """`nbytes` of zeroed shared memory behind one file descriptor.

    Raises EngineError when the kernel refuses. `close` gives the descriptor back; the mapping itself goes with the last
    view of it, so that a view which outlives `close` never points at unmapped memory.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        assert nbytes > 0
        self.nbytes = nbytes
        self.file_descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.file_descriptor, 0, nbytes)
            fcntl.fcntl(self.file_descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.mapping = mmap.mmap(self.file_descriptor, nbytes, mmap.MAP_SHARED)
        except (OSError, ValueError) as error:
            os.close(self.file_descriptor)
            raise EngineError(f"cannot allocate {gib(nbytes)} of shared memory for {name}: {error}") from error
        self.view = memoryview(self.mapping)

    def close(self) -> None:
        """Close the descriptor and let go of the mapping. Idempotent; nothing here may be used afterwards."""
        if self.file_descriptor < 0:
            return
        os.close(self.file_descriptor)
        self.file_descriptor = -1
        # Never `mapping.close()`: a tensor made by torch.frombuffer keeps the mapping alive but does not export its
        # buffer, so closing would succeed and the tensor's next access would crash the process.
        del self.view, self.mapping


class SealedWindow:
    """Another process's `SealedMemory`, mapped from a descriptor that it passed.

    Takes the descriptor over and closes it. Raises ValueError unless it is sealed against shrinking and holds exactly
    `nbytes`: without that, a later access could end in a bus error. `close` unmaps; every view must be gone by then.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            size = os.fstat(descriptor).st_size
            if not seals & fcntl.F_SEAL_SHRINK or size != nbytes:
                raise ValueError(f"shared memory of {size} bytes with seals {seals}: expected {nbytes}, sealed")
            self.mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        finally:
            os.close(descriptor)

    def populate(self, first: int, nbytes: int) -> None:
        """Map these bytes now, so that writing them later is not slowed down by page faults. Changes no byte."""
        start = first - first % mmap.PAGESIZE
        try:
            self.mapping.madvise(_MADV_POPULATE_WRITE, start, first + nbytes - start)
        except OSError as error:
            # Before Linux 5.14 there is no such advice; the faults then come one by one.
            if error.errno != errno.EINVAL:
                raise

    def close(self) -> None:
        """Unmap. Raises BufferError while a view is left."""
        self.mapping.close()


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes this process may still allocate: `MemAvailable`, or what its memory cgroup leaves where that is less."""
    available = _meminfo_bytes(meminfo.read_text(), "MemAvailable")
    limit_file, used_file = cgroup / "memory.max", cgroup / "memory.current"
    if not (limit_file.is_file() and used_file.is_file()):
        return available
    limit = limit_file.read_text().strip()
    if limit == "max":
        return available
    # Page cache that the kernel would drop under pressure counts as used; give it back, as MemAvailable does.
    reclaimable = _stat_bytes(cgroup / "memory.stat", "inactive_file")
    return min(available, max(0, int(limit) - int(used_file.read_text()) + reclaimable))


def require_memory(purpose: str, needed_bytes: int, free_bytes: int, remedy: str) -> None:
    """Raise EngineError naming both amounts and the remedy, unless `needed_bytes` fit into `free_bytes`."""
    if needed_bytes > free_bytes:
        raise EngineError(f"{purpose} needs {gib(needed_bytes)} but only {gib(free_bytes)} is available: {remedy}")


def gib(nbytes: int) -> str:
    """Bytes for people, in GiB."""
    return f"{nbytes / _GIB:.2f} GiB"


def _meminfo_bytes(text: str, key: str) -> int:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise EngineError(f"the kernel's memory report has no {key}")


def _stat_bytes(path: Path, key: str) -> int:
    if not path.is_file():
        return 0
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
