"""Config, weights and identity of a model in a Hugging Face directory: `config.json` and `.safetensors` files."""

import hashlib
from collections import Counter
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton_core.errors import EngineError
from baton_engine.config_huggingface import read_config
from baton_engine.model_files import ModelIdentity, Progress, check_cut, weight_revision
from baton_engine.shard import WHOLE, Cut, Shard

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TEMPLATE_FILE = "chat_template.jinja"

_KINDS = {"F64", "F32", "F16", "BF16"}
_HEADER_LENGTH_BYTES = 8
_UNUSED = ".rotary_emb.inv_freq"  # a constant that old files carry in every layer
_HEAD = "lm_head.weight"


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class HuggingFaceFolder:
    """One directory, its config read and its tensors listed.

    Raises EngineError where a file is missing or damaged, or the decoder cannot compute the model.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = read_config(folder)
        self._files = _weight_files(folder)  # in the order of their names
        self._kinds = self._check()

    def weights(self, dtype: torch.dtype, progress: Progress, shard: Shard | None = None) -> dict[str, Tensor]:
        """Every weight that `shard` holds, as `dtype` on the CPU, in memory of its own: the files may change once this
        returns."""
        weights: dict[str, Tensor] = {}
        done, total = 0, sum(self._kinds.values())
        for path in self._files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - it is not a dict
                    progress("weights", done, total)
                    done += 1
                    cut = WHOLE if shard is None else shard.cut(name)
                    if cut is not None and self._is_used(name):
                        weights[name] = _part(file, name, cut).to(dtype, copy=True)
        progress("weights", total, total)
        return weights

    def identity(self) -> ModelIdentity:
        """Revision, kinds of number and digests of tokenizer and chat template."""
        headers = [(path, _header_bytes(path)) for path in self._files]
        return ModelIdentity(
            weight_revision=weight_revision(headers),
            quantisation="+".join(sorted(self._kinds)),
            tokenizer_digest=self._digest_of_files(*TOKENIZER_FILES),
            template_digest=self._digest_of_files(TEMPLATE_FILE),
        )

    def _check(self) -> Counter[str]:
        """How many tensors of each kind there are; a kind that holds no plain numbers is refused."""
        kinds: Counter[str] = Counter()
        for path in self._files:
            with _opened(path) as file:
                kinds.update(file.get_slice(name).get_dtype() for name in file.keys())  # noqa: SIM118
        unknown = sorted(kinds.keys() - _KINDS)
        if unknown:
            raise EngineError(f"{self._folder} holds weights of kind {', '.join(unknown)}; Baton reads F32, F16, BF16")
        return kinds

    def _is_used(self, name: str) -> bool:
        return not name.endswith(_UNUSED) and not (name == _HEAD and self.config.tied_embeddings)

    def _digest_of_files(self, *names: str) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for name in names:
            path = self._folder / name
            if path.is_file():
                digest.update(name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    names = [SINGLE]
    if index.is_file():
        try:
            names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
        except (OSError, msgspec.MsgspecError) as error:
            raise EngineError(f"{index} cannot be used: {error}") from error
    files = [folder / name for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        others = sorted(path.name for path in folder.glob("*.bin"))
        advice = f" (it has {others[0]}: save the model as safetensors)" if others else ""
        raise EngineError(f"model directory {folder} has no {', '.join(missing)}{advice}")
    return files


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise EngineError(f"model file {path} cannot be read: {error}") from error


def _part(file: safe_open, name: str, cut: Cut) -> Tensor:
    """What `cut` keeps of a tensor; nothing else of it is read."""
    if cut is WHOLE:
        whole: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        return whole
    stored = file.get_slice(name)  # type: ignore[no-untyped-call]
    kept = slice(cut.kept.start, cut.kept.stop)
    check_cut(name, stored.get_shape(), cut)
    part: Tensor = stored[kept] if cut.dimension == 0 else stored[:, kept]
    return part


def _header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
    return _HEADER_LENGTH_BYTES + length
