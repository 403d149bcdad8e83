"""What the engine asks of a model on disk, whatever its format, and how two of them are told apart."""

import hashlib
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from baton_core.errors import EngineError
from baton_engine.model_config import ModelConfig
from baton_engine.shard import Cut, Shard

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and the total."""

_SAMPLES = 64
_SAMPLE_BYTES = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What tells two models apart, cheaply."""

    weight_revision: str  # see `weight_revision`
    quantisation: str  # kinds of the tensors, sorted, joined by "+"
    tokenizer_digest: str
    template_digest: str


class ModelFiles(Protocol):
    """A model on disk, opened and understood, its weights not yet read."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and switches."""
        ...

    def weights(self, dtype: torch.dtype, progress: Progress, shard: Shard | None = None) -> dict[str, Tensor]:
        """Every weight as `dtype` on the CPU, in memory of its own, under its Hugging Face name and in that layout.

        With a `shard` only what it holds, cut as it says. Raises EngineError.
        """
        ...

    def identity(self) -> ModelIdentity:
        """What the model is."""
        ...


def check_cut(name: str, shape: Sequence[int], cut: Cut) -> None:
    """Raise EngineError unless a weight of this shape has the dimension that `cut` goes by."""
    if cut.dimension >= len(shape) or shape[cut.dimension] != cut.total:
        raise EngineError(f"weight {name} has shape {list(shape)}, not {cut.total} places in dimension {cut.dimension}")


def weight_revision(files: Iterable[tuple[Path, int]]) -> str:
    """A digest of the sizes, headers and sampled content of `files`, given with the size of each one's header.

    Names and places of the files do not count. Raises EngineError.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, header_bytes in files:
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                digest.update(len(content).to_bytes(8, "little"))
                digest.update(content[:header_bytes])
                stride = max(1, (len(content) - header_bytes) // _SAMPLES)
                for start in range(header_bytes, len(content), stride):
                    digest.update(content[start : start + _SAMPLE_BYTES])
        except (OSError, ValueError) as error:
            raise EngineError(f"model file {path} cannot be read: {error}") from error
    return digest.hexdigest()
