"""Sends a `Load` to an endpoint, closed or open loop, and returns what happened."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from baton_cli.bench.client import Endpoint, until_done
from baton_cli.bench.progress import Bar
from baton_cli.bench.prompts import Prompts, poisson_arrivals_s
from baton_cli.bench.sample import Load, Sample
from baton_cli.errors import Interrupted

INTERRUPT_POLL_SECONDS = 0.2

Ask = Callable[[int, float | None], Awaitable[None]]
"""Sends request number `index`, due at that many seconds since the start (None: now), and keeps its sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Samples in the order in which they ended, and how busy this client was: near 1 it measured itself."""

    samples: list[Sample]
    unfinished: int
    client_cpu_share: float


async def run_load(
    endpoint: Endpoint, load: Load, prompts: Prompts, bar: Bar, interrupted: Callable[[], bool]
) -> Outcome:
    """Warm up, then measure. Raises Interrupted. A run beyond its time limit is cut and says how much is missing."""
    await _warm_up(endpoint, load, prompts, interrupted)
    samples: list[Sample] = []
    origin_s, cpu_s = time.perf_counter(), time.process_time()

    async def ask(index: int, due_s: float | None) -> None:
        late_s = 0.0 if due_s is None else time.perf_counter() - origin_s - due_s
        prompt = prompts.ids(f"request {index}", load.input_tokens)
        sample = await endpoint.complete(prompt, load.output_tokens, origin_s)
        samples.append(replace(sample, late_s=late_s))
        bar.step(failed=sample.failure is not None)

    await _bounded(_loop(load, ask), load.time_limit_seconds, interrupted)
    wall_s = time.perf_counter() - origin_s
    bar.end()
    return Outcome(
        samples=samples,
        unfinished=load.requests - len(samples),
        client_cpu_share=(time.process_time() - cpu_s) / wall_s if wall_s else 0.0,
    )


async def _warm_up(endpoint: Endpoint, load: Load, prompts: Prompts, interrupted: Callable[[], bool]) -> None:
    """Requests that nobody counts: connections, pools and kernels settle."""

    async def ask(index: int, _due_s: float | None) -> None:
        prompt = prompts.ids(f"warm-up {index}", load.input_tokens)
        await endpoint.complete(prompt, load.output_tokens, time.perf_counter())

    concurrency = min(load.concurrency or 1, max(1, load.warmup_requests))
    await _bounded(closed_loop(ask, load.warmup_requests, concurrency), load.time_limit_seconds, interrupted)


async def closed_loop(ask: Ask, requests: int, concurrency: int) -> None:
    """`concurrency` clients, each of which sends its next request when it has its answer."""
    indices = iter(range(requests))
    await asyncio.gather(*(_client(ask, indices) for _ in range(concurrency)))


async def open_loop(ask: Ask, arrivals_s: Sequence[float]) -> None:
    """Each request at its time, whatever became of those before it."""
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index, due_s in enumerate(arrivals_s):
            await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
            group.create_task(_told(ask, index, due_s))


async def _client(ask: Ask, indices: Iterator[int]) -> None:
    for index in indices:
        await ask(index, None)


async def _told(ask: Ask, index: int, due_s: float) -> None:
    await ask(index, due_s)


async def _loop(load: Load, ask: Ask) -> None:
    if load.rate_per_s is not None:
        await open_loop(ask, poisson_arrivals_s(load.seed, load.rate_per_s, load.requests))
    else:
        assert load.concurrency is not None, "a load is closed or open"
        await closed_loop(ask, load.requests, load.concurrency)


async def _bounded(work: Awaitable[None], seconds: float, interrupted: Callable[[], bool]) -> None:
    async def limited() -> None:
        try:
            async with asyncio.timeout(seconds):
                await work
        except TimeoutError:
            return  # what is missing is counted

    if not await until_done(asyncio.create_task(limited()), interrupted, INTERRUPT_POLL_SECONDS):
        raise Interrupted
