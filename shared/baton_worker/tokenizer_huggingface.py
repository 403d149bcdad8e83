"""The tokenizer of a Hugging Face directory: `tokenizer.json` and what the files beside it say about its tokens."""

import json
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from baton_core.errors import EngineError
from baton_worker.chat_template import ChatTemplate
from baton_worker.tokenizer_parts import Spelling, TokenizerParts

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"

_BYTE_LEVEL_DECODERS = {"Sequence", "ByteLevel", "Fuse"}
_SENTENCEPIECE_DECODERS = {"Sequence", "Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}


class _Decoder(msgspec.Struct, frozen=True):
    type: str
    decoders: list["_Decoder"] = []

    @property
    def types(self) -> set[str]:
        return {self.type}.union(*(decoder.types for decoder in self.decoders))


class _AddedToken(msgspec.Struct, frozen=True):
    id: int


class _TokenizerFile(msgspec.Struct, frozen=True):
    decoder: _Decoder | None = None
    added_tokens: list[_AddedToken] = []


class _Text(msgspec.Struct, frozen=True):
    content: str


class _Template(msgspec.Struct, frozen=True):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`tokenizer_config.json`, and `special_tokens_map.json` for what that leaves out."""

    bos_token: str | _Text | None = None
    eos_token: str | _Text | None = None
    unk_token: str | _Text | None = None
    pad_token: str | _Text | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[_Template] | dict[str, str] | None = None

    def special_tokens(self) -> dict[str, str]:
        """Texts by name, under the names that chat templates use."""
        named = {name: getattr(self, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        texts = {name: token.content if isinstance(token, _Text) else token for name, token in named.items()}
        return {name: text for name, text in texts.items() if text}


class _ModelConfig(msgspec.Struct, frozen=True):
    """`config.json` or `generation_config.json`."""

    vocab_size: int | None = None
    eos_token_id: int | list[int] | None = None


_File = TypeVar("_File")


def read_parts(folder: Path) -> TokenizerParts:
    """The tokenizer in `folder`. Raises EngineError naming the file at fault."""
    config = _read(folder / "tokenizer_config.json", _TokenizerConfig)
    texts = _read(folder / "special_tokens_map.json", _TokenizerConfig).special_tokens() | config.special_tokens()
    model = _read(folder / "config.json", _ModelConfig)
    fast, spelling = _load(folder / TOKENIZER_FILE, model.vocab_size)
    ids = {name: id_ for name, text in texts.items() if (id_ := fast.token_to_id(text)) is not None}
    # What the directory names as special is matched as a whole even where `tokenizer.json` does not list it.
    fast.add_special_tokens([AddedToken(texts[name], special=True, normalized=False) for name in ids])
    tokens = _tokens(fast)
    if model.vocab_size is not None and len(tokens) > model.vocab_size:
        raise EngineError(f"{folder} has {len(tokens)} tokens, but embeddings for {model.vocab_size} only")
    added = fast.get_added_tokens_decoder()
    ends = _ends(folder, model) + [ids[name] for name in ("eos_token",) if name in ids]
    template = _chat_template(folder, config)
    return TokenizerParts(
        fast=fast,
        spelling=spelling,
        tokens=tokens,
        whole_ids=frozenset(added),
        special_ids=frozenset(id_ for id_, token in added.items() if token.special),
        prefix_ids=_prefix(fast, config.add_bos_token, ids.get("bos_token")),
        eos_ids=tuple(dict.fromkeys(ends)),
        template=None if template is None else ChatTemplate(template, texts),
    )


def _load(path: Path, model_vocab: int | None) -> tuple[FastTokenizer, Spelling]:
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (path.parent / name).is_file()]
        advice = f"; it has {others[0]}, which Transformers can save as {path.name}" if others else ""
        raise EngineError(f"model directory {path.parent} has no {path.name}{advice}")
    file = _read(path, _TokenizerFile)
    spelling = _spelling(path, file.decoder)
    text = path.read_text(encoding="utf-8")
    if model_vocab is not None and any(token.id >= model_vocab for token in file.added_tokens):
        text = _within(text, model_vocab)
    fast = _parsed(path, text)
    fast.no_truncation()
    fast.no_padding()
    return fast, spelling


def _parsed(path: Path, text: str) -> FastTokenizer:
    try:
        return FastTokenizer.from_str(text)
    except Exception as error:  # the library raises Exception itself
        raise EngineError(f"{path} cannot be used: {error}") from error


def _within(text: str, model_vocab: int) -> str:
    """The tokenizer without the added tokens that the model has no embeddings for: nobody may write them."""
    parsed = json.loads(text)
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token["id"] < model_vocab]
    return json.dumps(parsed)


def _spelling(path: Path, decoder: _Decoder | None) -> Spelling:
    types = set() if decoder is None else decoder.types
    if "ByteLevel" in types and types <= _BYTE_LEVEL_DECODERS:
        return Spelling.BYTE_LEVEL
    if types & {"Replace", "Metaspace"} and types <= _SENTENCEPIECE_DECODERS:
        return Spelling.SENTENCEPIECE
    named = ", ".join(sorted(types)) or "none"
    raise EngineError(f"{path}: the decoder ({named}) is neither byte-level nor sentencepiece's; Baton has those two")


def _tokens(fast: FastTokenizer) -> list[str]:
    ids = fast.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, id_ in ids.items():
        tokens[id_] = token
    return tokens


def _prefix(fast: FastTokenizer, add_bos: bool | None, bos: int | None) -> tuple[int, ...]:
    """What the tokenizer itself puts before a text, unless `tokenizer_config.json` decides about BOS."""
    if add_bos is not None:
        return (bos,) if add_bos and bos is not None else ()
    plain: list[int] = fast.encode("a", add_special_tokens=False).ids
    dressed: list[int] = fast.encode("a").ids
    before = next((at for at in range(len(dressed)) if dressed[at : at + len(plain)] == plain), 0)
    return tuple(dressed[:before])


def _ends(folder: Path, model: _ModelConfig) -> list[int]:
    ends: list[int] = []
    for file in (_read(folder / "generation_config.json", _ModelConfig), model):
        found = file.eos_token_id
        ends += found if isinstance(found, list) else [] if found is None else [found]
    return ends


def _chat_template(folder: Path, config: _TokenizerConfig) -> str | None:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.chat_template
    if isinstance(template, list):
        template = {one.name: one.template for one in template}
    if isinstance(template, dict):
        return template.get("default")
    return template


def _read(path: Path, kind: type[_File]) -> _File:
    """The JSON file at `path`; with all defaults where it is absent."""
    try:
        return msgspec.json.decode(path.read_bytes() if path.is_file() else b"{}", type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} cannot be used: {error}") from error
