"""What one request has answered so far: tokens, visible text and how it ended."""

from dataclasses import dataclass

from baton_core.errors import Reason, Verdict
from baton_core.request import Finish, FinishType
from baton_worker.detokenizer import StopMatcher, StreamDecoder
from baton_worker.streams import Delivery
from baton_worker.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an answer ended; `matched` with STOP is a token id or a stop string."""

    type: FinishType
    matched: int | str | None = None
    verdict: Verdict | None = None


class Answer:
    """Grows by `feed`. Text is final once it is returned: it is never taken back."""

    def __init__(
        self,
        *,
        rid: str,
        prompt: tuple[int, ...],
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        skip_special: bool,
        keep_stop: bool,
    ) -> None:
        self.rid = rid
        self.prompt = prompt
        self.output_ids: list[int] = []
        self.cached_tokens = 0
        self.ending: Ending | None = None
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
    def failure(self) -> Verdict | None:
        """The verdict of an answer that failed. An abort that somebody asked for is not a failure, but an ending."""
        verdict = None if self.ending is None else self.ending.verdict
        return None if verdict is None or verdict.reason is Reason.ABORTED else verdict

    def feed(self, delivery: Delivery) -> str:
        """Take in what the scheduler delivered; the text that became visible. Sets `ending` at the end."""
        self.cached_tokens = max(self.cached_tokens, delivery.cached_tokens)
        shown: list[str] = []
        for index, token in enumerate(delivery.tokens):
            if self.ending is not None:
                break  # tokens behind a stop string are not part of the answer
            self.output_ids.append(token)
            if not self._is_hidden_stop(index, delivery):
                shown.append(self._show(self._decoder.feed(token)))
        if delivery.finish is not None and self.ending is None:
            shown.append(self._end(delivery.finish))
        text = "".join(shown)
        if text:
            self._parts.append(text)
        return text

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
        match = self._stops.feed(text)
        if match.stop is not None:
            self.ending = Ending(type=FinishType.STOP, matched=match.stop)
        return match.text
