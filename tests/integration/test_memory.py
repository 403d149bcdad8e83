"""A decode pool for two of eight long requests: the answers are what they would have been with room for all of them.

Decode bets on short answers, is wrong each time, and must retract; the KV cache waits on the host, or is computed anew: by
prefill, as a new attempt, or by decode itself.
"""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.stack import REQUEST_S, eventually, gold
from integration.workers import Worker, answer_of, flags_of, stop_all, streamed

MODEL = "smollm2-135m-instruct"
BETS = {"answer_share_start_percent": 1, "answer_share_floor_percent": 1}
POOL = {"page_tokens": 4, "kv_tokens": 192}
"""Two of the longest requests, of 64 + 32 tokens."""
COUNT = 32
LAYOUTS: dict[str, dict[str, object]] = {"TP1": {}, "TP3": {"tp": 3}, "PP2": {"pp": 2}}


def prompts() -> list[tuple[list[int], list[int]]]:
    """Eight of 17 to 64 tokens, with the answers of Transformers."""
    fitting = [one for one in gold() if 17 <= len(one["input_ids"]) <= 64 and len(one["output_ids"]) == COUNT]
    assert len(fitting) >= 8
    return [(one["input_ids"], one["output_ids"]) for one in fitting[:8]]


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker("prefill", tmp_path_factory.mktemp("prefill"), "prefill", **flags_of({}, MODEL))
    worker.wait()
    yield worker
    worker.stop()


WAYS: dict[str, dict[str, int]] = {
    "backup": {},
    "rebootstrap": {"backup_pages": 0, "rebootstraps_max": 100, "rebootstrap_ms": 60_000},
    "recompute": {"backup_pages": 0, "rebootstraps_max": 0},
}
QUICK = (("TP1", "backup"), ("TP1", "rebootstrap"), ("TP3", "backup"), ("TP3", "rebootstrap"))


@pytest.fixture(
    params=[
        pytest.param((layout, way), marks=() if (layout, way) in QUICK else pytest.mark.slow, id=f"{layout}-{way}")
        for layout in LAYOUTS
        for way in WAYS
    ]
)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    layout, name = request.param
    return layout, name


@pytest.fixture
def decode(way: tuple[str, str], tmp_path: Path) -> Iterator[Worker]:
    flags = flags_of(LAYOUTS[way[0]], MODEL, **POOL, **BETS, **WAYS[way[1]])
    worker = Worker("decode", tmp_path, "decode", **flags)
    worker.wait()
    yield worker
    stop_all([worker])


def told(worker: Worker, kind: str) -> dict[str, float]:
    """The gauges, or the counters, of the worker's leading rank."""
    answer = httpx.get(f"{worker.url}/debug/snapshot", timeout=REQUEST_S).json()
    found: dict[str, float] = answer["ranks"][0][kind]
    return found


async def alone(worker: Worker, input_ids: Sequence[int], **more: Any) -> httpx.Response:
    """Decode computes this prompt itself."""
    sampling = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True, **more}
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        body = {"input_ids": list(input_ids), "sampling_params": sampling}
        return await client.post(f"{worker.url}/generate", json=body)


async def test_retracted_answers_are_the_uninterrupted_ones(
    prefill: Worker, decode: Worker, way: tuple[str, str]
) -> None:
    before = told(prefill, "counters")["rebootstraps_total"]
    both, lone = prompts(), prompts()[::3]
    legs = [answer_of(prefill, decode, prompt, COUNT) for prompt, _ in both]
    answers, alones = await asyncio.gather(
        asyncio.gather(*legs), asyncio.gather(*(alone(decode, prompt) for prompt, _ in lone))
    )
    seconds = [second for _, second in answers]
    for (_, wanted), answer in zip([*both, *lone], [*seconds, *alones], strict=True):
        assert answer.status_code == 200, f"{answer.text}\n{decode.text()}"
        assert answer.json()["output_ids"] == wanted
    gauges, counters = told(decode, "gauges"), told(decode, "counters")
    backups = counters["retractions_total{way=backup}"]
    assert backups + counters["retractions_total{way=recompute}"] >= 2
    assert (backups > 0) == (gauges["backup_pages"] > 0) == (way[1] == "backup")
    again = counters["rebootstraps_total{outcome=done}"]
    assert (again > 0) == (way[1] == "rebootstrap")
    assert told(prefill, "counters")["rebootstraps_total"] - before >= again
    assert counters["rebootstraps_total{outcome=fallback}"] == 0
    assert gauges["pages_free"] + gauges["pages_cached"] == gauges["pages"]
    assert gauges["backup_pages_free"] == gauges["backup_pages"]


async def test_a_paused_answer_is_retracted_and_goes_on_where_it_was(decode: Worker) -> None:
    (prompt, wanted), *_ = prompts()
    asked = asyncio.create_task(alone(decode, prompt))

    async def stands(queue: str) -> bool:
        return told(decode, "gauges")[f"queue_requests{{queue={queue}}}"] == 1

    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        await eventually(lambda: stands("running"), "it runs")
        paused = await client.post(f"{decode.url}/pause_generation", json={"mode": "retract"})
        assert paused.status_code == 200, paused.text
        assert await stands("retracted")
        assert told(decode, "gauges")["pages_free"] == told(decode, "gauges")["pages"]
        assert (await client.get(f"{decode.url}/health")).status_code == 200
        assert not asked.done()
        assert (await client.post(f"{decode.url}/continue_generation")).status_code == 200
    assert (await asked).json()["output_ids"] == wanted


async def test_an_answer_that_is_taken_back_every_few_tokens_skips_none(prefill: Worker, decode: Worker) -> None:
    """F04 (scale: 32 tokens instead of 300, after every 1, 3 and 8 of them)."""
    for every in (1, 3, 8):
        prompt, wanted = prompts()[every % 8]
        before, seen = taken_back(decode), 0
        async with httpx.AsyncClient(timeout=REQUEST_S) as client, streamed(prefill, decode, prompt, COUNT) as answers:
            async for answer in answers:
                if len(answer) // every > seen and len(answer) < COUNT:
                    seen = len(answer) // every
                    paused = await client.post(f"{decode.url}/pause_generation", json={"mode": "retract"})
                    assert paused.status_code == 200, paused.text
                    assert (await client.post(f"{decode.url}/continue_generation")).status_code == 200
        assert answer == wanted, every
        assert taken_back(decode) > before


def taken_back(worker: Worker) -> float:
    """How often the worker took the KV cache of a request back."""
    return sum(count for name, count in told(worker, "counters").items() if name.startswith("retractions_total"))


@pytest.mark.slow
async def test_sampled_answers_are_the_same_with_and_without_company(decode: Worker) -> None:
    chosen = [prompt for prompt, _ in prompts()]
    sampled = {"temperature": 1.0, "top_p": 0.9}
    quiet = [(await alone(decode, one, **sampled, sampling_seed=seed)).json() for seed, one in enumerate(chosen)]
    together = await asyncio.gather(
        *(alone(decode, one, **sampled, sampling_seed=seed) for seed, one in enumerate(chosen))
    )
    assert [one.json()["output_ids"] for one in together] == [one["output_ids"] for one in quiet]
    assert sum(told(decode, "counters")[f"retractions_total{{way={way}}}"] for way in ("backup", "recompute")) >= 1
