"""A model small enough to simulate and strict enough to notice any wrong page.

A page's content is a fold over the tokens it covers, started from the contents of all pages before it; the next token is
a function of all pages' contents. So one foreign, stale or missing page anywhere changes every token that follows.
"""

from collections.abc import Sequence

from baton_core.plan import SequenceSlice
from baton_core.request import TokenLogprob

VOCABULARY = 97
_MODULUS = (1 << 61) - 1
_START = 17


def _fold(content: int, token: int) -> int:
    return (content * 1_000_003 + token + 1) % _MODULUS


def _chain(before: int, content: int) -> int:
    return (before * 69_069 + content + 12_345) % _MODULUS


def logprob_of(token: int) -> TokenLogprob:
    """What the model says of a token, whatever precedes it."""
    return TokenLogprob(token=token, logprob=-float(token), top=((token, -float(token)),))


class Oracle:
    """The tokens that follow a prompt, one by one, computed without any page."""

    def __init__(self, prompt: Sequence[int], page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._before = _START
        self._content = 0
        self._offset = 0
        self.contents: list[int] = []
        for token in prompt:
            self._take(token)
        self.contents.append(self._content)

    def next(self) -> int:
        """The token that follows everything so far; it becomes part of it."""
        token = _chain(self._before, self._content) % VOCABULARY
        self._take(token)
        return token

    def _take(self, token: int) -> None:
        if self._offset == self._page_tokens:
            self.contents.append(self._content)
            self._before = _chain(self._before, self._content)
            self._offset = 0
        self._content = _fold(self._content if self._offset else self._before, token)
        self._offset += 1


def forward(memory: list[int], piece: SequenceSlice, page_tokens: int) -> int:
    """Compute one slice out of, and into, the pages it names; return the token that follows."""
    index, offset = divmod(piece.start, page_tokens)
    before = _START
    for page in piece.pages[:index]:
        before = _chain(before, memory[page])
    content = memory[piece.pages[index]]
    for token in piece.tokens:
        if offset == page_tokens:
            before = _chain(before, content)
            index, offset = index + 1, 0
        content = _fold(content if offset else before, token)
        memory[piece.pages[index]] = content
        offset += 1
    return _chain(before, content) % VOCABULARY
