"""How the ranks of a stage on one host agree: an element-wise minimum over small vectors, for control only.

Every member has a slot in one shared file, with two buffers that take turns:

    slot of member m   | sequence | pid | count, values … (even turns) | count, values … (odd turns) |

A member writes its values, then raises its sequence, then waits until everybody's sequence is there: it spins for a
moment, then sleeps on a futex. A buffer is written again two turns later, and nobody gets there before everybody has read
it: to begin turn s+2 a member must have seen all the others begin s+1, which they do after reading s.

Ranks on several hosts agree through `groups` (gloo); this is for one host.
"""

import ctypes
import errno
import mmap
import os
import platform
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from baton_core.errors import EngineError

VALUES_MAX = 1 << 16
"""Values of one agreement: 4 a request in flight, and a few more."""

_HEADER_WORDS = 8  # one cache line: sequence, pid
_SLOT_WORDS = _HEADER_WORDS + 2 * (VALUES_MAX + 8)
_SPIN_S = 40e-6
_LOOK_S = 0.1
"""While asleep, a member looks this often whether those it waits for still live."""

_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class CollectiveLost(EngineError):
    """A rank did not take part in a control collective in time, or is gone."""


class ShmGroup:
    """Agreement through a shared file: a few microseconds where gloo takes hundreds."""

    def __init__(self, path: Path, rank: int, ranks: Sequence[int], timeout_ms: int) -> None:
        """`ranks` are the members' numbers in the worker, for people; `rank` is this member's index among them.

        The file appears with the first member. Raises CollectiveLost when the others do not come in time.
        """
        self.rank, self.size = rank, len(ranks)
        self._ranks, self._timeout_s = tuple(ranks), timeout_ms / 1000
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Every member sets the same size, and new bytes are 0: it does not matter who comes first.
            os.ftruncate(descriptor, self.size * _SLOT_WORDS * 8)
            self._map = mmap.mmap(descriptor, self.size * _SLOT_WORDS * 8)
        finally:
            os.close(descriptor)
        words = np.frombuffer(self._map, dtype=np.int64)
        self._slots = [words[index * _SLOT_WORDS : (index + 1) * _SLOT_WORDS] for index in range(self.size)]
        self._own = self._slots[rank]
        self._others = [index for index in range(self.size) if index != rank]
        self._sequence = 0
        self._barrier = threading.Lock()
        self._own[1] = os.getpid()

    def all_reduce_min(self, values: Sequence[int]) -> Sequence[int]:
        """Element-wise minimum over all members. Raises CollectiveLost naming who is missing."""
        count = len(values)
        if count > VALUES_MAX:
            raise CollectiveLost(f"{count} values in one agreement; there is room for {VALUES_MAX}")
        self._sequence += 1
        begin = _HEADER_WORDS + (self._sequence % 2) * (VALUES_MAX + 8)
        reduced = np.array(values, dtype=np.int64)
        self._own[begin] = count
        self._own[begin + 8 : begin + 8 + count] = reduced
        self._publish()
        for index in self._others:
            self._await(index)
            slot = self._slots[index]
            if slot[begin] != count:
                raise CollectiveLost(
                    f"rank {self._ranks[index]} brought {slot[begin]} values to an agreement, this one {count}"
                )
            np.minimum(reduced, slot[begin + 8 : begin + 8 + count], out=reduced)
        return array("q", reduced.tobytes())

    def close(self) -> None:
        """Give the mapping back."""
        self._own = np.zeros(0, dtype=np.int64)
        self._slots.clear()
        try:
            self._map.close()
        except BufferError:
            return  # a view is still alive in a frame that is being unwound; the mapping ends with the process

    def _publish(self) -> None:
        with self._barrier:  # a lock is a full memory barrier: the values are there before the sequence says so
            self._own[0] = self._sequence
        _futex(self._own, _FUTEX_WAKE, 2**31 - 1, None)

    def _await(self, index: int) -> None:
        slot, wanted = self._slots[index], self._sequence
        if slot[0] >= wanted:
            return
        began = time.monotonic()
        while time.monotonic() - began < _SPIN_S:
            if slot[0] >= wanted:
                return
        while slot[0] < wanted:
            if time.monotonic() - began > self._timeout_s:
                raise CollectiveLost(self._lost(index, f"did not take part within {self._timeout_s * 1000:.0f} ms"))
            if slot[1] and not _lives(int(slot[1])):
                raise CollectiveLost(self._lost(index, f"(process {slot[1]}) is gone"))
            seen = int(slot[0])
            if seen < wanted:
                asleep = time.monotonic()
                _futex(slot, _FUTEX_WAIT, seen, _LOOK_S)
                # Who oversleeps stood still (a frozen container), and most likely those that it waits for did, too.
                began += max(0.0, time.monotonic() - asleep - _LOOK_S)
        with self._barrier:
            return

    def _lost(self, index: int, what: str) -> str:
        also = [str(self._ranks[one]) for one in self._others if one != index and self._slots[one][0] < self._sequence]
        rest = f"; rank {', '.join(also)} neither" if also else ""
        return f"control collective {self._sequence}: rank {self._ranks[index]} {what}{rest}"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)


def _futex(
    slot: "np.ndarray[tuple[int], np.dtype[np.int64]]", operation: int, value: int, timeout_s: float | None
) -> None:
    """Sleep while the low half of the slot's sequence is `value`, or wake those who sleep on it."""
    if _FUTEX_CALL is None:
        if operation == _FUTEX_WAIT:
            os.sched_yield()  # no futex is known for this machine
        return
    limit = None
    if timeout_s is not None:
        limit = ctypes.byref(_Timespec(int(timeout_s), int(timeout_s % 1 * 1e9)))
    # Little-endian: the low half of the sequence is at its address. A sleep that ends early is looked into by the caller.
    word = ctypes.c_void_p(slot.ctypes.data)
    done = _libc.syscall(_FUTEX_CALL, word, operation, ctypes.c_uint32(value & 0xFFFFFFFF), limit, None, 0)
    if done == -1 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise OSError(ctypes.get_errno(), f"futex: {os.strerror(ctypes.get_errno())}")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
