"""One prefill and one decode worker without a router, and the checks GOLD and LEAK of the field reports."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from integration.stack import REQUEST_S, eventually
from integration.workers import Worker, answer_of, flags_of, stop_all
from tiny_folders import VOCAB

LENGTHS, COUNT = (5, 40, 150), 10
OTHER_LEG_MS = 1_500
POOL_TOKENS = 8_192
PAGE_TOKENS = 16
LASTING = ("tombstones", "expected_answer_ratio")  # stones go with time, and what was learned stays
ROOMS = itertools.count(100_000)


@dataclass(frozen=True)
class Exam:
    """A model, and prompts with the answers that count."""

    folder: Path
    prompts: list[tuple[list[int], list[int]]]


@dataclass
class Pair:
    """A prefill and a decode worker, and how they were when nothing had happened yet."""

    exam: Exam
    prefill: Worker
    decode: Worker
    idle: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def workers(self) -> tuple[Worker, Worker]:
        return self.prefill, self.decode

    def leg(self, room: int, tokens: int = 20, count: int = 4, **more: Any) -> dict[str, Any]:
        """The body of one leg."""
        return {
            "input_ids": [2 + (room * 7 + position) % (VOCAB - 2) for position in range(tokens)],
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": room,
            **more,
        }

    async def both(self, client: httpx.AsyncClient, tokens: int, count: int, **more: Any) -> list[httpx.Response]:
        """Both legs of a fresh room; prefill's and decode's answers."""
        leg = self.leg(next(ROOMS), tokens, count, **more)
        return list(await asyncio.gather(*(client.post(f"{one.url}/generate", json=leg) for one in self.workers)))

    async def gold(self) -> None:
        """The greedy answers are what they were."""
        answers = await asyncio.gather(
            *(answer_of(self.prefill, self.decode, prompt, COUNT, bootstrap_room=next(ROOMS))
              for prompt, _ in self.exam.prompts)
        )  # fmt: skip
        for (_, wanted), (first, second) in zip(self.exam.prompts, answers, strict=True):
            assert (first.status_code, second.status_code) == (200, 200), f"{first.text} {second.text}"
            assert second.json()["output_ids"] == wanted

    async def whole(self, within_s: float = 10.0) -> None:
        """GOLD, and LEAK: every page, row and queue is as it was when nothing had happened yet."""
        await eventually(self._quiet, "nothing is live", lambda: repr(self._gauges()), within_s)
        await self.gold()
        await eventually(self._quiet, "nothing is live", lambda: repr(self._gauges()), within_s)
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            for worker in self.workers:
                assert (await client.post(f"{worker.url}/flush_cache")).status_code == 200
        await eventually(self._as_before, "all is as before", lambda: repr(self._moved()), within_s)
        assert all(worker.process.poll() is None for worker in self.workers)

    def steps(self) -> float:
        """Forwards of prefill so far."""
        answer = httpx.get(f"{self.prefill.url}/debug/snapshot", timeout=REQUEST_S).json()
        return float(answer["ranks"][0]["counters"]["steps_total"])

    async def _quiet(self) -> bool:
        return all(unit["live_requests"] == 0 for units in self._gauges() for unit in units)

    async def _as_before(self) -> bool:
        return not self._moved()

    def _moved(self) -> list[tuple[str, float, float]]:
        """What differs from the beginning: gauge, then and now."""
        found = []
        for units, before in zip(self._gauges(), self.idle, strict=True):
            for unit, idle in zip(units, before, strict=True):
                found += [(name, idle[name], unit[name]) for name in idle if idle[name] != unit[name]]
        return [one for one in found if one[0] not in LASTING]

    def _gauges(self) -> list[list[dict[str, Any]]]:
        return [worker.snapshots() for worker in self.workers]


@asynccontextmanager
async def served(exam: Exam, directory: Path, prefill: Any = None, decode: Any = None) -> AsyncIterator[Pair]:
    """A pair with these flags."""
    common: dict[str, object] = {"kv_tokens": POOL_TOKENS, "other_leg_ms": OTHER_LEG_MS, "chunk_tokens": 64}
    pair = Pair(
        exam,
        Worker("prefill", directory, "prefill", **flags_of({}, exam.folder, **(common | (prefill or {})))),
        Worker("decode", directory, "decode", **flags_of({}, exam.folder, **(common | (decode or {})))),
    )
    try:
        for worker in pair.workers:
            await asyncio.to_thread(worker.wait)
        await pair.gold()
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            await eventually(pair._quiet, "nothing is live")
            for worker in pair.workers:
                assert (await client.post(f"{worker.url}/flush_cache")).status_code == 200
        pair.idle = pair._gauges()
        yield pair
    finally:
        await asyncio.to_thread(stop_all, pair.workers)
