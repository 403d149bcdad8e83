"""Reading GGUF files and Hugging Face directories, and loading an engine from them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from baton_core.errors import EngineError
from baton_core.plan import StepPlan
from baton_engine.loading import Engine, load_engine, weight_bytes
from baton_engine.shard import Shard
from baton_engine.weights_gguf import GgufFile
from baton_engine.weights_safetensors import HuggingFaceFolder
from tiny_folders import answers, load, quiet, save_folder, sure_prompts
from tiny_gguf import BLOCK_SIZES, QUANTIZED, requantized, write_gguf
from tiny_models import config_of, oracle, oracle_logits, part, prompt


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True)])
def test_a_file_gives_back_config_and_weights(tmp_path: Path, kind: str, tied: bool) -> None:
    model = oracle(kind, tied=tied)
    file = GgufFile(write_gguf(tmp_path / "model.gguf", model))
    assert file.config == config_of(model)
    weights = file.weights(torch.float32, quiet)
    expected = {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_weights_are_read_in_the_dtype_asked_for(tmp_path: Path, kind: str) -> None:
    model = oracle()
    file = GgufFile(write_gguf(tmp_path / "model.gguf", model, kind=kind))
    weights = file.weights(torch.bfloat16, quiet)
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    name = "model.layers.2.self_attn.q_proj.weight"
    torch.testing.assert_close(weights[name].float(), model.state_dict()[name], atol=0.01, rtol=0.02)
    assert file.identity().quantisation == "+".join(sorted(["F32", kind]))


def test_a_loaded_engine_answers_as_the_model_does(tmp_path: Path) -> None:
    model, tokens = oracle(), prompt(11, seed=5)
    heard: list[str] = []
    engine = load_engine(
        model_path=str(write_gguf(tmp_path / "model.gguf", model)),
        dtype="float32",
        device="cpu",
        kv_tokens=203,
        page_tokens=4,
        metadata_rows=2,
        threads=0,
        progress=lambda what, done, total: heard.append(what) if done == total else None,
    )
    item = replace(part("a", tokens, 0, first_page=0), pages=(49, 0, 7))
    result = engine.runner.run(StepPlan(step=1, slices=(item,)))
    assert result.results[0].token == int(oracle_logits(model, tokens)[-1].argmax())
    assert engine.pool.pages == 50 and engine.context_tokens == 200 and engine.rows.rows == 2
    assert heard == ["metadata", "weights", "kv pool", "warm-up"]
    engine.close()


def test_the_fingerprint_tells_files_dtypes_and_templates_apart(tmp_path: Path) -> None:
    same = [write_gguf(tmp_path / f"{name}.gguf", oracle()) for name in ("one", "two")]
    reseeded = write_gguf(tmp_path / "seed.gguf", oracle(seed=1))
    retold = write_gguf(tmp_path / "template.gguf", oracle(), template="{{ other }}")
    first, second = (load(path).fingerprint_fields for path in same)
    assert first == second
    assert changed(first, load(reseeded)) == {"weight_revision"}
    assert changed(first, load(retold)) == {"weight_revision", "template_digest"}
    assert changed(first, load(same[0], dtype="bfloat16")) == {"dtype"}
    assert changed(first, load(same[0], page_tokens=8)) == set(), "page sizes are translated, not compared"


def changed(fields: dict[str, str | int], other: Engine) -> set[str]:
    assert fields.keys() == other.fingerprint_fields.keys()
    return {name for name, value in fields.items() if other.fingerprint_fields[name] != value}


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"rope.scaling.type": "longrope"}, "RoPE scaling 'longrope'; Baton has linear, yarn"),
        ({"rope.dimension_count": 4}, "rotation of 4 of 8 dimensions"),
        ({"attention.value_length": 16}, "values of 16 dimensions beside keys of 8"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"attention.sliding_window": 5, "attention.sliding_window_pattern": 2}, "a pattern of sliding windows"),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, str | int | float], said: str
) -> None:
    with pytest.raises(EngineError, match=f"'llama'.*{said}"):
        GgufFile(write_gguf(tmp_path / "model.gguf", oracle(), metadata=metadata))


def test_an_architecture_without_a_decoder_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(EngineError, match="architecture 'mamba'"):
        GgufFile(tmp_path / "mamba.gguf")


def test_a_file_that_is_none_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(EngineError, match=r"model\.gguf"):
        GgufFile(path)
    path.write_bytes(b"not a model at all, but long enough to look at")
    with pytest.raises(EngineError, match=r"model\.gguf cannot be read: it is not a GGUF file"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "int3"}, "dtype 'int3' is not one of float32, bfloat16"),
        ({"kv_tokens": 3}, "holds no page of 4 tokens"),
        ({"device": "tpu9"}, "'tpu9' is not a device"),
        ({"device": "meta"}, "neither cpu nor cuda"),
        ({"kv_tokens": 10**12}, "model and KV pool together needs .* but only"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_loading(
    tmp_path: Path, changes: dict[str, str | int], said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        load(write_gguf(tmp_path / "model.gguf", oracle()), **changes)


# -- GGUF: kinds of numbers, and features


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_file_of_each_kind_computes_with_the_values_that_the_gguf_library_reads(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", oracle(**BLOCK_SIZES), kind=kind)
    exact = requantized(oracle(**BLOCK_SIZES), kind)
    weights = GgufFile(path).weights(torch.float32, quiet)
    assert all(torch.equal(weights[name], value) for name, value in exact.state_dict().items())
    engine = load(path)
    expected = sure_prompts(exact, (11,), 8)
    assert answers(engine, [expected[0][0]], 8, 4) == [expected[0][1]]
    engine.close()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
FEATURES: dict[str, tuple[str, dict[str, Any], dict[str, str | int | float]]] = {
    "mistral with a window": ("mistral", {"sliding_window": 6}, {"attention.sliding_window": 6}),
    "linear": (
        "llama",
        {"rope_parameters": {"rope_theta": 5_000.0, "rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "yarn": (
        "qwen2",
        {"rope_parameters": {"rope_theta": 5_000.0, **YARN}, "head_dim": 8},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        },
    ),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_a_gguf_file_says_beside_the_weights_is_obeyed(tmp_path: Path, feature: str) -> None:
    kind, changes, metadata = FEATURES[feature]
    model = oracle(kind, **changes)
    engine = load(write_gguf(tmp_path / "model.gguf", model, metadata=metadata))
    expected = sure_prompts(model, (5, 30), 8)
    assert answers(engine, [prompt for prompt, _ in expected], 8, 7) == [answer for _, answer in expected]
    engine.close()


def test_llama_3s_rope_scaling_is_a_tensor_in_a_gguf_file(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = oracle(rope_parameters={"rope_theta": 5_000.0, "rope_type": "llama3", **scaling})
    plain = 5_000.0 ** -(torch.arange(0, 8, 2) / 8)
    divisors = plain / model.model.rotary_emb.inv_freq
    assert divisors.max() > 1
    engine = load(write_gguf(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": divisors}))
    expected = sure_prompts(model, (5, 30), 8)
    assert answers(engine, [prompt for prompt, _ in expected], 8, 7) == [answer for _, answer in expected]
    engine.close()


# -- Hugging Face directories


def edited(folder: Path, **changes: Any) -> Path:
    """`folder` with other values in its config.json; None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM': it needs a decoder of its own"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba': it needs a decoder of its own"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised by 'gptq'"),
        ({"partial_rotary_factor": 0.5}, "rotation of 50% of each head"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'; Baton has linear"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE scaling 'longrope'; Baton has linear"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "not give all parameters of RoPE scaling 'llama3'"),
        ({"layer_types": ["linear_attention"] * 3}, r"config\.json cannot be used: .*layer_types"),
        ({"hidden_size": "many"}, r"config\.json cannot be used: .*hidden_size"),
        ({"vocab_size": 98}, r"embed_tokens\.weight has shape \[97, 48\], not \[98, 48\]"),
    ],
)
def test_a_directory_that_cannot_be_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = edited(save_folder(tmp_path / "model", oracle()), **changes)
    with pytest.raises(EngineError, match=said):
        load(folder)


def test_a_directory_without_its_weights_says_which_file_is_missing(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "sharded", oracle(), shard_bytes=30_000)
    last = sorted(folder.glob("model-*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(EngineError, match=f"has no {last.name}"):
        HuggingFaceFolder(folder)
    folder = save_folder(tmp_path / "pickled", oracle())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(EngineError, match=r"has no model.safetensors \(it has pytorch_model.bin"):
        HuggingFaceFolder(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 32)
    with pytest.raises(EngineError, match=r"model\.safetensors cannot be read"):
        HuggingFaceFolder(folder)


def test_an_old_config_means_what_it_meant(tmp_path: Path) -> None:
    model = oracle(rope_parameters={"rope_theta": 700.0, "rope_type": "linear", "factor": 2.0})
    folder = save_folder(tmp_path / "model", model)
    new = HuggingFaceFolder(folder).config
    edited(folder, rope_parameters=None, rope_theta=700.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert HuggingFaceFolder(folder).config == new


def test_what_a_file_holds_beside_the_decoders_weights_is_left_out(tmp_path: Path) -> None:
    model = oracle(tied=True)
    folder = save_folder(tmp_path / "model", model)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors")
    load(folder).close()


def test_eight_bit_floats_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", oracle())
    weights = {name: value.to(torch.float8_e4m3fn) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(EngineError, match="weights of kind F8_E4M3"):
        HuggingFaceFolder(folder)


def test_a_directorys_fingerprint_tells_weights_rope_and_tokenizers_apart(tmp_path: Path) -> None:
    folders = {name: save_folder(tmp_path / name, oracle(), shard_bytes=60_000) for name in ("one", "same", "retold")}
    (folders["retold"] / "chat_template.jinja").write_text("{{ other }}")
    folders["seed"] = save_folder(tmp_path / "seed", oracle(seed=1), shard_bytes=60_000)
    folders["scaled"] = edited(
        save_folder(tmp_path / "scaled", oracle(), shard_bytes=60_000),
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
    )
    engines = {name: load(folder) for name, folder in folders.items()}
    first = engines["one"].fingerprint_fields
    assert first["quantisation"] == "F32"
    assert [changed(first, engines[name]) for name in ("same", "retold", "seed", "scaled")] == [
        set(),
        {"template_digest"},
        {"weight_revision"},
        {"rope_scaling"},
    ]


def test_the_memory_needed_depends_on_the_dtype_and_counts_a_packed_output_projection() -> None:
    cpu = torch.device("cpu")
    config = replace(config_of(oracle()), tied_embeddings=True, vocab=100_000)
    shard, embeddings = Shard.whole(config), config.vocab * config.hidden
    assert shard.config == config and shard.parameters == config.parameters
    assert weight_bytes(shard, torch.float32, cpu) == 4 * (config.parameters + config.layer_parameters)
    assert weight_bytes(shard, torch.bfloat16, cpu) == 2 * (config.parameters + embeddings)
    assert weight_bytes(shard, torch.bfloat16, torch.device("cuda")) == 2 * (
        config.parameters + config.layer_parameters
    )
