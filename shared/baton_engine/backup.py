"""Where the KV cache of a retracted request waits: pages of host memory, and the thread that copies to and fro.

Copies are made in the order in which they were asked for, so "this one is over" is a comparison of numbers. The loop never
waits for them: the end of each pokes it, and what a poller then says is agreed over the unit like a transfer.
"""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from baton_core.agreement import KVPoll, Observation, Poller
from baton_core.effects import Backup, Restore
from baton_core.errors import Reason
from baton_core.request import PageId
from baton_engine.kv_pool import KVPool
from baton_engine.sealed_memory import available_bytes, require_memory
from baton_engine.transfer.protocol import Poke

log = structlog.get_logger(__name__)

FAILURES_KEPT = 65_536
"""So many copies ago a failure is forgotten: by then no rank asks for it (each live request has one copy under way)."""
_REMEDY = "lower --backup-pages (0: what is retracted is computed anew), or free memory"


@dataclass(frozen=True, slots=True)
class CopyPoller:
    """This rank's view of one copy."""

    store: "HostStore"
    copy: int

    def poll(self) -> Observation:
        """Transferring until it is over; then Success, or Failed, and nothing touches its pages and slots any more."""
        return self.store.observe(self.copy)


class HostStore:
    """`slots` pages of host memory beside the pool of one rank (pinned, where that is on a CUDA device).

    Raises EngineError, naming need and supply, where they would not fit.
    """

    def __init__(self, pool: KVPool, slots: int, poke: Poke) -> None:
        require_memory("the host backup of the KV cache", slots * pool.page_bytes, available_bytes(), _REMEDY)
        self._pages = pool.tensor.view(torch.uint8).view(-1, pool.page_bytes)  # [page, byte]
        cuda = self._pages.is_cuda
        self._slots = torch.empty(slots, pool.page_bytes, dtype=torch.uint8, pin_memory=cuda)  # [slot, byte]
        self._stream = torch.cuda.Stream(self._pages.device) if cuda else None  # type: ignore[no-untyped-call]
        self._poke = poke
        self._work: queue.SimpleQueue[Backup | Restore | None] = queue.SimpleQueue()
        self._over = 0  # copies up to this number
        self._failed: dict[int, str] = {}
        self._thread = threading.Thread(target=self._loop, name="kv-backup", daemon=True)
        self._thread.start()

    def start(self, effect: Backup | Restore) -> None:
        """Make this copy after those that were asked for before."""
        self._work.put(effect)

    def poller(self, copy: int) -> Poller:
        """This rank's view of copy number `copy`."""
        return CopyPoller(self, copy)

    def observe(self, copy: int) -> Observation:
        """Whether that copy is over, and how it ended."""
        if copy > self._over:
            return Observation(poll=KVPoll.Transferring)
        failed = self._failed.get(copy)
        if failed is not None:
            return Observation(poll=KVPoll.Failed, writers_stopped=True, reason=Reason.DEVICE_FAULT, text=failed)
        return Observation(poll=KVPoll.Success, writers_stopped=True)

    def close(self, timeout_s: float) -> None:
        """Let the thread end after the copies that were asked for."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while (effect := self._work.get()) is not None:
            try:
                if isinstance(effect, Backup):
                    self._copy(self._pages, effect.pages, self._slots, effect.slots)
                else:
                    self._copy(self._slots, effect.slots, self._pages, effect.pages)
            except RuntimeError as error:  # which is what torch raises, a lost device included
                log.error("backup.failed", rid=effect.rid, copy=effect.copy, error=str(error))
                self._failed[effect.copy] = str(error)
                while next(iter(self._failed)) <= effect.copy - FAILURES_KEPT:
                    del self._failed[next(iter(self._failed))]
            self._over = effect.copy
            self._poke()

    def _copy(self, source: Tensor, rows: Sequence[PageId], target: Tensor, to: Sequence[PageId]) -> None:
        assert len(rows) == len(to), f"{len(rows)} pages go to {len(to)}"
        if self._stream is None:
            for row, place in zip(rows, to, strict=True):
                target[place].copy_(source[row])
            return
        # Steps that were started may still write these pages, on other ranks than the one that speaks of them.
        self._stream.wait_stream(torch.cuda.default_stream(self._pages.device))
        with torch.cuda.stream(self._stream):
            for row, place in zip(rows, to, strict=True):
                target[place].copy_(source[row], non_blocking=True)
        self._stream.synchronize()
