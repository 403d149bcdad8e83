"""One of two decode containers is killed, paused, cut off or restarted under load: no stream that can go on may end badly.

As test_stack.py: `BATON_TEST_DOCKER=1 pytest -m slow tests/deploy/test_stack_faults.py`.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from deploy.live import PROJECT, Stack, docker, eventually, needs_docker
from deploy.load import Streams

pytestmark = needs_docker

STREAMS = 4
MORE_ANSWERS = 6
"""That must end well between a fault and its end, and after it."""
HEALED_S = 120.0
VICTIM, OTHER = "decode-2", "decode"
NETWORK = f"{PROJECT}_kv"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to the container, and what undoes it."""

    name: str
    hurt: Callable[[str], object]
    heal: Callable[[str], object]
    is_new_life: bool  # the worker that comes back is another one


FAULTS = (
    Fault("killed", lambda name: docker("kill", name), lambda name: docker("start", name), is_new_life=True),
    Fault("paused", lambda name: docker("pause", name), lambda name: docker("unpause", name), is_new_life=False),
    Fault(
        "cut off",
        lambda name: docker("network", "disconnect", NETWORK, name),
        lambda name: docker("network", "connect", "--alias", VICTIM, "--alias", "decode-workers", NETWORK, name),
        is_new_life=False,
    ),
    Fault("restarted", lambda name: docker("restart", "-t", "135", name), lambda _name: None, is_new_life=True),
)


async def until(holds: Callable[[], object], what: str, load: Streams) -> None:
    """Ask off the event loop, which carries the load, until it holds."""
    try:
        await asyncio.to_thread(eventually, holds, what, HEALED_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; {load.ended} streams ended, failures: {load.failures}") from error


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
async def test_streams_survive_a_decode_container_that_is(stack: Stack, fault: Fault) -> None:
    container = stack.container(VICTIM)
    await asyncio.to_thread(eventually, lambda: stack.is_serving(VICTIM) and stack.is_serving(OTHER), "two decodes", 60)
    first_life = stack.router()[VICTIM]["incarnation"]
    load, stop = Streams(stack.url), asyncio.Event()
    async with asyncio.TaskGroup() as streams:
        try:
            for number in range(STREAMS):
                streams.create_task(load.keep(number, stop))
            await until(lambda: load.ended >= STREAMS and in_flight(stack, VICTIM), "the victim has streams", load)
            await asyncio.to_thread(fault.hurt, container)
            ended = load.ended
            await until(lambda: load.ended >= ended + MORE_ANSWERS, "streams go on without the victim", load)
            await asyncio.to_thread(fault.heal, container)
            await until(lambda: stack.is_serving(VICTIM), "the victim serves again", load)
            await until(lambda: in_flight(stack, VICTIM), "and has streams again", load)
        finally:
            stop.set()
    assert load.failures == []
    assert (stack.router()[VICTIM]["incarnation"] != first_life) is fault.is_new_life
    for service in ("prefill", VICTIM, OTHER):
        await asyncio.to_thread(eventually, lambda one=service: at_rest(stack, one), f"{service} holds nothing", 30)


def in_flight(stack: Stack, service: str) -> bool:
    """Whether the router has legs there now."""
    return bool(stack.router()[service]["in_flight"])


def at_rest(stack: Stack, service: str) -> bool:
    """Whether nothing is live there, and all pages but the cached ones are free."""
    snapshot = json.loads(stack.inside(service, "/debug/snapshot"))
    gauges = snapshot["snapshot"]["gauges"]
    return (
        snapshot["live_requests"] == gauges["live_requests"] == gauges["quarantined_pages"] == 0
        and gauges["pages_free"] + gauges["pages_cached"] == gauges["pages"]
        and gauges.get("rows_free") == gauges.get("rows")
    )
