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
from baton_engine.model_files import ModelIdentity, Progress, check_cut, weight_revision
from baton_engine.shard import WHOLE, Cut, Shard
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

    def weights(self, dtype: torch.dtype, progress: Progress, shard: Shard | None = None) -> dict[str, Tensor]:
        """Every weight that `shard` holds, dequantized to `dtype` on the CPU, under its Hugging Face name."""
        weights: dict[str, Tensor] = {}
        wanted = [tensor for tensor in self._header.tensors if tensor.name != ROPE_DIVISORS]
        for done, tensor in enumerate(wanted):
            progress("weights", done, len(wanted))
            name = hugging_face_name(tensor.name)
            cut = WHOLE if shard is None else shard.cut(name)
            if cut is not None:
                values = self._values(tensor, dtype) if cut is WHOLE else self._part(tensor, dtype, cut)
                weights[name] = self._unpermuted(tensor.name, values)
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
        return self._decoded(tensor, self._raw(tensor), dtype).view(tensor.shape[::-1])

    def _part(self, tensor: TensorInfo, dtype: torch.dtype, cut: Cut) -> Tensor:
        """What `cut` keeps of the tensor, as `_values`; only blocks that hold some of it are decoded."""
        shape, kept = tensor.shape[::-1], cut.kept
        check_cut(hugging_face_name(tensor.name), shape, cut)
        block_values, block_bytes = GGML_QUANT_SIZES[_kind(tensor, self._path)]
        blocks = self._raw(tensor).reshape(-1, shape[-1] // block_values, block_bytes)  # [row, block of columns, byte]
        if cut.dimension < len(shape) - 1:
            return self._decoded(tensor, blocks[kept.start : kept.stop], dtype).view(len(kept), *shape[1:])
        first, end = kept.start // block_values, -(-kept.stop // block_values)
        values = self._decoded(tensor, blocks[:, first:end], dtype).view(*shape[:-1], (end - first) * block_values)
        skipped = first * block_values
        return values[..., kept.start - skipped : kept.stop - skipped].contiguous()

    def _raw(self, tensor: TensorInfo) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        """The tensor's bytes, where the file is mapped."""
        block_values, block_bytes = GGML_QUANT_SIZES[_kind(tensor, self._path)]
        end = tensor.offset + math.prod(tensor.shape) // block_values * block_bytes
        if tensor.shape[0] % block_values or end > len(self._content):
            raise EngineError(f"{self._path}: tensor {tensor.name} is damaged")
        return self._content[tensor.offset : end]

    def _decoded(
        self, tensor: TensorInfo, raw: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", dtype: torch.dtype
    ) -> Tensor:
        """The values of blocks of `tensor`, one after the other, as `dtype`, in memory of their own."""
        kind = _kind(tensor, self._path)
        if kind in _PLAIN:
            # A copy: torch would warn about the read-only mapping, and nothing may depend on the file later.
            return torch.from_numpy(np.array(raw).reshape(-1)).view(_PLAIN[kind]).to(dtype)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        # Blocks know nothing of rows, so the library may take them in whatever rows are quickest.
        count = raw.size // block_bytes * block_values
        run_values = math.gcd(count, math.lcm(_RUN_VALUES, block_values))
        rows = raw.reshape(-1, run_values // block_values * block_bytes)
        try:
            return torch.from_numpy(dequantize(rows, kind)).view(-1).to(dtype)
        except NotImplementedError as error:
            raise EngineError(f"cannot dequantize {tensor.name} of {self._path}: {error}") from error

    def _unpermuted(self, name: str, values: Tensor) -> Tensor:
        # llama.cpp interleaves the two halves that rotate together, row by row; Hugging Face keeps them apart.
        if not ARCHITECTURES[self.config.architecture].permuted_in_gguf:
            return values
        if kind_of(name) not in ("attn_q", "attn_k"):
            return values
        halves = values.view(-1, self.config.head_dim // 2, 2, *values.shape[1:])  # [head, pair, half, …]
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
