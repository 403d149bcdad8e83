"""One prefill and one decode worker, a registry and a router, on this machine, with the real model."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.stack import Stack, ask_all, cpu_seconds, eventually, gold, greedy

QUESTION = "What is the capital of France? Answer briefly."
PAGES = 512  # 8,192 tokens: enough for the test, quick to allocate


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = ("prefill.chunk_tokens=64", "prefill.kv_tokens=8192", "decode.kv_tokens=8192")
    running = Stack.up(tmp_path_factory.mktemp("1p1d"), "--dtype", "float32", "--transfer", "tcp", settings=settings)
    yield running
    running.down()


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "any", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, **more}


async def test_greedy_answers_equal_transformers_token_for_token_at_concurrency_16(stack: Stack) -> None:
    prompts = [prompt for prompt in gold() if len(prompt["input_ids"]) <= 600]
    assert len(prompts) >= 8
    answers = await ask_all(stack.url, [greedy(prompt) for prompt in prompts], concurrency=16)
    wrong = [p["name"] for p, a in zip(prompts, answers, strict=True) if a["output_ids"] != p["output_ids"]]
    assert wrong == []


async def test_the_kv_cache_crosses_from_process_to_process(stack: Stack) -> None:
    """Prefill computes the prompt, decode only the rest: seen in the tokens that each of them computed."""
    await stack.flush()
    before = await step_tokens(stack)
    prompt = next(prompt for prompt in gold() if len(prompt["input_ids"]) == 300)
    await ask_all(stack.url, [greedy(prompt)], concurrency=1)
    after = await step_tokens(stack)
    assert after["prefill"] - before["prefill"] == 300
    assert after["decode"] - before["decode"] == 31


async def step_tokens(stack: Stack) -> dict[str, float]:
    tokens = {}
    async with httpx.AsyncClient() as client:
        for role in ("prefill", "decode"):
            snapshot = (await client.get(f"{stack.entries(role)[0]['url']}/debug/snapshot")).json()["snapshot"]
            tokens[role] = snapshot["counters"].get("step_tokens_total", 0)
    return tokens


async def test_a_prompt_that_begins_like_an_earlier_one_is_computed_from_there_and_answers_the_same(
    stack: Stack,
) -> None:
    await stack.flush()
    prompt = next(prompt for prompt in gold() if len(prompt["input_ids"]) == 300)
    first, again = await ask_all(stack.url, [greedy(prompt), greedy(prompt)], concurrency=1)
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] == 288, "18 full pages; the last token is always computed"
    assert first["output_ids"] == again["output_ids"] == prompt["output_ids"]


async def test_a_chat_about_france_says_paris(stack: Stack) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{stack.url}/v1/chat/completions", json=chat(max_tokens=24))
    assert answer.status_code == 200
    choice = answer.json()["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


async def test_a_streamed_chat_shows_tokens_as_they_come(stack: Stack) -> None:
    pieces: list[str] = []
    async with httpx.AsyncClient(timeout=60) as client:
        body = chat(max_tokens=24, stream=True)
        async with client.stream("POST", f"{stack.url}/v1/chat/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    pieces.append(delta.get("content") or "")
    assert len([piece for piece in pieces if piece]) >= 5
    assert "Paris" in "".join(pieces)


async def test_the_same_seed_gives_the_same_text_and_another_seed_another(stack: Stack) -> None:
    def body(seed: int) -> dict[str, Any]:
        sampling = {"temperature": 1.0, "top_p": 0.95, "max_new_tokens": 24, "sampling_seed": seed}
        return {"text": "Once upon a time", "sampling_params": sampling}

    same, again, other = await ask_all(stack.url, [body(1), body(1), body(2)], concurrency=1)
    assert same["output_ids"] == again["output_ids"]
    assert same["output_ids"] != other["output_ids"]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"input_ids": [1] * 9_000}, "9000"),
        ({"text": ""}, "empty"),
        ({"text": 5}, "text"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"input_ids": [1, 10**9]}, "49151"),
    ],
)
async def test_a_wrong_request_is_a_400_that_names_what_is_wrong(
    stack: Stack, body: dict[str, Any], names: str
) -> None:
    async with httpx.AsyncClient(timeout=10) as client:
        answer = await client.post(f"{stack.url}/generate", json=body)
    assert answer.status_code == 400, answer.text
    assert names in answer.json()["error"]["message"]


async def test_after_200_mixed_requests_everything_is_back_in_its_place(stack: Stack) -> None:
    """Short and long, streamed and not, greedy and sampled, stopped, rejected and abandoned, 32 at a time."""
    before = await stack.idle_snapshots()
    draw = random.Random(20)
    gate = asyncio.Semaphore(32)
    async with httpx.AsyncClient(timeout=240, limits=httpx.Limits(max_connections=64)) as client:
        statuses = await asyncio.gather(*(mixed(client, stack.url, draw.random(), i, gate) for i in range(200)))
    assert set(statuses) <= {"200", "400", "left"}
    assert statuses.count("200") > 100
    after = await stack.idle_snapshots()
    for was, now in zip(before, after, strict=True):
        assert now["pages_free"] + now["pages_cached"] == now["pages"]
        for gauge in was:
            if gauge.startswith(("rows", "queue_requests", "poll_state", "running", "orphan")):
                assert now[gauge] == was[gauge], gauge
    await stack.flush()
    assert all(gauges["pages_free"] == gauges["pages"] for gauges in await stack.idle_snapshots())
    answer = (await ask_all(stack.url, [greedy(gold()[0])], concurrency=1))[0]
    assert answer["output_ids"] == gold()[0]["output_ids"]


async def mixed(client: httpx.AsyncClient, url: str, chance: float, number: int, gate: asyncio.Semaphore) -> str:
    """One of the 200; returns how it ended."""
    sampling = {"temperature": number % 2, "max_new_tokens": 1 + number % 24, "sampling_seed": number}
    body = {"text": f"{number}: " + "words and more words " * (number % 40), "sampling_params": sampling}
    async with gate:
        if chance < 0.1:
            answer = await client.post(f"{url}/generate", json=body | {"sampling_params": {"top_p": 7}})
            return str(answer.status_code)
        if chance < 0.3:
            try:
                await client.post(f"{url}/generate", json=body, timeout=chance)
            except httpx.TimeoutException:
                return "left"
            return "200"
        if chance < 0.6:
            async with client.stream("POST", f"{url}/generate", json=body | {"stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if chance < 0.4 and line:
                        return "left"
            return str(answer.status_code)
        return str((await client.post(f"{url}/generate", json=body)).status_code)


async def test_a_client_that_leaves_frees_both_workers_within_a_second(stack: Stack) -> None:
    await stack.idle_snapshots()
    body = {"text": "Tell me everything.", "sampling_params": {"max_new_tokens": 2_000, "ignore_eos": True}}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{stack.url}/generate", json=body | {"stream": True}) as answer,
    ):
        async for _ in answer.aiter_lines():
            break

    async def free() -> bool:
        return all(gauges["live_requests"] == 0 for gauges in await stack.snapshots())

    await eventually(free, "both legs are gone", within_s=1.0)


async def test_no_process_burns_cpu_when_idle(stack: Stack) -> None:
    await stack.idle_snapshots()
    pids = [entry["pid"] for entry in stack.state] + [
        rank["pid"] for entry in stack.state for rank in entry.get("ranks", [])
    ]
    before = {pid: cpu_seconds(pid) for pid in pids}
    await asyncio.sleep(3)
    busy = {pid: cpu_seconds(pid) - before[pid] for pid in pids}
    assert max(busy.values()) <= 0.15, busy  # 5 % of a core: heartbeats, probes, snapshots


async def test_state_json_tells_what_runs_where(stack: Stack) -> None:
    assert sorted(entry["role"] for entry in stack.state) == ["bootstrap", "decode", "prefill", "router"]
    for entry in stack.state:
        assert Path(entry["log"]).exists()
        assert entry["env"] == {key: value for key, value in entry["env"].items() if key.startswith("BATON_")}
    prefill = stack.entries("prefill")[0]
    assert prefill["bootstrap_port"] > 0
    assert [rank["rank"] for rank in prefill["ranks"]] == [0]
