"""The scheduler's loop waits for no forward: it keeps its appointments while a long chunk computes."""

from collections.abc import Iterator

import httpx
import pytest

from integration.stack import Stack, ask_all

LAG = "baton_prefill_control_tick_lag_seconds"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # Heartbeats every 20 ms give the loop an appointment to keep in the middle of every forward.
    settings = ("prefill.chunk_tokens=2048", "prefill.heartbeat_ms=20", "prefill.kv_tokens=8192")
    running = Stack.up(tmp_path_factory.mktemp("lag"), "--dtype", "float32", settings=settings)
    yield running
    running.down()


async def buckets(stack: Stack) -> dict[str, float]:
    """The cumulative counts of the lag histogram, by upper bound."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{stack.entries('prefill')[0]['url']}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith(f"{LAG}_bucket")]
    return {line.split('le="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def test_p99_tick_lag_stays_under_20_ms_while_2048_token_chunks_compute(stack: Stack) -> None:
    before = await buckets(stack)
    for number in range(3):
        ids = [(number * 31 + position * 7) % 40_000 + 100 for position in range(2_048)]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
        await ask_all(stack.url, [body], concurrency=1)
    after = await buckets(stack)
    # A worker that has only just started has no sample yet.
    ticks = after["+Inf"] - before.get("+Inf", 0)
    in_time = after["0.02"] - before.get("0.02", 0)
    assert ticks > 100
    assert in_time / ticks >= 0.99, f"{in_time:.0f} of {ticks:.0f} ticks began within 20 ms: {after}"
