"""Registry replicas on a Redis, started as deploy/compose/redis.yaml says: they agree, and each may go, and Redis too.

As test_stack.py: `BATON_TEST_DOCKER=1 pytest -m slow tests/deploy/test_stack_redis.py`.
"""

import asyncio
import dataclasses
import json
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deploy.live import PORTS, PROJECT, Stack, docker, needs_docker
from deploy.live import eventually as waiting
from deploy.load import mixed
from integration.stack import eventually

pytestmark = needs_docker

REPLICAS = (1, 2)
AGREED_S, SCRAPED_S, BACK_S = 15.0, 60.0, 120.0
UID = 10001
WRITE = """
import json, sys, urllib.error, urllib.request as u
rooms = {"instance": "", "dp_ranks": {"7": 0}}
headers = {"content-type": "application/json"} | ({"authorization": "Bearer " + sys.argv[1]} if sys.argv[1:] else {})
ask = u.Request("http://127.0.0.1:8990/register_dp_rank", json.dumps(rooms).encode(), headers, method="POST")
try:
    print(u.urlopen(ask).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Replicas:
    """The stack with two registries on one Redis."""

    stack: Stack
    token: str

    def said(self, path: str) -> list[Any]:
        """What both answer."""
        return [json.loads(self.stack.inside("bootstrap", path, replica=one)) for one in REPLICAS]

    def known(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Of each: the life of the registry, and the workers that it knows with theirs."""
        return [
            (told["registry_incarnation"], sorted((one["instance"], one["incarnation"]) for one in told["instances"]))
            for told in self.said("/v1/instances")
        ]

    def agree(self) -> bool:
        """Whether both know the one prefill worker, in the same life, and take writes."""
        one, other = self.known()
        return one == other and len(one[1]) == 1 and all(told["takes_writes"] for told in self.said("/ready"))


@pytest.fixture(scope="module")
def replicas(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """The stack all tests share, with another registry while these run."""
    token, path = secrets.token_hex(24), tmp_path_factory.mktemp("secrets") / "registry_token"
    path.write_text(token)
    path.chmod(0o400)
    os.chown(path, UID, UID)
    changed = dataclasses.replace(
        stack,
        files=(*stack.files, "-f", "deploy/compose/redis.yaml"),
        more=(*stack.more, ("BATON_REGISTRY_TOKEN", str(path))),
    )
    # All anew, the router too: one that has served counts as ill while it is without prefill, and that ends the waiting.
    try:
        changed.up("--force-recreate", "--scale", "bootstrap=2")
        yield Replicas(changed, token)
    finally:
        changed.compose("rm", "--force", "--stop", "redis")
        stack.up("--force-recreate")
        docker("volume", "rm", f"{PROJECT}_redis-data")


@asynccontextmanager
async def load(stack: Stack) -> AsyncIterator[list[int]]:
    """All that clients do, until the block is left; the statuses of what was asked rightly."""
    statuses: list[int] = []
    is_over = False

    async def ask() -> None:
        while not is_over:
            statuses.extend(await mixed(stack.url, rounds=1))

    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        try:
            yield statuses
        finally:
            is_over = True


def is_healthy(container: str) -> bool:
    """Whether Docker says so; one that only runs may not listen yet."""
    return docker("inspect", "--format", "{{.State.Health.Status}}", container) == "healthy"


async def more(statuses: list[int], rounds: int) -> None:
    """Until so many further rounds are answered."""
    before = len(statuses)

    async def holds() -> bool:
        return len(statuses) >= before + 5 * rounds

    await eventually(holds, "requests are answered", within_s=BACK_S)


async def restart(stack: Stack, service: str) -> None:
    """A new life of a worker, once the old one has finished what it had."""

    async def serves() -> bool:
        return await asyncio.to_thread(stack.is_serving, service)

    await asyncio.to_thread(docker, "restart", "--time", "135", stack.container(service))
    await eventually(serves, f"{service} serves again", within_s=BACK_S)


def test_both_know_the_same_workers_and_prometheus_knows_both(replicas: Replicas) -> None:
    waiting(replicas.agree, "both agree", AGREED_S)

    def all_up() -> bool:
        health = replicas.stack.scraped()
        return set(health.values()) == {"up"} and len(health) == len(PORTS) + 1

    waiting(all_up, "Prometheus sees both replicas", SCRAPED_S)


def test_both_take_writes_with_the_token_only(replicas: Replicas) -> None:
    for one in REPLICAS:
        name = replicas.stack.container("bootstrap", one)
        assert docker("exec", name, "python", "-c", WRITE) == "401"
        assert docker("exec", name, "python", "-c", WRITE, replicas.token) == "200"


async def test_a_replica_that_is_killed_under_load_costs_no_request_and_is_told_what_it_missed(
    replicas: Replicas,
) -> None:
    stack, killed = replicas.stack, replicas.stack.container("bootstrap", 1)
    async with load(stack) as statuses:
        await more(statuses, 1)
        await asyncio.to_thread(docker, "kill", killed)
        await more(statuses, 2)
        # A new life must look prefill up at the one that is left.
        await restart(stack, "decode")
        await more(statuses, 2)
    assert set(statuses) == {200}
    # And prefill's must register there.
    await restart(stack, "prefill")
    assert set(await mixed(stack.url, rounds=1)) == {200}
    await asyncio.to_thread(docker, "start", killed)
    waiting(lambda: is_healthy(killed), "it answers again", BACK_S)
    waiting(replicas.agree, "both agree again", BACK_S)


async def test_a_redis_that_restarts_under_load_costs_no_request_and_forgets_nothing(replicas: Replicas) -> None:
    waiting(replicas.agree, "both agree", AGREED_S)
    before = replicas.known()
    async with load(replicas.stack) as statuses:
        await more(statuses, 1)
        await asyncio.to_thread(docker, "restart", replicas.stack.container("redis"))
        await more(statuses, 2)
    assert set(statuses) == {200}
    waiting(replicas.agree, "both agree again", AGREED_S)
    assert replicas.known() == before
