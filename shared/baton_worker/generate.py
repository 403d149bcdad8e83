"""SGLang's `/generate`: fields in, fields out."""

import time
from typing import Any, assert_never

from baton_core.errors import ClientError
from baton_core.request import TOP_LOGPROBS_MAX, FinishType
from baton_worker.answer import Answer, Ending
from baton_worker.config import Role
from baton_worker.http import encode_json
from baton_worker.intake import Ask, Intake, Wanted, check_top_logprobs
from baton_worker.logprobs import MetaLogprobs
from baton_worker.respond import Route, event
from baton_worker.schemas import NO_OPS, GenerateBody, Leg, SamplingParams, refuse_unhonoured
from baton_worker.worker import Worker

MAX_NEW_TOKENS = 128
"""SGLang's default."""

DONE = b"data: [DONE]\n\n"
WEIGHT_VERSION = "default"


def ask_of(body: GenerateBody, leg: Leg, _intake: Intake) -> Ask:
    """What a body of `/generate` asks for. Raises ClientError."""
    if isinstance(body.text, list):
        raise ClientError("text: batches are not supported yet; send one request a prompt")
    if (body.text is None) == (body.input_ids is None):
        raise ClientError("exactly one of text and input_ids is needed")
    params = body.sampling_params or SamplingParams()
    refuse_unhonoured(params, NO_OPS[SamplingParams])
    logprobs, prompt_logprobs_from = _logprobs(body)
    wanted = Wanted(
        max_new_tokens=MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed if params.sampling_seed is None else params.sampling_seed,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        no_stop_trim=params.no_stop_trim,
        logprobs=logprobs,
        prompt_logprobs_from=prompt_logprobs_from,
    )
    prompt = body.text if body.text is not None else body.input_ids
    assert prompt is not None
    return Ask(leg=leg, prompt=prompt, wanted=wanted, stream=body.stream is True)


def _logprobs(body: GenerateBody) -> tuple[int | None, int | None]:
    """`logprobs` and `prompt_logprobs_from` of a body; SGLang's default is none of the prompt."""
    if body.return_logprob is not True:
        return None, None
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if start < -1:
        raise ClientError(f"logprob_start_len must be -1 (none of the prompt) or a position, not {start}")
    most = check_top_logprobs("top_logprobs_num", body.top_logprobs_num or 0, TOP_LOGPROBS_MAX)
    return most, None if start == -1 else start


class GenerateRenderer:
    """Cumulative chunks, as SGLang's default: each repeats all text and ids so far."""

    def __init__(self, body: GenerateBody, worker: Worker, started: float) -> None:
        self._echo_prompt = body.return_prompt_token_ids is True
        self._role = worker.role
        self._started = started
        self._logprobs: MetaLogprobs | None = None
        if body.return_logprob is True:
            texts = worker.intake.tokenizer if body.return_text_in_logprobs is True else None
            self._logprobs = MetaLogprobs(texts, with_top=bool(body.top_logprobs_num))

    def whole(self, answer: Answer) -> bytes:
        """The body of a complete answer."""
        return encode_json(self._value(answer))

    def chunk(self, answer: Answer, text: str) -> bytes:
        """One event a step."""
        return event(self._value(answer))

    def skip(self, answer: Answer, text: str) -> None:
        """Nothing to do: each chunk holds everything."""

    def tail(self, answer: Answer) -> bytes:
        """The end marker."""
        return DONE

    def _value(self, answer: Answer) -> dict[str, Any]:
        value: dict[str, Any] = {
            "text": answer.text,
            "output_ids": answer.output_ids,
            "meta_info": {
                "id": answer.rid,
                "finish_reason": finish_reason(answer.ending, self._length_of(answer)),
                "prompt_tokens": len(answer.prompt),
                "completion_tokens": len(answer.output_ids),
                "cached_tokens": answer.cached_tokens,
                "dp_rank": answer.dp_rank,
                "weight_version": WEIGHT_VERSION,
                "e2e_latency": time.perf_counter() - self._started,
            },
        }
        if self._logprobs is not None:
            value["meta_info"] |= self._logprobs.fields(answer)
        if self._echo_prompt:
            value["prompt_token_ids"] = answer.prompt
        return value

    def _length_of(self, answer: Answer) -> int:
        # A prefill leg ends with length 0: that is how SGLang's routers know it.
        return 0 if self._role is Role.PREFILL else len(answer.output_ids)


def finish_reason(ending: Ending | None, length: int) -> dict[str, object] | None:
    """SGLang's `finish_reason`; None while the answer grows."""
    if ending is None:
        return None
    match ending.type:
        case FinishType.STOP:
            return {"type": "stop", "matched": ending.matched}
        case FinishType.LENGTH:
            return {"type": "length", "length": length}
        case FinishType.ABORT:
            assert ending.verdict is not None
            reason = ending.verdict.reason.name.lower()
            text, status = ending.verdict.text, ending.verdict.status
            return {"type": "abort", "message": text, "status_code": status, "err_type": reason}
        case _:
            assert_never(ending.type)


GENERATE = Route(name="generate", body=GenerateBody, ask=ask_of, renderer=GenerateRenderer)
