"""A request that decode retracts goes back to its prefill worker, for real: again and again, and in vain."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from integration.stack import REQUEST_S, eventually
from integration.test_memory import COUNT, MODEL, prompts, told
from integration.workers import Worker, answer_of, flags_of, stop_all

Pair = tuple[Worker, Worker]


def started(directory: Path, **decode_flags: object) -> Pair:
    """A prefill worker, and a decode worker that keeps no backups."""
    decode = {"backup_pages": 0, "rebootstraps_max": 1_000, "rebootstrap_ms": 60_000, **decode_flags}
    workers = (
        Worker("prefill", directory, "prefill", **flags_of({}, MODEL)),
        Worker("decode", directory, "decode", **flags_of({}, MODEL, **decode)),
    )
    for worker in workers:
        worker.wait()
    return workers


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    workers = started(tmp_path)
    yield workers
    stop_all(workers)


def standing(decode: Worker, queue: str) -> float:
    """Requests in this phase."""
    return told(decode, "gauges")[f"queue_requests{{queue={queue}}}"]


async def post(worker: Worker, path: str, **body: object) -> None:
    """An operator says something to a worker."""
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        answer = await client.post(f"{worker.url}{path}", json=body)
        assert answer.status_code == 200, answer.text


async def retracted(decode: Worker, asked: "asyncio.Task[object]") -> bool:
    """Make the one request give its pages up, as soon as it runs; False if it has ended."""

    async def stands(queue: str) -> bool:
        return asked.done() or standing(decode, queue) == 1

    await eventually(lambda: stands("running"), "it runs, or is over")
    await post(decode, "/pause_generation", mode="retract")
    await eventually(lambda: stands("retracted"), "it has given its pages up, or is over")
    return not asked.done()


@pytest.mark.parametrize(
    "sampled",
    [
        pytest.param({"temperature": 0}, id="greedy"),
        pytest.param({"temperature": 1.0, "top_p": 0.95, "sampling_seed": 11}, id="sampled", marks=pytest.mark.slow),
    ],
)
async def test_an_answer_that_is_retracted_all_the_time_is_the_uninterrupted_one(
    pair: Pair, sampled: dict[str, object]
) -> None:
    prefill, decode = pair
    prompt, wanted = prompts()[0]
    sampling = {"max_new_tokens": COUNT, "ignore_eos": True, **sampled}
    if sampled["temperature"]:
        _, quiet = await answer_of(prefill, decode, prompt, COUNT, sampling_params=sampling)
        wanted = quiet.json()["output_ids"]
        assert wanted != prompts()[0][1], "it is sampled"
    asked = asyncio.create_task(answer_of(prefill, decode, prompt, COUNT, sampling_params=sampling))
    while await retracted(decode, asked):
        await post(decode, "/continue_generation")
    await post(decode, "/continue_generation")
    first, second = await asked
    assert (first.status_code, second.status_code) == (200, 200), second.text
    assert second.json()["output_ids"] == wanted
    counters = told(decode, "counters")
    assert counters["rebootstraps_total{outcome=done}"] >= 3
    assert counters["rebootstraps_total{outcome=fallback}"] == 0
    for worker in pair:
        gauges = told(worker, "gauges")
        assert gauges["pages_free"] + gauges["pages_cached"] == gauges["pages"]
        assert gauges["live_requests"] == 0


@pytest.mark.parametrize("what", ["killed", pytest.param("drained", marks=pytest.mark.slow), "paused"])
async def test_where_prefill_does_not_help_decode_goes_on_alone_with_the_same_text(tmp_path: Path, what: str) -> None:
    prefill, decode = started(tmp_path, rebootstrap_ms=1_000)
    try:
        prompt, wanted = prompts()[0]
        asked = asyncio.create_task(answer_of(prefill, decode, prompt, COUNT))
        assert await retracted(decode, asked)
        if what == "drained":
            await post(prefill, "/drain")
        else:
            await post(prefill, "/pause_generation", mode="in_place")
        await post(decode, "/continue_generation")
        if what == "killed":

            async def away() -> bool:
                return standing(decode, "transferring") == 1

            await eventually(away, "prefill has it")
            for pid in (prefill.process.pid, *prefill.rank_pids()):
                os.kill(pid, signal.SIGKILL)
        _, second = await asked
        assert second.status_code == 200, second.text
        assert second.json()["output_ids"] == wanted
        counters, gauges = told(decode, "counters"), told(decode, "gauges")
        assert counters["rebootstraps_total{outcome=fallback}"] == 1
        assert counters["rebootstraps_total{outcome=done}"] == 0

        async def empty() -> bool:
            gauges = told(decode, "gauges")
            return gauges["pages_spare"] == gauges["pages"] and gauges["live_requests"] == 0

        await eventually(empty, f"all pages are free: {gauges}")
    finally:
        stop_all((prefill, decode))
