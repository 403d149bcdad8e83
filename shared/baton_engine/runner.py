"""Runs plans: one frozen `StepPlan` in, one `StepResult` out."""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor

from baton_core.errors import EngineError, Reason, Verdict
from baton_core.plan import SequenceResult, SequenceSlice, StepPlan, StepResult
from baton_core.request import Sampling, TokenLogprob
from baton_engine.attention import layer_views
from baton_engine.kv_pool import KVPool
from baton_engine.llama import LlamaModel
from baton_engine.logprobs import judge, logit_blocks, score
from baton_engine.sampler import sample
from baton_engine.step_batch import BatchBuilder

_FAULTS = (RuntimeError, MemoryError, EngineError)
"""What a device or a model can do to a step; torch's out-of-memory error is a RuntimeError."""


class Runner:
    """A model over a pool. One step at a time, on any thread; holds no state of requests."""

    def __init__(self, model: LlamaModel, pool: KVPool) -> None:
        assert pool.shape.dtype == model.dtype and pool.shape.layers == model.config.layers
        self._model = model
        self._pool = pool
        self._views = layer_views(pool)
        self._builder = BatchBuilder(model.config, pool.shape, model.device)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute `plan`: write its keys and values into the pool, draw a token for every slice with `sample`, and
        give the logprobs that slices ask for.

        A fault of the device or the model comes back as `failed`, never as an exception. AssertionError: the plan breaks
        its contract, which is a bug of the scheduler.
        """
        check_plan(plan, self._pool, self._model.config.vocab)
        try:
            results = self._compute(plan)
        except _FAULTS as error:
            return failure(plan, error)
        return StepResult(step=plan.step, results=results)

    def run_idle(self) -> None:
        """Nothing: a rank by itself accompanies nobody."""

    def warm_up(self) -> None:
        """Run a small prompt and a decode step, so that the first request pays for no first-time set-up.

        Call it before any page is owned: it writes to page 0, and leaves it zeroed. Raises EngineError on a fault.
        """
        for plan in warm_up_plans(self._pool.shape.page_tokens):
            result = self.run(plan)
            if result.failed is not None:
                raise EngineError(f"warm-up: {result.failed.text}")
        self._pool.tensor[0].zero_()

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> tuple[SequenceResult, ...]:
        batch = self._builder.build(plan)
        hidden = self._model.forward(batch, self._views)
        logits = self._model.logits(hidden[batch.sampled_rows])
        scored = () if batch.scored_rows is None else logit_blocks(hidden[batch.scored_rows], self._model.logits)
        return results_of(plan, logits, scored)


def results_of(plan: StepPlan, logits: Tensor, scored: Iterable[Tensor]) -> tuple[SequenceResult, ...]:
    """The results of `plan`: `logits` `[samples, vocab]` of its slices with `sample`, `scored` those of all `score` rows,
    in blocks; both in plan order. Mutates `logits`. Raises EngineError where they are not finite."""
    drawn = iter(_drawn(plan, logits))
    scores = iter(score(scored, [item for item in plan.slices if item.score]))
    results: list[SequenceResult] = []
    for item in plan.slices:
        if item.sample or item.score:
            token, logprob = next(drawn) if item.sample else (None, None)
            own = tuple(islice(scores, len(item.score)))
            results.append(SequenceResult(rid=item.rid, token=token, logprob=logprob, scored=own))
    return tuple(results)


def failure(plan: StepPlan, error: BaseException) -> StepResult:
    """The result of a step that a fault ended."""
    text = f"step {plan.step} failed: {error}"
    return StepResult(step=plan.step, results=(), failed=Verdict(reason=Reason.DEVICE_FAULT, text=text))


def _drawn(plan: StepPlan, logits: Tensor) -> list[tuple[int, TokenLogprob | None]]:
    """A token for each slice with `sample`, in plan order, and its logprob where it is asked for."""
    slices = [item for item in plan.slices if item.sample]
    asked = [row for row, item in enumerate(slices) if item.sampling.logprobs is not None]
    as_given = logits[asked] if asked else None  # a copy: sampling masks logits in place
    tokens = sample(logits, slices)
    logprobs: dict[int, TokenLogprob] = {}
    if as_given is not None:
        tops = [slices[row].sampling.logprobs or 0 for row in asked]
        logprobs = dict(zip(asked, judge(as_given, [tokens[row] for row in asked], tops), strict=True))
    return [(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def check_plan(plan: StepPlan, pool: KVPool, vocab: int) -> None:
    """Assert what the core promises about a plan."""
    assert plan.slices, "an empty plan"
    assert len({item.rid for item in plan.slices}) == len(plan.slices), "one request twice in a plan"
    for item in plan.slices:
        assert item.tokens and item.start >= 0, f"{item.rid}: no tokens"
        assert min(item.tokens) >= 0 and max(item.tokens) < vocab, f"{item.rid}: a token outside the vocabulary"
        room = len(item.pages) * pool.shape.page_tokens
        assert item.start + len(item.tokens) <= room, f"{item.rid}: {len(item.pages)} pages are too few"
        assert item.score_from >= 0 and item.score_from + len(item.score) <= len(item.tokens), f"{item.rid}: score"
        assert all(0 <= token < vocab for token in item.score), f"{item.rid}: a scored token outside the vocabulary"
        assert min(item.pages) >= 0 and max(item.pages) < pool.pages, f"{item.rid}: a page outside the pool"


def warm_up_plans(page_tokens: int) -> tuple[StepPlan, ...]:
    """A small prompt and a decode step, in page 0."""
    tokens = max(1, min(page_tokens - 1, 16))
    prompt = _warm_up_slice(tokens=(0,) * tokens, start=0)
    following = _warm_up_slice(tokens=(0,), start=min(tokens, page_tokens - 1))
    return tuple(StepPlan(step=step, slices=(item,)) for step, item in enumerate((prompt, following)))


def _warm_up_slice(tokens: tuple[int, ...], start: int) -> SequenceSlice:
    greedy = Sampling(temperature=0)
    return SequenceSlice(rid="warm-up", tokens=tokens, start=start, pages=(0,), sample=True, sampling=greedy)
