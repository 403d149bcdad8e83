"""Real processes die, one at a time: who was touched hears it within a second, nobody else notices, and it heals."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from integration.stack import START_S, Stack, ask_all, eventually, gold, greedy

SETTINGS = ("prefill.kv_tokens=32768", "decode.kv_tokens=32768", "prefill.chunk_tokens=128")
LONG = 3_000


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack.up(tmp_path_factory.mktemp("deaths"), "--dtype", "float32", settings=SETTINGS)
    yield running
    running.down()


@dataclass
class Stream:
    """A streamed answer as its client sees it."""

    tokens_at: list[float] = field(default_factory=list)
    error: dict[str, Any] | None = None
    ended: bool = False

    def longest_gap_s(self, since: float) -> float:
        """Longest time without a token since `since`."""
        moments = [since, *(at for at in self.tokens_at if at > since)]
        return max(later - earlier for earlier, later in itertools.pairwise(moments))


async def follow(client: httpx.AsyncClient, url: str, stream: Stream, tokens: int) -> None:
    body = {"text": "Once upon a time", "stream": True}
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    async with client.stream("POST", f"{url}/generate", json=body | {"sampling_params": sampling}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                stream.error = event.get("error")
                stream.tokens_at.append(time.monotonic())
    stream.ended = True


@asynccontextmanager
async def streams(stack: Stack, count: int, tokens: int) -> AsyncIterator[list[Stream]]:
    """Streams that have begun when the block is entered."""
    followed = [Stream() for _ in range(count)]
    async with httpx.AsyncClient(timeout=120) as client:
        tasks = [asyncio.create_task(follow(client, stack.url, one, tokens)) for one in followed]

        async def begun() -> bool:
            for task in tasks:
                assert not task.done(), "a stream ended before it was to"
            return all(len(one.tokens_at) >= 2 for one in followed)

        await eventually(begun, "all streams have begun", within_s=60)
        yield followed
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, httpx.HTTPError):
                await task


async def under_way(client: httpx.AsyncClient, stack: Stack, number: int) -> tuple[int, float]:
    """A long prompt; its status and when it was answered."""
    ids = [(number * 31 + position * 7) % 40_000 + 100 for position in range(LONG)]
    answer = await client.post(
        f"{stack.url}/generate", json={"input_ids": ids, "sampling_params": {"max_new_tokens": 4}}
    )
    return answer.status_code, time.monotonic()


def restart(stack: Stack, role: str) -> None:
    argv = [sys.executable, "-m", "baton_cli", "restart", "--state", str(stack.directory), role, "0", "--kill"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stack.refresh()


async def usable(stack: Stack) -> None:
    """Wait until the router has a usable pair."""

    async def ready() -> bool:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{stack.url}/ready")).status_code == 200

    await eventually(ready, "the router has a usable pair", within_s=30)


async def works(stack: Stack) -> None:
    """The greedy answer is what it always was, and nothing is left behind."""
    await usable(stack)
    answer = (await ask_all(stack.url, [greedy(gold()[0])], concurrency=1))[0]
    assert answer["output_ids"] == gold()[0]["output_ids"]
    for gauges in await stack.idle_snapshots():
        assert gauges["pages_free"] + gauges["pages_cached"] == gauges["pages"]
        assert gauges["quarantined_pages"] == 0


@pytest.mark.parametrize("victim", ["app", "rank"])
async def test_killing_prefill_fails_what_it_was_computing_within_a_second_and_nothing_else(
    stack: Stack, victim: str
) -> None:
    prefill = stack.entries("prefill")[0]
    pid = prefill["pid"] if victim == "app" else prefill["ranks"][0]["pid"]
    async with streams(stack, 2, tokens=400) as others, httpx.AsyncClient(timeout=120) as client:
        prompts = [asyncio.create_task(under_way(client, stack, number)) for number in range(8)]
        await asyncio.sleep(1.0)  # let them get under way: some computing, some queued
        assert not any(task.done() for task in prompts)
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        answers = await asyncio.gather(*prompts)
        await asyncio.sleep(1.5)
        assert all(status >= 500 for status, _ in answers), answers
        assert max(at - killed_at for _, at in answers) < 1.0, [at - killed_at for _, at in answers]
        assert all(one.error is None for one in others)
        assert max(one.longest_gap_s(killed_at) for one in others) < 1.0
    restart(stack, "prefill")
    await works(stack)


async def test_killing_decode_ends_begun_streams_with_an_error_event_and_the_rest_with_a_5xx(stack: Stack) -> None:
    async with streams(stack, 2, tokens=2_000) as begun, httpx.AsyncClient(timeout=120) as client:
        prompts = [asyncio.create_task(under_way(client, stack, number)) for number in range(4)]
        await asyncio.sleep(1.0)
        os.kill(stack.entries("decode")[0]["pid"], signal.SIGKILL)
        killed_at = time.monotonic()
        answers = await asyncio.gather(*prompts)
        assert all(status >= 500 for status, _ in answers), answers
        assert max(at - killed_at for _, at in answers) < 1.0

        async def over() -> bool:
            return all(one.ended for one in begun)

        await eventually(over, "the begun streams end", within_s=1.0)
        assert all(one.error is not None and one.error["message"] for one in begun)
    restart(stack, "decode")
    await works(stack)


async def test_killing_the_registry_fails_nothing_under_way_and_new_pairs_name_it(stack: Stack) -> None:
    await works(stack)
    registry = stack.entries("bootstrap")[0]
    async with streams(stack, 1, tokens=200) as others:
        os.kill(registry["pid"], signal.SIGKILL)
        killed_at = time.monotonic()
        answer = (await ask_all(stack.url, [greedy(gold()[1])], concurrency=1))[0]
        assert answer["output_ids"] == gold()[1]["output_ids"], "a pair that knows each other goes on"
        assert others[0].error is None
        assert others[0].longest_gap_s(killed_at) < 1.0
    restart(stack, "decode")  # a new pair must ask the registry
    await usable(stack)
    async with httpx.AsyncClient(timeout=30) as client:
        asked_at = time.monotonic()
        answer = await client.post(f"{stack.url}/generate", json=greedy(gold()[1]))
        assert answer.status_code == 503, answer.text
        assert registry["url"].removeprefix("http://") in answer.json()["error"]["message"]
        assert time.monotonic() - asked_at < 2.5
    restart(stack, "bootstrap")
    restarted_at = time.monotonic()
    await works(stack)
    assert time.monotonic() - restarted_at < 5.0 + 5.0  # five seconds, and the time of the answer itself
