"""Bodies as clients send them: what is taken, what is refused, and that the refusal names the field."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from baton_core.errors import ClientError, Reason, Verdict
from baton_core.limits import Limits
from baton_worker import generate, openai
from baton_worker.config import DecodeConfig, Role, parse_cores
from baton_worker.intake import Intake, Prepared
from baton_worker.models import resolve_model
from baton_worker.schemas import ChatBody, CompletionBody, GenerateBody, decode, decode_leg
from baton_worker.tokenizer import Tokenizer

CONTEXT = 256
ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(resolve_model("smollm2-135m-instruct").path)


def intake(tokenizer: Tokenizer, role: Role = Role.DECODE) -> Intake:
    def check_host(host: str, _port: int) -> Verdict | None:
        allowed = host == "127.0.0.1"
        return None if allowed else Verdict(reason=Reason.INVALID_REQUEST, text=f"bootstrap_host {host} is not allowed")

    return Intake(
        role=role,
        tokenizer=tokenizer,
        limits=Limits(),
        own_bootstrap=("", 8998),
        check_host=check_host,
        dp_size=1,
    )


def prepare(tokenizer: Tokenizer, body: dict[str, Any] | bytes, role: Role = Role.DECODE) -> Prepared:
    """A body of /generate on its whole way through intake."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    door = intake(tokenizer, role)
    decoded = decode(raw, GenerateBody)
    return asyncio.run(door.prepare(generate.ask_of(decoded, decoded, door), CONTEXT))


def prepare_chat(tokenizer: Tokenizer, **body: Any) -> Prepared:
    door = intake(tokenizer)
    decoded = decode(json.dumps({"messages": [{"role": "user", "content": "Hi"}]} | body).encode(), ChatBody)
    return asyncio.run(door.prepare(openai.ask_of_chat(decoded, decoded, door), CONTEXT))


def test_defaults_are_those_of_sglang(tokenizer: Tokenizer) -> None:
    got = prepare(tokenizer, {"text": "Hi"})
    assert (got.sampling.max_new_tokens, got.sampling.temperature, got.sampling.top_k) == (128, 1.0, -1)
    assert got.sampling.stop_token_ids == tokenizer.eos_ids
    assert got.bootstrap is None


def test_unknown_top_level_keys_and_known_ones_that_ask_for_nothing_are_taken(tokenizer: Tokenizer) -> None:
    body = {
        "text": "Hi",
        "some_future_key": {"a": [1]},
        "return_logprob": False,
        "top_logprobs_num": 0,
        "lora_path": None,
        "sampling_params": {"n": 1, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None},
    }
    assert prepare(tokenizer, body).prompt == tuple(tokenizer.encode("Hi"))


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"text": "Hi", "token_ids_logprob": [1]}, "token_ids_logprob is not supported yet"),
        ({"text": "Hi", "return_hidden_states": True}, "return_hidden_states is not supported yet"),
        ({"text": "Hi", "sampling_params": {"n": 2}}, "n is not supported yet"),
        ({"text": "Hi", "sampling_params": {"json_schema": "{}"}}, "json_schema is not supported yet"),
        ({"text": "Hi", "sampling_params": {"presence_penalty": 0.5}}, "presence_penalty is not supported yet"),
        ({"text": "Hi", "sampling_params": {"logit_bias": {"5": 1}}}, "logit_bias is not supported yet"),
        ({"text": ["Hi", "Ho"]}, "text: batches are not supported yet"),
        ({"input_ids": [[1], [2]]}, "input_ids"),
        ({"text": "Hi", "sampling_params": {"colour": "red"}}, "colour"),
        ({"text": "Hi", "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"text": "Hi", "sampling_params": {"max_new_tokens": 1.5}}, "max_new_tokens"),
        ({"text": "Hi", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "Hi", "sampling_params": {"top_p": 0}}, "top_p"),
        ({"text": "Hi", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "min_new_tokens"),
        ({"text": "Hi", "sampling_params": {"stop_token_ids": [10**9]}}, "stop_token_ids"),
        ({"text": "Hi", "sampling_params": {"stop": ["x" * 2_000]}}, "stop"),
        ({"input_ids": [10**30]}, "token ids"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"text": ""}, "the prompt is empty"),
        ({}, "exactly one of text and input_ids"),
        ({"text": "Hi", "input_ids": [1]}, "exactly one of text and input_ids"),
        ({"text": "Hi", "routed_dp_rank": 1}, "routed_dp_rank 1"),
        ({"text": "Hi", "bootstrap_room": 5}, "bootstrap_host"),
        ({"text": "Hi", "bootstrap_host": "127.0.0.1", "bootstrap_room": 2**63}, "bootstrap_room"),
        ({"text": "Hi", "bootstrap_host": "127.0.0.1", "bootstrap_room": 0}, "bootstrap_room"),
        ({"text": "Hi", "bootstrap_host": "10.9.8.7", "bootstrap_room": 5}, "bootstrap_host 10.9.8.7 is not allowed"),
        ({"text": "Hi"} | ROOM | {"bootstrap_port": 0}, "bootstrap_port"),
    ],
)
def test_a_wrong_or_unhonoured_field_is_refused_by_name(tokenizer: Tokenizer, body: dict[str, Any], names: str) -> None:
    with pytest.raises(ClientError, match=names):
        prepare(tokenizer, body)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b'{"text": "a", "sampling_params": {"temperature": NaN}}',
        b'{"text": "a", "sampling_params": {"temperature": 1e999}}',
        b'{"text": "a", "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
)
def test_a_body_that_is_not_valid_json_is_a_client_error(tokenizer: Tokenizer, raw: bytes) -> None:
    with pytest.raises(ClientError, match="the body is not valid"):
        prepare(tokenizer, raw)


def test_outputs_are_clipped_to_the_context_and_prompts_are_not(tokenizer: Tokenizer) -> None:
    got = prepare(tokenizer, {"input_ids": [5] * 200, "sampling_params": {"max_new_tokens": 100_000}})
    assert got.sampling.max_new_tokens == CONTEXT - 200
    with pytest.raises(ClientError, match=r"256 tokens; this worker takes at most 255") as refused:
        prepare(tokenizer, {"input_ids": [5] * 256})
    assert refused.value.verdict.reason is Reason.CONTEXT_TOO_LONG


def test_both_legs_of_a_room_draw_the_same_seed(tokenizer: Tokenizer) -> None:
    legs = [prepare(tokenizer, {"text": "Hi"} | ROOM, role).sampling.seed for role in (Role.DECODE, Role.PREFILL)]
    other = prepare(tokenizer, {"text": "Hi"} | ROOM | {"bootstrap_room": 78}).sampling.seed
    assert legs[0] == legs[1] != other
    assert prepare(tokenizer, {"text": "Hi", "sampling_params": {"seed": -1}}).sampling.seed == 2**64 - 1


def test_prefill_needs_a_room_and_knows_its_own_address(tokenizer: Tokenizer) -> None:
    with pytest.raises(ClientError, match="prefill worker: the request needs a bootstrap_room"):
        prepare(tokenizer, {"text": "Hi"}, Role.PREFILL)


def test_a_health_probe_may_use_room_zero(tokenizer: Tokenizer) -> None:
    got = prepare(tokenizer, {"text": "Hi", "bootstrap_host": "2.2.2.2", "bootstrap_room": 0})
    assert got.bootstrap is not None
    assert got.bootstrap.port == 8998


def test_the_room_of_a_wrong_body_can_still_be_read() -> None:
    leg = decode_leg(json.dumps({"text": 5, "rid": "a"} | ROOM).encode())
    assert leg is not None
    assert (leg.bootstrap_room, leg.rid) == (77, "a")
    assert decode_leg(b"{") is None


def test_a_chat_may_use_the_rest_of_the_context(tokenizer: Tokenizer) -> None:
    got = prepare_chat(tokenizer)
    assert got.sampling.max_new_tokens == CONTEXT - len(got.prompt)
    assert prepare_chat(tokenizer, max_tokens=9, max_completion_tokens=7).sampling.max_new_tokens == 7
    assert prepare_chat(tokenizer, stop="END", temperature=0).stop == ("END",)


def test_chat_content_may_come_in_text_parts(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    split = prepare_chat(tokenizer, messages=[{"role": "user", "content": parts}])
    assert split.prompt == prepare_chat(tokenizer).prompt
    with pytest.raises(ClientError, match="image_url"):
        prepare_chat(tokenizer, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


@pytest.mark.parametrize("key", ["tools", "reasoning_effort", "n", "response_format", "logit_bias"])
def test_a_chat_key_that_is_not_honoured_is_named(tokenizer: Tokenizer, key: str) -> None:
    value = {
        "tools": [{}],
        "reasoning_effort": "high",
        "n": 2,
        "response_format": {"type": "json_object"},
        "logit_bias": {"1": 2},
    }
    with pytest.raises(ClientError, match=f"{key} is not supported yet"):
        prepare_chat(tokenizer, **{key: value[key]})


def test_logprobs_are_asked_for_only_when_the_client_asks(tokenizer: Tokenizer) -> None:
    silent = prepare(tokenizer, {"text": "Hi", "top_logprobs_num": 5, "logprob_start_len": 0}).sampling
    answer = prepare(tokenizer, {"text": "Hi", "return_logprob": True}).sampling
    everything = {"text": "Hi", "return_logprob": True, "top_logprobs_num": 5, "logprob_start_len": 0}
    both = prepare(tokenizer, everything).sampling
    assert (silent.logprobs, silent.prompt_logprobs_from) == (None, None)
    assert (answer.logprobs, answer.prompt_logprobs_from) == (0, None)
    assert (both.logprobs, both.prompt_logprobs_from) == (5, 0)
    legs = [prepare(tokenizer, everything | ROOM, role).sampling for role in (Role.DECODE, Role.PREFILL)]
    assert legs[0] == legs[1] == replace(both, seed=legs[0].seed)
    assert prepare_chat(tokenizer, logprobs=True).sampling.logprobs == 0
    assert prepare_chat(tokenizer, logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert prepare_chat(tokenizer, logprobs=False, top_logprobs=0).sampling.logprobs is None


def test_logprobs_of_a_prompt_are_bounded(tokenizer: Tokenizer) -> None:
    door = intake(tokenizer)
    body = {"input_ids": [5] * 1_100, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 128}
    decoded = decode(json.dumps(body).encode(), GenerateBody)
    with pytest.raises(ClientError, match="141900 logprobs of the prompt, at most 131072"):
        asyncio.run(door.prepare(generate.ask_of(decoded, decoded, door), 2_048))
    decoded = decode(json.dumps(body | {"logprob_start_len": 200}).encode(), GenerateBody)
    assert (
        asyncio.run(door.prepare(generate.ask_of(decoded, decoded, door), 2_048)).sampling.prompt_logprobs_from == 200
    )


def test_a_completion_takes_one_text_or_one_list_of_ids() -> None:
    def prompt_of(prompt: Any) -> Any:
        body = decode(json.dumps({"prompt": prompt}).encode(), CompletionBody)
        return openai.ask_of_completion(body, body, None).prompt  # type: ignore[arg-type]

    assert prompt_of("Hi") == prompt_of(["Hi"]) == "Hi"
    assert prompt_of([1, 2]) == prompt_of([[1, 2]]) == [1, 2]
    with pytest.raises(ClientError, match="batches"):
        prompt_of(["a", "b"])
    with pytest.raises(ClientError, match="list of token ids"):
        prompt_of([1, None])


def test_cores_are_numbers_and_ranges() -> None:
    assert parse_cores("") == ()
    assert parse_cores("0-2, 5") == (0, 1, 2, 5)
    for wrong in ("a", "3-1", "1-", "-1", "0-99999"):
        with pytest.raises(ValueError, match="cores"):
            parse_cores(wrong)


def test_a_worker_configuration_out_of_range_is_refused() -> None:
    for wrong in ({"port": 70_000}, {"page_tokens": 0}, {"registry": ("10.0.0.1:8998",)}, {"cores": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DecodeConfig(**wrong)
    assert DecodeConfig(host="0.0.0.0").reachable_host == "127.0.0.1"


def test_a_priority_reaches_the_scheduler_and_is_bounded(tokenizer: Tokenizer) -> None:
    assert prepare(tokenizer, {"text": "Hi"}).request("r", 1_000).priority == 0
    assert prepare(tokenizer, {"text": "Hi", "priority": -7}).request("r", 1_000).priority == -7
    with pytest.raises(ClientError, match="priority"):
        prepare(tokenizer, {"text": "Hi", "priority": 10**7})
