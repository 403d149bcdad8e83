"""Logprobs of the engine: Transformers' log-softmax, however the prompt is cut and whatever else is asked for."""

from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from baton_core.plan import SequenceResult, SequenceSlice, StepPlan
from baton_core.request import Sampling, TokenLogprob
from baton_engine.logprobs import BLOCK_ROWS, judge, logit_blocks, score
from baton_engine.runner import Runner
from tiny_models import GREEDY, TinyEngine, oracle, oracle_logits, part, prompt

ASKING = Sampling(temperature=0, logprobs=3)


@pytest.fixture(scope="module")
def engine() -> TinyEngine:
    return TinyEngine(oracle())


@pytest.fixture
def runner(engine: TinyEngine) -> Runner:
    return Runner(engine.model, engine.pool)


def run(runner: Runner, *slices: SequenceSlice) -> tuple[SequenceResult, ...]:
    result = runner.run(StepPlan(step=1, slices=slices))
    assert result.failed is None, result.failed
    return result.results


def chunk(tokens: list[int], start: int, end: int, *, first_page: int = 0, score_from: int = 0) -> SequenceSlice:
    """Tokens `start … end-1` of a prompt, with all scores from position `score_from` on, as the core cuts them."""
    first = max(start, score_from)
    return replace(
        part("scored", tokens[start:end], start, first_page=first_page, sample=end == len(tokens)),
        sampling=ASKING,
        score_from=max(0, first - start),
        score=tuple(tokens[first + 1 : end + 1]),
    )


def logprobs(one: TokenLogprob | None) -> list[float]:
    """Its numbers, the token's own first: rounding depends on a batch's shape, so they are compared by closeness."""
    assert one is not None and one.logprob is not None
    return [one.logprob, *(logprob for _, logprob in one.top)]


def expected(tokens: list[int]) -> torch.Tensor:
    """The oracle's log-softmax `[tokens, vocab]`."""
    return oracle_logits(oracle(), tokens).float().log_softmax(dim=-1)


def test_a_drawn_token_has_the_logprob_that_transformers_gives_it(runner: Runner) -> None:
    tokens = prompt(9, seed=1)
    (result,) = run(runner, replace(part("a", tokens, 0, first_page=0), sampling=ASKING))
    wanted = expected(tokens)[-1]
    assert result.token is not None and result.logprob is not None
    assert result.logprob.token == result.token
    assert result.logprob.logprob == pytest.approx(float(wanted[result.token]), abs=1e-4)
    best = wanted.topk(3)
    assert [token for token, _ in result.logprob.top] == best.indices.tolist()
    assert [logprob for _, logprob in result.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_temperature_filters_and_masks_change_no_logprob(runner: Runner) -> None:
    tokens = prompt(7, seed=2)
    (plain,) = run(runner, replace(part("a", tokens, 0, first_page=0), sampling=ASKING))
    assert plain.token is not None
    masked = replace(ASKING, stop_token_ids=(plain.token,), min_new_tokens=4, temperature=0.7, top_k=5)
    (other,) = run(runner, replace(part("a", tokens, 0, first_page=0), sampling=masked))
    assert other.token != plain.token
    assert plain.logprob is not None and other.logprob is not None
    assert other.logprob.top == plain.logprob.top


def test_a_request_that_asks_for_nothing_gets_nothing_in_any_company(runner: Runner) -> None:
    tokens = prompt(5, seed=3)
    silent = part("silent", tokens, 0, first_page=0)
    asking = replace(part("asking", tokens, 0, first_page=1), sampling=replace(GREEDY, logprobs=0))
    first, second = run(runner, silent, asking)
    assert (first.logprob, first.scored, second.scored) == (None, (), ())
    assert second.logprob is not None and second.logprob.top == ()


@pytest.mark.parametrize("cuts", [(0, 40), (0, 16, 32, 40), (0, 1, 2, 39, 40)])
def test_a_prompt_scored_in_chunks_is_scored_as_transformers_does(runner: Runner, cuts: tuple[int, ...]) -> None:
    tokens = prompt(40, seed=4)
    scored: list[TokenLogprob] = []
    for start, end in pairwise(cuts):
        (result,) = run(runner, chunk(tokens, start, end))
        assert (result.token is None) == (end < len(tokens))
        scored += result.scored
    wanted = expected(tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert [one.token for one in scored] == tokens[1:]
    assert [one.logprob for one in scored] == pytest.approx(wanted, abs=1e-4)
    assert [one.top[0][0] for one in scored] == expected(tokens)[:-1].argmax(dim=-1).tolist()


def test_scoring_may_begin_anywhere_in_a_chunk(runner: Runner) -> None:
    tokens = prompt(20, seed=5)
    (whole,) = run(runner, chunk(tokens, 0, 20))
    (tail,) = run(runner, chunk(tokens, 0, 20, score_from=13))
    assert [one.token for one in tail.scored] == tokens[14:]
    for one, other in zip(tail.scored, whole.scored[13:], strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-5)


def test_results_stand_in_plan_order_though_rows_are_regrouped(runner: Runner) -> None:
    tokens = prompt(12, seed=6)
    middle = chunk(tokens, 0, 8, first_page=3)  # scored, not sampled
    silent = part("silent", tokens, 0, first_page=0, sample=False)
    single = replace(part("single", [5], 0, first_page=1), sampling=ASKING)
    results = run(runner, middle, silent, single)
    assert [(one.rid, one.token is None, len(one.scored)) for one in results] == [
        ("scored", True, 8),
        ("single", False, 0),
    ]
    alone = run(runner, single)[0]
    assert results[1].token == alone.token
    assert logprobs(results[1].logprob) == pytest.approx(logprobs(alone.logprob), abs=1e-5)


def test_equal_tokens_are_ordered_by_id_also_at_the_border_of_the_likeliest() -> None:
    logits = torch.zeros(2, 300)
    logits[0, [250, 7]] = 2.0
    logits[1, 299] = 1.0
    first, second = judge(logits, [7, 0], [4, 2])
    assert [token for token, _ in first.top] == [7, 250, 0, 1]
    assert [token for token, _ in second.top] == [299, 0]
    assert judge(torch.zeros(1, 3), [0], [128])[0].top == tuple(
        (token, pytest.approx(-1.0986123)) for token in range(3)
    )


def test_a_long_chunk_is_scored_in_bounded_blocks() -> None:
    sizes: list[int] = []
    weight = torch.randn(11, 4, generator=torch.Generator().manual_seed(1))

    def head(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return hidden @ weight.T

    rows = 2 * BLOCK_ROWS + 9
    hidden = torch.randn(rows, 4, generator=torch.Generator().manual_seed(2))
    item = replace(part("a", [1], 0, first_page=0), sampling=ASKING, score=tuple(index % 11 for index in range(rows)))
    scored = score(logit_blocks(hidden, head), [item])
    assert sizes == [BLOCK_ROWS, BLOCK_ROWS, 9]
    at_once = judge(hidden @ weight.T, list(item.score), [3] * rows)
    assert len(scored) == rows
    for one, other in zip(scored, at_once, strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-5)


def test_logits_that_are_not_finite_fail_the_step(engine: TinyEngine) -> None:
    broken = TinyEngine(oracle())
    broken.pool.tensor.fill_(float("nan"))
    item = replace(part("poisoned", [1, 2], 9, first_page=0, sample=False), sampling=ASKING, score=(2, 3))
    result = Runner(broken.model, broken.pool).run(StepPlan(step=1, slices=(item,)))
    assert result.failed is not None and "not finite" in result.failed.text
