"""From a model's files to an engine that can run plans."""

from dataclasses import dataclass
from pathlib import Path

import torch

from baton_core.errors import EngineError
from baton_core.kv_layout import UnitLayout
from baton_core.ranks import Parallel
from baton_engine.groups import TensorGroups
from baton_engine.kv_pool import KVPool, PoolShape, RowMemory
from baton_engine.llama import LlamaModel
from baton_engine.model_config import ModelConfig
from baton_engine.model_files import ModelFiles, ModelIdentity, Progress
from baton_engine.parallel_runner import ParallelRunner
from baton_engine.projection import packs
from baton_engine.runner import Runner
from baton_engine.sealed_memory import available_bytes, require_memory
from baton_engine.shard import Shard, unit_layout
from baton_engine.team import Team
from baton_engine.weights_gguf import GgufFile
from baton_engine.weights_safetensors import HuggingFaceFolder

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes the engine computes in, and stores keys and values in."""

SOLO = Parallel()
"""A rank by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Everything of one rank that lives on its device. `context_tokens` is the longest prompt and answer together.

    `pool` has the layers and heads of this rank, `config` and `layout` are of the whole model and of the whole unit.
    """

    runner: Runner | ParallelRunner
    pool: KVPool
    rows: RowMemory
    config: ModelConfig
    layout: UnitLayout
    context_tokens: int
    fingerprint_fields: dict[str, str | int]  # whatever interprets keys and values, however they are laid out

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
    parallel: Parallel = SOLO,
    rank: int = 0,
    groups: TensorGroups | None = None,
) -> Engine:
    """Load a GGUF file or a Hugging Face directory and warm the engine up.

    A `rank` of several brings the `groups` that it has joined; it loads its shard, and warms up together with the others.
    `kv_tokens` is rounded down to whole pages; `threads` 0 leaves torch's own choice. Raises EngineError where the file,
    the dtype, the device or the memory will not do, or the model cannot be shared like that, before anything large is
    allocated.
    """
    if dtype not in DTYPES:
        raise EngineError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if kv_tokens < page_tokens:
        raise EngineError(f"kv_tokens {kv_tokens} holds no page of {page_tokens} tokens: raise --kv-tokens")
    target = _device(device, rank if parallel.ranks > 1 else None)
    if threads > 0:
        torch.set_num_threads(threads)
    progress("metadata", 0, 1)
    files = open_model(Path(model_path))
    config, identity = files.config, files.identity()
    progress("metadata", 1, 1)
    element = DTYPES[dtype]
    layout = unit_layout(config, parallel, element.itemsize, page_tokens)
    assert groups is not None or _is_alone(parallel), "ranks of several join their groups first"
    shard = Shard.of(config, parallel, parallel.place(rank))
    shape = _pool_shape(shard, kv_tokens // page_tokens, page_tokens, element)
    _require_memory(shard, shape, target)
    team = None if groups is None or _is_alone(parallel) else Team(shard, parallel, groups)
    model = LlamaModel(config, files.weights(element, progress, None if team is None else shard), target, team)
    progress("kv pool", 0, 1)
    pool, rows = KVPool(shape, str(target)), RowMemory(metadata_rows)
    progress("kv pool", 1, 1)
    runner = Runner(model, pool) if team is None else ParallelRunner(model, pool, team)
    progress("warm-up", 0, 1)
    if groups is not None:
        groups.meet("warm-up")
    runner.warm_up()
    progress("warm-up", 1, 1)
    return Engine(
        runner=runner,
        pool=pool,
        rows=rows,
        config=config,
        layout=layout,
        context_tokens=min(config.context_tokens, shape.pages * page_tokens),
        fingerprint_fields=_fingerprint_fields(config, identity, dtype),
    )


def open_model(path: Path) -> ModelFiles:
    """The model at `path`, a GGUF file or a Hugging Face directory. Raises EngineError."""
    return HuggingFaceFolder(path) if path.is_dir() else GgufFile(path)


def weight_bytes(shard: Shard, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that loading a shard takes at its peak, as `dtype` whatever the files hold.

    While a layer is fused it exists twice; where weights are packed, so does the output projection, and tied ones stay so.
    """
    twice = shard.config.layer_parameters
    if packs(device, dtype) and shard.heads:
        twice = max(twice, shard.table_parameters)
    return (shard.parameters + twice) * dtype.itemsize


def _is_alone(parallel: Parallel) -> bool:
    """Whether no rank ever computes with another: plain DP of single ranks is that, too."""
    return parallel.members == 1 and not (parallel.dp_attention and parallel.dp > 1)


def _device(name: str, rank: int | None) -> torch.device:
    """The device called `name`; for a `rank` of several, "cuda" is one of this host's devices, another for each rank."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError(f"{name!r} is not a device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise EngineError(f"device {name!r} is neither cpu nor cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError("device 'cuda' was asked for, but torch sees no CUDA device here: use --device cpu")
    if name == "cuda" and rank is not None:
        return torch.device("cuda", rank % torch.cuda.device_count())
    return device


def _pool_shape(shard: Shard, pages: int, page_tokens: int, dtype: torch.dtype) -> PoolShape:
    return PoolShape(
        pages=pages,
        layers=len(shard.layers),
        kv_heads=len(shard.kv_heads),
        page_tokens=page_tokens,
        head_dim=shard.model.head_dim,
        dtype=dtype,
    )


def _require_memory(shard: Shard, shape: PoolShape, device: torch.device) -> None:
    """Refuse now what would fail, or take the machine down, after minutes of loading."""
    model_bytes = weight_bytes(shard, shape.dtype, device)
    needed_bytes = model_bytes + shape.pool_bytes
    free_bytes = available_bytes()
    if device.type == "cuda":
        require_memory("the weights, on their way to the device,", model_bytes, free_bytes, "free memory")
        free_bytes = torch.cuda.mem_get_info(device)[0]
    remedy = "lower --kv-tokens, or free memory"
    if shape.dtype == torch.float32:
        remedy += ", or use --dtype bfloat16, which takes half"
    require_memory("model and KV pool together", needed_bytes, free_bytes, remedy)


def _fingerprint_fields(config: ModelConfig, identity: ModelIdentity, dtype: str) -> dict[str, str | int]:
    # What `kv_layout` translates (page size, who holds which heads and layers) is no part of it.
    return {
        "architecture": config.architecture,
        "layers": config.layers,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "key_order": "adjacent pairs",  # of dimensions that turn together, see `rotation`
        "rope_theta": str(config.rope_theta),
        "rope_scaling": str(config.rope_scaling),
        "sliding_window": str(config.sliding_window),
        "dtype": dtype,
        "weight_revision": identity.weight_revision,
        "quantisation": identity.quantisation,
        "tokenizer_digest": identity.tokenizer_digest,
        "template_digest": identity.template_digest,
    }
