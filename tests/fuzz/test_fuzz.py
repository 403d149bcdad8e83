"""Fuzz in CI's time: every port that a running stack opens, and what is inside a worker (`make fuzz` throws more).

A failure names port, seed and case, and how to throw that one alone.
"""

import asyncio
import os
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from fuzz.inside_lanes import INSIDE
from fuzz.lanes import drive
from fuzz.ports import PORTS_OF_A_STACK, listeners
from fuzz.run import LIVE
from fuzz.stand import Stand, standing

CASES = int(os.environ.get("BATON_TEST_FUZZ_CASES", "10000"))
SEED = 1


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="module")
def stand(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with standing(tmp_path_factory.mktemp("fuzz")) as running:
        runner.run(running.begin())
        yield running


def test_no_port_of_a_running_stack_is_left_out(stand: Stand) -> None:
    found = {one.name for pid in stand.pids.values() for one in listeners(pid, stand)}
    assert found == set(PORTS_OF_A_STACK), "a port was opened or closed: give it a lane, and a line in fuzz/ports.py"
    assert set(PORTS_OF_A_STACK.values()) <= set(LIVE) | set(INSIDE)


@pytest.mark.parametrize("port", list(LIVE))
def test_whatever_is_said_to_a_port_the_stack_lives_and_the_next_answer_is_right(
    runner: asyncio.Runner, stand: Stand, port: str
) -> None:
    runner.run(drive(LIVE[port](stand), SEED, 0, CASES))


@pytest.mark.parametrize("port", list(INSIDE))
def test_whatever_strangers_say_inside_a_worker_its_ranks_hear_each_other(runner: asyncio.Runner, port: str) -> None:
    async def run() -> None:
        lane = INSIDE[port]()
        try:
            await drive(lane, SEED, 0, CASES)
        finally:
            await lane.close()

    runner.run(run())
