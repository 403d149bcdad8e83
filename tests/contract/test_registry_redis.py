"""Replicas of the registry over one real Redis: they answer alike, and each survives the other's end, and Redis' own."""

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("redis", reason="the extra redis is not installed")

from baton_core.limits import RegistryLimits
from baton_core.registration import parse_registration
from baton_core.registry import Accepted, Instance, RegistryTable
from baton_io import registry_redis
from baton_io.registry_redis import RedisStore
from baton_io.registry_store import Deregister, PutRooms, Register, Renew, StoreAway, apply, history
from contract.registry_servers import listening_socket
from contract.test_registry_routes import RANK_0, TOPOLOGY, sglang_body

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = pytest.mark.skipif(SERVER is None, reason="redis-server is not installed (Debian: redis-server)")

LIMITS = RegistryLimits()


class RedisServer:
    """A Redis of the test's own; `append` keeps what it was told over a restart."""

    def __init__(self, folder: Path) -> None:
        with listening_socket() as free:
            self.port = int(free.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self.start()

    def start(self) -> None:
        assert SERVER is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder), "--save", ""]
        self.process = subprocess.Popen(
            [SERVER, *options, "--appendonly", "yes", "--appendfsync", "always"], stdout=subprocess.DEVNULL
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


async def until(holds: Callable[[], bool], limit_s: float = 15.0) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110  # what is waited for happens in another process
            await asyncio.sleep(0.01)


@asynccontextmanager
async def replica(url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, None, LIMITS)
    task = asyncio.create_task(store.follow())
    try:
        await until(lambda: store.is_up)
        yield store
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def ours(instance: str = "p0", tp_rank: int = 0, tp_size: int = 1, port: int = 1, lease_ms: int = 600_000) -> Register:
    told = {"instance": instance, "incarnation": f"{instance}-life", "lease_ms": lease_ms, "prefill_http_port": port}
    return Register(rank=parse_registration(sglang_body(tp_rank, tp_size, **told)))


def picture(table: RegistryTable, now: int) -> object:
    """All that a table would ever answer with."""
    shown = [(one.name, one.life, one.topology, one.endpoints, one.lost_units) for one in table.instances(now)]
    return shown, [room[:3] for room in table.rooms()], table.incarnation


# -- processes


@asynccontextmanager
async def service(redis: RedisServer, port: int) -> AsyncIterator[httpx.AsyncClient]:
    """A registry process."""
    command = [sys.executable, "-m", "baton_bootstrap", "--port", str(port), "--redis", redis.url]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http, asyncio.timeout(30):
            while not await answers(http):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            yield http
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


async def answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def told_alike(first: httpx.AsyncClient, second: httpx.AsyncClient, path: str, query: dict[str, int]) -> str:
    """What both say, once they say the same."""
    async with asyncio.timeout(5):
        while True:
            one, other = await first.get(path, params=query), await second.get(path, params=query)
            same = ("x-baton-registry-incarnation", "x-baton-incarnation")
            heads = [[answer.headers.get(name) for name in same] for answer in (one, other)]
            if (one.status_code, one.text, heads[0]) == (other.status_code, other.text, heads[1]):
                return one.text
            await asyncio.sleep(0.01)


async def test_two_processes_answer_alike_and_survive_each_others_restart(redis: RedisServer) -> None:
    with listening_socket() as one, listening_socket() as two:
        first_port, second_port = (int(bound.getsockname()[1]) for bound in (one, two))
    async with service(redis, first_port) as first:
        async with service(redis, second_port) as second:
            put = await first.put("/route", json=sglang_body(prefill_http_port=30_000))
            assert (put.status_code, put.text) == (200, "OK")
            assert "30000" in await told_alike(first, second, "/route", TOPOLOGY)
            room = await second.post("/register_dp_rank", json={"bootstrap_room": 77, "dp_rank": 0})
            assert room.status_code == 200
        # The second is killed; the first goes on, and the second, started again, knows everything.
        asked = await first.post("/query_dp_ranks", json={"bootstrap_rooms": [77, 78]})
        assert asked.json() == {"77": 0}
        async with service(redis, second_port) as second:
            assert await told_alike(first, second, "/route", RANK_0) == '{"rank_ip":"127.0.0.1","rank_port":20000}'
            answer = await second.post("/query_dp_ranks", json={"bootstrap_rooms": [77]})
            assert answer.json() == {"77": 0}
            gone = await second.delete("/v1/instances/default")
            assert gone.status_code == 200
            assert "0 workers" in await told_alike(first, second, "/route", TOPOLOGY)


# -- stores


async def test_whoever_writes_both_tables_are_equal(redis: RedisServer) -> None:
    async with replica(redis.url) as first, replica(redis.url) as second:
        writes = [ours("p0", rank, 2) for rank in (0, 1)] + [ours("p1", port=2)]
        for number, write in enumerate(writes):
            assert isinstance(await (first, second)[number % 2].write(write), Accepted)
        assert await second.write(PutRooms(instance="p0", rooms=((5, 0), (6, 0)))) is None
        assert isinstance(await first.write(Renew(instance="p1", incarnation="p1-life")), Instance)
        await until(lambda: picture(first.table, first.now()) == picture(second.table, second.now()))
        assert first.table.ranks_total == 3 and first.table.rooms_total == 2
        assert abs(first.now() - second.now()) < 1_000


async def test_a_lease_runs_out_on_all_replicas(redis: RedisServer) -> None:
    async with replica(redis.url) as first, replica(redis.url) as second:
        await first.write(ours(lease_ms=400))
        await until(lambda: len(second.table.instances(second.now())) == 1)
        await until(lambda: not first.table.instances(first.now()) and not second.table.instances(second.now()))


async def test_without_redis_reads_go_on_and_no_lease_runs_out(redis: RedisServer) -> None:
    async with replica(redis.url) as first, replica(redis.url) as second:
        await first.write(ours(lease_ms=3_000))
        await until(lambda: second.table.ranks_total == 1)
        redis.stop()
        await until(lambda: not first.is_up and not second.is_up)
        with pytest.raises(StoreAway, match="does not answer"):
            await first.write(Renew(instance="p0", incarnation="p0-life"))
        await asyncio.sleep(3.5)  # longer than the lease: this is about time that passes
        assert [one.name for one in first.table.instances(first.now())] == ["p0"]
        redis.start()
        await until(lambda: first.is_up and second.is_up)
        assert [one.name for one in second.table.instances(second.now())] == ["p0"]
        assert isinstance(await first.write(Renew(instance="p0", incarnation="p0-life")), Instance)
        await until(lambda: picture(first.table, first.now()) == picture(second.table, second.now()))
        assert abs(first.now() - second.now()) < 1_000  # the absence is left out once, not once a replica


async def test_a_redis_that_forgot_everything_is_a_new_life(redis: RedisServer, tmp_path: Path) -> None:
    async with replica(redis.url) as store:
        await store.write(ours())
        life = store.table.incarnation
        redis.stop()
        shutil.rmtree(tmp_path / "appendonlydir")
        redis.start()
        await until(lambda: store.is_up and store.table.incarnation != life)
        assert store.table.ranks_total == 0  # workers notice the new life, and register again


async def test_the_log_is_cut_and_a_newcomer_begins_at_the_snapshot(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_redis, "SNAPSHOT_ENTRIES", 20)
    async with replica(redis.url) as first:
        await first.write(ours("p0"))
        await first.write(ours("p1", port=2))
        for number in range(100):
            await first.write(PutRooms(instance="p0", rooms=((number, 0),)))
            await first.write(Renew(instance="p0", incarnation="p0-life"))
        await first.write(Deregister(instance="p1", incarnation=None))
        async with replica(redis.url) as second:
            length = await second._writer.xlen(registry_redis.LOG)
            assert length < 150, "the log grows without end"
            assert picture(first.table, first.now()) == picture(second.table, second.now())


def test_a_table_is_made_again_from_its_history() -> None:
    table = RegistryTable("life", LIMITS)
    for rank in (0, 1):
        apply(table, ours("p0", rank, 2, lease_ms=5_000), 1_000)
    apply(table, PutRooms(instance="p0", rooms=((9, 0),)), 1_500)
    apply(table, PutRooms(instance=None, rooms=((8, 0),)), 1_600)
    again = RegistryTable("life", LIMITS)
    for at_ms, write in history(table, 2_000, LIMITS.room_ms):
        apply(again, write, at_ms)
    assert picture(again, 2_000) == picture(table, 2_000)
    assert [one.expires_at for one in again.instances(5_999)] == [6_000] and not again.instances(6_000)
