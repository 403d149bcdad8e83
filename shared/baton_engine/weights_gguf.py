"""Config, weights and identity of a model in one GGUF file (llama.cpp's format, version 3).

Weights come out dequantized, under their Hugging Face names and in the Hugging Face layout, so that the decoder has one
naming and one RoPE layout whatever the file was.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from baton_core.errors import EngineError
from baton_engine.model_config import ARCHITECTURES, ModelConfig, refuse_features, refuse_unknown_architecture

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and the total."""

_SAMPLES = 64
_SAMPLE_BYTES = 4_096
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_NO_DEFAULT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What tells two model files apart, cheaply."""

    weight_revision: str  # blake2 of file size, header and sampled content
    quantisation: str  # kinds of the file's tensors, sorted, joined by "+"
    tokenizer_digest: str
    template_digest: str


class GgufFile:
    """One GGUF file, parsed once and mapped, not read.

    Raises EngineError where the file is missing, is no GGUF file, or holds a model that the decoder cannot compute.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise EngineError(f"cannot read {path} as a GGUF file: {error}") from error
        self._path = path
        self.config = self._read_config()

    def weights(self, dtype: torch.dtype, progress: Progress) -> dict[str, Tensor]:
        """Every weight, dequantized to `dtype` on the CPU, under its Hugging Face name."""
        weights: dict[str, Tensor] = {}
        total = len(self._reader.tensors)
        for done, entry in enumerate(self._reader.tensors):
            progress("weights", done, total)
            name = _hugging_face_name(entry.name)
            # Unquantized tensors come out as views of the read-only mapping, which torch would warn about.
            try:
                writable = np.require(dequantize(entry.data, entry.tensor_type), requirements="W")
                values = torch.from_numpy(writable)
            except NotImplementedError as error:
                raise EngineError(f"cannot dequantize {entry.name} of {self._path}: {error}") from error
            weights[name] = self._unpermuted(entry.name, values).to(dtype, copy=True)
        progress("weights", total, total)
        return weights

    def identity(self) -> ModelIdentity:
        """Revision, quantisation kinds and digests of tokenizer and chat template."""
        return ModelIdentity(
            weight_revision=self._weight_revision(),
            quantisation="+".join(sorted({entry.tensor_type.name for entry in self._reader.tensors})),
            tokenizer_digest=self._digest_of_fields(lambda name: name.startswith("tokenizer.ggml.")),
            template_digest=self._digest_of_fields(lambda name: name.startswith("tokenizer.chat_template")),
        )

    def _read_config(self) -> ModelConfig:
        name = str(self._value("general.architecture"))
        refuse_unknown_architecture(name)
        self._refuse_features(name)
        architecture = ARCHITECTURES[name]
        shapes = {entry.name: [int(size) for size in entry.shape] for entry in self._reader.tensors}
        hidden, vocab = shapes["token_embd.weight"]  # GGUF lists the fastest dimension first
        query_heads = int(self._value(f"{name}.attention.head_count"))
        return ModelConfig(
            architecture=name,
            layers=int(self._value(f"{name}.block_count")),
            hidden=hidden,
            intermediate=int(self._value(f"{name}.feed_forward_length")),
            query_heads=query_heads,
            kv_heads=int(self._value(f"{name}.attention.head_count_kv", query_heads)),
            head_dim=int(self._value(f"{name}.attention.key_length", hidden // query_heads)),
            vocab=vocab,
            context_tokens=int(self._value(f"{name}.context_length")),
            rope_theta=float(self._value(f"{name}.rope.freq_base", 10_000.0)),
            norm_eps=float(self._value(f"{name}.attention.layer_norm_rms_epsilon")),
            tied_embeddings="output.weight" not in shapes,
            qkv_bias=architecture.qkv_bias,
            qk_norm=architecture.qk_norm,
            rope_scaling=str(self._value(f"{name}.rope.scaling.type", "none")),
        )

    def _refuse_features(self, name: str) -> None:
        tensors = [entry.name for entry in self._reader.tensors]
        unknown = sorted({_kind(tensor) for tensor in tensors if not _is_known(tensor)})
        head_dim = self._value(f"{name}.attention.key_length", None)
        rotated = self._value(f"{name}.rope.dimension_count", head_dim)
        context = int(self._value(f"{name}.context_length"))
        window = int(self._value(f"{name}.attention.sliding_window", 0) or 0)
        refuse_features(
            name,
            {
                "mixture of experts": bool(self._value(f"{name}.expert_count", 0)),
                f"a sliding window of {window} tokens": 0 < window < context,
                "partial rotary embedding": head_dim is not None and rotated != head_dim,
                f"tensors that the decoder does not know ({', '.join(unknown)})": bool(unknown),
            },
        )

    def _value(self, key: str, default: object = _NO_DEFAULT) -> "int | float | str":
        field = self._reader.fields.get(key)
        if field is not None:
            value: int | float | str = field.contents()
            return value
        if default is _NO_DEFAULT:
            raise EngineError(f"{self._path} does not say {key}")
        return default  # type: ignore[return-value]  # a scalar, or None where the caller asks for it

    def _unpermuted(self, name: str, values: Tensor) -> Tensor:
        # llama.cpp interleaves the two halves that rotate together, row by row; Hugging Face keeps them apart.
        if not ARCHITECTURES[self.config.architecture].permuted_in_gguf:
            return values
        heads = {"attn_q": self.config.query_heads, "attn_k": self.config.kv_heads}.get(_kind(name))
        if heads is None:
            return values
        halves = values.view(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)

    def _weight_revision(self) -> str:
        raw = self._reader.data
        digest = hashlib.blake2b(digest_size=16)
        digest.update(len(raw).to_bytes(8, "little"))
        first = self._reader.data_offset
        digest.update(raw[:first].tobytes())
        stride = max(1, (len(raw) - first) // _SAMPLES)
        for start in range(first, len(raw), stride):
            digest.update(raw[start : start + _SAMPLE_BYTES].tobytes())
        return digest.hexdigest()

    def _digest_of_fields(self, wanted: Callable[[str], bool]) -> str:
        # Over the file's own encoding of each field: parsing a hundred thousand strings again would cost a second.
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(filter(wanted, self._reader.fields)):
            field = self._reader.fields[name]
            nbytes = sum(int(part.nbytes) for part in field.parts)
            digest.update(self._reader.data[field.offset : field.offset + nbytes].tobytes())
        return digest.hexdigest()


def _hugging_face_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block = _BLOCK.fullmatch(name)
    assert block is not None, name  # unknown names were refused with the config
    return f"model.layers.{block[1]}.{_BLOCK_NAMES[block[2]]}.{block[3]}"


def _is_known(name: str) -> bool:
    block = _BLOCK.fullmatch(name)
    return name in _TOP_NAMES or (block is not None and block[2] in _BLOCK_NAMES)


def _kind(name: str) -> str:
    """The name without its layer: what a refusal shows, once instead of once a layer."""
    block = _BLOCK.fullmatch(name)
    return name if block is None else block[2]
