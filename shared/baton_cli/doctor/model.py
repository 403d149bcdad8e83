"""The model that a planned stack is to serve: is it here, is it whole, can it be served, and what does it need."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_cli.doctor.findings import Finding, fail, ok, warn
from baton_cli.doctor.software import ModelFacts, TorchFacts
from baton_core.errors import EngineError
from baton_io.gguf_metadata import read_header
from baton_worker.models import MODELS, HubModel, resolve_model

TP_MAX = 16
NEED_ADVICE = "see docs/models.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where the model is; `path` None: not on this machine, or not usable, and the finding says why."""

    finding: Finding
    path: Path | None = None


def locate(model: str, environ: Mapping[str, str]) -> Located:
    """Find it without downloading anything."""
    known = MODELS.get(model)
    repository = known.repository if isinstance(known, HubModel) else _hub_id(model)
    if repository is not None:
        return _in_hub_cache(model, repository, environ)
    try:
        path = resolve_model(model).path
    except EngineError as error:
        return Located(finding=fail("model", str(error), "give another --model, or do what the line says"))
    return _checked(path)


def _hub_id(model: str) -> str | None:
    """The repository, where `model` can only be one of the hub's."""
    name = model.partition("@")[0]
    is_id = name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not name.endswith(".gguf")
    return name if is_id and not Path(model).expanduser().exists() else None


def _in_hub_cache(model: str, repository: str, environ: Mapping[str, str]) -> Located:
    home = Path(environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = sorted((cache / f"models--{repository.replace('/', '--')}" / "snapshots").glob("*"))
    for folder in reversed(snapshots):
        if (folder / "config.json").is_file():
            return _checked(folder)
    if importlib.util.find_spec("huggingface_hub") is None:
        text = f"{model} is on the Hugging Face hub ({repository}), and huggingface_hub is not installed"
        return Located(
            finding=fail("model", text, "pip install 'baton[hub]', or give the path of a model on this machine")
        )
    text = f"{repository} is not in {cache}: the first start will download it, which counts against --start-ms"
    return Located(finding=warn("model", text, f"hf download {repository}"))


def _checked(path: Path) -> Located:
    fault = _fault_of_folder(path) if path.is_dir() else _fault_of_file(path)
    if fault is not None:
        return Located(finding=fail("model", f"{path}: {fault}", "download it again, or mend its permissions"))
    return Located(finding=ok("model", str(path)), path=path)


def _fault_of_file(path: Path) -> str | None:
    if not os.access(path, os.R_OK):
        return "not readable by this user"
    try:
        header = read_header(path, lambda _key: False)
    except EngineError as error:
        return str(error)
    last = max((tensor.offset for tensor in header.tensors), default=0)
    size = path.stat().st_size
    return f"cut off: {size:,} bytes, and a tensor begins at {last:,}" if last >= size else None


def _fault_of_folder(path: Path) -> str | None:
    files = sorted(path.glob("*.safetensors"))
    if not (path / "config.json").is_file():
        return "no config.json"
    if not files:
        return "no *.safetensors"
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return "no tokenizer.json"
    closed = [file.name for file in (path / "config.json", *files) if not os.access(file, os.R_OK)]
    return f"not readable by this user: {', '.join(closed)}" if closed else _cut_off(files)


def _cut_off(files: Sequence[Path]) -> str | None:
    for file in files:
        with file.open("rb") as content:
            header_bytes = int.from_bytes(content.read(8), "little")
        if file.stat().st_size <= 8 + header_bytes:
            return f"{file.name} is cut off, or a pointer of Git LFS"
    return None


def judge_model(found: TorchFacts, dtypes: Sequence[str]) -> Finding | None:
    """What the engine says of the model; None where it was not asked."""
    if found.refused:
        return fail("architecture", found.refused, NEED_ADVICE)
    if found.unknown:
        return warn("architecture", f"the engine could not be asked ({found.unknown})", NEED_ADVICE)
    model = found.model
    if model is None:
        return None
    cache = ", ".join(f"{kv_bytes_a_token(model, name):,} bytes of KV a token in {name}" for name in dtypes)
    tp = ", ".join(str(size) for size in tensor_parallel_sizes(model))
    return ok(
        "architecture",
        f"{model.architecture}, {model.parameters / 1e6:,.0f} M weights, context {model.context_tokens:,}, {cache}; "
        f"tp may be {tp}",
    )


def kv_bytes_a_token(model: ModelFacts, dtype: str) -> int:
    """Bytes of KV cache that one token takes, over all ranks of a unit."""
    return model.numbers_a_token * (4 if dtype == "float32" else 2)


def tensor_parallel_sizes(model: ModelFacts) -> list[int]:
    """The values of --tp that the heads permit: query heads divide; KV heads divide, or are whole copies."""
    return [
        size
        for size in range(1, TP_MAX + 1)
        if model.query_heads % size == 0 and (model.kv_heads % size == 0 or size % model.kv_heads == 0)
    ]
