"""Logprobs as SGLang writes them in `meta_info`: an entry is `[logprob | null, token_id, text | null]`.

    input_token_logprobs    the prompt's, from `logprob_start_len` on; null for the very first token
    output_token_logprobs   the answer's
    input_top_logprobs      for each of these tokens the likeliest ones in its place; null where the entry's logprob is
    output_top_logprobs

A prefill worker gives the prompt's and its one token's; the decode worker beside it gives an empty list for the prompt,
so that a router puts both together by appending. A worker that serves alone gives everything.
"""

from collections.abc import Iterable

import msgspec

from baton_core.request import TokenLogprob
from baton_worker.answer import Answer
from baton_worker.http import encode_json
from baton_worker.tokenizer import Tokenizer

Entry = tuple[float | None, int, str | None]


class MetaLogprobs:
    """The logprob fields of one answer, which grows. `texts` is None where the client wants no texts."""

    def __init__(self, texts: Tokenizer | None, *, with_top: bool) -> None:
        self._texts = texts
        self._with_top = with_top
        self._input, self._output = _GrowingArray(), _GrowingArray()
        self._input_top, self._output_top = _GrowingArray(), _GrowingArray()

    def fields(self, answer: Answer) -> dict[str, msgspec.Raw]:
        """All fields as of now: cumulative, as SGLang's streams are by default."""
        self._grow(self._input, self._input_top, answer.prompt_logprobs)
        self._grow(self._output, self._output_top, answer.output_logprobs)
        fields = {"input_token_logprobs": self._input.json(), "output_token_logprobs": self._output.json()}
        if self._with_top:
            fields |= {"input_top_logprobs": self._input_top.json(), "output_top_logprobs": self._output_top.json()}
        return fields

    def _grow(self, tokens: "_GrowingArray", tops: "_GrowingArray", known: list[TokenLogprob]) -> None:
        fresh = known[len(tokens) :]
        tokens.extend(self._entry(one.token, one.logprob) for one in fresh)
        if self._with_top:
            tops.extend(self._top(one) for one in fresh)

    def _top(self, one: TokenLogprob) -> list[Entry] | None:
        return None if one.logprob is None else [self._entry(token, logprob) for token, logprob in one.top]

    def _entry(self, token: int, logprob: float | None) -> Entry:
        text = None if self._texts is None else self._texts.decode([token], skip_special=False)
        return logprob, token, text


class _GrowingArray:
    """A JSON array that only grows: each item is encoded once, however often the array is sent."""

    def __init__(self) -> None:
        self._items: list[bytes] = []

    def __len__(self) -> int:
        return len(self._items)

    def extend(self, items: Iterable[object]) -> None:
        """Put `items` at the end."""
        self._items += map(encode_json, items)

    def json(self) -> msgspec.Raw:
        """The array, as it stands in a JSON text."""
        return msgspec.Raw(b"[" + b",".join(self._items) + b"]")
