"""Runs step plans on a thread of its own, so that the loop never waits for a forward."""

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


class Compute:
    """One thread, one plan at a time. `finished` yields each result once; every result pokes the driver."""

    def __init__(self, runner: Runs, poke: Poke, clock: Callable[[], int]) -> None:
        self._runner = runner
        self._poke = poke
        self._clock = clock
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self._died: BaseException | None = None
        self.busy_since_ms: int | None = None
        self._thread = threading.Thread(target=self._loop, name="compute", daemon=True)
        self._thread.start()

    def start(self, plan: StepPlan) -> None:
        """Begin to compute `plan`."""
        assert self.busy_since_ms is None, "a step is running"
        self.busy_since_ms = self._clock()
        self._plans.put(plan)

    def finished(self) -> StepResult | None:
        """The result of the running plan, once. Raises what the compute thread died of."""
        if self._died is not None:
            raise RuntimeError(f"the compute thread died: {self._died!r}") from self._died
        try:
            result = self._results.get_nowait()
        except queue.Empty:
            return None
        self.busy_since_ms = None
        return result

    def close(self, timeout_s: float) -> None:
        """Let the thread end after the running step."""
        self._plans.put(None)
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        # Torch's own threads are born from this one and inherit it: a loop that wakes up runs before they go on.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            while (plan := self._plans.get()) is not None:
                self._results.put(self._runner.run(plan))
                self._poke()
        except BaseException as error:  # noqa: BLE001 - the driver raises it: a dead thread must not go unnoticed
            self._died = error
            self._poke()
