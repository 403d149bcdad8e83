"""Ranks that share a model answer as one rank does: real processes, gloo, real runners, tiny random models, float32."""

import importlib.util
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.testing import assert_close

from baton_core.kv_layout import UnitLayout
from baton_core.plan import StepPlan, StepResult
from baton_core.ranks import Parallel
from rank_pool import (
    Fault,
    RankPool,
    Rounds,
    answering,
    broken,
    computed,
    load_rank,
    poisoned,
    rank_pool,
    refused,
    renumbered,
    trace,
)
from tiny_folders import MARGIN, save_folder
from tiny_gguf import write_gguf
from tiny_models import oracle

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 101, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "biased": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "one kv head": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "tied": True}),
    "normed heads": ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 80}),
    "qwen2": ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "windowed": ("mistral", {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 9}),
}
PROMPTS: dict[str, list[int]] = {"a": [23, 1, 9, 30], "b": [12, 2]}
"""Lengths of the prompts of each unit."""
COUNT, CHUNK = 6, 7


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of ranks and the model that they share."""

    model: str
    gguf: str | None = None  # kind of the file's matrices; None: safetensors
    parallel: Parallel = field(default_factory=Parallel)
    chunk: int = CHUNK


CASES: dict[str, Case] = {
    "TP2": Case(model="biased", parallel=Parallel(tp=2)),
    "TP3": Case(model="normed heads", parallel=Parallel(tp=3)),
    "TP4, one KV head on all": Case(model="one kv head", gguf="F32", parallel=Parallel(tp=4)),
    "TP4 of blocks": Case(model="qwen2", gguf="Q8_0", parallel=Parallel(tp=4)),
    "PP2": Case(model="biased", gguf="F16", parallel=Parallel(pp=2)),
    "PP2xTP2": Case(model="one kv head", parallel=Parallel(pp=2, tp=2)),
    "CP2": Case(model="windowed", parallel=Parallel(cp=2)),
    "CP2xTP2": Case(model="biased", parallel=Parallel(cp=2, tp=2), chunk=5),
    "DPA2": Case(model="normed heads", parallel=Parallel(dp=2, dp_attention=True)),
    "DPA2xTP2": Case(model="biased", parallel=Parallel(dp=2, tp=2, dp_attention=True)),
}
SLOW_CASES: dict[str, Case] = {
    "TP2, heads of a kind": Case(model="normed heads", gguf="BF16", parallel=Parallel(tp=2)),
    "TP2, quantised": Case(model="qwen2", gguf="Q4_0", parallel=Parallel(tp=2)),
    "TP2, windows": Case(model="windowed", gguf="F32", parallel=Parallel(tp=2)),
    "TP4, heads of a kind": Case(model="normed heads", parallel=Parallel(tp=4)),
    "TP4": Case(model="biased", gguf="Q5_1", parallel=Parallel(tp=4)),
    "PP3": Case(model="normed heads", parallel=Parallel(pp=3)),
    "PP2, tied": Case(model="one kv head", gguf="F32", parallel=Parallel(pp=2)),
    "PP2xCP2": Case(model="qwen2", parallel=Parallel(pp=2, cp=2)),
    "CP4": Case(model="normed heads", parallel=Parallel(cp=4), chunk=3),
    "CP3 in long chunks": Case(model="biased", parallel=Parallel(cp=3), chunk=64),
    "CP2xDPA2": Case(model="qwen2", parallel=Parallel(cp=2, dp=2, dp_attention=True), chunk=1),
    "DPA3": Case(model="one kv head", gguf="F32", parallel=Parallel(dp=3, dp_attention=True)),
    "DP2": Case(model="biased", parallel=Parallel(dp=2)),
    "DP2xTP2": Case(model="biased", parallel=Parallel(dp=2, tp=2)),
}


@pytest.fixture
def ranks() -> RankPool:
    return rank_pool()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def saved(folder: Path, name: str, gguf: str | None) -> Path:
    """The model as files, made once."""
    path = folder / f"{name} {gguf}".replace(" ", "-")
    if not path.exists():
        kind, changes = MODELS[name]
        model = oracle(kind, **(SIZES | changes))
        if gguf is None:
            save_folder(path, model)
        else:
            window = changes.get("sliding_window")
            metadata = {} if window is None else {"attention.sliding_window": window}
            write_gguf(path, model, kind=gguf, metadata=metadata)
    return path


@cache
def solo(path: Path, dtype: str, unit: str, chunk: int) -> tuple[list[StepPlan], list[StepResult], torch.Tensor]:
    """Plans for the prompts of one unit, what one rank answers to them, and what its pool holds then.

    The prompts are such that the rank is sure of every token it draws.
    """
    engine = load_rank(str(path), dtype, Parallel(), 0, None)
    for seed in range(100):
        random = torch.Generator().manual_seed(1_000 * ord(unit) + seed)
        lengths, vocab = PROMPTS[unit], SIZES["vocab_size"]
        prompts = [torch.randint(0, vocab, (length,), generator=random).tolist() for length in lengths]
        engine.pool.tensor.zero_()
        plans, results = trace(engine, prompts, COUNT, chunk, unit)
        drawn = [one.logprob for result in results for one in result.results if one.logprob is not None]
        if all(one.top[0][1] - one.top[1][1] >= MARGIN for one in drawn):
            pool = engine.pool.tensor.clone()
            engine.close()
            return plans, results, pool
    raise AssertionError("the rank is never sure")


def rounds_of(units: list[list[StepPlan]]) -> Rounds:
    """The plans of all units, side by side; every unit but the first begins two steps late, and rests in between."""
    columns: list[list[StepPlan | None]] = []
    for index, plans in enumerate(units):
        late: list[StepPlan | None] = [None, None] if index else []
        columns.append([*late, *plans[:3], *([None] if index else []), *plans[3:]])
    length = max(map(len, columns))
    return list(zip(*([*column, *[None] * (length - len(column))] for column in columns), strict=True))


def check(ranks: RankPool, folder: Path, tmp_path: Path, case: Case) -> None:
    """Compare every step, and every page, of every rank with the solo engine."""
    path, parallel = saved(folder, case.model, case.gguf), case.parallel
    units = [solo(path, "float32", "ab"[unit % 2], case.chunk) for unit in range(parallel.dp)]
    rounds = rounds_of([plans for plans, _, _ in units])
    if not parallel.dp_attention:
        # Units of their own idle with nobody.
        rounds = [tuple(unit[0][min(step, len(unit[0]) - 1)] for unit in units) for step in range(len(units[0][0]))]
    answers = ranks.run(
        computed, range(parallel.ranks), parallel, f"file://{tmp_path}/meet", str(path), "float32", rounds
    )
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, Fault), f"rank {rank}: {answer.text}"
        place = parallel.place(rank)
        plans, expected, pool = units[place.dp_rank]
        if place.member == parallel.speaker:
            same_answers(answer[0][: len(plans)], expected)
        else:
            assert not any(result.results or result.failed for result in answer[0])
        part = answer[1].member(place.member)
        whole = pool[:, part.first_layer : part.end_layer, :, part.first_head : part.end_head]
        assert_close(answer[2], whole, atol=1e-4, rtol=1e-4)


def same_answers(results: list[StepResult], expected: list[StepResult]) -> None:
    """The same tokens, and the same logprobs but for rounding."""
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert result.step == wanted.step and result.failed is None
        assert [(one.rid, one.token) for one in result.results] == [(one.rid, one.token) for one in wanted.results]
        for one, other in zip(result.results, wanted.results, strict=True):
            assert len(one.scored) == len(other.scored)
            ours = [*one.scored, *([] if one.logprob is None else [one.logprob])]
            theirs = [*other.scored, *([] if other.logprob is None else [other.logprob])]
            for judged, exact in zip(ours, theirs, strict=True):
                assert judged.token == exact.token
                assert judged.logprob == pytest.approx(exact.logprob, abs=2e-4)
                assert [value for _, value in judged.top] == pytest.approx([value for _, value in exact.top], abs=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_a_model_answer_as_one_rank_does(
    ranks: RankPool, folder: Path, tmp_path: Path, name: str
) -> None:
    check(ranks, folder, tmp_path, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_ranks_in_every_layout_answer_as_one_rank_does(
    ranks: RankPool, folder: Path, tmp_path: Path, name: str
) -> None:
    check(ranks, folder, tmp_path, SLOW_CASES[name])


def test_ranks_share_a_model_in_bfloat16(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    path, parallel = saved(folder, "biased", None), Parallel(cp=2, tp=2)
    plans, exact, _ = solo(path, "float32", "b", CHUNK)
    rounds: Rounds = [(plan,) for plan in plans]
    answers = ranks.run(computed, range(4), parallel, f"file://{tmp_path}/meet", str(path), "bfloat16", rounds)
    assert not any(isinstance(answer, Fault) for answer in answers), answers
    drawn = [one for result in answers[0][0] for one in result.results if one.logprob is not None]
    wanted = [one for result in exact for one in result.results if one.logprob is not None]
    # Rounding may turn a close choice, but not the likelihood of the answer.
    likelihoods = [one.logprob.top[0][1] for one in wanted]
    assert [one.logprob.top[0][1] for one in drawn] == pytest.approx(likelihoods, abs=1.0)


def test_a_fault_in_what_the_speaker_finds_fails_the_step_and_nobody_else(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    path, parallel = saved(folder, "biased", None), Parallel(tp=2)
    plans, expected, _ = solo(path, "float32", "a", CHUNK)
    answers = ranks.run(
        poisoned, range(2), parallel, f"file://{tmp_path}/meet", str(path), renumbered([plans[1], *plans])
    )
    assert not any(isinstance(answer, Fault) for answer in answers), answers
    first, *others = answers[0]
    assert first.failed is not None and "not finite" in first.failed.text and first.results == ()
    assert [[one.token for one in result.results] for result in others] == [
        [one.token for one in result.results] for result in expected
    ]


def test_a_fault_in_a_forward_ends_the_rank_and_its_siblings_hear_of_it(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    path = saved(folder, "biased", None)
    plans, _, _ = solo(path, "float32", "a", CHUNK)
    answers = ranks.run(broken, range(2), Parallel(tp=2), f"file://{tmp_path}/meet", str(path), plans[0], 1)
    assert answers[1] == Fault("RuntimeError", "the device is out of memory")
    assert answers[0].kind == "GroupLost" and "rank 1 did not answer the roll call" in answers[0].text


@pytest.mark.parametrize(
    ("model", "parallel", "said"),
    [
        ("biased", Parallel(tp=3), "8 query heads cannot be shared by --tp 3"),
        ("biased", Parallel(pp=4), "3 layers cannot be shared by --pp 4"),
        ("biased", Parallel(pp=2, dp=2, dp_attention=True), "--dp-attention with --pp 2 is not possible"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_on_every_rank(
    ranks: RankPool, folder: Path, tmp_path: Path, model: str, parallel: Parallel, said: str
) -> None:
    path = saved(folder, model, None)
    answers = ranks.run(refused, range(parallel.ranks), parallel, f"file://{tmp_path}/meet", str(path))
    assert [answer.kind for answer in answers] == ["EngineError"] * parallel.ranks
    assert all(said in answer.text for answer in answers)


def test_the_layout_of_a_unit_says_who_holds_what(folder: Path) -> None:
    engine = load_rank(str(saved(folder, "biased", None)), "float32", Parallel(dp=2), 1, None)
    assert engine.layout == UnitLayout(layers=3, kv_heads=4, head_dim=8, element_bytes=4, page_tokens=4)
    assert "page_tokens" not in engine.fingerprint_fields
    engine.close()


# -- the real model


GOLD = json.loads((Path(__file__).parents[1] / "gold" / "smollm2.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [Parallel(tp=3), Parallel(pp=2, cp=2), Parallel(dp=2, dp_attention=True)],
    ids=lambda parallel: f"tp{parallel.tp} pp{parallel.pp} cp{parallel.cp} dp{parallel.dp}",
)
def test_ranks_that_share_the_real_model_answer_as_transformers_does(
    ranks: RankPool, tmp_path: Path, parallel: Parallel
) -> None:
    spec = importlib.util.find_spec(GOLD["model"]["package"])
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {GOLD['model']['package']} is not installed")
    path = Path(spec.submodule_search_locations[0]) / GOLD["model"]["file"]
    prompt = next(item for item in GOLD["prompts"] if item["name"] == "chat-capital")
    answer = prompt["output_ids"]
    plans = answering(prompt["input_ids"], answer)
    idle = [None] * (parallel.dp - 1) if parallel.dp_attention else []
    rounds: Rounds = [(plan, *idle) for plan in plans]
    answers = ranks.run(
        computed, range(parallel.ranks), parallel, f"file://{tmp_path}/meet", str(path), "float32", rounds
    )
    assert not any(isinstance(one, Fault) for one in answers), answers
    drawn = [one.token for result in answers[parallel.speaker][0] for one in result.results if one.token is not None]
    assert drawn == answer
