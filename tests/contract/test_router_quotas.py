"""Quotas of keys that two routers share through one real Redis, and what becomes of them while it is away (R11)."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("redis", reason="the extra redis is not installed")

from baton_core.routing.fairness import Quota
from baton_router import shared_quotas
from baton_router.config import RouterConfig
from baton_router.shared_quotas import SharedQuotas
from contract.fake_workers import LONG_MS, Client, World, decodes, decodes_slowly, running, world
from contract.test_registry_redis import SERVER, RedisServer

pytestmark = pytest.mark.skipif(SERVER is None, reason="redis-server is not installed (Debian: redis-server)")

KEYS = """
[keys.rare]
key = "rare"
requests_per_s = 0.01
[keys.narrow]
key = "narrow"
concurrent_max = 2
[keys.free]
key = "free"
"""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@asynccontextmanager
async def replicas(redis: RedisServer, folder: Path, script: object = decodes) -> AsyncIterator[tuple[World, Client]]:
    """Two routers in front of the same workers; the second as a client of it."""
    path = folder / "keys.toml"
    path.write_text(KEYS)
    settings = {"keys_file": str(path), "redis": redis.url, "probe_interval_ms": LONG_MS}
    async with AsyncExitStack() as stack:
        w = await stack.enter_async_context(world(decode=(script,), **settings))  # type: ignore[arg-type]
        urls = {"prefill": (w.prefill[0].url,), "decode": (w.decode[0].url,)}
        second = await stack.enter_async_context(running(RouterConfig(**urls, **settings)))  # type: ignore[arg-type]
        await second.until("/ready", lambda status, _: status == 200)
        yield w, second


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def ask(client: Client, name: str) -> int:
    async with client.post(headers=key(name)) as response:
        await response.read()
        assert response.status != 429 or int(response.headers["retry-after"]) >= 1
        return response.status


async def alone(client: Client) -> float:
    """How often that router had to count for itself."""
    _, text = await client.get("/metrics")
    return next(
        float(line.split()[1]) for line in text.splitlines() if line.startswith("baton_router_local_quotas_total ")
    )


async def test_what_one_router_let_in_counts_at_the_other(redis: RedisServer, tmp_path: Path) -> None:
    async with replicas(redis, tmp_path) as (w, second):
        await until_redis_answers(w.client)
        assert [await ask(w.client, "rare"), await ask(second, "rare")] == [200, 429]
        assert [await ask(second, "free") for _ in range(5)] == [200] * 5
        assert await alone(second) == 0


async def until_redis_answers(client: Client) -> None:
    """It has only just been started: ask for the quota that nobody minds, until it is shared."""
    async with asyncio.timeout(10):
        while True:
            before = await alone(client)
            assert await ask(client, "narrow") == 200
            if await alone(client) == before:
                return


async def test_places_are_shared_and_given_back_to_all(redis: RedisServer, tmp_path: Path) -> None:
    async with replicas(redis, tmp_path, decodes_slowly) as (w, second):
        w.decode[0].script = decodes
        await until_redis_answers(w.client)
        await until_redis_answers(second)
        w.decode[0].script = decodes_slowly
        async with w.client.post(headers=key("narrow")) as one, second.post(headers=key("narrow")) as two:
            await one.content.readany()
            await two.content.readany()
            assert [await ask(w.client, "narrow"), await ask(second, "narrow")] == [429, 429]
            w.decode[0].release.set()
            await one.read()
            await two.read()
        async with asyncio.timeout(5):
            while await ask(second, "narrow") != 200:
                pass
        await w.idle()


async def test_while_redis_is_away_each_router_counts_for_itself_and_no_request_fails(
    redis: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with replicas(redis, tmp_path) as (w, second):
        await until_redis_answers(w.client)
        redis.stop()
        capsys.readouterr()
        for client in (w.client, second):
            assert [await ask(client, "free") for _ in range(5)] == [200] * 5
            assert [await ask(client, "narrow") for _ in range(10)] == [200] * 10
            assert [await ask(client, "rare"), await ask(client, "rare")] == [200, 429], "its own count"
            assert await alone(client) >= 10
        assert capsys.readouterr().out.count("router.quotas_not_shared") == 2, "one line each"
        redis.start()
        async with asyncio.timeout(15):
            while True:
                before = await alone(second)
                await ask(second, "narrow")
                if await alone(second) == before:
                    break
        assert "router.quotas_shared_again" in capsys.readouterr().out


async def test_the_places_of_a_router_that_died_come_back_by_themselves(redis: RedisServer) -> None:
    quota = Quota(concurrent_max=1)
    missed: list[None] = []
    dead, alive = (SharedQuotas(redis.url, None, lease_ms=300, on_away=lambda: missed.append(None)) for _ in range(2))
    tasks = [asyncio.create_task(one.run()) for one in (dead, alive)]
    async with asyncio.timeout(10):
        while await dead.enter("a", quota, "1") != 0:
            pass  # Redis is starting
    assert await alive.enter("a", quota, "2") == 1.0
    async with asyncio.timeout(5):
        while await alive.enter("a", quota, "3") != 0:
            pass
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_redis_that_does_not_answer_delays_one_request_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_quotas, "CALL_S", 0.1)
    asked: list[None] = []

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(None)
        await _reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    missed: list[None] = []
    quotas = SharedQuotas(f"redis://127.0.0.1:{port}/0", None, lease_ms=1_000, on_away=lambda: missed.append(None))
    async with server:
        began_s = asyncio.get_running_loop().time()
        assert [await quotas.enter("a", Quota(concurrent_max=1), str(n)) for n in range(200)] == [None] * 200
        assert asyncio.get_running_loop().time() - began_s < 1.0
        assert len(missed) == 200 and len(asked) <= 2
