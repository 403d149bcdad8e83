"""From a model file to an engine that can run plans."""

from dataclasses import dataclass
from pathlib import Path

import torch

from baton_core.errors import EngineError
from baton_engine.kv_pool import KVPool, PoolShape, RowMemory
from baton_engine.llama import LlamaModel
from baton_engine.model_config import ModelConfig
from baton_engine.runner import Runner
from baton_engine.sealed_memory import available_bytes, require_memory
from baton_engine.weights_gguf import GgufFile, ModelIdentity, Progress

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes the engine computes in, and stores keys and values in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Everything of one rank that lives on its device. `context_tokens` is the longest prompt and answer together."""

    runner: Runner
    pool: KVPool
    rows: RowMemory
    config: ModelConfig
    context_tokens: int
    fingerprint_fields: dict[str, str | int]  # whatever shapes or interprets keys and values

    def close(self) -> None:
        """Release pool and rows."""
        self.pool.close()
        self.rows.close()


def load_engine(
    *,
    model_path: str,
    dtype: str,
    device: str,
    kv_tokens: int,
    page_tokens: int,
    metadata_rows: int,
    threads: int,
    progress: Progress,
) -> Engine:
    """Load a GGUF file and warm the engine up.

    `kv_tokens` is rounded down to whole pages; `threads` 0 leaves torch's own choice. Raises EngineError where the file,
    the dtype, the device or the memory will not do, before anything large is allocated.
    """
    if dtype not in DTYPES:
        raise EngineError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if kv_tokens < page_tokens:
        raise EngineError(f"kv_tokens {kv_tokens} holds no page of {page_tokens} tokens: raise --kv-tokens")
    target = _device(device)
    if threads > 0:
        torch.set_num_threads(threads)
    progress("metadata", 0, 1)
    file = GgufFile(Path(model_path))
    identity = file.identity()
    progress("metadata", 1, 1)
    shape = _pool_shape(file.config, kv_tokens // page_tokens, page_tokens, DTYPES[dtype])
    _require_memory(file.config, shape, target)
    model = LlamaModel(file.config, file.weights(shape.dtype, progress), target)
    progress("kv pool", 0, 1)
    pool, rows = KVPool(shape, device), RowMemory(metadata_rows)
    progress("kv pool", 1, 1)
    runner = Runner(model, pool)
    progress("warm-up", 0, 1)
    runner.warm_up()
    progress("warm-up", 1, 1)
    return Engine(
        runner=runner,
        pool=pool,
        rows=rows,
        config=file.config,
        context_tokens=min(file.config.context_tokens, shape.pages * page_tokens),
        fingerprint_fields=_fingerprint_fields(file.config, shape, identity, dtype),
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError(f"{name!r} is not a device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise EngineError(f"device {name!r} is neither cpu nor cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError("device 'cuda' was asked for, but torch sees no CUDA device here: use --device cpu")
    return device


def _pool_shape(config: ModelConfig, pages: int, page_tokens: int, dtype: torch.dtype) -> PoolShape:
    return PoolShape(
        pages=pages,
        layers=config.layers,
        kv_heads=config.kv_heads,
        page_tokens=page_tokens,
        head_dim=config.head_dim,
        dtype=dtype,
    )


def _require_memory(config: ModelConfig, shape: PoolShape, device: torch.device) -> None:
    """Refuse now what would fail, or take the machine down, after minutes of loading."""
    weight_bytes = config.parameters * shape.dtype.itemsize
    free_bytes = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    require_memory(
        "model and KV pool together", weight_bytes + shape.pool_bytes, free_bytes, "lower --kv-tokens, or free memory"
    )


def _fingerprint_fields(
    config: ModelConfig, shape: PoolShape, identity: ModelIdentity, dtype: str
) -> dict[str, str | int]:
    return {
        "architecture": config.architecture,
        "layers": config.layers,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": str(config.rope_theta),
        "rope_scaling": config.rope_scaling,
        "dtype": dtype,
        "page_tokens": shape.page_tokens,
        "weight_revision": identity.weight_revision,
        "quantisation": identity.quantisation,
        "tokenizer_digest": identity.tokenizer_digest,
        "template_digest": identity.template_digest,
    }
