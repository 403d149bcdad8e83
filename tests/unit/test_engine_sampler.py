"""Drawing tokens."""

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from baton_core.errors import EngineError
from baton_core.plan import SequenceSlice
from baton_core.request import Sampling
from baton_engine.sampler import sample, uniform

PROBABILITIES = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
LOGITS = PROBABILITIES.log()
VOCAB = 5_000


def drawn(logits: Tensor, sampling: Sampling, count: int = 1, output_index: int = 0) -> list[int]:
    """Tokens of `count` requests that differ in their seed only, drawn in one batch from the same logits."""
    slices = [
        SequenceSlice(
            rid=f"r{seed}",
            tokens=(1,),
            start=0,
            pages=(0,),
            sample=True,
            sampling=replace(sampling, seed=sampling.seed + seed),
            output_index=output_index,
        )
        for seed in range(count)
    ]
    return sample(logits.repeat(count, 1), slices)


def frequencies(sampling: Sampling, count: int = 3_000) -> list[float]:
    counts = Counter(drawn(LOGITS, sampling, count))
    return [counts[token] / count for token in range(len(LOGITS))]


def test_temperature_zero_takes_the_best_and_the_lowest_of_equals() -> None:
    assert drawn(torch.tensor([1.0, 5.0, 5.0, 2.0]), Sampling(temperature=0), 3) == [1, 1, 1]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=5), Sampling(top_p=0.9999)])
def test_tokens_come_as_often_as_their_probability_says(sampling: Sampling) -> None:
    assert frequencies(sampling) == pytest.approx(PROBABILITIES.tolist(), abs=0.03)


def test_a_higher_temperature_flattens_and_a_lower_one_sharpens() -> None:
    for temperature in (0.5, 2.0):
        expected = torch.softmax(LOGITS / temperature, dim=-1).tolist()
        assert frequencies(Sampling(temperature=temperature)) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_p=0.69), {1, 3}),  # 0.4 precedes token 3, 0.7 precedes token 2
        (Sampling(top_p=0.71), {1, 3, 2}),
        (Sampling(top_p=0.05), {1}),
        (Sampling(min_p=0.3), {1, 2, 3}),
        (Sampling(top_k=3, min_p=0.5), {1, 3}),
        (Sampling(top_k=2, top_p=0.99, min_p=0.1), {1, 3}),
    ],
)
def test_filters_keep_exactly_their_tokens(sampling: Sampling, kept: set[int]) -> None:
    assert set(drawn(LOGITS, sampling, 500)) == kept


def test_filtered_tokens_keep_their_proportions() -> None:
    seen = frequencies(Sampling(top_k=2))
    assert seen[1] == pytest.approx(4 / 7, abs=0.03)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_the_shortcut_for_top_p_draws_what_sorting_everything_draws(top_p: float) -> None:
    generator = torch.Generator().manual_seed(5)
    for width in (0.1, 4.0):  # nearly flat: the best 1,024 do not reach top_p; peaked: they do
        logits = torch.randn(VOCAB, generator=generator) * width
        order = logits.argsort(descending=True, stable=True)
        probabilities = torch.softmax(logits.double(), dim=-1)[order]
        kept = probabilities.masked_fill(probabilities.cumsum(0) - probabilities > top_p, 0.0)
        for seed in range(20):
            sampling = Sampling(top_p=top_p, seed=seed)
            place = torch.searchsorted(kept.cumsum(0), kept.sum() * uniform(sampling, 0), right=True)
            assert drawn(logits, sampling) == [int(order[place])]


def test_top_k_of_one_is_greedy() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(6)).round()
    assert drawn(logits, Sampling(top_k=1, seed=9), 4) == drawn(logits, Sampling(temperature=0), 4)


def test_a_draw_depends_on_seed_sample_and_position_alone() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(7))
    sampling = Sampling(seed=3)
    alone = drawn(logits, sampling, output_index=4)
    assert drawn(logits, replace(sampling, seed=0), 8, output_index=4)[3:4] == alone
    others = {
        uniform(sampling, 5),
        uniform(replace(sampling, seed=4), 4),
        uniform(replace(sampling, sample_index=1), 4),
    }
    assert uniform(sampling, 4) not in others and len(others) == 3
    assert all(0 <= number < 1 for number in others)


def test_uniform_numbers_are_the_same_on_every_machine() -> None:
    # Both legs of a handoff draw from the same function: changing it breaks mixed versions.
    assert uniform(Sampling(seed=1, sample_index=2), 3) == 0.7069603535111167


def test_stop_tokens_are_out_of_reach_below_the_least_length() -> None:
    greedy = Sampling(temperature=0, min_new_tokens=2, stop_token_ids=(1, 99))
    assert drawn(LOGITS, greedy, output_index=1) == [3]
    assert drawn(LOGITS, greedy, output_index=2) == [1]
    assert 1 not in drawn(LOGITS, replace(greedy, temperature=1.0), 300)


def test_logits_that_are_not_finite_name_their_request() -> None:
    broken = LOGITS.clone()
    broken[2] = float("nan")
    with pytest.raises(EngineError, match="not finite for request r0"):
        drawn(broken, Sampling(temperature=0))


def test_nothing_to_sample_is_no_work() -> None:
    assert sample(torch.empty(0, 5), []) == []


def test_kinds_of_sampling_mix_in_one_batch() -> None:
    kinds = [Sampling(temperature=0), Sampling(seed=1), Sampling(top_k=3, seed=2), Sampling(top_p=0.5, seed=3)]
    slices = [
        SequenceSlice(rid=f"r{row}", tokens=(1,), start=0, pages=(0,), sample=True, sampling=kind)
        for row, kind in enumerate(kinds)
    ]
    alone = [drawn(LOGITS, kind)[0] for kind in kinds]
    assert sample(LOGITS.repeat(4, 1), slices) == alone
