"""The decoder against Transformers, and against itself in other shapes of batch."""

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.testing import assert_close

from baton_core.errors import EngineError
from baton_engine.llama import LlamaModel
from baton_engine.model_config import ModelConfig
from tiny_models import TinyEngine, config_of, oracle, oracle_logits, part, prompt


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_every_position_are_those_of_transformers(kind: str, tied: bool) -> None:
    model = oracle(kind, tied=tied)
    engine, tokens = TinyEngine(model), prompt(23, seed=1)
    expected = oracle_logits(model, tokens)
    whole = engine.logits(part("whole", tokens, 0, first_page=0))
    one_by_one = [engine.logits(part("steps", [token], at, first_page=3))[0] for at, token in enumerate(tokens)]
    assert_close(whole[0], expected[-1], atol=2e-4, rtol=1e-4)
    assert_close(torch.stack(one_by_one), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 16, 50])
def test_a_prompt_in_chunks_gives_what_the_whole_prompt_gives(chunk: int) -> None:
    engine, tokens = TinyEngine(oracle()), prompt(50, seed=2)
    whole = engine.logits(part("whole", tokens, 0, first_page=0))
    chunked = torch.empty(0)
    for start in range(0, len(tokens), chunk):
        chunked = engine.logits(part("chunked", tokens[start : start + chunk], start, first_page=2))
    assert_close(chunked, whole, atol=1e-4, rtol=1e-4)


def test_a_mixed_batch_gives_each_sequence_what_it_gets_alone() -> None:
    model = oracle()
    engine = TinyEngine(model)
    decoding = {f"decode-{index}": prompt(length, seed=index) for index, length in enumerate((1, 3, 4, 5, 40, 61, 90))}
    for index, (rid, tokens) in enumerate(decoding.items()):
        engine.logits(part(rid, tokens, 0, first_page=index, sample=False))
    fresh, resumed = prompt(9, seed=20), prompt(21, seed=21)
    engine.logits(part("resumed", resumed[:13], 0, first_page=106, sample=False))
    batch = [
        part("fresh", fresh, 0, first_page=105),
        *[part(rid, [7], len(tokens), first_page=index) for index, (rid, tokens) in enumerate(decoding.items())],
        part("silent", prompt(6, seed=22), 0, first_page=107, sample=False),
        part("resumed", resumed[13:], 13, first_page=106),
    ]
    sequences = [fresh, *[[*tokens, 7] for tokens in decoding.values()], resumed]
    expected = torch.stack([oracle_logits(model, tokens)[-1] for tokens in sequences])
    assert_close(engine.logits(*batch), expected, atol=2e-4, rtol=1e-4)


def test_a_step_that_samples_nothing_computes_no_logits() -> None:
    engine = TinyEngine(oracle())
    assert engine.logits(part("silent", [1, 2, 3], 0, first_page=0, sample=False)).shape == (0, 97)


def test_bfloat16_stays_close_to_float32() -> None:
    model, tokens = oracle(), prompt(30, seed=3)
    exact = TinyEngine(model).logits(part("a", tokens, 0, first_page=0))
    coarse = TinyEngine(model, dtype=torch.bfloat16).logits(part("a", tokens, 0, first_page=0))
    assert coarse.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(coarse, exact).item() > 0.99


def test_what_other_sequences_left_in_the_pool_is_never_seen() -> None:
    model, tokens = oracle(), prompt(10, seed=4)
    engine = TinyEngine(model)
    engine.pool.tensor.fill_(50.0)
    engine.logits(part("a", tokens[:-1], 0, first_page=0, sample=False))
    decoded = engine.logits(part("a", tokens[-1:], 9, first_page=0))
    assert_close(decoded[0], oracle_logits(model, tokens)[-1], atol=2e-4, rtol=1e-4)


def test_an_architecture_without_a_decoder_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"'mamba'.*decoders for llama, mistral, qwen2, qwen3"):
        _config(architecture="mamba")


def test_sizes_that_make_no_model_are_refused() -> None:
    with pytest.raises(EngineError, match="it needs 2 query heads over 4 KV heads"):
        _config(kv_heads=4)
    with pytest.raises(EngineError, match="it needs 0 as layers"):
        _config(layers=0)
    with pytest.raises(EngineError, match="an odd head size, 5"):
        _config(head_dim=5)


def test_a_missing_weight_and_a_misshapen_one_are_named() -> None:
    model = oracle()
    weights = dict(model.state_dict())
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(EngineError, match=r"no weight model\.layers\.1\.mlp\.up_proj\.weight"):
        LlamaModel(config_of(model), weights, torch.device("cpu"))
    weights = dict(model.state_dict(), **{"model.norm.weight": torch.ones(5)})
    with pytest.raises(EngineError, match=r"model\.norm\.weight has shape \[5\], not \[48\]"):
        LlamaModel(config_of(model), weights, torch.device("cpu"))


def _config(**changed: str | int) -> ModelConfig:
    settings: dict[str, Any] = {"architecture": "llama", "layers": 1, "kv_heads": 1, "head_dim": 4}
    return ModelConfig(
        hidden=8,
        intermediate=8,
        query_heads=2,
        vocab=8,
        context_tokens=8,
        rope_theta=1e4,
        norm_eps=1e-5,
        tied_embeddings=True,
        **(settings | changed),
    )
