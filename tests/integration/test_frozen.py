"""A worker that stands still as a whole, as a paused container or virtual machine does, goes on as if nothing had been."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from integration.stack import REQUEST_S, eventually
from integration.workers import Worker, flags_of
from tiny_folders import VOCAB, save_folder
from tiny_models import oracle

LIMIT_MS = 3_000
FROZEN_S = 2 * LIMIT_MS / 1000
TOKENS, FROZEN_AT = 200, 20


async def test_a_worker_of_two_ranks_that_was_frozen_amid_a_stream_loses_no_rank_and_no_token(tmp_path: Path) -> None:
    """Every watch inside it has run out meanwhile: on the loop, the step and the agreement of its ranks."""
    model = oracle("llama", vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=4_096)
    limits = {"loop_stall_ms": LIMIT_MS, "step_ms": LIMIT_MS, "control_collective_ms": LIMIT_MS}
    worker = Worker(
        "decode", tmp_path, "frozen", **flags_of({"tp": 2}, save_folder(tmp_path / "tiny", model), **limits)
    )
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "stream": True, "sampling_params": sampling}
    events: list[dict[str, object]] = []
    try:
        await asyncio.to_thread(worker.wait)
        pids = [worker.process.pid, *worker.rank_pids()]
        async with httpx.AsyncClient(timeout=REQUEST_S) as http:
            async with http.stream("POST", f"{worker.url}/generate", json=body) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) == FROZEN_AT:
                        await freeze(pids)
            assert (await http.get(f"{worker.url}/health")).status_code == 200, worker.text()
        assert len(events[-1].get("output_ids", ())) == TOKENS, events[-1]  # type: ignore[arg-type]
        assert [worker.process.pid, *worker.rank_pids()] == pids
    finally:
        worker.stop()


async def freeze(pids: list[int]) -> None:
    """Stop all of them, for longer than any of their limits."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until_s = time.monotonic() + FROZEN_S

    async def is_over() -> bool:
        return time.monotonic() > until_s

    await eventually(is_over, "it was frozen", within_s=2 * FROZEN_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
