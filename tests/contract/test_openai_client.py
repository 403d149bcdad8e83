"""The official `openai` client against a worker's real app over a scripted scheduler."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from contract.worker_apps import Running, Start, model_tokenizer

TEXT = "Grüße 🎉 to you"
CHAT: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}


@pytest.fixture(scope="module")
def start() -> Start:
    return Start(model_tokenizer())


@asynccontextmanager
async def client_of(running: Running, **headers: str) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://127.0.0.1:{running.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=10, default_headers=headers) as client:
        yield client


async def test_completions_whole_and_streamed_are_what_the_client_expects(start: Start) -> None:
    async with start() as running, client_of(running) as client:
        whole = await client.completions.create(model="any", prompt=TEXT, max_tokens=64, logprobs=2)
        stream = await client.completions.create(
            model="any", prompt=TEXT, max_tokens=64, logprobs=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason) == (TEXT, "length")
    assert choice.logprobs is not None and choice.logprobs.tokens is not None and whole.usage is not None
    assert len(choice.logprobs.tokens) == whole.usage.completion_tokens
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TEXT
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert {chunk.model for chunk in chunks} == {whole.model} == {"any"}


async def test_chats_whole_and_streamed_are_what_the_client_expects(start: Start) -> None:
    special = {"extra_body": {"skip_special_tokens": False}}
    async with start() as running, client_of(running) as client:
        whole = await client.chat.completions.create(**CHAT, **special, logprobs=True, top_logprobs=3)
        stream = await client.chat.completions.create(**CHAT, **special, logprobs=True, top_logprobs=3, stream=True)
        chunks = [chunk async for chunk in stream]
    (choice,) = whole.choices
    assert choice.message.role == chunks[0].choices[0].delta.role == "assistant"
    assert (choice.finish_reason, chunks[-1].choices[0].finish_reason) == ("length", "length")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert choice.logprobs is not None and choice.logprobs.content is not None
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    assert [one for some in streamed if some for one in some.content or []] == choice.logprobs.content
    assert [len(one.top_logprobs) for one in choice.logprobs.content] == [3] * 6


async def test_models_are_listed(start: Start) -> None:
    async with start() as running, client_of(running) as client:
        models = [model async for model in client.models.list()]
    assert [(model.id, model.object) for model in models] == [("smollm2-135m-instruct", "model")]


async def test_failures_raise_the_clients_own_errors(start: Start) -> None:
    async with start() as running:
        async with client_of(running) as client:
            with pytest.raises(openai.BadRequestError, match="best_of is not supported yet") as refused:
                await client.completions.create(model="any", prompt="Hi", best_of=3)
        async with client_of(running, **{"x-request-id": "fail-1"}) as client:
            with pytest.raises(openai.InternalServerError, match="no such worker"):
                await client.completions.create(model="any", prompt="Hi")
    assert refused.value.status_code == 400
    assert refused.value.type == "invalid_request_error"


async def test_a_stream_that_fails_raises_and_does_not_end_well(start: Start) -> None:
    async with start() as running, client_of(running, **{"x-request-id": "break-1"}) as client:
        stream = await client.completions.create(model="any", prompt=TEXT, stream=True)
        await anext(aiter(stream))
        await running.worker.fresh_snapshot(2_000)  # what the scheduler waits for to fail
        with pytest.raises(openai.APIError, match="the peer went away"):
            [chunk async for chunk in stream]
