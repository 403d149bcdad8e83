"""OpenAI's `/v1/completions` and `/v1/chat/completions`, for one prompt and one choice."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton_core.errors import ClientError
from baton_core.request import FinishType
from baton_worker.answer import Answer
from baton_worker.http import encode_json
from baton_worker.intake import Ask, Intake, Wanted, check_top_logprobs
from baton_worker.openai_logprobs import chat_logprobs, completion_logprobs
from baton_worker.respond import Route, event
from baton_worker.schemas import ChatBody, ChatMessage, CompletionBody, Leg, OpenAIBody
from baton_worker.tokenizer import Tokenizer
from baton_worker.worker import Worker

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat may use the rest of the context."""

TOP_LOGPROBS_MAX = 20
"""OpenAI's limit for chats, here for both routes."""

DONE = b"data: [DONE]\n\n"
FINISH_REASONS = {FinishType.STOP: "stop", FinishType.LENGTH: "length", FinishType.ABORT: "abort"}


def ask_of_completion(body: CompletionBody, leg: Leg, _intake: Intake) -> Ask:
    """What a completion asks for. Raises ClientError."""
    longest = COMPLETION_MAX_TOKENS if body.max_tokens is None else _not_negative("max_tokens", body.max_tokens)
    wanted = _wanted(body, longest, _completion_top(body.logprobs))
    return Ask(leg=leg, prompt=_one_prompt(body.prompt), wanted=wanted, stream=body.stream is True)


def ask_of_chat(body: ChatBody, leg: Leg, intake: Intake) -> Ask:
    """What a chat asks for. Raises ClientError."""
    if not body.messages:
        raise ClientError("messages is empty")
    prompt = intake.tokenizer.render_chat([_message(message) for message in body.messages])
    limits = (("max_completion_tokens", body.max_completion_tokens), ("max_tokens", body.max_tokens))
    longest = next((_not_negative(key, value) for key, value in limits if value is not None), None)
    wanted = _wanted(body, longest, _chat_top(body))
    # The template writes whatever special tokens the model wants.
    return Ask(leg=leg, prompt=prompt, wanted=wanted, stream=body.stream is True, add_special=False)


def _not_negative(key: str, tokens: int) -> int:
    # Checked under the client's own name for it: the scheduler knows it by another.
    if tokens < 0:
        raise ClientError(f"{key} must be at least 0, not {tokens}")
    return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the two routes differ on the wire."""

    kind: str
    chunk_kind: str
    id_prefix: str
    content: Callable[[str], dict[str, Any]]  # all text, in a whole body
    opening: dict[str, Any] | None  # what a stream says first, alone
    delta: Callable[[str], dict[str, Any]]  # new text, in a stream
    closing: dict[str, Any]  # goes with the finish reason
    logprobs: Callable[[Answer, Tokenizer, int, int], dict[str, Any]]  # of the tokens from … to …


TEXT = Shape(
    kind="text_completion",
    chunk_kind="text_completion",
    id_prefix="cmpl-",
    content=lambda text: {"text": text},
    opening=None,
    delta=lambda text: {"text": text},
    closing={"text": ""},
    logprobs=completion_logprobs,
)
MESSAGE = Shape(
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    id_prefix="chatcmpl-",
    content=lambda text: {"message": {"role": "assistant", "content": text}},
    opening={"delta": {"role": "assistant", "content": ""}},
    delta=lambda text: {"delta": {"content": text}},
    closing={"delta": {}},
    logprobs=chat_logprobs,
)


class OpenAIRenderer:
    """Writes one answer in a `Shape`."""

    def __init__(self, shape: Shape, body: CompletionBody | ChatBody, worker: Worker) -> None:
        self._shape = shape
        self._tokenizer = worker.intake.tokenizer
        # Completions may ask for 0 of the likeliest tokens, which is not the same as for no logprobs.
        self._judged = body.logprobs is not None and body.logprobs is not False
        self._judged_tokens = 0  # how many have been sent with their logprobs
        self._model = worker.model.name if body.model is None else body.model
        self._usage_wanted = body.stream_options is not None and body.stream_options.include_usage is True
        self._opened = shape.opening is None

    def whole(self, answer: Answer) -> bytes:
        """The body of a complete answer."""
        choice = self._choice(self._shape.content(answer.text), _finish(answer), self._logprobs(answer))
        return encode_json(self._frame(answer, self._shape.kind, [choice]) | {"usage": _usage(answer)})

    def chunk(self, answer: Answer, text: str) -> bytes:
        """Events for what became visible; a token's logprobs go with its text, those without text with the next."""
        choices = []
        if not self._opened and self._shape.opening is not None:
            choices.append(self._choice(self._shape.opening, None))
            self._opened = True
        if text:
            choices.append(self._choice(self._shape.delta(text), None, self._logprobs(answer)))
        if answer.ending is not None:
            choices.append(self._choice(self._shape.closing, _finish(answer), self._logprobs(answer)))
        return b"".join(event(self._frame(answer, self._shape.chunk_kind, [choice])) for choice in choices)

    def skip(self, answer: Answer, text: str) -> None:
        """`chunk` was written by another worker: keep count of it."""
        self._opened = True
        if text and self._judged:
            self._judged_tokens = answer.settled_tokens

    def tail(self, answer: Answer) -> bytes:
        """Usage, where the client wants it, and the end marker."""
        if not self._usage_wanted:
            return DONE
        return event(self._frame(answer, self._shape.chunk_kind, []) | {"usage": _usage(answer)}) + DONE

    def _choice(
        self, content: dict[str, Any], finish: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Of the tokens that are settled and not sent yet; None where there are none, or none are asked for."""
        first, end = self._judged_tokens, answer.settled_tokens if self._judged else 0
        if end <= first:
            return None
        self._judged_tokens = end
        return self._shape.logprobs(answer, self._tokenizer, first, end)

    def _frame(self, answer: Answer, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._shape.id_prefix + answer.rid,
            "object": kind,
            "created": answer.created,
            "model": self._model,
            "choices": choices,
        }


def _finish(answer: Answer) -> str:
    assert answer.ending is not None, "whole bodies are written at the end"
    return FINISH_REASONS[answer.ending.type]


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, completion = len(answer.prompt), len(answer.output_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _completion_top(logprobs: int | bool | None) -> int | None:
    if logprobs is None or logprobs is False:
        return None
    if logprobs is True:
        raise ClientError(f"logprobs must be a number between 0 and {TOP_LOGPROBS_MAX}")
    return check_top_logprobs("logprobs", logprobs, TOP_LOGPROBS_MAX)


def _chat_top(body: ChatBody) -> int | None:
    top = check_top_logprobs("top_logprobs", body.top_logprobs or 0, TOP_LOGPROBS_MAX)
    if top and not body.logprobs:
        raise ClientError("top_logprobs needs logprobs: true")
    return top if body.logprobs else None


def _wanted(body: OpenAIBody, longest: int | None, logprobs: int | None) -> Wanted:
    return Wanted(
        max_new_tokens=longest,
        min_new_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        no_stop_trim=body.no_stop_trim,
        logprobs=logprobs,
    )


def _one_prompt(prompt: str | list[Any]) -> str | list[int]:
    """The only prompt of a completion: a text, a list of token ids, or a list that holds one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if any(isinstance(item, str | list) for item in prompt):
        raise ClientError("prompt: batches are not supported yet; send one request a prompt")
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        raise ClientError("prompt must be a text or a list of token ids")
    return prompt


def _message(message: ChatMessage) -> dict[str, object]:
    if message.tool_calls:
        raise ClientError("tool_calls is not supported yet; leave it out")
    content = message.content
    if isinstance(content, list):
        wrong = next((part.type for part in content if part.type != "text" or part.text is None), None)
        if wrong is not None:
            raise ClientError(f"content parts of type {wrong!r} are not supported; only text is")
        content = "".join(part.text or "" for part in content)
    return {"role": message.role, "content": content or ""}


COMPLETION = Route(
    name="completions",
    body=CompletionBody,
    ask=ask_of_completion,
    renderer=lambda body, worker, _started: OpenAIRenderer(TEXT, body, worker),
)
CHAT = Route(
    name="chat",
    body=ChatBody,
    ask=ask_of_chat,
    renderer=lambda body, worker, _started: OpenAIRenderer(MESSAGE, body, worker),
)
