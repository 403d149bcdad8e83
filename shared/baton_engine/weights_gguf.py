"""Config, weights and identity of a model in one GGUF file (llama.cpp's format).

Weights come out dequantized, under their Hugging Face names and in the Hugging Face layout, so that the decoder has one
naming and one RoPE layout whatever the file was.
"""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from baton_core.errors import EngineError
from baton_engine.config_gguf import ROPE_DIVISORS, read_config
from baton_engine.gguf_names import hugging_face_name, kind_of
from baton_engine.model_config import ARCHITECTURES
from baton_engine.model_files import ModelIdentity, Progress, weight_revision
from baton_io.gguf_metadata import TensorInfo, read_header

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_RUN_VALUES = 8_192
"""Dequantized at once by the library's inner loop: few calls, and still in the caches."""


class GgufFile:
    """One GGUF file, its header parsed and its tensors mapped, not read.

    Raises EngineError where the file is missing, is no GGUF file, or holds a model that the decoder cannot compute.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = read_header(path, lambda key: not key.startswith("tokenizer."))
        self._content = np.memmap(path, mode="r", dtype=np.uint8)
        self._tensors = {tensor.name: tensor for tensor in self._header.tensors}
        divisors = self._tensors.get(ROPE_DIVISORS)
        self.config = read_config(
            path, self._header, None if divisors is None else tuple(self._values(divisors, torch.float32).tolist())
        )

    def weights(self, dtype: torch.dtype, progress: Progress) -> dict[str, Tensor]:
        """Every weight, dequantized to `dtype` on the CPU, under its Hugging Face name."""
        weights: dict[str, Tensor] = {}
        wanted = [tensor for tensor in self._header.tensors if tensor.name != ROPE_DIVISORS]
        for done, tensor in enumerate(wanted):
            progress("weights", done, len(wanted))
            weights[hugging_face_name(tensor.name)] = self._unpermuted(tensor.name, self._values(tensor, dtype))
        progress("weights", len(wanted), len(wanted))
        return weights

    def identity(self) -> ModelIdentity:
        """Revision, quantisation kinds and digests of tokenizer and chat template."""
        kinds = {_kind(tensor, self._path).name for tensor in self._header.tensors}
        return ModelIdentity(
            weight_revision=weight_revision([(self._path, self._header.data_offset)]),
            quantisation="+".join(sorted(kinds)),
            tokenizer_digest=self._digest_of_fields(lambda name: name.startswith("tokenizer.ggml.")),
            template_digest=self._digest_of_fields(lambda name: name.startswith("tokenizer.chat_template")),
        )

    def _values(self, tensor: TensorInfo, dtype: torch.dtype) -> Tensor:
        """The tensor as `dtype`, in memory of its own, in the order of dimensions that torch has."""
        kind = _kind(tensor, self._path)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        count = math.prod(tensor.shape)
        end = tensor.offset + count // block_values * block_bytes
        if tensor.shape[0] % block_values or end > len(self._content):
            raise EngineError(f"{self._path}: tensor {tensor.name} is damaged")
        raw = self._content[tensor.offset : end]
        shape = tensor.shape[::-1]
        if kind in _PLAIN:
            # A copy: torch would warn about the read-only mapping, and nothing may depend on the file later.
            return torch.from_numpy(np.array(raw)).view(_PLAIN[kind]).view(shape).to(dtype)
        # Blocks know nothing of rows, so the library may take them in whatever rows are quickest.
        run_values = math.gcd(count, math.lcm(_RUN_VALUES, block_values))
        rows = raw.reshape(-1, run_values // block_values * block_bytes)
        try:
            return torch.from_numpy(dequantize(rows, kind)).view(shape).to(dtype)
        except NotImplementedError as error:
            raise EngineError(f"cannot dequantize {tensor.name} of {self._path}: {error}") from error

    def _unpermuted(self, name: str, values: Tensor) -> Tensor:
        # llama.cpp interleaves the two halves that rotate together, row by row; Hugging Face keeps them apart.
        if not ARCHITECTURES[self.config.architecture].permuted_in_gguf:
            return values
        heads = {"attn_q": self.config.query_heads, "attn_k": self.config.kv_heads}.get(kind_of(name))
        if heads is None:
            return values
        halves = values.view(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)

    def _digest_of_fields(self, wanted: Callable[[str], bool]) -> str:
        # Over the file's own encoding of each field: making a hundred thousand strings would cost a second.
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(filter(wanted, self._header.spans)):
            first, end = self._header.spans[name]
            digest.update(name.encode() + b"\0" + self._content[first:end].tobytes())
        return digest.hexdigest()


def _kind(tensor: TensorInfo, path: Path) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(tensor.kind)
    except ValueError as error:
        raise EngineError(f"{path}: tensor {tensor.name} is of a kind that Baton does not know: {error}") from error
