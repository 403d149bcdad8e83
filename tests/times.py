"""The table of times (docs/reliability.md), measured on a small stack of this machine; exits 1 where a bound is missed.

    python tests/times.py [--repeats 100]

Idle rows come first; then the same under load (clients that keep both workers busy); then the rows that hurt processes.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from integration.stack import START_S, Stack, ask_all, eventually, gold, greedy

SETTINGS = ("prefill.kv_tokens=16384", "decode.kv_tokens=16384", "prefill.chunk_tokens=128")
CLIENTS = 6
LINK_SILENT_S, LOOP_STALL_S = 5.0, 15.0  # deadlines that end what a stopped process holds up (`limits`)
ROOMS = itertools.count(10_000)
WRONG: tuple[dict[str, Any], ...] = (
    {"input_ids": [5] * 17_000},
    {"text": "x" * 2_000_000},
    {"text": "word " * 60_000},
    {"text": 5},
    {"text": "a", "sampling_params": {"top_p": 7}},
)


@dataclass
class Table:
    """Rows as they are measured."""

    missed: list[str] = field(default_factory=list)

    def row(self, event: str, measured_s: float, bound_s: float) -> None:
        """Print one; a miss is kept."""
        verdict = "ok" if measured_s <= bound_s else "MISSED"
        print(f"{event:<78} {measured_s * 1_000:>9.1f} ms  of {bound_s * 1_000:>8.0f} ms  {verdict}", flush=True)
        if measured_s > bound_s:
            self.missed.append(event)


def quantile(samples: list[float], share: float) -> float:
    """The sample that this share of all does not exceed."""
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


class Bench:
    """A stack, and what is asked of it."""

    def __init__(self, stack: Stack, client: httpx.AsyncClient, repeats: int) -> None:
        self.stack, self.client, self.repeats = stack, client, repeats

    def door(self, role: str) -> str:
        """A worker's URL."""
        return str(self.stack.entries(role)[0]["url"])

    def leg(self, room: int, **more: Any) -> dict[str, Any]:
        """One leg of a small request."""
        port = self.stack.entries("prefill")[0]["bootstrap_port"]
        meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        return {"text": "The quick brown fox", "sampling_params": {"max_new_tokens": 4}} | meeting | more

    async def post(self, door: str, body: dict[str, Any]) -> tuple[int, float]:
        """Status, and how long it took."""
        began = time.perf_counter()
        answer = await self.client.post(f"{door}/generate", json=body)
        return answer.status_code, time.perf_counter() - began

    async def rejections(self) -> list[float]:
        """What the app can refuse, at every door."""
        took = []
        for number in range(self.repeats):
            for role in ("router", "prefill", "decode"):
                body = WRONG[number % len(WRONG)]
                if role != "router":
                    body = self.leg(next(ROOMS)) | body
                    if "input_ids" in body:
                        body = {key: value for key, value in body.items() if key != "text"}
                door = self.stack.url if role == "router" else self.door(role)
                status, seconds = await self.post(door, body)
                assert status == 400, status
                took.append(seconds)
        return took

    async def duplicates(self) -> list[float]:
        """A second leg of a live room, which only the scheduler can refuse."""
        took = []
        for _ in range(max(4, self.repeats // 10)):
            room = next(ROOMS)
            first = asyncio.create_task(self.post(self.door("decode"), self.leg(room)))
            await self.until_live()
            status, seconds = await self.post(self.door("decode"), self.leg(room))
            assert status == 409, status
            took.append(seconds)
            await self.post(self.door("prefill"), self.leg(room))
            await first
        return took

    async def until_live(self) -> None:
        """Decode holds a request."""

        async def live() -> bool:
            return (await self.stack.snapshots())[-1]["live_requests"] > 0

        await eventually(live, "decode has the leg")

    async def told(self, waiting: str) -> list[float]:
        """From the refusal of one leg to the answer of the other, which waits at `waiting`."""
        refusing = "prefill" if waiting == "decode" else "decode"
        took = []
        for _ in range(max(10, self.repeats)):  # of fewer than a hundred the p99 is simply the worst
            room = next(ROOMS)
            other = asyncio.create_task(self.post(self.door(waiting), self.leg(room)))
            await asyncio.sleep(0.03)
            status, _ = await self.post(self.door(refusing), self.leg(room, sampling_params={"top_p": 7}))
            refused_at = time.perf_counter()
            assert status == 400, status
            status, _ = await other
            assert status == 400, status
            took.append(time.perf_counter() - refused_at)
        return took

    def pids(self, role: str) -> list[int]:
        """App and rank."""
        entry = self.stack.entries(role)[0]
        return [entry["pid"], *(rank["pid"] for rank in entry.get("ranks", []))]

    async def long_prompts(self, count: int) -> list[asyncio.Task[tuple[int, float]]]:
        """Prompts that take a while, begun."""
        ids = [(position * 7) % 40_000 + 100 for position in range(3_000)]
        bodies = [
            {"input_ids": [100 + number, *ids], "sampling_params": {"max_new_tokens": 2}} for number in range(count)
        ]
        begun = [asyncio.create_task(self.post(self.stack.url, body)) for body in bodies]
        await asyncio.sleep(1.0)
        return begun

    async def restart(self, role: str) -> None:
        """As an operator does."""
        argv = [sys.executable, "-m", "baton_cli", "restart", "--state", str(self.stack.directory), role, "0", "--kill"]
        done = await asyncio.to_thread(
            subprocess.run, argv, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.stack.refresh()

    async def works(self) -> None:
        """A greedy answer is right, as soon as there is one."""

        async def answered() -> bool:
            answer = await self.client.post(f"{self.stack.url}/generate", json=greedy(gold()[0]))
            return bool(answer.status_code == 200 and answer.json()["output_ids"] == gold()[0]["output_ids"])

        await eventually(answered, "the greedy answer", within_s=60)


@contextlib.asynccontextmanager
async def load(bench: Bench) -> AsyncIterator[None]:
    """Clients that keep both workers busy."""
    over = False

    async def client(number: int) -> None:
        while not over:
            body = {"text": f"{number} word " * 60, "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
            await bench.post(bench.stack.url, body)

    clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
    await asyncio.sleep(1.0)
    yield
    over = True
    await asyncio.gather(*clients)


async def quick_rows(bench: Bench, table: Table) -> None:
    """Refusals, idle and loaded."""
    table.row("rejection decidable in the app, idle, p99", quantile(await bench.rejections(), 0.99), 0.050)
    table.row(
        "rejection decided in the scheduler, idle, p99 (one tick more)", quantile(await bench.duplicates(), 0.99), 0.070
    )
    for waiting in ("decode", "prefill"):
        table.row(
            f"other leg ({waiting}) told of a reject, idle, p99", quantile(await bench.told(waiting), 0.99), 0.100
        )
    async with load(bench):
        table.row("rejection decidable in the app, loaded, p50", quantile(await bench.rejections(), 0.5), 0.020)
        for waiting in ("decode", "prefill"):
            row = f"other leg ({waiting}) told of a reject, loaded, p99"
            table.row(row, quantile(await bench.told(waiting), 0.99), 0.300)


async def fault_rows(bench: Bench, table: Table) -> None:
    """Processes that stop, die and come back."""
    prompts = await bench.long_prompts(4)
    leg = bench.leg(next(ROOMS), text="word " * 3_000)
    legs = [asyncio.create_task(bench.post(bench.door(role), leg)) for role in ("prefill", "decode")]
    (rank,) = bench.pids("prefill")[1:]
    os.kill(rank, signal.SIGSTOP)
    began = time.perf_counter()
    status, _ = await legs[1]
    event = "invisible fault (prefill's rank stopped) → decode's leg: silence, and one second"
    table.row(event, time.perf_counter() - began, LINK_SILENT_S + 1.0)
    assert status == 502, status
    ended = await asyncio.gather(*prompts)
    assert all(status >= 500 for status, _ in ended), ended
    event = "the same → clients, who are tried again: scheduler stall, and one second"
    table.row(event, time.perf_counter() - began, LOOP_STALL_S + 1.0)
    os.kill(rank, signal.SIGCONT)
    await legs[0]
    await bench.restart("prefill")
    await bench.works()
    for role in ("prefill", "decode"):
        prompts = await bench.long_prompts(6)
        for pid in bench.pids(role):
            os.kill(pid, signal.SIGKILL)
        began = time.perf_counter()
        await asyncio.gather(*prompts)
        table.row(f"visible fault ({role} killed) → clients, all of six", time.perf_counter() - began, 1.0)
        began = time.perf_counter()
        await bench.restart(role)
        await bench.works()
        table.row(f"{role} usable again after restart", time.perf_counter() - began, 30.0)
    for pid in bench.pids("bootstrap"):
        os.kill(pid, signal.SIGKILL)
    answers = await ask_all(bench.stack.url, [greedy(gold()[1])], concurrency=1)
    assert answers[0]["output_ids"] == gold()[1]["output_ids"], "nothing fails while the registry is dead"
    began = time.perf_counter()
    await bench.restart("bootstrap")
    await bench.works()
    table.row("registry usable again after restart; nothing failed meanwhile", time.perf_counter() - began, 5.0)


async def measure(directory: Path, repeats: int) -> Table:
    """All rows."""
    table = Table()
    stack = await asyncio.to_thread(Stack.up, directory, "--dtype", "float32", settings=SETTINGS)
    try:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            bench = Bench(stack, client, repeats)
            rows: tuple[Callable[[Bench, Table], Awaitable[None]], ...] = (quick_rows, fault_rows)
            for some in rows:
                await bench.works()
                await some(bench, table)
    finally:
        await asyncio.to_thread(stack.down)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-times-") as directory:
        table = asyncio.run(measure(Path(directory), options.repeats))
    print(f"{len(table.missed)} missed" if table.missed else "every bound is kept")
    return 1 if table.missed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started goes with whoever started it
    sys.exit(main())
