"""A conversation of twenty turns: each hands over only the pages that decode does not hold, and no answer is another one.

The answers to compare with are those of a decode worker that keeps no cache and computes everything itself.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.stack import REQUEST_S, eventually, gold
from integration.test_memory import told
from integration.workers import Worker, answer_of, flags_of, stop_all

MODEL = "smollm2-135m-instruct"
TURNS, NEW_TOKENS, COUNT = 20, 9, 8
PAGE_TOKENS = 4
FIRST_WORDS = 1
"""Of the gold prompts, the one that the conversation begins with: every answer of it has the margin."""
MARGIN = 5e-3
"""Between the two likeliest tokens at every position, or rounding might decide; see "Numerics"."""


@dataclass(frozen=True)
class Turn:
    """What is asked, everything before it included, and what the model answers."""

    prompt: list[int]
    answer: list[int]


async def alone(worker: Worker, prompt: list[int], **more: Any) -> dict[str, Any]:
    """What decode answers that computes this prompt itself."""
    sampling = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        body = {"input_ids": prompt, "sampling_params": sampling, **more}
        answer = await client.post(f"{worker.url}/generate", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def talk(oracle: Worker) -> list[Turn]:
    """The conversation, with margins."""
    turns: list[Turn] = []
    history: list[int] = []
    words = [one["input_ids"] for one in gold() if len(one["input_ids"]) >= NEW_TOKENS]
    for number in range(TURNS):
        prompt = history + words[(number + FIRST_WORDS) % len(words)][:NEW_TOKENS]
        found = await alone(oracle, prompt, return_logprob=True, top_logprobs_num=2)
        tops = [[one[0] for one in top] for top in found["meta_info"]["output_top_logprobs"]]
        assert min(first - second for first, second in tops) >= MARGIN, f"turn {number}: {tops}"
        turns.append(Turn(prompt, found["output_ids"]))
        history = prompt + found["output_ids"]
    return turns


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    flags = flags_of({}, MODEL, page_tokens=PAGE_TOKENS, no_prefix_cache=True)
    oracle = Worker("decode", tmp_path_factory.mktemp("oracle"), "oracle", **flags)
    try:
        oracle.wait()
        found = asyncio.run(talk(oracle))
        assert told(oracle, "gauges")["pages_cached"] == 0
    finally:
        oracle.stop()
    return found


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Worker, Worker]]:
    flags = flags_of({}, MODEL, page_tokens=PAGE_TOKENS, transfer=request.param)
    workers = [Worker(role, tmp_path, role, **flags) for role in ("prefill", "decode")]
    for worker in workers:
        worker.wait()
    yield workers[0], workers[1]
    stop_all(workers)


def received_bytes(decode: Worker) -> float:
    """Bytes of KV pages that this worker was sent so far."""
    counters = told(decode, "counters")
    return sum(count for name, count in counters.items() if name.startswith("transfer_bytes_total"))


def pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


async def test_a_turn_hands_over_the_pages_of_its_new_tokens_and_no_other(
    turns: list[Turn], pair: tuple[Worker, Worker]
) -> None:
    prefill, decode = pair
    held = page_bytes = 0
    for number, turn in enumerate(turns):
        before = received_bytes(decode)
        _, second = await answer_of(prefill, decode, turn.prompt, COUNT)
        assert second.status_code == 200, f"{second.text}\n{decode.text()}"
        assert second.json()["output_ids"] == turn.answer, f"turn {number}"
        assert second.json()["meta_info"]["cached_tokens"] < len(turn.prompt)
        moved = received_bytes(decode) - before
        page_bytes = page_bytes or moved / pages(len(turn.prompt))
        assert moved == (pages(len(turn.prompt)) - held) * page_bytes, f"turn {number}"
        # Of the last token that was drawn the KV is not known; so of what is new to decode, that is the first.
        new_tokens = len(turn.prompt) - held * PAGE_TOKENS
        assert moved <= pages(new_tokens) * page_bytes and (number == 0 or new_tokens <= NEW_TOKENS + PAGE_TOKENS)
        held = (len(turn.prompt) + COUNT - 1) // PAGE_TOKENS
    counters = told(decode, "counters")
    asked = sum(len(turn.prompt) for turn in turns)
    assert counters["prefix_asked_tokens_total"] == asked
    assert counters["prefix_hit_tokens_total"] > 0.8 * asked

    again = await alone(decode, turns[-1].prompt)
    assert again["output_ids"] == turns[-1].answer
    assert again["meta_info"]["cached_tokens"] == (len(turns[-1].prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
    await flushed(decode)


async def flushed(decode: Worker) -> None:
    """Every page is free or cached; after a flush every page is free."""

    async def quiet() -> bool:
        return bool(told(decode, "gauges")["live_requests"] == 0)

    await eventually(quiet, "nothing is live")
    gauges = told(decode, "gauges")
    assert gauges["pages_cached"] > 0
    assert gauges["pages_free"] + gauges["pages_cached"] == gauges["pages"]
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        assert (await client.post(f"{decode.url}/flush_cache")).status_code == 200

    async def empty() -> bool:
        gauges = told(decode, "gauges")
        return bool(gauges["pages_free"] == gauges["pages"])

    await eventually(empty, "every page is free")
