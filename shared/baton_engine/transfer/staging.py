"""Staging (S8): pages gathered into one piece, sent as one write, and scattered again on decode.

    prefill: pool ── gather ──► buffer ══ one write ══► ring ── scatter ──► pool :decode

For transports that dislike many small runs, where the two layouts make them. Both ends know the plan, so a frame says
only which source pages it holds. On decode what has arrived waits in a ring, so that receiving and scattering overlap;
above the ring's watermark a frame is scattered by the thread that received it, so a full ring holds up nobody. A handoff
counts as done when everything is scattered (`settled`), and its pages are free when no scattering touches them.
"""

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from baton_core.request import Room
from baton_engine.transfer.attempts import AttemptTable, Incoming, Key
from baton_engine.transfer.checksum import verify
from baton_engine.transfer.flow import Flow
from baton_engine.transfer.pool_bytes import Bytes, PoolSource, PoolTarget
from baton_engine.transfer.protocol import Poke
from baton_engine.transfer.ways import Job

RING_BYTES = 64 * 1024 * 1024


def gather(source: PoolSource, job: Job, ordinals: range, buffer: Bytes) -> int:
    """Copy what the job's reader gets of these source pages to the front of `buffer`; returns how many bytes it is."""
    filled = 0
    first = job.push.first
    for ordinal, _, stripes in job.flow.plan.stripes(ordinals, job.target.wanted):
        start = job.push.pages[ordinal - first] * source.page_bytes
        for one in stripes:
            nbytes = one.nbytes * one.count
            rows = source.rows(start + one.source_offset, one.nbytes, one.count, one.source_step)
            np.copyto(buffer[filled : filled + nbytes].reshape(one.count, one.nbytes), rows)
            filled += nbytes
    return filled


def scatter(target: PoolTarget, flow: Flow, ordinals: range, payload: Bytes) -> None:
    """Write what `gather` put together into the pages that the attempt expects."""
    assert isinstance(flow.one, Incoming)
    pages, read = flow.one.pages, 0
    for _, first, stripes in flow.plan.stripes(ordinals, flow.one.wanted):
        touched = set()
        for one in stripes:
            page, nbytes = pages[first + one.target_ordinal], one.nbytes * one.count
            target.write(page, one, payload[read : read + nbytes].reshape(one.count, one.nbytes))
            touched.add(page)
            read += nbytes
        for page in touched:
            target.landed(page)


def staged_bytes(flow: Flow, ordinals: range, wanted: range) -> int:
    """How many bytes a frame of these source pages has."""
    pages = flow.plan.stripes(ordinals, wanted)
    return sum(one.nbytes * one.count for _, _, stripes in pages for one in stripes)


@dataclass(slots=True, eq=False)
class Slot:
    """A contiguous part of the ring, from reservation to release."""

    start: int
    end: int
    released: bool = False


class Ring:
    """Memory handed out in order, in contiguous parts, and taken back in any order. Thread-safe; never blocks."""

    def __init__(self, nbytes: int) -> None:
        self.bytes: Bytes = np.empty(nbytes, dtype=np.uint8)
        self._slots: deque[Slot] = deque()  # the oldest first
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> Slot | None:
        """Room for `nbytes`; None where that would pass the watermark, the oldest part still in use."""
        with self._lock:
            start = self._slots[-1].end if self._slots else 0
            watermark = self._slots[0].start if self._slots else 0
            wrapped = bool(self._slots) and start <= watermark
            if not wrapped and start + nbytes > len(self.bytes):
                start, wrapped = 0, bool(self._slots)
            if start + nbytes > (watermark if wrapped else len(self.bytes)):
                return None
            slot = Slot(start, start + nbytes)
            self._slots.append(slot)
            return slot

    def release(self, slot: Slot) -> None:
        """The part is not needed any more."""
        with self._lock:
            slot.released = True
            while self._slots and self._slots[0].released:
                self._slots.popleft()

    def view(self, slot: Slot) -> Bytes:
        """The part's bytes."""
        return self.bytes[slot.start : slot.end]


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A frame in the ring."""

    flow: Flow
    ordinals: range
    slot: Slot


class StagingRing:
    """What has arrived on decode and is not scattered yet, and the thread that scatters it (`agreement.Staging`)."""

    def __init__(self, target: PoolTarget, table: AttemptTable, poke: Poke, ring_bytes: int = RING_BYTES) -> None:
        self.memory = Ring(ring_bytes)
        self._target, self._table, self._poke = target, table, poke
        self._arrived: deque[_Arrived] = deque()
        self._waiting: dict[Key, int] = {}  # frames not scattered, by attempt
        self._wake = threading.Condition()
        self._closing = False
        threading.Thread(target=self._run, name="kv-scatter", daemon=True).start()

    def settled(self, room: Room, attempt: int) -> bool:
        """Whether every chunk that arrived has been scattered into the pool."""
        return (room, attempt) not in self._waiting

    def put(self, flow: Flow, ordinals: range, slot: Slot) -> None:
        """These pages lie in `slot`; it is released when they are scattered."""
        key = (flow.one.room, flow.one.attempt)
        with self._wake:
            self._waiting[key] = self._waiting.get(key, 0) + 1
            self._arrived.append(_Arrived(flow, ordinals, slot))
            self._wake.notify()

    def close(self) -> None:
        """End the thread; what is left is not scattered."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def _run(self) -> None:
        while (arrived := self._next()) is not None:
            flow = arrived.flow
            # What was revoked while it waited stays where it is: its pages may soon be somebody else's.
            if self._table.enter(flow, flow.carrier):
                try:
                    scatter(self._target, flow, arrived.ordinals, self.memory.view(arrived.slot))
                finally:
                    self._table.leave(flow)
            # Not after a fault: what is not scattered never counts as settled.
            self.memory.release(arrived.slot)
            self._settle((flow.one.room, flow.one.attempt))
            if self.settled(flow.one.room, flow.one.attempt):
                for each in flow.one.flows.values():
                    verify(self._table, self._target.memory, each)

    def _next(self) -> _Arrived | None:
        with self._wake:
            while not self._arrived and not self._closing:
                self._wake.wait()
            return None if self._closing else self._arrived.popleft()

    def _settle(self, key: Key) -> None:
        with self._wake:
            self._waiting[key] -= 1
            if self._waiting[key] == 0:
                del self._waiting[key]
        self._poke()
