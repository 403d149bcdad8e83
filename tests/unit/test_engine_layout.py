"""What makes the engine fast must change nothing: norms in two operations, paired rotations, split and grouped attention."""

import math
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

import baton_engine.attention
import baton_engine.step_batch
from baton_core.plan import SequenceSlice, StepPlan
from baton_engine.attention import layer_views
from baton_engine.kv_pool import KVPool, PoolShape
from baton_engine.model_config import SlidingWindow
from baton_engine.projection import gated_projection, projection
from baton_engine.residual import ResidualStream, norm_weight
from baton_engine.rotation import Rotation, paired
from baton_engine.step_batch import BatchBuilder, StepBatch
from tiny_models import TinyEngine, config_of, oracle, oracle_logits, part, prompt

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden", [48, 576, 896])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_the_stream_s_norm_is_rms_norm_with_its_epsilon(dtype: torch.dtype, hidden: int, size: float) -> None:
    embedded, weight = (torch.randn(5, hidden) * size).to(dtype), torch.rand(hidden).to(dtype)
    added = (torch.randn(5, hidden) * size).to(dtype)
    expected = functional.rms_norm((embedded + added).float(), (hidden,), weight.float(), 1e-5)
    stream = ResidualStream(embedded.clone(), 1e-5)
    stream.add(added)
    assert_close(stream.normed(norm_weight(weight)).float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(stream.hidden, embedded + added)


def test_a_row_of_zeros_stays_zero() -> None:
    assert not ResidualStream(torch.zeros(1, 8), 1e-5).normed(norm_weight(torch.ones(8))).any()


def test_a_length_that_bfloat16_cannot_hold_is_made_up_for_by_the_weights() -> None:
    embedded = torch.randn(64, 896, dtype=torch.bfloat16)
    exact = functional.rms_norm(embedded.float(), (896,), torch.full((896,), 0.77), 1e-5)
    normed = ResidualStream(embedded.clone(), 1e-5).normed(norm_weight(torch.full((896,), 0.77, dtype=torch.bfloat16)))
    assert abs(normed.float().norm() / exact.norm() - 1) < 2**-9 + 1e-3


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_paired_rotations_give_the_scores_of_half_rotations(dtype: torch.dtype) -> None:
    rows, query_heads, kv_heads, head_dim = 7, 4, 2, 16
    angles = torch.rand(rows, 1, head_dim // 2) * 6
    heads = torch.randn(rows, query_heads + 2 * kv_heads, head_dim).to(dtype)
    interleaved = paired(heads.transpose(0, 2).reshape(head_dim, -1), head_dim).view(head_dim, -1, rows).transpose(0, 2)
    interleaved = interleaved.contiguous()
    rotation = Rotation(torch.polar(torch.ones_like(angles), angles), query_heads, kv_heads, dtype)
    rotation.turn(interleaved)
    keys = interleaved[:, query_heads : query_heads + kv_heads].float()
    turned = _turned_by_halves(heads.float(), angles)
    expected = torch.einsum("aqd,bkd->abqk", turned[:, :query_heads], turned[:, query_heads : query_heads + kv_heads])
    scores = torch.einsum("aqd,bkd->abqk", rotation.queries.float(), keys)
    assert_close(scores, expected, atol=8 * TOLERANCE[dtype], rtol=8 * TOLERANCE[dtype])


def _turned_by_halves(values: Tensor, angles: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 40])
def test_projections_are_products_however_weights_are_packed(dtype: torch.dtype, has_bias: bool, tokens: int) -> None:
    values, weight = torch.randn(tokens, 32).to(dtype), (torch.randn(48, 32) * 0.2).to(dtype)
    bias = torch.randn(48).to(dtype) if has_bias else None
    plain = functional.linear(values.float(), weight.float(), None if bias is None else bias.float())
    gate, up = plain.chunk(2, dim=-1)
    near = {"atol": TOLERANCE[dtype] * 2, "rtol": TOLERANCE[dtype]}
    assert_close(projection(weight, bias)(values).float(), plain, **near)
    assert_close(gated_projection(weight, bias)(values).float(), functional.silu(gate) * up, **near)


@pytest.mark.parametrize("chunk", [3, 20])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attending_to_past_and_chunk_apart_is_attending_to_both(
    monkeypatch: pytest.MonkeyPatch, chunk: int, dtype: torch.dtype
) -> None:
    tokens = prompt(90, seed=5)

    def last_logits(split_from: int) -> Tensor:
        monkeypatch.setattr(baton_engine.attention, "_SPLIT_FROM_TOKENS", split_from)
        engine, logits = TinyEngine(oracle(), dtype=dtype), torch.empty(0)
        for start in range(0, len(tokens), chunk):
            logits = engine.logits(part("a", tokens[start : start + chunk], start, first_page=0))
        return logits

    apart, together = last_logits(0), last_logits(10_000)
    assert not torch.equal(apart, together)
    bound = 1e-4 if dtype == torch.float32 else 0.03 * together.abs().max().item()
    assert_close(apart, together, atol=bound, rtol=1e-4)


def test_small_gathers_give_what_a_large_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton_engine.step_batch, "_GROUP_BYTES", 9_000)  # 17 pages of 512 bytes
    model = oracle()
    engine = TinyEngine(model)
    lengths = [3, 31, 8, 17, 23, 30, 44]
    for index, length in enumerate(lengths):
        engine.logits(part(f"r{index}", prompt(length, seed=index), 0, first_page=index, sample=False))
    slices = [part(f"r{index}", [9], length, first_page=index) for index, length in enumerate(lengths)]
    batch = _batch(engine, StepPlan(step=1, slices=tuple(slices)))
    assert sorted(group.rows for group in batch.decode_groups) == [1, 2, 2, 2]
    expected = torch.stack(
        [oracle_logits(model, [*prompt(length, seed=index), 9])[-1] for index, length in enumerate(lengths)]
    )
    assert_close(engine.logits(*slices), expected, atol=2e-4, rtol=1e-4)


def test_all_gathers_of_a_step_share_their_memory() -> None:
    engine = TinyEngine(oracle())
    slices = (part("a", [1], 100, first_page=0), part("b", [1], 3, first_page=1), part("c", [1, 2], 40, first_page=2))
    batch = _batch(engine, StepPlan(step=1, slices=slices))
    rooms = [group.gathered for group in batch.decode_groups]
    rooms += [chunk.gathered for chunk in batch.prompt_chunks if chunk.gathered is not None]
    assert len(rooms) == 3 and len({room.data_ptr() for room in rooms}) == 1


@pytest.mark.parametrize(("head_dim", "dtype"), [(2, torch.bfloat16), (6, torch.bfloat16), (12, torch.float32)])
def test_heads_of_any_even_size_are_written_whole(head_dim: int, dtype: torch.dtype) -> None:
    shape = PoolShape(pages=2, layers=2, kv_heads=1, page_tokens=4, head_dim=head_dim, dtype=dtype)
    pool = KVPool(shape)
    size = head_dim * dtype.itemsize
    for view in layer_views(pool):
        assert view.token_rows.dtype.itemsize * view.token_rows.shape[1] == size
    last = torch.arange(head_dim).to(dtype)
    layer_views(pool)[1].token_rows[0] = last.view(layer_views(pool)[1].token_rows.dtype)
    assert torch.equal(pool.tensor[0, 1, 0, 0, 0], last) and pool.tensor.sum() == last.sum()
    pool.close()


def test_a_plan_s_batch_holds_no_padding_for_a_sequence_of_its_own() -> None:
    config = replace(config_of(oracle()), sliding_window=None)
    engine = TinyEngine(oracle())
    batch = BatchBuilder(config, engine.pool.shape, torch.device("cpu")).build(
        StepPlan(step=1, slices=(part("a", [1], 5, first_page=0),))
    )
    (group,) = batch.decode_groups
    assert group.bias is None and group.keys.shape == (1, 2, 6, 8) and math.prod(group.gathered.shape) == 2 * 2 * 2 * 32


def _windowed(layers: tuple[int, ...], *slices: SequenceSlice) -> StepBatch:
    """The batch of a model of 3 layers, of which `layers` see 9 tokens; a page has 4."""
    engine = TinyEngine(oracle())
    config = replace(engine.config, sliding_window=SlidingWindow(tokens=9, layers=frozenset(layers)))
    return BatchBuilder(config, engine.pool.shape, torch.device("cpu")).build(StepPlan(step=1, slices=slices))


def test_layers_with_a_window_gather_only_the_pages_of_the_window() -> None:
    far, near = part("far", [1], 100, first_page=0), part("near", [1], 5, first_page=1)
    runs = 2 * 2  # of keys and values, of 2 heads
    batch = _windowed((1,), far, near, part("chunk", [1, 2, 3], 50, first_page=2))
    alone, together = batch.decode_groups[1].in_layer(True), batch.decode_groups[1].in_layer(False)
    assert len(together.gather) == 26 * runs and len(alone.gather) == 3 * runs  # pages 23 to 25, tokens 92 to 100
    assert together.keys.shape[2] == 101 and alone.keys.shape[2] == 9 and alone.bias is None
    short = batch.decode_groups[0]
    assert short.in_layer(True) is short, "nothing lies before its window"
    chunk = batch.prompt_chunks[0]
    assert chunk.in_layer(False).gather is not None and len(chunk.in_layer(False).gather) == 14 * runs
    assert chunk.in_layer(True).gather is not None and len(chunk.in_layer(True).gather) == 4 * runs  # tokens 42 to 52
    assert chunk.in_layer(True).past_tokens is None


def test_where_every_layer_has_a_window_nothing_else_is_gathered_or_kept_room_for() -> None:
    batch = _windowed((0, 1, 2), part("far", [1], 100, first_page=0), part("chunk", [1, 2, 3], 50, first_page=2))
    (group,), (chunk,) = batch.decode_groups, batch.prompt_chunks
    assert group.near is None and chunk.near is None
    assert len(group.gather) == 3 * 4 and chunk.gathered is not None and len(chunk.gathered) == 4 * 4
    assert group.gathered.untyped_storage().nbytes() == 4 * 4 * 4 * 8 * 4


def test_windows_of_sequences_of_different_length_are_gathered_together() -> None:
    model = oracle("mistral", sliding_window=9)
    engine = TinyEngine(model, window=9)
    lengths = [20, 23, 27, 30]
    for index, length in enumerate(lengths):
        engine.logits(part(f"r{index}", prompt(length, seed=index), 0, first_page=index, sample=False))
    slices = [part(f"r{index}", [9], length, first_page=index) for index, length in enumerate(lengths)]
    expected = torch.stack(
        [oracle_logits(model, [*prompt(length, seed=index), 9])[-1] for index, length in enumerate(lengths)]
    )
    assert_close(engine.logits(*slices), expected, atol=2e-4, rtol=1e-4)


def _batch(engine: TinyEngine, plan: StepPlan) -> StepBatch:
    return BatchBuilder(engine.config, engine.pool.shape, torch.device("cpu")).build(plan)
