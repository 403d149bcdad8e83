"""One of two decode containers is killed, paused, cut off or restarted under load, and no request is lost (S11, R9).

As test_stack.py: `BATON_TEST_DOCKER=1 pytest -m slow tests/deploy/test_stack_faults.py`. The stack computes in float32, so
that each answer is held against every token of the one that was given while nothing was wrong.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import docker
import pytest

from deploy.known import Asked, Known, learn, load
from deploy.live import PROJECT, Stack, needs_docker
from integration.stack import eventually

pytestmark = needs_docker

VICTIM, OTHER = "decode", "decode-2"
KV = f"{PROJECT}_kv"
CLIENTS = 6
AWAY_REQUESTS = 6
"""So many are asked and answered while one is away."""
BACK_REQUESTS = 2
"""So many are answered by the one that is back."""
BEGIN_S, SEEN_S, AWAY_S, BACK_S, CALM_S = 60.0, 15.0, 240.0, 240.0, 60.0
SILENCE_S = 10.0
"""The router's `worker_silence_ms`: so long a frozen worker keeps what it has."""
SLACK_S = 5.0
NOTICE_S = 2.5
"""What a stream next door may stand still: less than the shortest time after which somebody silent is given up."""


class Engine:
    """Docker itself, through its SDK."""

    def __init__(self, stack: Stack) -> None:
        self._client = docker.from_env()
        self._victim = self._client.containers.get(stack.container(VICTIM))

    def kill(self) -> None:
        """SIGKILL, to all of it."""
        self._victim.kill()

    def start(self) -> None:
        """After `kill`."""
        self._victim.start()

    def pause(self) -> None:
        """All of its processes stand still; its connections stay."""
        self._victim.pause()

    def unpause(self) -> None:
        """They go on, as if nothing had been."""
        self._victim.unpause()

    def cut(self) -> None:
        """It runs on and reaches nobody, and no connection hears of it."""
        self._client.networks.get(KV).disconnect(self._victim)

    def join(self) -> None:
        """After `cut`."""
        self._client.networks.get(KV).connect(self._victim, aliases=[VICTIM, "decode-workers"])

    def restart(self) -> None:
        """SIGTERM, as long as it needs, and a new life."""
        self._victim.restart(timeout=135)

    def heal(self) -> None:
        """Whatever a test that failed has left."""
        self._victim.reload()
        if self._victim.status == "paused":
            self.unpause()
        elif self._victim.status != "running":
            self.start()
        if KV not in self._victim.attrs["NetworkSettings"]["Networks"]:
            self.join()


@dataclass(frozen=True, slots=True)
class Field:
    """The stack, its engine, and what is asked of it."""

    stack: Stack
    engine: Engine
    known: list[Known]


@pytest.fixture(scope="module")
def known(stack: Stack) -> list[Known]:
    """What is asked, and what must be answered."""
    return asyncio.run(learn(stack.url))


@pytest.fixture
def ground(stack: Stack, known: list[Known]) -> Iterator[Field]:
    """Whole before and after."""
    field = Field(stack, Engine(stack), known)
    yield field
    field.engine.heal()


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What became of a drill. Times are `time.monotonic`'s."""

    asked: list[Asked]
    logged: dict[str, dict[str, Any]]  # by request: what the router says
    hurt_s: float
    away_s: float  # the router sends nothing there any more
    last_away_s: float  # the router still did not: a look before the last one that saw so
    back_s: float  # the router sends there again
    is_same_life: bool  # it is the process that it was before

    def at(self, service: str, among: list[Asked]) -> list[Asked]:
        """Those that this worker alone answered, at the first try."""
        return [one for one in among if self.stayed(one) and f"//{service}:" in self.logged[one.rid]["decode"]]

    def stayed(self, one: Asked) -> bool:
        """Whether it was answered where it was first sent."""
        told = self.logged[one.rid]
        return bool(told["attempts"] == 1 and told["migrations"] == 0)

    @property
    def moved(self) -> list[Asked]:
        """Those that were begun again, or gone on with, elsewhere."""
        return [one for one in self.asked if not self.stayed(one)]


async def drill(field: Field, name: str, hurt: Callable[[], None], heal: Callable[[], None] | None) -> Story:
    """Hurt one of two under load, wait until others are served without it, and heal it; `heal` None: it comes by itself."""
    stack, looks_s = field.stack, list[float]()

    async def serves(service: str) -> bool:
        return await asyncio.to_thread(stack.is_serving, service)

    async def both_stream() -> bool:
        workers = await asyncio.to_thread(stack.router)
        live = sum(one.is_stream and one.is_live(time.monotonic()) for one in asked)
        return live >= CLIENTS / 2 and all(workers[one]["in_flight"] >= 2 for one in (VICTIM, OTHER))

    async def life() -> str:
        return str((await asyncio.to_thread(stack.router))[VICTIM]["incarnation"])

    async def is_away() -> bool:
        return not await serves(VICTIM)

    async def is_back() -> bool:
        looks_s.append(time.monotonic())
        return await serves(VICTIM)

    def answered_since(since_s: float, service: str, number: int) -> Callable[[], Any]:
        async def holds() -> bool:
            over = [one.rid for one in asked if one.began_s > since_s and one.ended_s is not None]
            if len(over) < number:
                return False
            logged = await asyncio.to_thread(stack.finished)
            return sum(f"//{service}:" in logged.get(rid, {"decode": ""})["decode"] for rid in over) >= number

        return holds

    async with load(stack.url, field.known, CLIENTS, name) as asked:
        await eventually(both_stream, "both stream", within_s=BEGIN_S)
        before, hurt_s = await life(), time.monotonic()
        hurting = asyncio.create_task(asyncio.to_thread(hurt))
        await eventually(is_away, f"{VICTIM} is seen to be away", within_s=SEEN_S)
        away_s = time.monotonic()
        # Watched from now on: one that is restarted comes back when it likes.
        returning = asyncio.create_task(eventually(is_back, f"{VICTIM} serves again", within_s=AWAY_S + BACK_S))
        try:
            await eventually(answered_since(away_s, OTHER, AWAY_REQUESTS), "others are served", within_s=AWAY_S)
            await hurting
            if heal is not None:
                await asyncio.to_thread(heal)
            await returning
        finally:
            returning.cancel()
        after, back_s = await life(), time.monotonic()
        await eventually(answered_since(back_s, VICTIM, BACK_REQUESTS), f"{VICTIM} has its share", within_s=AWAY_S)
    logged = await asyncio.to_thread(stack.finished)
    return Story(
        asked=asked,
        logged=logged,
        hurt_s=hurt_s,
        away_s=away_s,
        last_away_s=looks_s[-3],
        back_s=back_s,
        is_same_life=before == after,
    )


async def check(field: Field, story: Story, *, moves: bool, is_same_life: bool, stands_still_s: float) -> None:
    """Nobody lost anything; who was elsewhere did not notice; who came then went elsewhere; nothing is left behind."""
    wrong = {one.rid: (one.wrong, story.logged.get(one.rid)) for one in story.asked if one.wrong is not None}
    assert not wrong
    assert story.is_same_life is is_same_life
    live = [one for one in story.asked if one.is_live(story.hurt_s)]
    bystanders = story.at(OTHER, live)
    gaps_s = [max((one.longest_gap_s for one in some), default=0.0) for some in (bystanders, story.moved)]
    print(
        f"longest gap of {len(bystanders)} next door {gaps_s[0]:.2f} s, of {len(story.moved)} that moved {gaps_s[1]:.2f} s"
    )
    assert len(bystanders) >= 2
    assert all(one.longest_gap_s < NOTICE_S for one in bystanders), [one.longest_gap_s for one in bystanders]
    assert bool(story.moved) is moves, [story.logged[one.rid] for one in story.moved]
    assert all(one.longest_gap_s < stands_still_s for one in story.moved), [one.longest_gap_s for one in story.moved]
    newcomers = [one for one in story.asked if story.away_s < one.began_s < story.last_away_s]
    assert len(newcomers) >= AWAY_REQUESTS and story.at(OTHER, newcomers) == newcomers
    late = [one for one in story.asked if one.began_s > story.back_s]
    assert all(map(story.stayed, late)), [story.logged[one.rid] for one in late if not story.stayed(one)]
    assert len(story.at(VICTIM, late)) >= BACK_REQUESTS

    async def calm() -> bool:
        found = [await asyncio.to_thread(field.stack.gauges, one) for one in ("prefill", VICTIM, OTHER)]
        return all(
            not one["live_requests"]
            and not one.get("quarantined_pages")
            and one["pages_free"] + one["pages_cached"] == one["pages"]
            for one in found
        )

    await eventually(calm, "nothing is left of any of them", within_s=CALM_S)


async def test_a_decode_container_that_is_killed_loses_no_request_and_serves_again_once_it_is_started(
    ground: Field,
) -> None:
    story = await drill(ground, "kill", ground.engine.kill, ground.engine.start)
    await check(ground, story, moves=True, is_same_life=False, stands_still_s=SLACK_S)


async def test_a_decode_container_that_is_paused_loses_no_request_and_serves_again_once_it_goes_on(
    ground: Field,
) -> None:
    story = await drill(ground, "pause", ground.engine.pause, ground.engine.unpause)
    await check(ground, story, moves=True, is_same_life=True, stands_still_s=SILENCE_S + SLACK_S)


async def test_a_decode_container_that_is_cut_off_loses_no_request_and_serves_again_once_it_is_reached(
    ground: Field,
) -> None:
    story = await drill(ground, "cut", ground.engine.cut, ground.engine.join)
    await check(ground, story, moves=True, is_same_life=True, stands_still_s=SILENCE_S + SLACK_S)


async def test_a_decode_container_that_is_restarted_finishes_what_it_has_and_nobody_notices(ground: Field) -> None:
    story = await drill(ground, "restart", ground.engine.restart, None)
    await check(ground, story, moves=False, is_same_life=False, stands_still_s=NOTICE_S)
