"""Every decoder of the family, saved by Transformers and loaded by us, answers as Transformers does, in float32."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoTokenizer

from baton_worker.tokenizer import Tokenizer
from tiny_folders import CORPUS, VOCAB, answers, load, save_folder, sure_prompts
from tiny_models import oracle

ROPE = {"rope_theta": 5_000.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "smollm2": ("llama", {"tie_word_embeddings": True}),
    "llama, biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    "llama, one head each": ("llama", {"num_key_value_heads": 6}),
    "llama, linear": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "llama, llama3": (
        "llama",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2, yarn": (
        "qwen2",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama, yarn with everything": (
        "llama",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 3.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.5,
                "truncate": False,
            }
        },
    ),
    "qwen3, yarn with a factor": (
        "qwen3",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "attention_factor": 1.3,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3, biased": ("qwen3", {"attention_bias": True}),
    "qwen3, some windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
LENGTHS = (1, 6, 9, 23, 50)
COUNT = 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_gives_transformers_answers_in_chunks_and_in_company(tmp_path: Path, kind: str) -> None:
    name, changes = KINDS[kind]
    model = oracle(name, vocab_size=VOCAB, **changes)
    engine = load(save_folder(tmp_path / "model", model))
    expected = sure_prompts(model, LENGTHS, COUNT)
    prompts = [prompt for prompt, _ in expected]
    for chunk in (5, 64):
        assert answers(engine, prompts, COUNT, chunk) == [answer for _, answer in expected]
    engine.close()


def test_the_text_is_transformers_too(tmp_path: Path) -> None:
    model = oracle("qwen3", vocab_size=VOCAB)
    folder = save_folder(tmp_path / "model", model)
    ours, theirs = Tokenizer.of_model(folder), AutoTokenizer.from_pretrained(folder)
    expected = sure_prompts(model, LENGTHS, COUNT)
    engine = load(folder)
    got = answers(engine, [prompt for prompt, _ in expected], COUNT, 16)
    engine.close()
    assert [ours.decode(answer) for answer in got] == [
        theirs.decode(answer, skip_special_tokens=True) for _, answer in expected
    ]
    assert [ours.encode(text) for text in CORPUS] == [theirs.encode(text) for text in CORPUS]


def test_a_sharded_model_is_the_same_model(tmp_path: Path) -> None:
    model = oracle("llama", vocab_size=VOCAB)
    whole = load(save_folder(tmp_path / "whole", model))
    folder = save_folder(tmp_path / "sharded", model, shard_bytes=60_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    sharded = load(folder)
    prompts = [prompt for prompt, _ in sure_prompts(model, (9, 23), COUNT)]
    assert answers(sharded, prompts, COUNT, 16) == answers(whole, prompts, COUNT, 16)
    whole.close()
    sharded.close()
