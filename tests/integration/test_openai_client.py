"""The official `openai` client against a real stack; and that two workers answer in every field as one alone does."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from integration.stack import Stack, gold

QUESTION = "What is the capital of France? Answer briefly."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
TOLERANCE = 1e-4
PASSING = {"id", "created", "e2e_latency"}
"""Fields that differ from one request to the next."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = ("prefill.chunk_tokens=64", "prefill.kv_tokens=4096", "decode.kv_tokens=4096")
    running = Stack.up(tmp_path_factory.mktemp("openai"), "--dtype", "float32", "--transfer", "tcp", settings=settings)
    yield running
    running.down()


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


async def test_the_models_are_listed(client: AsyncOpenAI) -> None:
    models = [model.id async for model in client.models.list()]
    assert models == ["smollm2-135m-instruct"]


async def test_a_chat_has_usage_reason_and_logprobs(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="any", messages=MESSAGES, temperature=0, max_tokens=24, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 <= (answer.usage.prompt_tokens_details.cached_tokens or 0) < answer.usage.prompt_tokens
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for one in content:
        assert one.bytes == list(one.token.encode())
        assert [top.logprob for top in one.top_logprobs] == sorted((t.logprob for t in one.top_logprobs), reverse=True)
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, one.top_logprobs[0].logprob), "greedy"
    assert "".join(one.token for one in content[:-1]) == choice.message.content
    assert content[-1].token == "<|im_end|>"


async def test_a_streamed_chat_adds_up_to_the_whole_one(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    judged: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    whole = await client.chat.completions.create(**asked, **judged)
    text, logprobs, reasons, usages = "", [], [], []
    stream = await client.chat.completions.create(
        **asked, **judged, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            text += choice.delta.content or ""
            logprobs += choice.logprobs.content or [] if choice.logprobs else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None
    assert alike([one.model_dump() for one in logprobs], whole.choices[0].logprobs.model_dump()["content"]) == []
    assert reasons == ["stop"]
    assert whole.usage is not None
    assert [usage.model_dump(exclude={"prompt_tokens_details"}) for usage in usages] == [
        whole.usage.model_dump(exclude={"prompt_tokens_details"})
    ]


async def test_a_completion_has_usage_reason_and_logprobs(client: AsyncOpenAI) -> None:
    prompt = next(prompt for prompt in gold() if prompt["name"] == "prose-65")
    answer = await client.completions.create(
        model="any", prompt=prompt["input_ids"], temperature=0, max_tokens=12, logprobs=2
    )
    (choice,) = answer.choices
    assert prompt["output_text"].startswith(choice.text)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (65, 12)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset and logprobs.top_logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert [choice.text[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]
    assert [max(top.values()) for top in logprobs.top_logprobs] == logprobs.token_logprobs, "greedy"


async def test_a_streamed_completion_adds_up_and_stops_where_it_should(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "prompt": "One, two, three, four,", "temperature": 0, "max_tokens": 16}
    whole = await client.completions.create(**asked, stop=["seven"], logprobs=0)
    stream = await client.completions.create(**asked, stop=["seven"], logprobs=0, stream=True)
    text, tokens = "", []
    reason: str | None = None
    async for chunk in stream:
        (choice,) = chunk.choices
        text += choice.text
        tokens += choice.logprobs.tokens or [] if choice.logprobs else []
        reason = choice.finish_reason or reason
    assert whole.choices[0].logprobs is not None
    assert (text, tokens) == (whole.choices[0].text, whole.choices[0].logprobs.tokens)
    assert reason == whole.choices[0].finish_reason == "stop"
    assert "seven" not in text


async def test_a_wrong_request_raises_what_the_client_knows(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model="any", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        await client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="top_logprobs must be between 0 and 20"):
        await client.chat.completions.create(model="any", messages=MESSAGES, logprobs=True, top_logprobs=21)


# -- two workers and one


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["chat-capital", "prose-129"])
async def test_a_disaggregated_answer_equals_the_colocated_one_in_every_field(
    stack: Stack, name: str, stream: bool
) -> None:
    prompt = next(prompt for prompt in gold() if prompt["name"] == name)
    sampling = {"temperature": 0, "max_new_tokens": 8}
    judged = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 4, "return_text_in_logprobs": True}
    body = {"input_ids": prompt["input_ids"], "sampling_params": sampling, "stream": stream} | judged
    meta = (await both(stack, "/generate", body))["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == prompt["input_ids"]
    assert meta["input_token_logprobs"][0][0] is None
    assert [entry[1] for entry in meta["output_token_logprobs"]] == prompt["output_ids"][:8]


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_answers_are_the_same_from_two_workers_and_from_one(stack: Stack, stream: bool) -> None:
    asked = {"max_tokens": 8, "temperature": 0, "stream": stream}
    await both(stack, "/v1/completions", asked | {"prompt": "Water boils at", "logprobs": 4})
    await both(stack, "/v1/chat/completions", asked | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4})


async def test_a_cached_prompt_changes_only_what_usage_says_of_it(stack: Stack, client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "prompt": "Water boils at 100 " * 8, "temperature": 0, "logprobs": 4}
    await forget_prompts(stack)
    fresh = (await client.completions.create(**asked)).model_dump()
    again = (await client.completions.create(**asked)).model_dump()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    again["usage"]["prompt_tokens_details"]["cached_tokens"] = 0
    assert alike(fresh, again) == []


async def both(stack: Stack, route: str, body: dict[str, Any]) -> Any:
    """The answer of the two workers together, once it is found to equal what decode says alone."""
    await forget_prompts(stack)  # or the two would rightly differ in `cached_tokens`
    pair = settled(await post(stack.url + route, body))
    await forget_prompts(stack)  # decode keeps what it was handed
    alone = settled(await post(stack.entries("decode")[0]["url"] + route, body))
    assert alike(pair, alone) == [], route
    return pair


async def forget_prompts(stack: Stack) -> None:
    """Empty the prefix caches."""
    await stack.idle_snapshots()
    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.post(f"{stack.url}/flush_cache")
    assert answer.status_code == 200, answer.text


async def post(url: str, body: dict[str, Any]) -> bytes:
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(url, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream" if body["stream"] else "application/json")
    return answer.content


def settled(raw: bytes) -> Any:
    """A body as JSON. Of a stream, whose cut into events depends on timing: SGLang's last event, or OpenAI's added up."""
    if not raw.startswith(b"data: "):
        return json.loads(raw)
    *events, done = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    if "choices" not in chunks[0]:
        return chunks[-1]
    return {"texts": "".join(map(text_of, chunks)), "logprobs": logprobs_of(chunks), "last": chunks[-1]}


def text_of(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


def logprobs_of(chunks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    added: dict[str, list[Any]] = {}
    for chunk in chunks:
        for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
            added.setdefault(key, []).extend(values or [])
    return added


def alike(one: Any, other: Any, path: str = "$") -> list[str]:
    """Where two JSON values differ: numbers within the tolerance are equal, passing fields are not compared."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return [f"{path}: keys {sorted(one)} and {sorted(other)}"]
        keys = one.keys() - PASSING
        return [place for key in keys for place in alike(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} items"]
        pairs = enumerate(zip(one, other, strict=True))
        return [place for index, (a, b) in pairs for place in alike(a, b, f"{path}[{index}]")]
    if isinstance(one, float) and isinstance(other, float):
        return [] if abs(one - other) <= TOLERANCE else [f"{path}: {one} and {other}"]
    return [] if one == other else [f"{path}: {one!r} and {other!r}"]
