"""A model small enough to simulate and strict enough to notice any wrong page, on any rank.

The keys (and values) of a token are one number, a fold over the whole prompt so far, marked with the cell (layer, keys or
values, head) that they belong to. The next token is a function of the numbers of all tokens, on all ranks, in all their
cells. So one foreign, stale, missing or misplaced page anywhere changes every token that follows.
"""

from collections.abc import Sequence
from random import Random

from baton_core.kv_layout import UnitLayout
from baton_core.plan import SequenceSlice
from baton_core.ranks import Member
from baton_core.request import PageId, TokenLogprob

VOCABULARY = 97
WORD_BYTES = 8
_MODULUS = (1 << 59) - 55
_START = 17
_FOLD = (1 << 55) - 55
_CELL_SHIFT = 56
"""A word is the cell's number above this bit and the fold below it."""
_TOKENS_MAX = 512
_ONES = [sum(1 << (64 * position) for position in range(tokens)) for tokens in range(_TOKENS_MAX)]
"""By tokens: a number whose words are all 1."""


def fold(before: int, token: int) -> int:
    """The number of a token that follows one with number `before`."""
    return (before * 1_000_003 + token + 1) % _FOLD


def logprob_of(token: int) -> TokenLogprob:
    """What the model says of a token, whatever precedes it."""
    return TokenLogprob(token=token, logprob=-float(token), top=((token, -float(token)),))


class Oracle:
    """The tokens that follow a prompt, one by one, computed without any page."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._last = _START
        self._sum = 0
        self._weight = 1
        self.folds: list[int] = []
        for token in prompt:
            self._take(token)

    def next(self) -> int:
        """The token that follows everything so far; it becomes part of it."""
        token = self._sum % VOCABULARY
        self._take(token)
        return token

    def _take(self, token: int) -> None:
        self._last = fold(self._last, token)
        self.folds.append(self._last)
        self._sum = (self._sum + self._last * self._weight) % _MODULUS
        self._weight = (self._weight << 64) % _MODULUS


def token_of(seen: Sequence[int]) -> int:
    """The token that ranks draw together which see these numbers."""
    return (seen[0] if len(set(seen)) == 1 else sum(seen) * 31 + 7) % VOCABULARY


class Memory:
    """One rank's KV pool, byte for byte as its layout says; what is in a page before it is written is noise."""

    def __init__(self, unit: UnitLayout, member: Member, pages: int, random: Random) -> None:
        layout = unit.member(member)
        self.page_tokens, self.page_bytes = layout.page_tokens, layout.page_bytes
        self.bytes = bytearray(random.randbytes(pages * self.page_bytes))
        self._words = memoryview(self.bytes).cast("Q")
        self._page_words = self.page_bytes // WORD_BYTES
        self._cells = [
            (
                layout.offset(layer, value, head) // WORD_BYTES,
                ((layer * 2 + value) * unit.kv_heads + head) << _CELL_SHIFT,
            )
            for layer in range(layout.first_layer, layout.end_layer)
            for value in (0, 1)
            for head in range(layout.first_head, layout.end_head)
        ]

    def forward(self, piece: SequenceSlice) -> int:
        """Compute one slice out of, and into, the pages it names; return what this rank sees of the sequence then."""
        size, words, position = self.page_tokens, self._words, piece.start
        before = self._fold_at(piece.pages, position - 1) if position else _START
        for token in piece.tokens:
            before = fold(before, token)
            index, offset = divmod(position, size)
            first = piece.pages[index] * self._page_words + offset
            for cell, mark in self._cells:
                words[first + cell] = before | mark
            position += 1
        return self.seen(piece.pages[: -(-position // size)], position)

    def write(self, pages: Sequence[PageId], folds: Sequence[int], held_pages: int) -> None:
        """Make these pages but the held ones hold a prompt, by magic (the fake backend)."""
        for position, number in enumerate(folds):
            if position < held_pages * self.page_tokens:
                continue
            index, offset = divmod(position, self.page_tokens)
            first = pages[index] * self._page_words + offset
            for cell, mark in self._cells:
                self._words[first + cell] = number | mark

    def seen(self, pages: Sequence[PageId], tokens: int) -> int:
        """What the first `tokens` tokens in these pages come to; anything wrong in any cell changes it."""
        values = []
        cell_bytes = self.page_tokens * WORD_BYTES
        starts = [page * self.page_bytes for page in pages]
        for cell, mark in self._cells:
            begin, end = cell * WORD_BYTES, cell * WORD_BYTES + cell_bytes
            raw = b"".join([self.bytes[start + begin : start + end] for start in starts])
            values.append(int.from_bytes(raw[: tokens * WORD_BYTES], "little") - mark * _ONES[tokens])
        if values.count(values[0]) == len(values):
            return values[0] % _MODULUS
        return sum(values) * 31 % _MODULUS

    def _fold_at(self, pages: Sequence[PageId], position: int) -> int:
        index, offset = divmod(position, self.page_tokens)
        return self._words[pages[index] * self._page_words + self._cells[0][0] + offset] & ((1 << _CELL_SHIFT) - 1)
