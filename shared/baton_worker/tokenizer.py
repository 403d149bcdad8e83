"""Text to token ids and back, from the vocabulary inside a GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from baton_core.errors import ClientError, EngineError, Reason
from baton_worker.chat_template import ChatTemplate
from baton_worker.gguf_metadata import Value, read_metadata

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`: tokens matched as a whole; control tokens are hidden in answers."""

PROBE_CHARS_A_TOKEN = 8
"""Prose has about 4 characters a token. A text longer than 8 for each token of the context is probed before it is
encoded as a whole."""

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_NAMES = ("model", "pre", "tokens", "token_type", "merges", "add_bos_token")
_ID_NAMES = ("bos_token_id", "eos_token_id", "eot_token_id")
_KEYS = frozenset((_TEMPLATE, *(_PREFIX + name for name in (*_NAMES, *_ID_NAMES))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What the file says about its tokens."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    pre: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None


class Tokenizer:
    """Byte-level BPE tokenizer of one model. Immutable after construction; safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises EngineError when the vocabulary is of a kind that is not supported."""
        self._fast = _build(vocabulary)
        self._add_bos = vocabulary.add_bos and vocabulary.bos_id is not None
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.vocab_size = len(vocabulary.tokens)
        self.special_ids = frozenset(id_ for id_, kind in enumerate(vocabulary.kinds) if kind == CONTROL)
        self.token_chars_max = max(map(len, vocabulary.tokens))
        self._whole = {id_ for id_, kind in enumerate(vocabulary.kinds) if kind in (CONTROL, USER_DEFINED)}
        self._tokens = vocabulary.tokens
        self._byte_of_char = {char: byte for byte, char in _byte_characters().items()}
        self._template = _chat_template(vocabulary)

    @staticmethod
    def from_gguf(path: Path) -> "Tokenizer":
        """The tokenizer of the model file at `path`. Takes about half a second. Raises EngineError."""
        metadata = read_metadata(path, _KEYS)
        try:
            return Tokenizer(_vocabulary(metadata))
        except EngineError as error:
            raise EngineError(f"model file {path}: {error}") from error

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelt out in it count as such. `add_special` puts BOS in front if due."""
        ids = self._encode(text)
        return [self.bos_id, *ids] if add_special and self._add_bos and self.bos_id is not None else ids

    def encode_within(self, text: str, context_tokens: int, *, add_special: bool = True) -> list[int]:
        """As `encode`, but raises ClientError, without encoding all of it, when `text` cannot fit `context_tokens`."""
        if len(text) > context_tokens * self.token_chars_max:
            raise too_long(f"at least {-(-len(text) // self.token_chars_max)}", context_tokens)
        probe_chars = context_tokens * PROBE_CHARS_A_TOKEN
        if len(text) > probe_chars:
            # No token spans the border between a word and the space behind it, so a text cut there has no more tokens.
            head = text[:probe_chars].rpartition(" ")[0].rstrip()
            tokens = len(self._encode(head))
            if tokens >= context_tokens:
                raise too_long(f"more than {tokens}", context_tokens)
        return self.encode(text, add_special=add_special)

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, self._visible(ids, skip_special))).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; empty for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            return b""
        text = self._tokens[token]
        if token in self._whole:
            return text.encode()
        return bytes(self._byte_of_char[char] for char in text if char in self._byte_of_char)

    def render_chat(self, messages: list[dict[str, object]]) -> str:
        """The prompt text of a chat. Raises ClientError when the model has no template, or it refuses `messages`."""
        if self._template is None:
            raise ClientError("this model has no chat template; use /v1/completions or /generate")
        return self._template.render(messages)

    def _encode(self, text: str) -> list[int]:
        # The batch call releases the interpreter lock while it works; the single one does not.
        ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _visible(self, ids: list[int], skip_special: bool) -> list[int]:
        return [id_ for id_ in ids if id_ not in self.special_ids] if skip_special else ids


def too_long(tokens: str, context_tokens: int) -> ClientError:
    """The refusal of a prompt that does not fit, naming both numbers."""
    return ClientError(
        f"the prompt has {tokens} tokens; this worker takes at most {context_tokens - 1}. Shorten the prompt.",
        Reason.CONTEXT_TOO_LONG,
    )


def _pre_tokenizer(name: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    table: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level],
        "gpt-2": [byte_level],
        "default": [byte_level],
    }
    if name not in table:
        raise EngineError(f"tokenizer kind {name!r} is not supported (known: {', '.join(table)})")
    return pre_tokenizers.Sequence(table[name])


def _build(vocabulary: Vocabulary) -> FastTokenizer:
    # Duplicates (padding entries) keep their first id.
    ids: dict[str, int] = {}
    for id_, token in enumerate(vocabulary.tokens):
        ids.setdefault(token, id_)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    fast = FastTokenizer(models.BPE(vocab=ids, merges=pairs))
    fast.pre_tokenizer = _pre_tokenizer(vocabulary.pre)
    fast.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        whole = [token for token, of in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if of == kind]
        add = fast.add_special_tokens if special else fast.add_tokens
        add([AddedToken(token, special=special, normalized=False) for token in whole])
    return fast


def _chat_template(vocabulary: Vocabulary) -> ChatTemplate | None:
    if vocabulary.chat_template is None:
        return None
    names = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_ids[0] if vocabulary.eos_ids else None}
    special = {name: vocabulary.tokens[id_] for name, id_ in names.items() if id_ is not None}
    return ChatTemplate(vocabulary.chat_template, special)


def _vocabulary(metadata: dict[str, Value]) -> Vocabulary:
    def get(name: str) -> Value | None:
        return metadata.get(_PREFIX + name)

    if get("model") != "gpt2":
        raise EngineError(f"tokenizer model {get('model')!r} is not supported (known: 'gpt2', byte-level BPE)")
    tokens, kinds, merges = get("tokens"), get("token_type"), get("merges")
    if not (isinstance(tokens, list) and isinstance(kinds, list) and isinstance(merges, list) and tokens):
        raise EngineError("the vocabulary is incomplete: tokens, token types or merges are missing")
    if len(tokens) != len(kinds):
        raise EngineError(f"the vocabulary has {len(tokens)} tokens but {len(kinds)} token types")
    size = len(tokens)
    special = {name: get(f"{name}_token_id") for name in ("bos", "eos", "eot")}
    known = {name: id_ for name, id_ in special.items() if isinstance(id_, int) and 0 <= id_ < size}
    template = metadata.get(_TEMPLATE)
    return Vocabulary(
        tokens=[str(token) for token in tokens],
        kinds=[kind if isinstance(kind, int) else 0 for kind in kinds],
        merges=[str(merge) for merge in merges],
        pre=str(get("pre") or "default"),
        bos_id=known.get("bos"),
        eos_ids=tuple(dict.fromkeys(known[name] for name in ("eos", "eot") if name in known)),
        add_bos=get("add_bos_token") is True,
        chat_template=template if isinstance(template, str) else None,
    )


def _byte_characters() -> dict[int, str]:
    """GPT-2's table: every byte as a printable character; the others are moved above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(moved)}
