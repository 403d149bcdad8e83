"""Five hundred requests of every kind, with clients that leave at any moment: afterwards everything is in its place."""

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.pairs import LASTING
from integration.stack import Stack, ask_all, eventually, gold, greedy

REQUESTS = 500
CONCURRENCY = 32


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = ("prefill.chunk_tokens=64", "prefill.kv_tokens=8192", "decode.kv_tokens=8192")
    running = Stack.up(tmp_path_factory.mktemp("leaks"), "--dtype", "float32", "--transfer", "shm", settings=settings)
    yield running
    running.down()


def shared_mappings(pid: int) -> list[str]:
    """Names of the memory files that a process maps: its own pool and rows, and those of peers."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sorted(line.split(maxsplit=5)[5] for line in lines if "memfd:baton" in line)


def ranks(stack: Stack) -> list[int]:
    return [rank["pid"] for entry in stack.state for rank in entry.get("ranks", [])]


async def one(client: httpx.AsyncClient, url: str, number: int, draw: random.Random) -> str:
    """One request, of a kind that `draw` picks; how it ended."""
    kind, patience_s = draw.random(), draw.random() * 2
    sampling: dict[str, Any] = {"max_new_tokens": draw.randint(1, 24), "temperature": draw.choice([0, 1])}
    body: dict[str, Any] = {"text": "word " * draw.randint(1, 300) + str(number), "sampling_params": sampling}
    if kind < 0.05:
        body["sampling_params"] = {"top_p": 7}
    elif kind < 0.10:
        body = {"input_ids": [5] * 9_000}
    elif kind < 0.50:
        body["stream"] = True
    leaves = kind >= 0.30 and draw.random() < 0.5
    try:
        async with asyncio.timeout(patience_s if leaves else 120):
            async with client.stream("POST", f"{url}/generate", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    pass
            return str(answer.status_code)
    except TimeoutError:
        return "left"


async def test_after_500_mixed_requests_with_random_disconnects_everything_is_in_its_place(stack: Stack) -> None:
    await ask_all(stack.url, [greedy(gold()[0])], concurrency=1)
    await stack.flush()
    before = await stack.idle_snapshots()
    mappings = {pid: shared_mappings(pid) for pid in ranks(stack)}
    descriptors = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in ranks(stack)}
    draw = random.Random(500)
    gate = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(timeout=240, limits=httpx.Limits(max_connections=CONCURRENCY)) as client:

        async def gated(number: int) -> str:
            async with gate:
                return await one(client, stack.url, number, draw)

        endings = await asyncio.gather(*(gated(number) for number in range(REQUESTS)))
    counts = {ending: endings.count(ending) for ending in sorted(set(endings))}
    assert set(counts) == {"200", "400", "left"}, counts
    assert min(counts.values()) >= 20, counts

    after = await stack.idle_snapshots()
    assert all(now["pages_free"] + now["pages_cached"] == now["pages"] for now in after)
    await stack.flush()
    after = await stack.idle_snapshots()
    for was, now in zip(before, after, strict=True):
        moved = {gauge: (was[gauge], now[gauge]) for gauge in was if gauge not in LASTING and was[gauge] != now[gauge]}
        assert moved == {}
    assert {pid: shared_mappings(pid) for pid in ranks(stack)} == mappings

    async def as_many_descriptors() -> bool:
        return all(len(os.listdir(f"/proc/{pid}/fd")) <= count for pid, count in descriptors.items())

    await eventually(as_many_descriptors, "no descriptor is left behind")
    answer = (await ask_all(stack.url, [greedy(gold()[0])], concurrency=1))[0]
    assert answer["output_ids"] == gold()[0]["output_ids"]


async def test_a_cache_hit_over_shm_answers_as_transformers_does(stack: Stack) -> None:
    prompts = [prompt for prompt in gold() if len(prompt["input_ids"]) >= 100]
    for cached in (False, True):
        answers = await ask_all(stack.url, [greedy(prompt) for prompt in prompts], concurrency=4)
        assert [answer["output_ids"] for answer in answers] == [prompt["output_ids"] for prompt in prompts]
        if cached:
            assert all(answer["meta_info"]["cached_tokens"] >= 96 for answer in answers)


WRONG = {
    "a prompt that is too long": {"input_ids": [5] * 9_000},
    "far too long a text": {"text": "x" * 1_000_000},
    "a text of the wrong type": {"text": 5},
    "an unknown sampling key": {"text": "a", "sampling_params": {"temprature": 1}},
    "an empty text": {"text": ""},
    "an empty list": {"input_ids": []},
    "an id outside the vocabulary": {"input_ids": [1, 10**9]},
    "a negative id": {"input_ids": [-1]},
}


@pytest.mark.parametrize("what", list(WRONG))
async def test_what_can_be_refused_is_refused_at_once_at_every_door(stack: Stack, what: str) -> None:
    """The bound of the requirements for an idle machine, here on the median of ten: a test machine is rarely idle."""
    doors = [stack.url, *stack.worker_urls()]
    async with httpx.AsyncClient(timeout=10) as client:
        for number, door in enumerate(doors):
            took_ms = []
            for attempt in range(10):
                room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1_000, "bootstrap_room": 1 + attempt}
                body = WRONG[what] | (room if number else {})
                began = time.perf_counter()
                answer = await client.post(f"{door}/generate", json=body)
                took_ms.append((time.perf_counter() - began) * 1_000)
                assert 400 <= answer.status_code < 500, answer.text
                assert answer.json()["error"]["message"]
            assert sorted(took_ms)[5] < 50, f"{door}: {took_ms}"
    assert (await ask_all(stack.url, [greedy(gold()[0])], 1))[0]["output_ids"] == gold()[0]["output_ids"]
