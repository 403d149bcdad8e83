"""A worker of many ranks over real HTTP, real ipc and real processes: who gets what, and what is left when one dies."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton_worker.config import Role
from baton_worker.tokenizer import Tokenizer
from baton_worker.worker import State
from contract.worker_apps import (
    LIMITS,
    ROOM,
    Running,
    ScriptedAnnouncer,
    ScriptedCompanion,
    Start,
    model_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return model_tokenizer()


@pytest.fixture
def start(tokenizer: Tokenizer) -> Start:
    return Start(tokenizer)


def unit_of(answer: Any) -> int:
    return int(answer.json()["meta_info"]["dp_rank"])


@asynccontextmanager
async def streaming(running: Running, rid: str, dp_rank: int) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """A stream on this unit, after its first token; yields its further events."""
    ask = {"text": "Hi", "rid": rid, "stream": True, "routed_dp_rank": dp_rank}
    async with running.http.stream("POST", "/generate", json=ask) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()

        async def events() -> AsyncIterator[dict[str, Any]]:
            async for line in lines:
                if line and not line.endswith("[DONE]"):
                    yield json.loads(line.removeprefix("data: "))

        told = events()
        first = await anext(told)
        assert first["meta_info"]["dp_rank"] == dp_rank
        yield told


# -- many ranks, one worker


async def test_a_worker_of_two_stages_of_two_is_ready_with_what_its_least_rank_has(start: Start) -> None:
    companion = ScriptedCompanion()
    async with start(companion=companion, tp=2, pp=2) as running:
        body = (await running.ask("echo-1", "Hello there")).json()
        info = (await running.http.get("/server_info")).json()
        seen = await running.worker.fresh_snapshots(2_000)
    assert body["text"] == "Hello there"
    assert (info["tp_size"], info["pp_size"], info["dp_size"]) == (2, 2, 1)
    assert (info["kv_pages"], info["context_tokens"], info["kv_bytes"]) == (61, 509, 4 * 4_096)
    assert [(one["rank"], one["pp_rank"], one["tp_rank"]) for one in info["ranks"]] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert len({one["pid"] for one in info["ranks"]}) == 4
    assert [ready.rank for ready in companion.readies] == [0, 1, 2, 3]
    assert [one.gauges.get("seen{event=Submit}", 0) for one in seen] == [1, 0, 0, 0], "only the leader gets requests"


async def test_the_longest_prompt_is_what_every_rank_can_hold(start: Start) -> None:
    async with start(tp=2) as running:
        fits = await running.http.post("/generate", json={"input_ids": [5] * 510, "rid": "echo-1"})
        answer = await running.http.post("/generate", json={"input_ids": [5] * 511, "rid": "echo-2"})
    assert (fits.status_code, answer.status_code) == (200, 400)
    assert "511" in answer.json()["error"]["message"]


async def test_all_ranks_leave_when_the_worker_does(start: Start) -> None:
    async with start(tp=2, dp=2) as running:
        pids = [rank.pid or 0 for rank in running.worker.units.ranks]
        running.worker.terminate()
        assert await running.exit_code == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# -- which unit


async def test_decode_takes_units_in_turn_and_a_named_one_wins(start: Start) -> None:
    async with start(dp=2) as running:
        turns = [unit_of(await running.ask(f"echo-{index}")) for index in range(4)]
        named = [unit_of(await running.ask(f"named-{index}", routed_dp_rank=1)) for index in range(2)]
        old_name = unit_of(await running.ask("echo-9", data_parallel_rank=1))
        wrong = await running.ask("echo-10", routed_dp_rank=2)
    assert turns == [0, 1, 0, 1]
    assert named == [1, 1]
    assert old_name == 1
    assert wrong.status_code == 400
    message = "routed_dp_rank 2 is out of range: this worker has dp_size 2"
    assert wrong.json()["error"]["message"] == message


async def test_prefill_follows_the_room_unless_a_unit_is_named(start: Start) -> None:
    async with start(Role.PREFILL, dp=2) as running:
        followed = [unit_of(await running.ask(f"e-{room}", **ROOM | {"bootstrap_room": room})) for room in (4, 7, 9)]
        named = unit_of(await running.ask("e-named", **ROOM, routed_dp_rank=0, disagg_prefill_dp_rank=0))
        agreed = unit_of(await running.ask("e-agreed", **ROOM, disagg_prefill_dp_rank=0))
        astray = await running.ask("e-astray", **ROOM, routed_dp_rank=0)
        wrong = await running.ask("e-wrong", **ROOM, disagg_prefill_dp_rank=2)
    assert followed == [0, 1, 1]
    assert (named, agreed) == (0, 0), "room 77 would follow to 1, but decode is told to look on 0"
    assert (astray.status_code, astray.json()["error"]["reason"]) == (400, "dp_conflict"), "decode would look on 1"
    assert (wrong.status_code, wrong.json()["error"]["reason"]) == (400, "invalid_request")
    assert "disagg_prefill_dp_rank 2 is out of range: this worker has dp_size 2" in wrong.json()["error"]["message"]


async def test_the_idlest_unit_takes_the_next_request(start: Start) -> None:
    async with (
        start(dp=2, load_balance_method="least_load") as running,
        streaming(running, "hold-1", 0),
        streaming(running, "hold-2", 0),
    ):
        assert [unit_of(await running.ask(f"echo-{index}")) for index in range(3)] == [1, 1, 1]


async def test_a_refusal_with_a_room_reaches_the_unit_that_the_room_belongs_to(start: Start) -> None:
    async with start(Role.PREFILL, dp=2) as running:
        for changes in ({"sampling_params": {"n": 2}}, {"routed_dp_rank": 5}, {"disagg_prefill_dp_rank": 5}):
            answer = await running.http.post("/generate", json={"text": "Hi"} | ROOM | changes)
            assert answer.status_code == 400
        async with asyncio.timeout(5):
            while True:
                seen = await running.worker.fresh_snapshots(2_000)
                if seen[1].gauges.get("rejected{reason=invalid_request}", 0) == 3:
                    break
    assert "rejected{reason=invalid_request}" not in seen[0].gauges


async def test_what_is_said_to_all_reaches_every_unit(start: Start) -> None:
    async with start(dp=2, tp=2) as running:
        asked = [asyncio.create_task(running.ask(f"mute-{index}")) for index in range(2)]
        await running.until(lambda: len(running.worker.streams) == 2)
        assert [running.worker.streams.live(dp_rank) for dp_rank in (0, 1)] == [1, 1]
        await running.http.post("/abort_request", json={"abort_all": True})
        statuses = [(await one).status_code for one in asked]
        assert (await running.http.post("/flush_cache")).status_code == 200
        assert (await running.http.post("/pause_generation", json={"mode": "sleep"})).status_code == 400
        assert (await running.http.post("/pause_generation", json={"mode": "retract"})).status_code == 200
        assert (await running.http.post("/continue_generation")).status_code == 200
        assert (await running.http.get("/health_generate")).status_code == 200
        seen = await running.worker.fresh_snapshots(2_000)
    assert statuses == [200, 200]
    for event in ("AbortAll", "FlushCache", "Pause", "Continue"):
        counts = [one.gauges.get(f"seen{{event={event}}}", 0) for one in seen]
        assert counts == [1, 0, 1, 0], event


async def test_a_look_up_is_answered_to_the_unit_that_asked(start: Start) -> None:
    async with start(dp=2) as running:
        answer = await running.ask("look-1", **ROOM, routed_dp_rank=1)
        seen = await running.worker.fresh_snapshots(2_000)
    assert answer.json()["error"]["message"] == "room 77"
    assert [one.gauges.get("seen{event=Resolved}", 0) for one in seen] == [0, 1]


# -- rooms that registries must know


async def test_a_registered_room_is_open_as_long_as_its_request(start: Start) -> None:
    announcer = ScriptedAnnouncer()
    async with start(Role.PREFILL, announcer=announcer, dp=2, load_balance_method="round_robin") as running:
        asked = asyncio.create_task(running.ask("reg-1", **ROOM, routed_dp_rank=1))
        await running.until(lambda: bool(announcer.told))
        assert announcer.told == ["room 77 on 1"]
        await running.http.post("/abort_request", json={"rid": "reg-1"})
        await asked
    assert announcer.told == ["room 77 on 1", "room 77 over without an answer"]


# -- what operators see


async def test_load_and_metrics_are_told_unit_by_unit(start: Start) -> None:
    async with start(dp=2) as running, streaming(running, "hold-1", 1):
        await running.worker.fresh_snapshots(2_000)
        loads = (await running.http.get("/v1/loads")).json()["loads"]
        metrics = (await running.http.get("/metrics")).text
        debug = (await running.http.get("/debug/snapshot")).json()
    assert [(one["dp_rank"], one["num_running_reqs"], one["num_used_tokens"]) for one in loads] == [
        (0, 0, 0),
        (1, 1, 16),
    ]
    assert 'baton_decode_queue_requests{dp_rank="1",queue="running"} 1.0' in metrics
    assert 'baton_decode_pages_free{dp_rank="0"} 64.0' in metrics
    assert debug["snapshot"]["gauges"]["live"] == 1
    assert [one["gauges"]["live"] for one in debug["ranks"]] == [0, 1]


# -- the end of a unit


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2, "dp_attention": True}])
async def test_a_dead_rank_of_the_only_unit_or_of_any_in_step_ends_the_worker_at_once(
    start: Start, layout: dict[str, Any]
) -> None:
    async with start(**layout) as running:
        pids = [rank.pid or 0 for rank in running.worker.units.ranks]
        asked = [asyncio.create_task(running.ask(f"mute-{index}")) for index in range(2)]
        await running.until(lambda: len(running.worker.streams) == 2)
        running.kill(1)
        answers = [await one for one in asked]
        async with asyncio.timeout(5):
            assert await running.exit_code == 1
    assert [answer.status_code for answer in answers] == [500, 500]
    assert {answer.json()["error"]["reason"] for answer in answers} == {"worker_lost"}
    assert "rank 1 was ended by signal SIGKILL" in answers[0].json()["error"]["message"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_under_plain_dp_the_other_units_stream_on_and_then_the_worker_ends(start: Start) -> None:
    announcer = ScriptedAnnouncer()
    async with start(dp=2, tp=2, announcer=announcer) as running:
        sibling = running.worker.units.ranks[2].pid or 0
        async with streaming(running, "hold-0", 0) as survivor, streaming(running, "hold-1", 1) as victim:
            running.kill(3)
            failed = [event async for event in victim]
            await running.until(lambda: running.worker.state is State.DRAINING)
            refused = await running.ask("echo-1")
            unready = await running.http.get("/ready")
            assert not running.exit_code.done(), "a stream is still running"
            await running.http.post("/abort_request", json={"rid": "hold-0"})
            rest = [event async for event in survivor]
        async with asyncio.timeout(5):
            assert await running.exit_code == 1
    why = "decode worker lost its scheduler of DP rank 1: rank 3 was ended by signal SIGKILL"
    assert [event["error"]["code"] for event in failed] == [500]
    assert failed[0]["error"]["message"] == why
    assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "draining")
    assert why in refused.json()["error"]["message"]
    assert (unready.status_code, unready.json()["reasons"]) == (503, ["the worker is draining", why])
    assert rest[-1]["meta_info"]["finish_reason"]["message"] == "aborted by request"
    assert announcer.told == ["unit 1 lost"]
    with pytest.raises(ProcessLookupError):
        os.kill(sibling, 0)


async def test_with_nothing_left_to_finish_a_lost_unit_is_the_end(start: Start) -> None:
    async with start(dp=2) as running:
        running.kill(0)
        async with asyncio.timeout(5):
            assert await running.exit_code == 1


async def test_what_does_not_finish_within_the_drain_limit_is_cut(start: Start) -> None:
    async with start(dp=2, limits=replace(LIMITS, drain_ms=100)) as running:
        asked = asyncio.create_task(running.ask("mute-1", routed_dp_rank=0))
        await running.until(lambda: len(running.worker.streams) == 1)
        running.kill(1)
        answer = await asked
        async with asyncio.timeout(5):
            assert await running.exit_code == 1
    assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "draining")


async def test_when_the_last_unit_dies_too_nobody_waits(start: Start) -> None:
    async with start(dp=2) as running:
        asked = asyncio.create_task(running.ask("mute-1", routed_dp_rank=0))
        await running.until(lambda: len(running.worker.streams) == 1)
        running.kill(1)
        await running.until(lambda: running.worker.state is State.DRAINING)
        running.kill(0)
        answer = await asked
        async with asyncio.timeout(5):
            assert await running.exit_code == 1
    assert answer.status_code == 500
    assert "of DP rank 0: rank 0" in answer.json()["error"]["message"]


async def test_the_last_words_of_a_rank_name_the_one_that_it_missed(start: Start) -> None:
    async with start(tp=2) as running:
        answer = await running.ask("words-1")
        assert await running.exit_code == 1
    message = answer.json()["error"]["message"]
    assert message.endswith("rank 0 exited with code 1: rank 1 did not take part in a collective")


async def test_a_stopped_follower_is_named_and_ends_its_unit(start: Start) -> None:
    async with start(dp=2, tp=2, limits=replace(LIMITS, loop_stall_ms=1_000)) as running:
        async with streaming(running, "hold-0", 0) as survivor:
            running.kill(3, signal.SIGSTOP)
            await running.until(lambda: running.worker.state is State.DRAINING)
            lost = running.worker.units[1].lost
            await running.http.post("/abort_request", json={"rid": "hold-0"})
            assert [event async for event in survivor]
        assert await running.exit_code == 1
    assert "rank 3 made no progress for 1000 ms (loop_stall_ms) and was killed" in lost
