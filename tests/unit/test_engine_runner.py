"""Running plans: results, faults and bugs."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from baton_core.errors import Reason
from baton_core.plan import SequenceSlice, StepPlan
from baton_core.request import Sampling
from baton_engine.runner import Runner
from tiny_models import TinyEngine, oracle, oracle_logits, part, prompt


@pytest.fixture(scope="module")
def engine() -> TinyEngine:
    return TinyEngine(oracle())


@pytest.fixture
def runner(engine: TinyEngine) -> Runner:
    return Runner(engine.model, engine.pool)


def plan(*slices: SequenceSlice) -> StepPlan:
    return StepPlan(step=7, slices=slices)


def test_results_come_for_sampled_slices_in_plan_order(runner: Runner) -> None:
    first, second, silent = prompt(5, seed=1), [3], prompt(4, seed=2)
    result = runner.run(
        plan(
            part("first", first, 0, first_page=0),
            part("silent", silent, 0, first_page=1, sample=False),
            part("second", second, 0, first_page=2),
        )
    )
    best = [int(oracle_logits(oracle(), tokens)[-1].argmax()) for tokens in (first, second)]
    assert result.step == 7 and result.failed is None
    assert [(item.rid, item.token) for item in result.results] == [("first", best[0]), ("second", best[1])]


def test_a_sampled_answer_is_the_same_alone_and_in_company(runner: Runner) -> None:
    sampling = Sampling(temperature=1.5, seed=12)
    tokens = prompt(6, seed=3)
    slices = [replace(part(f"r{index}", tokens, 0, first_page=index), sampling=sampling) for index in range(3)]
    alone = runner.run(plan(slices[0])).results[0].token
    assert [item.token for item in runner.run(plan(*slices)).results] == [alone] * 3


def test_a_fault_of_the_model_is_a_result_not_an_exception() -> None:
    broken = TinyEngine(oracle())
    broken.pool.tensor.fill_(float("nan"))
    runner = Runner(broken.model, broken.pool)
    result = runner.run(plan(part("poisoned", [1], 9, first_page=0)))
    assert result.results == () and result.failed is not None
    assert result.failed.reason is Reason.DEVICE_FAULT and "poisoned" in result.failed.text


@pytest.mark.parametrize(
    "slices",
    [
        (),
        (part("a", [], 0, first_page=0),),
        (part("a", [97], 0, first_page=0),),
        (part("a", [1], 128, first_page=0),),
        (replace(part("a", [1], 0, first_page=0), pages=(256,)),),
        (part("a", [1], 0, first_page=0), part("a", [2], 1, first_page=0)),
    ],
)
def test_a_plan_that_breaks_its_contract_is_our_bug(runner: Runner, slices: tuple[SequenceSlice, ...]) -> None:
    with pytest.raises(AssertionError):
        runner.run(plan(*slices))


def test_warming_up_leaves_the_pool_as_it_was() -> None:
    fresh = TinyEngine(oracle())
    Runner(fresh.model, fresh.pool).warm_up()
    assert fresh.pool.tensor.count_nonzero() == 0


def test_keys_and_values_land_only_in_the_slices_own_pages(engine: TinyEngine, runner: Runner) -> None:
    engine.pool.tensor.zero_()
    item = part("a", prompt(6, seed=4), 0, first_page=10)
    runner.run(plan(item))
    written = engine.pool.tensor.abs().sum(dim=(1, 2, 3, 5))  # [page, token]
    expected = torch.zeros_like(written, dtype=torch.bool)
    expected[item.pages[0]] = True
    expected[item.pages[1], :2] = True
    assert torch.equal(written > 0, expected)
