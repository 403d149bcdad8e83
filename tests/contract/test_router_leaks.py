"""Load counters over very many requests that end in every way (H10 of docs/reliability.md)."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator

import aiohttp
import pytest
import structlog
import uvloop
from aiohttp import web

from contract.fake_workers import (
    FakeWorker,
    Received,
    Script,
    World,
    answers,
    decodes,
    decodes_slowly,
    dies_after,
    event,
    is_silent,
    prefills,
    resets,
    tells,
    world,
)

ENDED = "baton_router_requests_total"
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the")
REQUESTS, AT_ONCE, ROUND = 10_000, 48, 2_000
SPREAD = 60
WAYS: dict[str, tuple[Script, ...]] = {
    "prefill": (*(prefills,) * 12, is_silent, resets, answers(400), answers(503)),
    "decode": (*(decodes, tells()) * 3, tells(dies_at=2), dies_after(event({"text": "a"})), is_silent, answers(500)),
}
BODIES: tuple[dict[str, object], ...] = (
    *({"text": "x", "stream": True},) * 6,
    *({"text": "x"},) * 3,
    {"text": ["x", "y"], "stream": True},
    {"text": "x", "sampling_params": {"n": 2}},
    {"text": 5},
)


async def as_told(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
    """A worker that does each request in the way that the request names."""
    worker.received.clear()  # ten thousand bodies are nobody's business
    return await WAYS[worker.role][received.body["ways"][worker.role]](worker, request, received)


async def leaves_somewhere(w: World, draw: random.Random) -> None:
    """One client: half of them leave, before the answer, in it, or within the request's body."""
    ways = {role: draw.randrange(len(scripts)) for role, scripts in WAYS.items()}
    is_silence = any(WAYS[role][way] is is_silent for role, way in ways.items())
    patience_s = draw.choice((None, None, 0.001 + draw.random() / 100, draw.random() / 10))
    call = w.client.post(
        json=draw.choice(BODIES) | {"ways": ways}, headers={"x-baton-budget-ms": "100" if is_silence else "30000"}
    )
    try:
        async with asyncio.timeout(patience_s), call as response:
            if draw.random() < 0.3:
                await response.content.readany()
                response.close()  # in the middle of the answer
            else:
                await response.read()
    except (TimeoutError, aiohttp.ClientError):
        return


async def leaves_nowhere(w: World) -> None:
    async with w.client.post() as response:
        assert response.status == 200
        await response.read()


async def all_clients(count: int, client: Callable[[], "asyncio.Future[None]"]) -> None:
    """`count` clients, some at a time."""
    left = iter(range(count))

    async def one_after_another() -> None:
        for _ in left:
            await client()

    await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))


async def figures_of(w: World) -> dict[str, float]:
    """Every series of the router."""
    _, text = await w.client.get("/metrics")
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def ended(figures: dict[str, float]) -> float:
    """Requests that the router saw the end of; clients that left before it heard of them are not among them."""
    return sum(value for name, value in figures.items() if name.startswith(ENDED))


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """As the router runs in production."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Ten thousand lines of log are nobody's business either."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("quiet")
async def test_ten_thousand_requests_with_disconnects_at_any_moment_leave_every_counter_at_zero() -> None:
    """H10, H19. A restarted worker then takes its share and no more."""
    draw = random.Random(8)
    settings = {"decode_policy": "least_load", "breaker_failures_max": 1_000_000, "retries": 1, "probe_interval_ms": 50}
    async with (
        world((as_told,) * 2, (as_told,) * 3, **settings) as w,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        w.client.session = session
        figures: dict[str, float] = {}
        while ended(figures) < REQUESTS:
            await all_clients(ROUND, lambda: asyncio.ensure_future(leaves_somewhere(w, draw)))
            await w.idle()
            figures = await figures_of(w)
        statuses = {name for name, value in figures.items() if name.startswith(ENDED) and value}
        assert len(statuses) >= 6, "requests ended in many ways"
        loads = {name: value for name, value in figures.items() if "target_inflight" in name or "target_load" in name}
        assert len(loads) == 10 and set(loads.values()) == {0.0}
        assert figures["baton_router_queue_requests"] == 0

        for worker in w.prefill + w.decode:
            worker.script = prefills if worker.role == "prefill" else decodes
        w.decode[0].info["incarnation"] = "life-2"
        await w.client.until("/server_info", lambda _, body: body["workers"][2]["incarnation"] == "life-2")
        for worker in w.decode:
            worker.received.clear()
            worker.script = decodes_slowly
        asked = [asyncio.create_task(leaves_nowhere(w)) for _ in range(SPREAD)]
        await w.client.until(
            "/server_info", lambda _, body: sum(one["in_flight"] for one in body["workers"][2:]) == SPREAD
        )
        for worker in w.decode:
            worker.release.set()
        await asyncio.gather(*asked)
        assert [len(worker.received) for worker in w.decode] == [SPREAD // 3] * 3
        await w.idle()
