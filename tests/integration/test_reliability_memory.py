"""What users of other systems reported of memory that runs out (theme F), tried on small pools: see docs/reliability.md."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from integration.pairs import ROOMS, Exam
from integration.stack import REQUEST_S, eventually
from integration.workers import Worker, answer_of, flags_of, stop_all
from tiny_folders import VOCAB, save_folder, sure_prompts
from tiny_models import oracle

BETS = {"answer_share_start_percent": 1, "answer_share_floor_percent": 1, "page_tokens": 4}
LENGTHS, COUNT = (17, 19, 22, 24), 30
CHUNK = 64
AROUND_CHUNK = (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 450)
LONGEST_WAIT_S = 60.0
HERE = {"routed_dp_rank": 0}
"""Prefill has one unit, whatever decode has."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    tiny = oracle("llama", vocab_size=VOCAB, num_attention_heads=8, num_key_value_heads=4)
    return tiny, save_folder(tmp_path_factory.mktemp("models") / "tiny", tiny)


@pytest.fixture(scope="module")
def exam(model: tuple[Any, Path]) -> Exam:
    return Exam(model[1], sure_prompts(model[0], LENGTHS, COUNT))


@pytest.fixture(scope="module")
def prefill(exam: Exam, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker("prefill", tmp_path_factory.mktemp("prefill"), "prefill", **flags_of({}, exam.folder))
    worker.wait()
    yield worker
    worker.stop()


@asynccontextmanager
async def decoding(directory: Path, exam: Exam, name: str = "decode", **flags: object) -> AsyncIterator[Worker]:
    """A decode worker with these flags."""
    worker = Worker("decode", directory, name, **flags_of({}, exam.folder, **(BETS | flags)))
    try:
        await asyncio.to_thread(worker.wait)
        yield worker
    finally:
        await asyncio.to_thread(stop_all, [worker])


async def asked(prefill: Worker, decode: Worker, prompt: list[int], count: int, **more: Any) -> list[int]:
    """The answer's tokens, of both legs of a fresh room."""
    first, second = await answer_of(prefill, decode, prompt, count, bootstrap_room=next(ROOMS), **more)
    assert (first.status_code, second.status_code) == (200, 200), f"{first.text} {second.text}\n{decode.text()}"
    tokens: list[int] = second.json()["output_ids"]
    return tokens


def retractions(decode: Worker, unit: int = 0) -> float:
    """How often this worker took pages back."""
    ranks = httpx.get(f"{decode.url}/debug/snapshot", timeout=REQUEST_S).json()["ranks"]
    counters = ranks[unit]["counters"]
    return float(sum(value for name, value in counters.items() if name.startswith("retractions_total")))


@pytest.mark.parametrize("backup_pages", [512, 0])
async def test_sixty_four_long_answers_in_a_pool_for_their_prompts_all_end_well(
    exam: Exam, prefill: Worker, tmp_path: Path, backup_pages: int
) -> None:
    """F01, F11: decode's pool is 1.3 times the prompts; nobody is left in a queue, and every text is the right one."""
    pool = sum(len(prompt) for prompt, _ in exam.prompts) * 64 // len(exam.prompts) * 13 // 10
    async with decoding(tmp_path, exam, kv_tokens=pool, backup_pages=backup_pages, chunk_tokens=CHUNK) as decode:
        wanted = [exam.prompts[number % len(exam.prompts)] for number in range(64)]
        async with asyncio.timeout(LONGEST_WAIT_S):
            answers = await asyncio.gather(*(asked(prefill, decode, prompt, COUNT) for prompt, _ in wanted))
        assert answers == [answer for _, answer in wanted]
        assert retractions(decode) > 0


async def test_a_full_pool_of_one_unit_stalls_nobody_on_another(exam: Exam, prefill: Worker, tmp_path: Path) -> None:
    """F02: two requests of 60 % of a pool each meet on unit 0; the streams of unit 1 go on."""
    (prompt, wanted), *_ = exam.prompts
    pool = (len(prompt) + COUNT) * 10 // 6
    async with decoding(tmp_path, exam, dp=2, kv_tokens=pool, backup_pages=0) as decode:
        crowd = [
            asyncio.create_task(asked(prefill, decode, one, COUNT, routed_dp_rank=0, prefill_more=HERE))
            for one in [prompt] * 6
        ]
        gaps: list[float] = []
        while not all(task.done() for task in crowd):
            began_s = time.monotonic()
            assert await asked(prefill, decode, prompt, COUNT, routed_dp_rank=1, prefill_more=HERE) == wanted
            gaps.append(time.monotonic() - began_s)
        assert [await task for task in crowd] == [wanted] * 6
        assert retractions(decode, 0) > 0
        assert retractions(decode, 1) == 0
        assert max(gaps) < 5.0


async def test_a_pool_that_holds_one_prompt_serves_two_in_turn_and_refuses_what_never_fits(
    exam: Exam, prefill: Worker, tmp_path: Path
) -> None:
    """F05: pages for a whole prompt are reserved at once or not at all, so that no two halves wait for each other."""
    long, wanted = exam.prompts[-1]
    async with decoding(tmp_path, exam, kv_tokens=len(long) + COUNT + 4) as decode:
        async with asyncio.timeout(LONGEST_WAIT_S):
            assert await asyncio.gather(*(asked(prefill, decode, long, COUNT) for _ in range(8))) == [wanted] * 8
        async with asyncio.timeout(2):
            legs = await answer_of(prefill, decode, long * 4, COUNT, bootstrap_room=next(ROOMS))
        assert [leg.status_code for leg in legs] == [400, 400], [leg.text for leg in legs]
        for number in range(20):
            prompt, answer = exam.prompts[number % len(exam.prompts)]
            assert await asked(prefill, decode, prompt, 4) == answer[:4]


async def test_a_decode_worker_without_room_holds_up_nobody_elses_prompts(
    exam: Exam, prefill: Worker, tmp_path: Path
) -> None:
    """F07: one decode worker stands still with a full pool and a queue; prompts for another are computed as ever."""
    prompt, wanted = exam.prompts[0]
    async with (
        decoding(tmp_path, exam, "full", kv_tokens=96) as full,
        decoding(tmp_path, exam, "free") as free,
        httpx.AsyncClient(timeout=REQUEST_S) as client,
    ):
        assert (await client.post(f"{full.url}/pause_generation", json={"mode": "in_place"})).status_code == 200
        stuck = [asyncio.create_task(asked(prefill, full, prompt, COUNT)) for _ in range(12)]

        async def is_full() -> bool:
            gauges = full.snapshots()[0]
            return gauges["queue_requests{queue=prealloc}"] >= 8

        await eventually(is_full, "its queue is long", lambda: repr(full.snapshots()))
        for _ in range(5):
            async with asyncio.timeout(3):
                assert await asked(prefill, free, prompt, COUNT) == wanted
        assert not any(task.done() for task in stuck)
        assert (await client.post(f"{full.url}/continue_generation")).status_code == 200
        assert await asyncio.gather(*stuck) == [wanted] * 12


@pytest.fixture(scope="module", params=[1, 2], ids=["PP1", "PP2"])
def chunked(
    request: pytest.FixtureRequest, exam: Exam, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Worker, Worker]]:
    directory = tmp_path_factory.mktemp("chunked")
    flags = flags_of({"pp": request.param}, exam.folder, chunk_tokens=CHUNK)
    workers = Worker("prefill", directory, "prefill", **flags), Worker("decode", directory, "d", **flags)
    for worker in workers:
        worker.wait()
    yield workers
    stop_all(workers)


async def test_prompts_around_the_size_of_a_chunk_are_whole_with_and_without_a_cache(
    model: tuple[Any, Path], chunked: tuple[Worker, Worker]
) -> None:
    """F08, F10 (scale: chunks of 64 tokens instead of 512)."""
    prompts = sure_prompts(model[0], AROUND_CHUNK, 6)
    for prompt, wanted in prompts:
        assert await asked(*chunked, prompt, 6) == wanted
    assert await asyncio.gather(*(asked(*chunked, prompt, 6) for prompt, _ in prompts)) == [one for _, one in prompts]
