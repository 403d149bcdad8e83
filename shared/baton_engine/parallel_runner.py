"""Runs plans on one rank of several. Every member of a unit runs the same plans in the same order.

    first stage   tokens ─► embeddings ─► layers ─┐ hidden states, (cp, tp) to the same (cp, tp)
    next stage                             layers ◄┘ ─► … ─► norm, logits ─► the speaker draws

Each CP rank has its portion of the rows; the rows that are sampled or scored are brought together before the logits, which
the TP ranks of CP rank 0 make together. What the speaker draws is the step's result; the others have none.

A fault is not a result here: the siblings would wait for this rank for ever. It is raised, and ends the rank. Only what
the speaker finds in the logits, when everybody's work is done, fails the step alone.
"""

import torch
from torch import Tensor

from baton_core.errors import EngineError
from baton_core.plan import StepPlan, StepResult
from baton_engine.attention import layer_views
from baton_engine.kv_pool import KVPool
from baton_engine.llama import LlamaModel
from baton_engine.logprobs import logit_blocks
from baton_engine.portion import Portion, portion, wanted
from baton_engine.roll_call import GroupLost
from baton_engine.runner import check_plan, failure, results_of, warm_up_plans
from baton_engine.step_batch import BatchBuilder, StepBatch
from baton_engine.team import Team


class ParallelRunner:
    """A shard of a model over the shard of a pool. One step at a time; holds no state of requests."""

    def __init__(self, model: LlamaModel, pool: KVPool, team: Team) -> None:
        assert pool.shape.dtype == model.dtype and pool.shape.layers == model.config.layers
        self._model, self._pool, self._team = model, pool, team
        self._views = layer_views(pool)
        self._builder = BatchBuilder(model.config, pool.shape, model.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute `plan` together with the other members; results are the speaker's only.

        Raises what goes wrong, GroupLost where another member is missing. AssertionError: the plan breaks its contract.
        """
        check_plan(plan, self._pool, self._model.config.vocab)
        portions = self._portions(plan)
        own = plan.slices if portions is None else portions[self._team.cp.rank].slices
        rows = sum(len(item.tokens) for item in own)
        has_company = self._begin(rows)
        batch = (
            self._builder.build(plan) if portions is None else self._builder.build_portion(portions, self._team.cp.rank)
        )
        if rows:
            hidden = self._forward(batch, rows)
        else:
            self._model.accompany(batch, self._views, has_company)
            hidden = self._room(0)
        if not self._team.shard.heads:
            if rows:
                self._team.stages.send(hidden.contiguous(), self._team.stages.rank + 1)
            return StepResult(step=plan.step, results=())
        return self._judge(plan, *self._wanted(plan, batch, hidden, portions))

    @torch.inference_mode()
    def run_idle(self) -> None:
        """DP attention: take part in a step of other units. Raises as `run` does."""
        if self._begin(0):
            self._model.accompany(None, self._views, has_company=True)

    def warm_up(self) -> None:
        """Run a small prompt and a decode step with all members (with DP attention: of all units), see `Runner.warm_up`."""
        for plan in warm_up_plans(self._pool.shape.page_tokens):
            result = self.run(plan)
            if result.failed is not None:
                raise EngineError(f"warm-up: {result.failed.text}")
        self._pool.tensor[0].zero_()

    def _portions(self, plan: StepPlan) -> tuple[Portion, ...] | None:
        parts = self._team.cp.size
        return None if parts == 1 else tuple(portion(plan, part, parts) for part in range(parts))

    def _begin(self, rows: int) -> bool:
        has_company = self._team.begin(rows, self._room(0))
        return self._team.shares_units and has_company

    def _room(self, rows: int) -> Tensor:
        model = self._model
        return torch.empty(rows, model.config.hidden, dtype=model.dtype, device=model.device)

    def _forward(self, batch: StepBatch, rows: int) -> Tensor:
        """The last hidden states of this stage."""
        entering = None
        if not self._team.shard.embeds:
            entering = self._room(rows)
            self._team.stages.receive(entering, self._team.stages.rank - 1)
        return self._model.forward(batch, self._views, entering)

    def _wanted(
        self, plan: StepPlan, batch: StepBatch, hidden: Tensor, portions: tuple[Portion, ...] | None
    ) -> tuple[Tensor, Tensor]:
        """The states of the rows that are sampled, and of those that are scored."""
        scored_rows = batch.sampled_rows[:0] if batch.scored_rows is None else batch.scored_rows
        if portions is None:
            return hidden[batch.sampled_rows], hidden[scored_rows]
        samples, scores = wanted(plan)
        rows = torch.cat((batch.sampled_rows, scored_rows))
        places = portions[self._team.cp.rank].places
        both = self._team.wanted_rows(hidden, rows, places, samples + scores)
        return both[:samples], both[samples:]

    def _judge(self, plan: StepPlan, sampled: Tensor, scored: Tensor) -> StepResult:
        """What the step makes of its last hidden states, on the last stage."""
        team = self._team
        if team.place.cp_rank > 0:
            return StepResult(step=plan.step, results=())
        drawn = self._logits(sampled) if len(sampled) else sampled.float()[:, :0]
        blocks = logit_blocks(scored, self._logits)
        if not team.speaks:
            for _ in blocks:
                pass
            return StepResult(step=plan.step, results=())
        try:
            return StepResult(step=plan.step, results=results_of(plan, drawn, blocks))
        except GroupLost:
            raise
        except EngineError as error:
            for _ in blocks:
                pass  # the others' products wait for ours
            return failure(plan, error)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of the whole vocabulary on the speaker; elsewhere nothing."""
        logits = self._team.logits(self._model.scores(hidden))
        return hidden.new_empty(0) if logits is None else logits
