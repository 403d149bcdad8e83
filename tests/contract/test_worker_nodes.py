"""A worker on two nodes, both on this machine: real processes and sockets; only the schedulers are scripted."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from baton_core.limits import Limits
from baton_worker.app import create_app
from baton_worker.config import DecodeConfig, Role
from baton_worker.materials import Materials
from baton_worker.models import resolve_model
from baton_worker.node_app import Node
from baton_worker.nodes import Hub
from baton_worker.serving import Site, listen, monotonic_ms, port_of, serve
from baton_worker.tokenizer import Tokenizer
from baton_worker.worker import State, Worker
from contract.worker_apps import LIMITS, SCRIPTED_RANK, Running, ScriptedCompanion, model_tokenizer
from ports import free_port

FAST = replace(LIMITS, start_ms=10_000, link_silent_ms=2_500)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return model_tokenizer()


@dataclass
class TwoNodes:
    """Node 0 as a worker that serves, and node 1."""

    running: Running
    node: Node
    node_http: httpx.AsyncClient
    node_exit: "asyncio.Task[int]"


class Nodes:
    """`async with nodes(tp=2) as both`: a worker of two nodes, ready."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.port = free_port(in_a_row=2)

    def config(self, node_rank: int, limits: Limits = FAST, **options: Any) -> DecodeConfig:
        address = f"127.0.0.1:{self.port}"
        return DecodeConfig(limits=limits, nnodes=2, node_rank=node_rank, dist_init_addr=address, **options)

    def materials(self, life: str) -> Materials:
        return Materials(
            role=Role.DECODE,
            incarnation=life,
            model=resolve_model("smollm2-135m-instruct"),
            tokenizer=self._tokenizer,
            rank_command=(sys.executable, str(SCRIPTED_RANK)),
        )

    def node(self, config: DecodeConfig) -> tuple[Node, int, "asyncio.Task[int]"]:
        """Start a node that is not the first: it, its HTTP port, and its exit code to come."""
        listener = listen("127.0.0.1", 0)
        node = Node(config, self.materials("a life that nobody hears of"), monotonic_ms)
        return node, port_of(listener), asyncio.create_task(serve(node, [Site(node.app(), listener)]))

    @asynccontextmanager
    async def __call__(self, **options: Any) -> AsyncIterator[TwoNodes]:
        node, node_port, node_exit = self.node(self.config(1, **options))  # first: it waits for node 0
        listener = listen("127.0.0.1", 0)
        worker = Worker(
            config=self.config(0, **options),
            materials=self.materials("life1"),
            own_bootstrap=("127.0.0.1", 8998),
            companion=ScriptedCompanion(),
            clock=monotonic_ms,
        )
        exit_code = asyncio.create_task(serve(worker, [Site(create_app(worker), listener)]))
        base = f"http://127.0.0.1:{port_of(listener)}"
        async with (
            httpx.AsyncClient(base_url=base, timeout=10) as http,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{node_port}", timeout=10) as node_http,
        ):
            running = Running(worker, http, port_of(listener), exit_code)
            await until(lambda: worker.state is not State.STARTING)
            yield TwoNodes(running, node, node_http, node_exit)
        worker.terminate()
        async with asyncio.timeout(15):
            await exit_code
            await node_exit


async def until(holds: Callable[[], bool], limit_s: float = 15.0) -> None:
    async with asyncio.timeout(limit_s):
        while True:
            if holds():
                return
            await asyncio.sleep(0.005)


async def test_two_nodes_are_one_worker_which_node_0_serves_and_ends(tokenizer: Tokenizer) -> None:
    async with Nodes(tokenizer)(tp=2, dp=2) as both:
        running = both.running
        answers = [(await running.ask(f"echo-{index}", "Hello there")).json() for index in range(2)]
        info = (await running.http.get("/server_info")).json()
        seen = await running.worker.fresh_snapshots(2_000)
        health = (await both.node_http.get("/health")).status_code
        absent = (await both.node_http.post("/generate", json={"text": "Hi"})).status_code
        running.worker.terminate()
        assert await running.exit_code == 0
        assert await both.node_exit == 0
    assert [(one["text"], one["meta_info"]["dp_rank"]) for one in answers] == [("Hello there", 0), ("Hello there", 1)]
    assert [(one["rank"], one["dp_rank"]) for one in info["ranks"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert len({one["pid"] for one in info["ranks"]}) == 4 and info["kv_pages"] == 61
    assert [one.gauges.get("seen{event=Submit}", 0) for one in seen] == [1, 0, 1, 0]
    assert (health, absent) == (200, 404)


async def test_a_rank_that_dies_on_another_node_fails_its_unit_by_name(tokenizer: Tokenizer) -> None:
    async with Nodes(tokenizer)(tp=2) as both:
        asked = asyncio.create_task(both.running.ask("mute-1"))
        await until(lambda: len(both.running.worker.streams) == 1)
        both.running.kill(1)
        answer = await asked
        assert await both.running.exit_code == 1
        assert await both.node_exit == 1
    assert answer.status_code == 500
    assert "rank 1 was ended by signal SIGKILL" in answer.json()["error"]["message"]


async def test_the_ranks_of_a_lost_unit_are_killed_on_every_node(tokenizer: Tokenizer) -> None:
    async with Nodes(tokenizer)(tp=4) as both:
        pids = [rank.pid or 0 for rank in both.running.worker.units.ranks]
        both.running.kill(0)
        assert await both.running.exit_code == 1
        assert await both.node_exit == 1
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_unit_on_another_node_may_die_while_those_here_finish(tokenizer: Tokenizer) -> None:
    async with Nodes(tokenizer)(dp=2) as both:
        running = both.running
        asked = asyncio.create_task(running.ask("hold-1", routed_dp_rank=0))
        await running.until_rank_saw("live")
        running.kill(1)
        await until(lambda: running.worker.state is State.DRAINING)
        await running.http.post("/abort_request", json={"rid": "hold-1"})
        assert (await asked).status_code == 200
        assert await running.exit_code == 1
        assert await both.node_exit == 1


async def test_a_node_without_node_0_ends(tokenizer: Tokenizer) -> None:
    async with Nodes(tokenizer)(tp=2) as both:
        hub = both.running.worker._hub
        assert isinstance(hub, Hub) and hub._socket is not None
        hub._socket.close(linger=0)  # as if node 0 were gone
        hub._socket = None
        async with asyncio.timeout(10):
            assert await both.node_exit == 1


async def test_a_silent_node_fails_its_ranks_by_name(tokenizer: Tokenizer) -> None:
    async with Nodes(tokenizer)(tp=2) as both:
        asked = asyncio.create_task(both.running.ask("mute-1"))
        await until(lambda: len(both.running.worker.streams) == 1)
        assert both.node._life is not None
        both.node._life.cancel()  # it says nothing any more
        answer = await asked
        assert await both.running.exit_code == 1
    assert answer.status_code == 500
    assert "rank 1 is on node 1, silent for 2500 ms" in answer.json()["error"]["message"]


async def test_a_node_of_another_layout_is_refused_with_both(tokenizer: Tokenizer) -> None:
    nodes = Nodes(tokenizer)
    async with nodes(tp=2) as both:
        _, _, exit_code = nodes.node(nodes.config(1, tp=4))
        async with asyncio.timeout(10):
            assert await exit_code == 1
        assert both.running.worker.state is State.SERVING


async def test_nobody_waits_for_ever_for_a_node(tokenizer: Tokenizer) -> None:
    nodes = Nodes(tokenizer)
    limits = replace(FAST, start_ms=300)
    listener = listen("127.0.0.1", 0)
    worker = Worker(
        config=nodes.config(0, limits, tp=2),
        materials=nodes.materials("life1"),
        own_bootstrap=("127.0.0.1", 8998),
        companion=ScriptedCompanion(),
        clock=monotonic_ms,
    )
    async with asyncio.timeout(10):
        assert await serve(worker, [Site(create_app(worker), listener)]) == 1
        _, _, exit_code = nodes.node(nodes.config(1, limits, tp=2))
        assert await exit_code == 1
