"""Plans that are being computed: with pipeline stages several at a time, committed in the order in which they were made."""

from collections.abc import Iterator

from baton_core.ledger import Ledger
from baton_core.limits import Millis
from baton_core.machine import Handoff, Phase
from baton_core.plan import SequenceResult, SequenceSlice, StepPlan, StepResult

_OVER = (Phase.REVOKING, Phase.DONE, Phase.FAILED)


class Steps:
    """Numbers plans, keeps at most `plans_max` of them running, and takes their results."""

    def __init__(self, ledger: Ledger, plans_max: int) -> None:
        self._ledger = ledger
        self._plans_max = plans_max
        self.running: dict[int, StepPlan] = {}  # by step
        self.count = 0

    @property
    def full(self) -> bool:
        """Whether another plan must wait for a result."""
        return len(self.running) >= self._plans_max

    def begin(self, slices: tuple[SequenceSlice, ...]) -> StepPlan | None:
        """A plan of these slices, running from now on; None where there are none."""
        if not slices:
            return None
        self.count += 1
        plan = self.running[self.count] = StepPlan(step=self.count, slices=slices)
        return plan

    def commit(self, result: StepResult, now: Millis) -> Iterator[tuple[Handoff, SequenceSlice, SequenceResult | None]]:
        """The oldest running plan is computed: yields what it made of each request that still wants it, in plan order.

        A failed step fails every request in it; one that was ended meanwhile may now give back what it holds.
        """
        oldest = next(iter(self.running), None)
        assert result.step == oldest, f"step {result.step} ends where {oldest} is the oldest that runs"
        plan = self.running.pop(result.step)
        results = {one.rid: one for one in result.results}
        for piece in plan.slices:
            handoff = self._ledger.live[piece.rid]
            if result.failed is not None:
                self._ledger.fail(handoff, result.failed, now)
            self._ledger.step_left(handoff)
            if handoff.phase not in _OVER:
                yield handoff, piece, results.get(piece.rid)
