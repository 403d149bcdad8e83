"""A stream told to a router so that another worker can continue it, and a stream that continues another worker's.

A decode worker that is asked for token ids (header `x-baton-token-ids`) ends each of its writes with a record, a field
of the last event that only the router reads and strips:

    data: {"text": " the"}
    baton-part: {"tokens": [262], "start": {…}}     the tokens behind all events up to here; in the first, what began

    baton-last: {"tokens": [2]}                     likewise, and the answer is complete
    baton-fail: 500                                 its event holds the error that ends the answer

If the worker is lost, the router sends the same body to another pair, with these records as `baton_continuation`. The
tokens become the end of the prompt; the answer is replayed from them in silence, so that text, logprobs, stop strings
and counts go on as if nothing had been; and what is drawn keeps its seed and its output positions.
"""

from dataclasses import replace

import msgspec

from baton_core.errors import ClientError
from baton_core.request import Sampling, TokenLogprob, prompt_digest
from baton_worker.answer import Answer
from baton_worker.http import encode_json

TOKEN_IDS_HEADER = "x-baton-token-ids"
"""Of a request: give records, please. Of its answer: here they are; how many tokens came with the request."""


class Start(msgspec.Struct, kw_only=True):
    """What began an answer, beyond its body."""

    rid: str
    created: int
    seed: int
    prompt_tokens: int
    prompt_digest: int
    cached_tokens: int = 0


class Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One record."""

    tokens: list[int]
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    start: Start | None = None


class Past:
    """What another worker has told of an answer before it was lost. Raises ClientError when it cannot be one."""

    def __init__(self, parts: list[Part], vocab_size: int) -> None:
        if not parts or parts[0].start is None:
            raise ClientError("baton_continuation: the first part does not say how the answer began")
        self.start = parts[0].start
        self.parts = parts
        self.tokens = tuple(token for part in parts for token in part.tokens)
        if not self.tokens:
            raise ClientError("baton_continuation: no token is given")
        if min(self.tokens) < 0 or max(self.tokens) >= vocab_size:
            raise ClientError(f"baton_continuation: token ids must be between 0 and {vocab_size - 1}")

    def prompt(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """The prompt of what is left. Raises ClientError when `prompt` is not the one that the answer began with."""
        if (len(prompt), prompt_digest(prompt)) != (self.start.prompt_tokens, self.start.prompt_digest):
            raise ClientError(
                f"baton_continuation: the prompt has {len(prompt)} tokens here and had {self.start.prompt_tokens} there, "
                "or others: the two workers do not tokenize alike"
            )
        return prompt + self.tokens

    def sampling(self, sampling: Sampling) -> Sampling:
        """How the rest is drawn. Raises ClientError when there is no rest."""
        told = len(self.tokens)
        if told >= sampling.max_new_tokens:
            raise ClientError(f"baton_continuation: {told} of at most {sampling.max_new_tokens} tokens are given")
        try:
            return replace(sampling, seed=self.start.seed).after(told)
        except ValueError as error:
            raise ClientError(f"baton_continuation: {error}") from error


class Scribe:
    """Writes the records of one answer; what `answer` holds already was told by another worker."""

    def __init__(self, answer: Answer, sampling: Sampling, *, is_fresh: bool) -> None:
        self._answer = answer
        self._seed = sampling.seed
        self._is_fresh = is_fresh
        self.given = self._told = len(answer.output_ids)  # of another worker

    def part(self, events: bytes) -> bytes:
        """`events`, the answer not being complete with them, and their record."""
        return _signed(events, b"part", self._record())

    def last(self, events: bytes) -> bytes:
        """`events`, the last of the answer, and their record."""
        return _signed(events, b"last", self._record())

    @staticmethod
    def failed(event: bytes, status: int) -> bytes:
        """The event of an error that ends the answer, marked as such."""
        return _signed(event, b"fail", b"%d" % status)

    def _record(self) -> bytes:
        answer, told = self._answer, self._told
        self._told = len(answer.output_ids)
        part = Part(tokens=answer.output_ids[told:], logprobs=answer.output_logprobs[told:])
        if self._is_fresh:
            self._is_fresh = False
            part.prompt_logprobs = answer.prompt_logprobs
            part.start = Start(
                rid=answer.rid,
                created=answer.created,
                seed=self._seed,
                prompt_tokens=len(answer.prompt),
                prompt_digest=prompt_digest(answer.prompt),
                cached_tokens=answer.cached_tokens,
            )
        return encode_json(part)


def _signed(events: bytes, kind: bytes, value: bytes) -> bytes:
    """The record goes into the last event, or where there is none into an empty one, which means nothing to anybody."""
    return b"%bbaton-%b: %b\n\n" % (events.removesuffix(b"\n") or b"\n", kind, value)
