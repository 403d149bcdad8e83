"""Reading GGUF files, and loading an engine from one."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers import PreTrainedModel

from baton_core.errors import EngineError
from baton_core.plan import StepPlan
from baton_engine.loading import Engine, load_engine
from baton_engine.weights_gguf import GgufFile
from tiny_models import config_of, oracle, oracle_logits, part, prompt

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, str] | None = None,
    template: str = "{{ messages }}",
) -> Path:
    """Write `model` the way llama.cpp's converter does; matrices as `kind`."""
    config = config_of(model)
    writer = GGUFWriter(path, config.architecture)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context_tokens)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_token_list(["a", "b"])
    writer.add_chat_template(template)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    heads = {"attn_q": config.query_heads, "attn_k": config.kv_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tied_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        short = NAMES[stem if layer is None else stem.split(".", 3)[3]]
        values = weight.float()
        if config.architecture == "llama" and short in heads:
            halves = values.view(heads[short], 2, values.shape[0] // heads[short] // 2, -1)
            values = halves.transpose(1, 2).reshape(values.shape)
        stored = kind if values.dim() == 2 else GGMLQuantizationType.F32
        full = f"{short}.{suffix}" if layer is None else f"blk.{layer}.{short}.{suffix}"
        writer.add_tensor(full, quantize(values.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quiet(what: str, done: int, total: int) -> None:
    """Progress nobody watches."""


def load(path: Path, **changed: str | int) -> Engine:
    settings = {"dtype": "float32", "device": "cpu", "kv_tokens": 200, "page_tokens": 4, "metadata_rows": 2}
    return load_engine(model_path=str(path), threads=0, progress=quiet, **(settings | changed))


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
    file = GgufFile(write_gguf(tmp_path / "model.gguf", model, kind=GGMLQuantizationType[kind]))
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
    assert changed(first, load(same[0], page_tokens=8)) == {"page_tokens"}


def changed(fields: dict[str, str | int], other: Engine) -> set[str]:
    assert fields.keys() == other.fingerprint_fields.keys()
    return {name for name, value in fields.items() if other.fingerprint_fields[name] != value}


def test_what_the_decoder_lacks_is_refused_by_name(tmp_path: Path) -> None:
    scaled = write_gguf(tmp_path / "scaled.gguf", oracle(), extra={"llama.rope.scaling.type": "linear"})
    with pytest.raises(EngineError, match="RoPE scaling 'linear'"):
        GgufFile(scaled)
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
    with pytest.raises(EngineError, match=r"cannot read .*model\.gguf as a GGUF file"):
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
