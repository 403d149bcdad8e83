"""Runs step plans on a thread of its own, in order, so that the loop never waits for a forward."""

import os
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from baton_core.plan import StepPlan, StepResult
from baton_engine.transfer.protocol import Poke


class Runs(Protocol):
    """Computes a plan; a fault is part of the result, not an exception."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step."""
        ...

    def run_idle(self) -> None:
        """DP attention: take part in the step of other units, with nothing of our own."""
        ...


class _End:
    """The end of the work."""


_END = _End()


class Compute:
    """One thread, one plan after the other. `finished` yields each result once; every result pokes the driver."""

    def __init__(self, runner: Runs, poke: Poke, clock: Callable[[], int]) -> None:
        self._runner = runner
        self._poke = poke
        self._clock = clock
        self._work: queue.SimpleQueue[StepPlan | _End | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()
        self._died: BaseException | None = None
        self._outstanding = 0
        self.busy_since_ms: int | None = None
        """Since when the oldest piece of work has been in hand; None while there is none."""
        self._thread = threading.Thread(target=self._loop, name="compute", daemon=True)
        self._thread.start()

    def start(self, plan: StepPlan) -> None:
        """Compute `plan` after what was started before."""
        self._put(plan)

    def start_idle(self) -> None:
        """Take part in a step of the other units, with nothing of our own."""
        self._put(None)

    def finished(self) -> list[StepResult | None]:
        """What has been finished since, each once: a result, or None for an idle part. Raises what the thread died of."""
        if self._died is not None:
            raise RuntimeError(f"the compute thread died: {self._died!r}") from self._died
        done: list[StepResult | None] = []
        while True:
            try:
                done.append(self._results.get_nowait())
            except queue.Empty:
                break
        if done:
            self._outstanding -= len(done)
            self.busy_since_ms = self._clock() if self._outstanding else None
        return done

    def excuse(self, overslept_ms: int) -> None:
        """The whole process stood still for so long: the work in hand could not get on."""
        if self.busy_since_ms is not None and overslept_ms > 0:
            self.busy_since_ms += overslept_ms

    def close(self, timeout_s: float) -> None:
        """Let the thread end after the running step."""
        self._work.put(_END)
        self._thread.join(timeout_s)

    def _put(self, work: StepPlan | None) -> None:
        self._outstanding += 1
        if self.busy_since_ms is None:
            self.busy_since_ms = self._clock()
        self._work.put(work)

    def _loop(self) -> None:
        # Torch's own threads are born from this one and inherit it: a loop that wakes up runs before they go on.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            while not isinstance(work := self._work.get(), _End):
                if work is None:
                    self._runner.run_idle()
                    self._results.put(None)
                else:
                    self._results.put(self._runner.run(work))
                self._poke()
        except BaseException as error:  # noqa: BLE001 - the driver raises it: a dead thread must not go unnoticed
            self._died = error
            self._poke()
