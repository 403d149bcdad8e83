"""The tokenizer inside a GGUF file, built without the `gguf` library, Transformers or torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from baton_core.errors import EngineError
from baton_io.gguf_metadata import Value, read_header
from baton_worker.chat_template import ChatTemplate
from baton_worker.tokenizer_parts import Spelling, TokenizerParts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Values of `tokenizer.ggml.token_type`. The last two are matched as a whole; control tokens are hidden in answers."""

_Item = TypeVar("_Item")
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_EMBEDDINGS = "token_embd.weight"
_END_NAMES = ("eos", "eot", "eom")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What the file says about its tokens."""

    model: str  # "gpt2" for byte-level BPE, "llama" for sentencepiece's BPE
    pre: str  # how text is cut into words
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    scores: list[float]
    ids: Mapping[str, int]  # of "bos", "eos", …, as far as they are known and valid
    add_bos: bool
    add_space_prefix: bool
    chat_template: str | None

    @property
    def token_ids(self) -> dict[str, int]:
        """Ids by token; duplicates (padding entries) keep their first id."""
        return {token: id_ for id_, token in reversed(list(enumerate(self.tokens)))}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pre:
    """One value of `tokenizer.ggml.pre`: how byte-level BPE cuts text into words."""

    cuts: tuple[Any, ...]  # pre-tokenizers before bytes become characters
    gpt2_words: bool = False  # whether the byte-level step cuts once more, as GPT-2 does
    ignores_merges: bool = False  # whether a word in the vocabulary is one token whatever the merges say
    composes: bool = False  # Unicode NFC first
    adds_bos: bool = False  # where the file does not say


def _cut(digits: str) -> Any:
    return pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")


def _pre_kinds() -> dict[str, _Pre]:
    llama3 = _Pre(cuts=(_cut(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
    qwen2 = _Pre(cuts=(_cut(r"\p{N}"),), composes=True)
    plain = _Pre(cuts=(), gpt2_words=True)
    smollm = _Pre(cuts=(pre_tokenizers.Digits(individual_digits=True),), gpt2_words=True)
    named = {"llama-bpe": llama3, "llama3": llama3, "llama-v3": llama3, "qwen2": qwen2, "deepseek-r1-qwen": qwen2}
    return {**named, "smollm": smollm, "gpt-2": plain, "default": plain}


def read_parts(path: Path) -> TokenizerParts:
    """The tokenizer of the model file at `path`. Takes about half a second. Raises EngineError naming the file."""
    header = read_header(path, lambda key: key.startswith("tokenizer."))
    try:
        vocabulary = _vocabulary(header.values)
        for tensor in header.tensors:
            if tensor.name == _EMBEDDINGS and tensor.shape[-1] < len(vocabulary.tokens):
                raise EngineError(f"{len(vocabulary.tokens)} tokens, but embeddings for {tensor.shape[-1]} only")
        return _parts(vocabulary)
    except EngineError as error:
        raise EngineError(f"model file {path}: {error}") from error


def _parts(vocabulary: Vocabulary) -> TokenizerParts:
    kinds = list(enumerate(vocabulary.kinds))
    sentencepiece = vocabulary.model == "llama"
    fast = _sentencepiece(vocabulary) if sentencepiece else _byte_level(vocabulary)
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        whole = [token for token, of in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if of == kind]
        add = fast.add_special_tokens if special else fast.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in whole])
    bos = vocabulary.ids.get("bos")
    return TokenizerParts(
        fast=fast,
        spelling=Spelling.SENTENCEPIECE if sentencepiece else Spelling.BYTE_LEVEL,
        tokens=vocabulary.tokens,
        whole_ids=frozenset(id_ for id_, kind in kinds if kind in (CONTROL, USER_DEFINED)),
        special_ids=frozenset(id_ for id_, kind in kinds if kind in (CONTROL, UNKNOWN)),
        prefix_ids=(bos,) if vocabulary.add_bos and bos is not None else (),
        eos_ids=tuple(dict.fromkeys(vocabulary.ids[name] for name in _END_NAMES if name in vocabulary.ids)),
        template=_chat_template(vocabulary),
    )


def _byte_level(vocabulary: Vocabulary) -> FastTokenizer:
    pre = _pre(vocabulary.pre)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    bpe = models.BPE(vocab=vocabulary.token_ids, merges=pairs, ignore_merges=pre.ignores_merges)
    fast = FastTokenizer(bpe)
    if pre.composes:
        fast.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_words)
    fast.pre_tokenizer = pre_tokenizers.Sequence([*pre.cuts, byte_level])
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentencepiece(vocabulary: Vocabulary) -> FastTokenizer:
    unknown = vocabulary.ids.get("unknown")
    bpe = models.BPE(
        vocab=vocabulary.token_ids,
        merges=_merges_of_scores(vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    fast = FastTokenizer(bpe)
    spaces: list[Any] = [normalizers.Prepend("▁")] if vocabulary.add_space_prefix else []
    fast.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    return fast


def _merges_of_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Sentencepiece has no merges: two neighbours may merge where the whole is a token, the best score first."""
    pieces = zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True)
    scores = {token: score for token, kind, score in pieces if kind == NORMAL}
    ids = vocabulary.token_ids
    found = [
        (-score, ids[token[:cut]], ids[token[cut:]])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in sorted(found)]


def _pre(name: str) -> _Pre:
    kinds = _pre_kinds()
    if name not in kinds:
        raise EngineError(f"tokenizer kind {name!r} (tokenizer.ggml.pre) is not supported (known: {', '.join(kinds)})")
    return kinds[name]


def _chat_template(vocabulary: Vocabulary) -> ChatTemplate | None:
    if vocabulary.chat_template is None:
        return None
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: vocabulary.tokens[vocabulary.ids[of]] for name, of in names.items() if of in vocabulary.ids}
    return ChatTemplate(vocabulary.chat_template, special)


def _vocabulary(metadata: dict[str, Value]) -> Vocabulary:
    def get(name: str) -> Value | None:
        return metadata.get(_PREFIX + name)

    model, pre, template = get("model"), str(get("pre") or "default"), metadata.get(_TEMPLATE)
    if model not in ("gpt2", "llama"):
        raise EngineError(f"tokenizer model {model!r} is not supported (known: 'gpt2' and 'llama')")
    tokens = _list(get("tokens"), str, "tokens")
    special = {name: get(f"{name}_token_id") for name in (*_END_NAMES, "bos", "unknown", "padding")}
    add_bos = get("add_bos_token")
    adds_by_itself = model == "llama" or _pre(pre).adds_bos
    vocabulary = Vocabulary(
        model=str(model),
        pre=pre,
        tokens=tokens,
        kinds=_list(get("token_type"), int, "token types"),
        merges=_list(get("merges"), str, "merges") if model == "gpt2" else [],
        scores=_list(get("scores"), float, "scores") if model == "llama" else [],
        ids={name: id_ for name, id_ in special.items() if isinstance(id_, int) and 0 <= id_ < len(tokens)},
        add_bos=adds_by_itself if add_bos is None else add_bos is True,
        add_space_prefix=get("add_space_prefix") is not False,
        chat_template=template if isinstance(template, str) else None,
    )
    for what, items in (("token types", vocabulary.kinds), ("scores", vocabulary.scores or tokens)):
        if len(items) != len(tokens):
            raise EngineError(f"the vocabulary has {len(tokens)} tokens but {len(items)} {what}")
    return vocabulary


def _list(value: Value | None, kind: type[_Item], what: str) -> list[_Item]:
    if not (isinstance(value, list) and value and all(isinstance(item, kind) for item in value)):
        raise EngineError(f"the vocabulary is incomplete: {what} are missing")
    return [item for item in value if isinstance(item, kind)]
