"""Bodies of the inference routes: SGLang's `/generate` and OpenAI's two, decoded strictly, known keys only honoured.

A key we know but do not honour yet is refused by name unless its value asks for nothing (`NO_OPS`). Keys we do not know
are ignored at the top level of `/generate`, as SGLang does; inside `sampling_params` and on OpenAI's routes, where a
misspelt key would silently change the answer, they are refused.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from baton_core.errors import ClientError
from baton_worker.continuation import Part

Body = TypeVar("Body", bound=msgspec.Struct)


class Leg(msgspec.Struct, kw_only=True):
    """What all three bodies carry for disaggregated serving."""

    rid: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    bootstrap_instance: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None  # SGLang's old name of routed_dp_rank
    disagg_prefill_dp_rank: int | None = None
    priority: int | None = None  # greater is served first where KV pages are short; 0 by default
    baton_continuation: list[Part] | None = None  # a router's: what another worker has answered already


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of `/generate`. None means the default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = None  # byte-level tokenizers put none
    # Known, not honoured yet: see NO_OPS.
    n: Any = None
    beam_width: Any = None
    choice: Any = None
    custom_params: Any = None
    ebnf: Any = None
    frequency_penalty: Any = None
    json_schema: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    regex: Any = None
    repetition_penalty: Any = None
    stop_regex: Any = None
    stream_interval: Any = None
    structural_tag: Any = None
    watermark: Any = None


class GenerateBody(Leg, kw_only=True):
    """Body of `/generate`."""

    text: str | list[Any] | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams | None = None
    stream: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None  # null and -1: none of the prompt's
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`stream_options` of the OpenAI routes."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers: there is none here


class OpenAIBody(Leg, kw_only=True):
    """What both OpenAI bodies share; `top_k` and below are the usual extensions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


class CompletionBody(OpenAIBody, kw_only=True):
    """Body of `/v1/completions`. `prompt` may be one text, one list of token ids, or a list of one of these."""

    prompt: str | list[Any]
    logprobs: int | bool | None = None  # how many; false asks for nothing


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None


class ChatBody(OpenAIBody, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


_SAMPLING_NO_OPS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "beam_width": (0, 1),
    "choice": ((), []),
    "custom_params": ({},),
    "ebnf": ("",),
    "frequency_penalty": (0,),
    "json_schema": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "regex": ("",),
    "repetition_penalty": (1,),
    "stop_regex": ("", []),
    "stream_interval": (1,),
    "structural_tag": ("",),
    "watermark": (False,),
}

_ANY_ROUTE_NO_OPS: dict[str, tuple[object, ...]] = {
    "custom_logit_processor": (),
    "lora_path": ("",),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "session_params": ({},),
}

_OPENAI_NO_OPS: dict[str, tuple[object, ...]] = _ANY_ROUTE_NO_OPS | {
    "n": (1,),
    "ebnf": ("",),
    "frequency_penalty": (0,),
    "json_schema": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "regex": ("",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_regex": ("", []),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structural_tag": ("",),
}

NO_OPS: dict[type[msgspec.Struct], dict[str, tuple[object, ...]]] = {
    SamplingParams: _SAMPLING_NO_OPS,
    GenerateBody: _ANY_ROUTE_NO_OPS
    | {
        "audio_data": ([],),
        "image_data": ([],),
        "video_data": ([],),
        "input_embeds": (),
        "return_sampling_mask": (False,),
        "token_ids_logprob": ([],),
    },
    CompletionBody: _OPENAI_NO_OPS | {"best_of": (1,), "echo": (False,), "suffix": ("",)},
    ChatBody: _OPENAI_NO_OPS
    | {
        "audio": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
}
"""Keys we know and do not honour yet, with the values (besides null) that ask for nothing."""

INDIFFERENT = frozenset(
    {
        "bootstrap_pair_key",
        "conversation_id",
        "decode_tp_size",
        "log_metrics",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "routing_key",
        "safety_identifier",
        "separate_reasoning",
        "stream_reasoning",
        "user",
    }
)
"""Keys of OpenAI's clients and of SGLang's router that change no answer of ours, whatever they say."""

ASKS_FOR_NOTHING: tuple[object, ...] = (None, False, "", [], {})
"""What a key that we do not know may say on OpenAI's routes."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANYTHING = msgspec.json.Decoder()  # what was skipped before was not read: it may still be wrong
_DECODERS: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {
    body: msgspec.json.Decoder(body) for body in (GenerateBody, CompletionBody, ChatBody, Leg)
}


def decode(raw: bytes, body: type[Body]) -> Body:
    """`raw` as a `body`. Raises ClientError naming the field, also for a known key that is not honoured."""
    decoded: Body = _decode(raw, _DECODERS[body])
    others = {key: value for key, value in _decode(raw, _FIELDS).items() if key not in body.__struct_fields__}
    for key, value in others.items():
        if key in NO_OPS[body]:
            _refuse_unless(key, _decode(value, _ANYTHING), NO_OPS[body][key])
        elif issubclass(body, OpenAIBody) and key not in INDIFFERENT:
            if _decode(value, _ANYTHING) not in ASKS_FOR_NOTHING:
                raise ClientError(f"{key[:64]} is not a known parameter; leave it out")
    return decoded


def decode_leg(raw: bytes) -> Leg | None:
    """Only what names the room, from a body that may be wrong elsewhere; None if even that cannot be read."""
    try:
        leg: Leg = _decode(raw, _DECODERS[Leg])
    except ClientError:
        return None
    return leg


def refuse_unhonoured(body: msgspec.Struct, no_ops: Mapping[str, tuple[object, ...]]) -> None:
    """Raise ClientError if a key of `no_ops` asks for something."""
    for key, accepted in no_ops.items():
        _refuse_unless(key, getattr(body, key), accepted)


def _refuse_unless(key: str, value: object, accepted: tuple[object, ...]) -> None:
    if value is not None and value not in accepted:
        raise ClientError(f"{key} is not supported yet; leave it out")


def _decode(raw: bytes | msgspec.Raw, decoder: "msgspec.json.Decoder[Any]") -> Any:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ClientError(f"the body is not valid: {error}") from error
    except RecursionError as error:
        raise ClientError("the body is not valid: it is nested too deeply") from error
