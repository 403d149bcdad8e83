"""Who may come in, how much and when: keys, quotas, the queue."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from baton_core.routing.pace import FREE_WAITERS_UNKNOWN
from contract.fake_workers import (
    World,
    decodes,
    decodes_slowly,
    error_of,
    is_silent,
    prefills,
    world,
)
from ports import free_port

KEYS = """
[keys.search]
key = "sk-search"
priority_max = 10
[keys.batch]
key = "sk-batch"
concurrent_max = 1
requests_per_s = 0.5
"""


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


async def status_of(w: World, **headers: str) -> tuple[int, Any]:
    async with w.client.post(json={"text": "x"}, headers=headers) as response:
        return response.status, await response.json()


async def until_status(w: World, wanted: int, **headers: str) -> None:
    async with asyncio.timeout(5):
        while (await status_of(w, **headers))[0] != wanted:
            pass


async def test_without_a_good_key_a_request_is_refused_and_no_worker_hears_of_it(keys_file: Path) -> None:
    async with world(keys_file=str(keys_file)) as w:
        await until_status(w, 200, **key("sk-search"))
        seen = len(w.decode[0].received)
        for headers in ({}, key("sk-wrong"), {"authorization": "Basic sk-search"}, key("")):
            assert (await status_of(w, **headers))[0] == 401
        assert len(w.decode[0].received) == seen
        _, text = await w.client.get("/metrics")
        assert 'admission_rejections_total{reason="unauthorized"}' in text
        assert (await w.client.get("/ready"))[0] == 200


async def test_a_clients_key_never_reaches_a_worker_and_the_routers_own_does(keys_file: Path) -> None:
    async with world(keys_file=str(keys_file), worker_key="wk") as w:
        await until_status(w, 200, **{"x-api-key": "sk-search"})
        for worker in (w.prefill[0], w.decode[0]):
            headers = worker.received[-1].headers
            assert headers["authorization"] == "Bearer wk"
            assert "sk-search" not in str(headers)


async def test_a_key_beyond_its_quota_is_told_when_to_come_again_and_others_are_not_harmed(keys_file: Path) -> None:
    async with world(keys_file=str(keys_file)) as w:
        await until_status(w, 200, **key("sk-search"))
        assert (await status_of(w, **key("sk-batch")))[0] == 200
        async with w.client.post(headers=key("sk-batch")) as response:
            assert response.status == 429
            assert 1 <= int(response.headers["retry-after"]) <= 2
            assert "batch" in (await response.json())["error"]["message"]
        assert [(await status_of(w, **key("sk-search")))[0] for _ in range(20)] == [200] * 20


async def test_keys_are_read_again_when_the_file_changes_and_a_wrong_file_changes_nothing(keys_file: Path) -> None:
    async with world(keys_file=str(keys_file)) as w:
        await until_status(w, 200, **key("sk-search"))
        keys_file.write_text('[keys.new]\nkey = "sk-new"\n')
        await until_status(w, 200, **key("sk-new"))
        assert (await status_of(w, **key("sk-search")))[0] == 401
        keys_file.write_text("[keys.new]\nno = 1\n")
        assert (await status_of(w, **key("sk-new")))[0] == 200


async def test_what_does_not_run_waits_and_what_does_not_fit_the_queue_is_refused_with_retry_after() -> None:
    async with world(decode=(decodes_slowly,), concurrent_max=1, queue_max=1) as w:
        async with w.client.post() as running:
            await running.content.readany()
            waiting = asyncio.create_task(status_of(w))
            await w.client.until("/metrics", lambda _, text: "baton_router_queue_requests 1.0" in text)
            async with w.client.post() as refused:
                assert (refused.status, refused.headers["retry-after"]) == (503, "1")
                assert error_of(await refused.json()) == (503, "WAITING_FULL")
            w.decode[0].script = decodes
            w.decode[0].release.set()
            await running.read()
        assert (await waiting)[0] == 200
        await w.idle()


async def test_a_more_important_request_takes_the_place_of_one_that_waits() -> None:
    async with world(decode=(decodes_slowly,), concurrent_max=1, queue_max=1) as w, w.client.post() as running:
        await running.content.readany()
        ordinary = asyncio.create_task(status_of(w))
        await w.client.until("/metrics", lambda _, text: "baton_router_queue_requests 1.0" in text)
        urgent = asyncio.create_task(status_of(w, **{"x-baton-priority": "5"}))
        assert (await ordinary)[0] == 503
        w.decode[0].script = decodes
        w.decode[0].release.set()
        assert (await urgent)[0] == 200
        assert (await status_of(w, **{"x-baton-priority": "high"}))[0] == 400


async def test_a_client_that_leaves_the_queue_gives_its_place_back() -> None:
    async with world(decode=(is_silent,), concurrent_max=1, queue_max=1) as w:
        running = asyncio.create_task(status_of(w))
        await asyncio.wait_for(w.decode[0].arrival.wait(), 5)
        for _ in range(3):
            waiting = asyncio.create_task(status_of(w))
            await w.client.until("/metrics", lambda _, text: "baton_router_queue_requests 1.0" in text)
            waiting.cancel()
            await w.client.until("/metrics", lambda _, text: "baton_router_queue_requests 0.0" in text)
        running.cancel()
        await w.idle()
        w.decode[0].script = decodes
        assert (await status_of(w))[0] == 200


async def test_nobody_waits_in_the_queue_longer_than_is_set() -> None:
    async with world(decode=(is_silent,), concurrent_max=1, queue_ms=50) as w:
        running = asyncio.create_task(status_of(w))
        await asyncio.wait_for(w.decode[0].arrival.wait(), 5)
        status, body = await status_of(w)
        assert status == 503
        assert "50 ms" in body["error"]["message"]
        running.cancel()


async def test_a_router_whose_file_of_keys_makes_no_sense_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[keys.a]")
    command = f"-m baton_router --port {free_port()} --keys-file {path}"
    router = await asyncio.create_subprocess_exec(sys.executable, *command.split(), stderr=asyncio.subprocess.PIPE)
    _, said = await asyncio.wait_for(router.communicate(), 30)
    assert router.returncode == 1
    assert b"keys.a needs either a key or its sha256" in said


async def test_who_would_wait_too_long_for_a_first_token_is_told_so_before_any_worker_hears_of_it() -> None:
    async with world(first_token_ms=200) as w:
        await until_status(w, 200)
        w.prefill[0].script, w.decode[0].script = is_silent, is_silent
        seen = len(w.decode[0].received)
        waiting = [asyncio.create_task(status_of(w)) for _ in range(FREE_WAITERS_UNKNOWN + 1)]
        async with asyncio.timeout(5):
            # The wait comes first: who asks nobody lets nobody else get on.
            while await expected_wait_s(w) < 0.2 or len(w.decode[0].received) < seen + len(waiting):
                pass
        async with w.client.post(json={"text": "x"}) as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) >= 1
            assert "200 ms" in (await response.json())["error"]["message"]
        assert len(w.decode[0].received) == seen + len(waiting)
        _, scrape = await w.client.get("/metrics")
        assert 'admission_rejections_total{reason="overloaded"} 1.0' in scrape
        assert f"baton_router_first_token_waiting_requests {len(waiting)}.0" in scrape
        for task in waiting:
            task.cancel()
        await w.idle()
        w.prefill[0].script, w.decode[0].script = prefills, decodes
        assert (await status_of(w))[0] == 200


async def expected_wait_s(w: World) -> float:
    _, scrape = await w.client.get("/metrics")
    return float(scrape.partition("\nbaton_router_first_token_expected_seconds ")[2].partition("\n")[0])
