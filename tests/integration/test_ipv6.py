"""A stack whose processes listen on IPv6 alone: registration, look-up, control links and pages all go there."""

import re
from collections.abc import Iterator

import httpx
import pytest

from integration.stack import ask_all, gold, greedy
from integration.workers import Worker, stop_all

HOST = "::1"


@pytest.fixture(scope="module", params=["tcp", "shm"])
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Registry, prefill, decode, router."""
    directory = tmp_path_factory.mktemp("ipv6")
    common = {"host": HOST, "dtype": "float32", "kv_tokens": 8_192, "threads": 1, "transfer": request.param}
    started = [Worker("bootstrap", directory, "registry", host=HOST)]
    try:
        started[0].wait()
        for role in ("prefill", "decode"):
            started.append(Worker(role, directory, role, registry=started[0].url, **common))
        for one in started:
            one.wait()
        registry, prefill, decode = (one.url for one in started)
        started.append(
            Worker("router", directory, "router", host=HOST, prefill=prefill, decode=decode, registry=registry)
        )
        started[-1].wait()
        yield started
    finally:
        stop_all(started)


async def test_a_stack_on_ipv6_alone_gives_the_right_answers(processes: list[Worker]) -> None:
    prompts = gold()[:4]
    _, prefill, _, router = processes
    answers = await ask_all(router.url, [greedy(prompt) for prompt in prompts], concurrency=2)
    assert [answer["output_ids"] for answer in answers] == [prompt["output_ids"] for prompt in prompts]
    async with httpx.AsyncClient() as client:
        await client.get(f"{prefill.url}/debug/snapshot")  # makes the scheduler tell its app
        metrics = (await client.get(f"{prefill.url}/metrics")).text
    done = re.search(r'baton_prefill_handoffs_total\{[^}]*outcome="done"[^}]*\} 4\.0', metrics)
    assert done is not None, "prefill handed every prompt over"
