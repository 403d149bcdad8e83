"""Workers of several ranks when things go wrong: cancels at random, a rank that stops, a rank that dies.

`BATON_TEST_CANCEL_SECONDS` sets how long the cancels go on (make test-matrix: ten minutes a layout).
"""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from integration.stack import REQUEST_S, eventually
from integration.workers import Worker, answer_of, flags_of, stop_all
from tiny_folders import VOCAB, save_folder
from tiny_models import oracle

CANCEL_S = float(os.environ.get("BATON_TEST_CANCEL_SECONDS", "15"))
COLLECTIVE_MS = 3_000
DRAIN_MS = 20_000
CONTEXT_TOKENS, PROMPT_TOKENS = 512, 28


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = oracle("llama", vocab_size=VOCAB, hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    return save_folder(tmp_path_factory.mktemp("models") / "tiny", model)


@dataclass
class Pair:
    """A prefill and a decode worker."""

    prefill: Worker
    decode: Worker


def started(directory: Path, folder: Path, prefill: dict[str, object], decode: dict[str, object]) -> Pair:
    limits: dict[str, object] = {"control_collective_ms": COLLECTIVE_MS, "tensor_collective_ms": COLLECTIVE_MS}
    more = limits | {"drain_ms": DRAIN_MS, "loop_stall_ms": 6_000}
    pair = Pair(
        Worker("prefill", directory, "prefill", **flags_of(prefill, folder, chunk_tokens=32, **more)),
        Worker("decode", directory, "decode", **flags_of(decode, folder, **more)),
    )
    pair.prefill.wait()
    pair.decode.wait()
    return pair


@pytest.fixture(params=[{"tp": 2}, {"pp": 2}], ids=["TP2", "PP2"])
def pair(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[Pair]:
    running = started(tmp_path, folder, request.param, request.param)
    yield running
    stop_all([running.prefill, running.decode])


def prompt(length: int, dice: random.Random) -> list[int]:
    return [dice.randrange(2, VOCAB) for _ in range(length)]


async def test_random_cancels_leave_no_orphan_on_any_rank(pair: Pair) -> None:
    dice = random.Random(5)
    before = [worker.snapshots() for worker in (pair.prefill, pair.decode)]
    until = time.monotonic() + CANCEL_S
    outcomes = {"answered": 0, "cancelled": 0}

    async def client() -> None:
        while time.monotonic() < until:
            patience_s = dice.choice((0.0, 0.005, 0.03, 0.1, 0.4, 10.0))
            try:
                async with asyncio.timeout(patience_s):
                    first, second = await answer_of(
                        pair.prefill, pair.decode, prompt(dice.randint(1, 150), dice), dice.randint(1, 40)
                    )
            except TimeoutError:
                outcomes["cancelled"] += 1
                continue
            assert {first.status_code, second.status_code} == {200}, f"{first.text} {second.text}"
            outcomes["answered"] += 1

    await asyncio.gather(*(client() for _ in range(12)))
    assert min(outcomes.values()) > 10, outcomes
    for worker, idle in zip((pair.prefill, pair.decode), before, strict=True):
        await eventually(lambda w=worker: _idle(w), f"{worker.name} is idle", lambda w=worker: repr(w.snapshots()))  # type: ignore[misc]
        async with httpx.AsyncClient(timeout=REQUEST_S) as http:
            assert (await http.post(f"{worker.url}/flush_cache")).status_code == 200
        await eventually(
            lambda w=worker, b=idle: _as_before(w, b),  # type: ignore[misc]
            f"{worker.name} is as before",
            lambda w=worker: repr(w.snapshots()),  # type: ignore[misc]
        )


async def _idle(worker: Worker) -> bool:
    return all(unit["live_requests"] == 0 for unit in worker.snapshots())


async def _as_before(worker: Worker, before: list[dict[str, float]]) -> bool:
    names = ("pages_free", "pages_cached", "rows_free", "live_requests")
    return [[unit.get(name) for name in names] for unit in worker.snapshots()] == [
        [unit.get(name) for name in names] for unit in before
    ]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "dp_attention": True}], ids=["TP2", "DPA2"])
async def test_a_stopped_rank_is_named_and_its_worker_exits(
    layout: dict[str, object], folder: Path, tmp_path: Path
) -> None:
    pair = started(tmp_path, folder, layout, {})
    try:
        os.kill(pair.prefill.rank_pids()[1], signal.SIGSTOP)
        began = time.monotonic()
        first, second = await answer_of(pair.prefill, pair.decode, list(range(2, 60)), 4)
        assert time.monotonic() - began < 15
        assert first.status_code >= 500
        assert second.status_code >= 500
        assert "rank 1" in first.text
        await eventually(lambda: _ended(pair.prefill), "the worker has exited")
        assert pair.prefill.process.returncode != 0
    finally:
        stop_all([pair.prefill, pair.decode])


async def _ended(worker: Worker) -> bool:
    return worker.process.poll() is not None


async def test_with_plain_dp_the_other_unit_streams_on_when_one_stops(folder: Path, tmp_path: Path) -> None:
    pair = started(tmp_path, folder, {}, {"dp": 2})
    try:
        other = asyncio.create_task(_last_event(pair, unit=1))
        await eventually(lambda: _running(pair.decode, 1), "unit 1 streams", lambda: repr(pair.decode.snapshots()))
        os.kill(pair.decode.rank_pids()[1], signal.SIGSTOP)
        began = time.monotonic()
        while not other.done():
            whole = await _last_event(pair, unit=0)
            if "error" in whole:
                break  # unit 1 was given up, and the worker takes nothing new
            assert whole["meta_info"]["completion_tokens"] == CONTEXT_TOKENS - PROMPT_TOKENS
            assert whole["meta_info"]["dp_rank"] == 0
        assert time.monotonic() - began > 2, "unit 0 answered while unit 1 stood still"
        assert "rank 1" in (await other)["error"]["message"]
        await eventually(lambda: _ended(pair.decode), "the worker has exited", pair.decode.text, within_s=30)
        assert pair.decode.process.returncode != 0
    finally:
        stop_all([pair.prefill, pair.decode])


async def _last_event(pair: Pair, unit: int) -> dict[str, Any]:
    """The last event of a stream as long as the context, on this unit of decode."""
    body = {
        "input_ids": list(range(2, 2 + PROMPT_TOKENS)),
        "sampling_params": {"temperature": 0, "max_new_tokens": 2_000, "ignore_eos": True},
        "stream": True,
        "routed_dp_rank": unit,
    }
    last = ""
    async with (
        httpx.AsyncClient(timeout=REQUEST_S) as http,
        http.stream("POST", f"{pair.decode.url}/generate", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith(("data: {", "{")):
                last = line.removeprefix("data: ")
    event: dict[str, Any] = json.loads(last)
    return event


async def _running(worker: Worker, unit: int) -> bool:
    return bool(worker.snapshots()[unit]["running_requests"] > 0)
