"""How the ranks of a unit compute a step together: stage after stage, each over all of its ranks.

A stage computes a step when all of its ranks have begun it and the stage before has finished it; meanwhile the others
work on other steps. The token depends on what every rank sees in its own pages.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton_core.errors import Reason, Verdict
from baton_core.plan import SequenceResult, SequenceSlice, StepPlan, StepResult
from baton_core.unit_log import Done, Idled
from simulation.invariants import Broken, check_step
from simulation.oracle import logprob_of, token_of

if TYPE_CHECKING:
    from simulation.rank import Rank
    from simulation.unit import Unit

RETRY_MS = 40


@dataclass(slots=True)
class Run:
    """One step under way. `begun`: ranks of each stage that have come to it; `seen`: by slice, what each rank sees."""

    plan: StepPlan
    begun: list[int]
    seen: list[list[int]] = field(default_factory=list)


class Tensors:
    """The compute side of one unit."""

    def __init__(self, unit: "Unit") -> None:
        self._unit, self.world = unit, unit.world
        self._stages = unit.parallel.pp
        self._runs: dict[int, Run] = {}
        self._finished = [0] * self._stages  # the last step of each stage
        self._busy = [False] * self._stages

    def start(self, rank: "Rank", plan: StepPlan) -> None:
        """A rank begins a step."""
        run = self._runs.get(plan.step)
        if run is None:
            run = self._runs[plan.step] = Run(plan, [0] * self._stages, [[] for _ in plan.slices])
        if run.plan != plan:
            raise Broken("siblings", f"{rank} plans {plan}, others {run.plan}")
        run.begun[rank.stage] += 1
        self._next(rank.stage)

    def idle(self, rank: "Rank") -> None:
        """A rank idles through a round of the other units."""
        self.world.at(1 + int(self.world.random.random() * self.world.shape.step_ms), self._idled, rank)

    def _idled(self, rank: "Rank") -> None:
        if rank.paused:
            self.world.at(RETRY_MS, self._idled, rank)
        elif rank.alive:
            rank.done(Idled(member=rank.member))

    def _next(self, stage: int) -> None:
        step = self._finished[stage] + 1
        run = self._runs.get(step)
        if run is None or self._busy[stage] or run.begun[stage] < self._unit.parallel.stage_members:
            return
        if stage and self._finished[stage - 1] < step:
            return
        self._busy[stage] = True
        slowness = max(rank.slowness for rank in self._unit.stages[stage].ranks)
        self.world.at(
            1 + int(self.world.random.random() * self.world.shape.step_ms) * slowness, self._computed, stage, run
        )

    def _computed(self, stage: int, run: Run) -> None:
        ranks = self._unit.stages[stage].ranks
        if not self._unit.alive:
            return
        if any(rank.paused for rank in ranks):
            self.world.at(RETRY_MS, self._computed, stage, run)
            return
        step = run.plan.step
        failed = {rank.member for rank in ranks if not self._compute(rank, run)}
        self._finished[stage], self._busy[stage] = step, False
        for rank in ranks:
            result = self._result(run) if rank.member == self._unit.parallel.speaker else None
            if rank.member in failed:
                verdict = Verdict(reason=Reason.DEVICE_FAULT, text="the step failed")
                result = StepResult(step=step, results=(), failed=verdict)
            rank.done(Done(member=rank.member, step=step, result=result))
        if stage + 1 == self._stages:
            del self._runs[step]
        else:
            self._next(stage + 1)
        self._next(stage)

    def _compute(self, rank: "Rank", run: Run) -> bool:
        """One rank's share; False if it fails."""
        check_step(rank, run.plan)
        rate = self.world.rates.step_failed
        if rate and self.world.random.random() < rate / self._unit.parallel.members:
            self.world.fault("step_failed", rank, [piece.rid for piece in run.plan.slices])
            return False
        for seen, piece in zip(run.seen, run.plan.slices, strict=True):
            seen.append(rank.memory.forward(piece))
        return True

    def _result(self, run: Run) -> StepResult:
        """What the speaker makes of it. Where some rank failed, its own words count, not these."""
        drawn = [(piece, token_of(seen) if seen else 0) for piece, seen in zip(run.plan.slices, run.seen, strict=True)]
        results = tuple(_of_slice(piece, token) for piece, token in drawn if piece.sample or piece.score)
        return StepResult(step=run.plan.step, results=results)


def _of_slice(piece: SequenceSlice, token: int) -> SequenceResult:
    return SequenceResult(
        rid=piece.rid,
        token=token if piece.sample else None,
        logprob=logprob_of(token) if piece.sample and piece.sampling.logprobs is not None else None,
        scored=tuple(logprob_of(scored) for scored in piece.score),
    )
