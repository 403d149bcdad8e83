"""Text to token ids and back, with the tokenizer that comes with a model."""

from pathlib import Path

from baton_core.errors import ClientError, Reason
from baton_worker import tokenizer_gguf, tokenizer_huggingface
from baton_worker.tokenizer_parts import Spelling, TokenizerParts

PROBE_CHARS_A_TOKEN = 8
"""Prose has about 4 characters a token. A text longer than 8 for each token of the context is probed before it is
encoded as a whole."""


class Tokenizer:
    """The tokenizer of one model. Immutable after construction; safe to use from several threads."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._fast = parts.fast
        self._prefix = list(parts.prefix_ids)
        self._tokens = parts.tokens
        self._whole_ids = parts.whole_ids
        self._template = parts.template
        self._is_byte_level = parts.spelling is Spelling.BYTE_LEVEL
        self._byte_of_char = {char: byte for byte, char in _byte_characters().items()}
        self._byte_pieces = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        self.special_ids = parts.special_ids
        self.eos_ids = parts.eos_ids
        self.vocab_size = len(parts.tokens)
        self.token_chars_max = max(map(len, parts.tokens), default=1)

    @staticmethod
    def of_model(path: Path) -> "Tokenizer":
        """The tokenizer of a model: a GGUF file or a Hugging Face directory. Raises EngineError."""
        return Tokenizer(tokenizer_huggingface.read_parts(path)) if path.is_dir() else Tokenizer.from_gguf(path)

    @staticmethod
    def from_gguf(path: Path) -> "Tokenizer":
        """The tokenizer of the GGUF file at `path`. Takes about half a second. Raises EngineError."""
        return Tokenizer(tokenizer_gguf.read_parts(path))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelt out in it count as such. `add_special` puts BOS in front if due."""
        return self._prefix + self._encode(text) if add_special else self._encode(text)

    def encode_within(self, text: str, context_tokens: int, *, add_special: bool = True) -> list[int]:
        """As `encode`, but raises ClientError, without encoding all of it, when `text` cannot fit `context_tokens`."""
        if len(text) > context_tokens * self.token_chars_max:
            raise too_long(f"at least {-(-len(text) // self.token_chars_max)}", context_tokens)
        probe_chars = context_tokens * PROBE_CHARS_A_TOKEN
        if len(text) > probe_chars:
            # No token spans the border between a word and the space behind it, so a text cut there has no more tokens.
            head = text[:probe_chars].rpartition(" ")[0].rstrip()
            # A single word of that length is cut in the middle: the token at the cut may have been a part of longer ones.
            tokens = len(self._encode(head)) if head else len(self._encode(text[:probe_chars])) * 9 // 10
            if tokens >= context_tokens:
                raise too_long(f"more than {tokens}", context_tokens)
        return self.encode(text, add_special=add_special)

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not valid UTF-8 become U+FFFD.

        An answer continues its prompt: a space that sentencepiece writes before its first word is part of it.
        """
        return b"".join(map(self.token_bytes, self._visible(ids, skip_special))).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; empty for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            return b""
        text = self._tokens[token]
        if token in self._whole_ids:
            return text.encode()
        if self._is_byte_level:
            return bytes(self._byte_of_char[char] for char in text if char in self._byte_of_char)
        return self._byte_pieces.get(text) or text.replace("▁", " ").encode()

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


def _byte_characters() -> dict[int, str]:
    """GPT-2's table: every byte as a printable character; the others are moved above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(moved)}
