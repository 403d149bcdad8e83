"""Token ids to text while they come: never half a character, never the beginning of a stop string too early."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from baton_worker.tokenizer import Tokenizer


class StreamDecoder:
    """Incremental detokenization of one answer; what `feed` and `flush` return adds up to `Tokenizer.decode`.

    A byte-level token stands for bytes, so that an incremental UTF-8 decoder does all: O(1) a token, and bytes of an
    unfinished character wait for the rest of it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        return "" if token in self._hidden else self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """At the end: an unfinished character, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class Match:
    """What `StopMatcher.feed` found: text that may be shown, and the stop string that ends the answer, if any."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds stop strings across token borders, holding back text that may be the beginning of one.

    The match that ends first wins, and among those the one that begins first: so the result does not depend on how the
    text was cut into pieces. The stop string itself is part of the text only with `keep_stop`.
    """

    def __init__(self, stops: Sequence[str], *, keep_stop: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._keep_stop = keep_stop
        self._held = ""

    def feed(self, text: str) -> Match:
        """More text. After a match the matcher is done."""
        if not self._stops:
            return Match(text)
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return Match(text[: end if self._keep_stop else start], stop)
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return Match(text[: len(text) - keep])

    def flush(self) -> str:
        """The text still held back, when the answer ends without a match."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
