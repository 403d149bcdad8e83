"""Runs plans: one frozen `StepPlan` in, one `StepResult` out."""

import torch

from baton_core.errors import EngineError, Reason, Verdict
from baton_core.plan import SequenceResult, SequenceSlice, StepPlan, StepResult
from baton_core.request import Sampling
from baton_engine.attention import layer_views
from baton_engine.kv_pool import KVPool
from baton_engine.llama import LlamaModel
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
        """Compute `plan`: write its keys and values into the pool, draw a token for every slice with `sample`.

        A fault of the device or the model comes back as `failed`, never as an exception. AssertionError: the plan breaks
        its contract, which is a bug of the scheduler.
        """
        _check(plan, self._pool, self._model.config.vocab)
        try:
            tokens = self._compute(plan)
        except _FAULTS as error:
            text = f"step {plan.step} failed: {error}"
            return StepResult(step=plan.step, results=(), failed=Verdict(reason=Reason.DEVICE_FAULT, text=text))
        sampled = [item for item in plan.slices if item.sample]
        results = tuple(SequenceResult(rid=item.rid, token=token) for item, token in zip(sampled, tokens, strict=True))
        return StepResult(step=plan.step, results=results)

    def warm_up(self) -> None:
        """Run a small prompt and a decode step, so that the first request pays for no first-time set-up.

        Call it before any page is owned: it writes to page 0, and leaves it zeroed. Raises EngineError on a fault.
        """
        tokens = max(1, min(self._pool.shape.page_tokens - 1, 16))
        prompt = _warm_up_slice(tokens=(0,) * tokens, start=0)
        following = _warm_up_slice(tokens=(0,), start=min(tokens, self._pool.shape.page_tokens - 1))
        for step, item in enumerate((prompt, following)):
            result = self.run(StepPlan(step=step, slices=(item,)))
            if result.failed is not None:
                raise EngineError(f"warm-up: {result.failed.text}")
        self._pool.tensor[0].zero_()

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> list[int]:
        logits = self._model.logits(self._builder.build(plan), self._views)
        return sample(logits, [item for item in plan.slices if item.sample])


def _check(plan: StepPlan, pool: KVPool, vocab: int) -> None:
    """Assert what the core promises about a plan."""
    assert plan.slices, "an empty plan"
    assert len({item.rid for item in plan.slices}) == len(plan.slices), "one request twice in a plan"
    for item in plan.slices:
        assert item.tokens and item.start >= 0, f"{item.rid}: no tokens"
        assert min(item.tokens) >= 0 and max(item.tokens) < vocab, f"{item.rid}: a token outside the vocabulary"
        room = len(item.pages) * pool.shape.page_tokens
        assert item.start + len(item.tokens) <= room, f"{item.rid}: {len(item.pages)} pages are too few"
        assert min(item.pages) >= 0 and max(item.pages) < pool.pages, f"{item.rid}: a page outside the pool"


def _warm_up_slice(tokens: tuple[int, ...], start: int) -> SequenceSlice:
    greedy = Sampling(temperature=0)
    return SequenceSlice(rid="warm-up", tokens=tokens, start=start, pages=(0,), sample=True, sampling=greedy)
