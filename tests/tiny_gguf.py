"""Tiny models as GGUF files, written the way llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor
from transformers import PreTrainedModel

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")
"""Kinds that the `gguf` library can write."""

BLOCK_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
"""Changes of `tiny_models.TINY` that make every row a multiple of 32 values: what a quantised block holds."""

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
    kind: str = "F32",
    metadata: dict[str, str | int | float] | None = None,
    tensors: dict[str, Tensor] | None = None,
    template: str = "{{ messages }}",
) -> Path:
    """Write `model`, matrices as `kind`; more `metadata` (its keys without the architecture) and `tensors`."""
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list(["a", "b"])
    writer.add_chat_template(template)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{architecture}.{key}", value)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values.numpy())
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            _add(writer, name, _permuted(model, name, weight.float()), GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def requantized(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """`model` with the matrices that a file of `kind` gives back: the library's own values. Changes `model`."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                stored = quantize(_permuted(model, name, weight).numpy(), GGMLQuantizationType[kind])
                values = torch.from_numpy(np.array(dequantize(stored, GGMLQuantizationType[kind])))
                weight.copy_(_permuted(model, name, values.view(weight.shape), back=True))
    return model


def _add(writer: GGUFWriter, name: str, values: Tensor, kind: GGMLQuantizationType) -> None:
    stem, _, suffix = name.rpartition(".")
    layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
    short = NAMES[stem if layer is None else stem.split(".", 3)[3]]
    stored = kind if values.dim() == 2 else GGMLQuantizationType.F32
    full = f"{short}.{suffix}" if layer is None else f"blk.{layer}.{short}.{suffix}"
    writer.add_tensor(full, quantize(values.numpy(), stored), raw_dtype=stored)


def _permuted(model: PreTrainedModel, name: str, values: Tensor, *, back: bool = False) -> Tensor:
    """llama.cpp interleaves the halves of each head that rotate together, for Llama and Mistral."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    short = name.split(".")[-2]
    if config.model_type not in ("llama", "mistral") or short not in heads:
        return values
    pairs = (values.shape[0] // heads[short] // 2, 2)
    halves = values.reshape(heads[short], *(pairs if back else pairs[::-1]), *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)
