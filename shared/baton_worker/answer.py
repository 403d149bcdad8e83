"""What one request has answered so far: tokens and their logprobs, visible text and how it ended."""

from dataclasses import dataclass

from baton_core.errors import Reason, Verdict
from baton_core.request import Finish, FinishType, TokenLogprob
from baton_worker.detokenizer import StopMatcher, StreamDecoder
from baton_worker.streams import Delivery, unjudged
from baton_worker.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an answer ended; `matched` with STOP is a token id or a stop string."""

    type: FinishType
    matched: int | str | None = None
    verdict: Verdict | None = None


class Answer:
    """Grows by `feed`. Text is final once it is returned: it is never taken back.

    With `judged`, `output_logprobs` has one entry for each of `output_ids`.
    """

    def __init__(
        self,
        *,
        rid: str,
        prompt: tuple[int, ...],
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        skip_special: bool,
        keep_stop: bool,
        judged: bool = False,
        created: int = 0,
    ) -> None:
        self.rid = rid
        self.created = created
        self.prompt = prompt
        self.output_ids: list[int] = []
        self.output_logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        # How many characters are decoded before each of `output_ids`: more than `text` has, where a stop string was cut.
        self.text_starts: list[int] = []
        self.cached_tokens = 0
        self.dp_rank = 0  # the unit that answers
        self.ending: Ending | None = None
        self._is_resumed = False
        self._judged = judged
        self._decoded_chars = 0
        self._visible_chars = 0
        self._keep_stop = keep_stop
        self._decoder = StreamDecoder(tokenizer, skip_special=skip_special)
        self._stops = StopMatcher(stop, keep_stop=keep_stop)
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All visible text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def settled_tokens(self) -> int:
        """How many tokens, from the first on, have no text that is still held back; all of them at the end."""
        if self.ending is not None:
            return len(self.output_ids)
        settled = len(self.output_ids)
        end = self._decoded_chars
        while settled and end > self._visible_chars:
            settled -= 1
            end = self.text_starts[settled]
        return settled

    @property
    def failure(self) -> Verdict | None:
        """The verdict of an answer that failed. An abort that somebody asked for is not a failure, but an ending."""
        verdict = None if self.ending is None else self.ending.verdict
        return None if verdict is None or verdict.reason is Reason.ABORTED else verdict

    def resume(self, cached_tokens: int) -> None:
        """From now on the scheduler has tokens of this answer in its prompt: what it has cached of them is not news."""
        self.cached_tokens = cached_tokens
        self._is_resumed = True

    def feed(self, delivery: Delivery) -> str:
        """Take in what the scheduler delivered; the text that became visible. Sets `ending` at the end."""
        if not self._is_resumed:
            self.cached_tokens = max(self.cached_tokens, delivery.cached_tokens)
        self.prompt_logprobs += delivery.prompt_logprobs
        shown: list[str] = []
        for index, token in enumerate(delivery.tokens):
            if self.ending is not None:
                break  # tokens behind a stop string are not part of the answer
            self._note(index, delivery)
            if not self._is_hidden_stop(index, delivery):
                shown.append(self._show(self._decoder.feed(token)))
        if delivery.finish is not None and self.ending is None:
            shown.append(self._end(delivery.finish))
        text = "".join(shown)
        if text:
            self._parts.append(text)
            self._visible_chars += len(text)
        return text

    def _note(self, index: int, delivery: Delivery) -> None:
        token = delivery.tokens[index]
        self.output_ids.append(token)
        self.text_starts.append(self._decoded_chars)
        if self._judged:
            known = index < len(delivery.logprobs)
            self.output_logprobs.append(delivery.logprobs[index] if known else unjudged(token))

    def _is_hidden_stop(self, index: int, delivery: Delivery) -> bool:
        """Whether token `index` is the stop token that ended the answer, and the client does not want to see it."""
        last = index == len(delivery.tokens) - 1
        matched = None if delivery.finish is None else delivery.finish.matched
        return last and matched == delivery.tokens[index] and not self._keep_stop

    def _end(self, finish: Finish) -> str:
        shown = self._show(self._decoder.flush())
        if self.ending is None:
            self.ending = Ending(type=finish.type, matched=finish.matched, verdict=finish.verdict)
            shown += self._stops.flush()
        return shown

    def _show(self, text: str) -> str:
        self._decoded_chars += len(text)
        match = self._stops.feed(text)
        if match.stop is not None:
            self.ending = Ending(type=FinishType.STOP, matched=match.stop)
        return match.text
