"""What a rank holds of a model, what it reads of its files, and what it computes of a plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch import Tensor

from baton_core.errors import EngineError
from baton_core.plan import SequenceSlice, StepPlan
from baton_core.ranks import Parallel
from baton_engine.loading import open_model, weight_bytes
from baton_engine.model_config import ModelConfig
from baton_engine.portion import portion, wanted
from baton_engine.shard import Shard, refuse_impossible, unit_layout
from tiny_folders import quiet, save_folder
from tiny_gguf import BLOCK_SIZES, QUANTIZED, write_gguf
from tiny_models import GREEDY, config_of, oracle

CPU = torch.device("cpu")
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}


def shards(model: ModelConfig, parallel: Parallel) -> list[Shard]:
    return [Shard.of(model, parallel, parallel.place(rank)) for rank in range(parallel.ranks)]


def config(**changed: Any) -> ModelConfig:
    return replace(config_of(oracle()), **changed)


# -- who holds what


def test_heads_columns_layers_and_tokens_are_shared_and_nothing_is_lost() -> None:
    model = config(layers=5, query_heads=12, kv_heads=6, intermediate=80, vocab=97)
    parts = shards(model, Parallel(tp=3, pp=2))
    assert [part.layers for part in parts] == [range(2)] * 3 + [range(2, 5)] * 3
    assert [part.query_heads for part in parts[:3]] == [range(4), range(4, 8), range(8, 12)]
    assert [part.kv_heads for part in parts[:3]] == [range(2), range(2, 4), range(4, 6)]
    assert [len(part.columns) for part in parts[:3]] == [26, 27, 27] and parts[2].columns.stop == 80
    assert [(part.embeds, part.heads) for part in parts] == [(True, False)] * 3 + [(False, True)] * 3
    assert sum(part.parameters for part in parts) == model.parameters


def test_with_fewer_kv_heads_than_ranks_neighbours_hold_the_same_one() -> None:
    parts = shards(config(query_heads=8, kv_heads=2), Parallel(tp=4))
    assert [part.kv_heads for part in parts] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert all(part.config.queries_per_kv == 2 for part in parts)


def test_with_dp_attention_the_mlp_is_shared_by_all_units_and_its_bias_added_once() -> None:
    parts = shards(config(mlp_bias=True, output_bias=True), Parallel(tp=2, dp=2, dp_attention=True))
    assert [part.columns for part in parts] == [range(20), range(20, 40), range(40, 60), range(60, 80)]
    assert [part.adds_down_bias for part in parts] == [True, False, False, False]
    assert [part.adds_output_bias for part in parts] == [True, False, True, False]


def test_the_pool_of_a_rank_is_the_layout_of_its_member() -> None:
    model, parallel = config(layers=3, query_heads=8, kv_heads=2), Parallel(tp=4, pp=3, cp=2, dp=2)
    layout = unit_layout(model, parallel, 4, 16)
    assert layout.members == parallel.members
    for part, place in zip(shards(model, parallel), map(parallel.place, range(parallel.ranks)), strict=True):
        member = layout.member(place.member)
        assert range(member.first_layer, member.end_layer) == part.layers
        assert range(member.first_head, member.end_head) == part.kv_heads


@pytest.mark.parametrize(
    ("changed", "parallel", "said"),
    [
        ({"query_heads": 9, "kv_heads": 3}, Parallel(tp=2), "9 query heads cannot be shared by --tp 2"),
        ({"query_heads": 12, "kv_heads": 3}, Parallel(tp=2), "3 KV heads cannot be shared by --tp 2: one number must"),
        ({"layers": 3}, Parallel(pp=4), "3 layers cannot be shared by --pp 4"),
        ({"intermediate": 5}, Parallel(tp=2, dp=3, dp_attention=True), "5 MLP columns cannot be shared by 6 ranks"),
        ({}, Parallel(pp=2, dp=2, dp_attention=True), "--dp-attention with --pp 2 is not possible"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_both_numbers(
    changed: dict[str, int], parallel: Parallel, said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        refuse_impossible(config(**changed), parallel)


def test_the_memory_of_a_rank_is_that_of_its_shard() -> None:
    model = config(tied_embeddings=True, layers=4, vocab=100_000)
    first, last = (Shard.of(model, Parallel(pp=2, tp=2), Parallel(pp=2, tp=2).place(rank)) for rank in (0, 3))
    table = 50_000 * model.hidden
    layers = 2 * first.config.layer_parameters
    assert first.parameters == last.parameters == layers + table
    assert weight_bytes(first, torch.float32, CPU) == 4 * (layers + table + first.config.layer_parameters)
    assert weight_bytes(last, torch.bfloat16, CPU) == 2 * (layers + 2 * table)
    assert weight_bytes(first, torch.bfloat16, CPU) == 2 * (layers + table + first.config.layer_parameters)


# -- what is read of the files


def joined(parts: list[Tensor], whole: Tensor, kv_sharers: int) -> Tensor:
    """The parts of a weight, put together along the dimension in which they are shorter."""
    if all(part.shape == whole.shape for part in parts):
        return parts[0]
    shorter = [dimension for dimension in range(whole.dim()) if parts[0].shape[dimension] < whole.shape[dimension]]
    (dimension,) = shorter
    if sum(part.shape[dimension] for part in parts) > whole.shape[dimension]:
        parts = parts[::kv_sharers]
    return torch.cat(parts, dimension)


@pytest.mark.parametrize("kind", ["safetensors", *QUANTIZED])
def test_the_shards_of_all_ranks_make_up_the_weights(tmp_path: Path, kind: str) -> None:
    sizes = {**BLOCK_SIZES, **BIASED, "num_key_value_heads": 2, "vocab_size": 101}
    model = oracle(**sizes)
    if kind == "safetensors":
        files = open_model(save_folder(tmp_path / "model", model))
    else:
        files = open_model(write_gguf(tmp_path / "model.gguf", model, kind=kind))
    whole = files.weights(torch.float32, quiet)
    parallel = Parallel(tp=4, pp=2)
    held = [files.weights(torch.float32, quiet, shard) for shard in shards(files.config, parallel)]
    for name, weight in whole.items():
        holders = [one[name] for one in held if name in one]
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            assert len(holders) == 1
        assert torch.equal(joined(holders, weight, kv_sharers=2), weight), name
    assert all(value.is_contiguous() for one in held for value in one.values())
    assert {name for one in held for name in one} == set(whole)
    assert not any("layers.0." in name for name in held[4]) and "model.norm.weight" not in held[0]


def test_a_weight_of_another_size_than_the_config_says_is_named(tmp_path: Path) -> None:
    files = open_model(save_folder(tmp_path / "model", oracle()))
    wrong = Shard.of(replace(files.config, intermediate=96), Parallel(tp=2), Parallel(tp=2).place(1))
    with pytest.raises(EngineError, match=r"mlp\.\w+_proj\.weight has shape \[.*\], not 96 places in dimension"):
        files.weights(torch.float32, quiet, wrong)


# -- what a CP rank computes of a plan


def piece(rid: str, tokens: range, start: int, *, sample: bool, score_from: int = 0, scores: int = 0) -> SequenceSlice:
    return SequenceSlice(
        rid=rid,
        tokens=tuple(tokens),
        start=start,
        pages=(0, 1, 2, 3),
        sample=sample,
        sampling=GREEDY,
        score_from=score_from,
        score=tuple(range(900, 900 + scores)),
    )


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_the_portions_of_a_plan_are_the_plan(parts: int) -> None:
    slices = (
        piece("long", range(10, 21), 4, sample=True, score_from=2, scores=7),
        piece("one", range(30, 31), 9, sample=True, scores=1),
        piece("silent", range(40, 43), 0, sample=False, scores=3),
        piece("last", range(50, 52), 0, sample=True),
    )
    plan = StepPlan(step=1, slices=slices)
    portions = [portion(plan, part, parts) for part in range(parts)]
    for item in slices:
        pieces = [one for each in portions for one in each.slices if one.rid == item.rid]
        assert tuple(token for one in pieces for token in one.tokens) == item.tokens
        assert [one.start for one in pieces] == [
            item.start + sum(len(one.tokens) for one in pieces[:index]) for index in range(len(pieces))
        ]
        assert [one.sample for one in pieces] == [False] * (len(pieces) - 1) + [item.sample]
        assert tuple(token for one in pieces for token in one.score) == item.score
        first = item.tokens[item.score_from]
        scored = [one.tokens[one.score_from] for one in pieces if one.score]
        assert scored[:1] == ([first] if item.score else [])
    places = [place for each in portions for place in each.places]
    samples, scores = wanted(plan)
    assert (samples, scores) == (3, 11) and sorted(places) == list(range(samples + scores))
    assert sum(each.rows for each in portions) == 17 and portions[-1].rows >= 4
    for each in portions:
        asked = sum(one.sample for one in each.slices) + sum(len(one.score) for one in each.slices)
        assert len(each.places) == asked
