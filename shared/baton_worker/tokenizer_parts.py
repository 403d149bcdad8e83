"""What a tokenizer is made of, whatever file it was read from."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tokenizers import Tokenizer as FastTokenizer

from baton_worker.chat_template import ChatTemplate


class Spelling(Enum):
    """How a vocabulary writes bytes as text."""

    BYTE_LEVEL = "byte level"  # GPT-2's: every byte is a printable character
    SENTENCEPIECE = "sentencepiece"  # text with ▁ for a space; bytes that are no text as <0x0A>


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """A tokenizer, and what else its files say about tokens."""

    fast: FastTokenizer
    spelling: Spelling
    tokens: Sequence[str]  # by id; empty where there is none
    whole_ids: frozenset[int]  # spelt as they are, matched as a whole
    special_ids: frozenset[int]  # hidden in answers
    prefix_ids: tuple[int, ...]  # put in front of a prompt that no chat template made
    eos_ids: tuple[int, ...]
    template: ChatTemplate | None
