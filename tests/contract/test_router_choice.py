"""Which workers get a request, seen from outside: ranks, conversations, reported load, breakers, degraded service."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import pytest

from contract.fake_workers import (
    FakeWorker,
    World,
    answers,
    decodes,
    error_of,
    is_silent,
    prefills,
    resets,
    world,
)

# -- data-parallel ranks


def four_ranks(workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.info |= {"dp_size": 4, "bootstrap_port": urlsplit(worker.url).port}


async def ask(w: World, count: int = 1, body: dict[str, Any] | None = None, **options: Any) -> list[int]:
    """Statuses of that many requests, one after the other."""
    statuses = []
    for _ in range(count):
        async with w.client.post(json=body or {"text": "x"}, **options) as response:
            await response.read()
            statuses.append(response.status)
    return statuses


async def test_under_follow_the_room_names_the_rank_and_every_rank_gets_its_turn() -> None:
    async with world(prepare=four_ranks, dp_mode="follow") as w:
        assert await ask(w, 8) == [200] * 8
        bodies = [received.body for received in w.prefill[0].received]
        assert [body["bootstrap_room"] % 4 for body in bodies] == [0, 1, 2, 3] * 2
        assert not [key for body in bodies for key in body if "rank" in key]


async def test_under_inject_each_leg_is_told_its_rank_and_decode_that_of_prefill() -> None:
    async with world(prepare=four_ranks, dp_mode="inject") as w:
        await ask(w, 2)
        legs = zip(w.prefill[0].received, w.decode[0].received, strict=True)
        for rank, (prefill, decode) in enumerate(legs):
            assert prefill.body["routed_dp_rank"] == rank
            assert "disagg_prefill_dp_rank" not in prefill.body
            assert (decode.body["routed_dp_rank"], decode.body["disagg_prefill_dp_rank"]) == (rank, rank)
            assert prefill.body["bootstrap_room"] == decode.body["bootstrap_room"]


async def test_under_register_the_rank_is_published_at_the_registry_before_the_legs_are_sent() -> None:
    async with world(prepare=four_ranks, dp_mode="register") as w:
        await ask(w, 2)
        sent = [received.body for received in w.prefill[0].received]
        assert w.prefill[0].registered == [
            {"bootstrap_room": body["bootstrap_room"], "dp_rank": body["routed_dp_rank"]} for body in sent
        ]


async def test_a_worker_with_one_rank_is_told_of_none() -> None:
    async with world(dp_mode="inject") as w:
        await ask(w)
        assert not [key for key in w.decode[0].received[0].body if "rank" in key]


# -- conversations and load


@pytest.mark.parametrize("policy", ["session", "consistent_hash"])
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"text": "x", "session_params": {"id": "s-1"}}, {}),
        ({"text": "x", "user": "u-1"}, {}),
        ({"text": "x", "conversation_id": "c-1"}, {}),
        ({"text": "x"}, {"x-session-id": "h-1"}),
    ],
    ids=["session_params", "user", "conversation_id", "header"],
)
async def test_a_conversation_stays_on_its_workers(policy: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    async with world((prefills,) * 3, (decodes,) * 3, prefill_policy=policy, decode_policy=policy) as w:
        await ask(w, 6, body, headers=headers)
        assert sorted(len(worker.received) for worker in w.prefill) == [0, 0, 6]
        assert sorted(len(worker.received) for worker in w.decode) == [0, 0, 6]


async def test_load_that_other_routers_put_on_a_worker_is_seen() -> None:
    def busy(workers: list[FakeWorker]) -> None:
        workers[1].loads = [{"dp_rank": 0, "num_running_reqs": 30, "num_waiting_reqs": 20}]

    async with world(decode=(decodes, decodes), prepare=busy, decode_policy="least_load") as w:
        await ask(w, 6)
        assert [len(worker.received) for worker in w.decode] == [0, 6]


async def test_a_decode_worker_without_room_for_the_prompt_is_passed_over() -> None:
    def full(workers: list[FakeWorker]) -> None:
        workers[1].loads = [{"dp_rank": 0, "num_used_tokens": 990, "max_total_num_tokens": 1000}]

    async with world(decode=(decodes, decodes), prepare=full) as w:
        await ask(w, 4, {"text": "x" * 400})
        assert [len(worker.received) for worker in w.decode] == [0, 4]


async def test_prompts_with_the_same_beginning_go_to_the_same_prefill_worker() -> None:
    async with world((prefills,) * 3, prefill_policy="cache_aware") as w:
        for number in range(6):
            await ask(w, 1, {"text": "You are a helpful assistant. " * 40 + str(number)})
        assert sorted(len(worker.received) for worker in w.prefill) == [0, 0, 6]


# -- breakers and budgets


async def test_a_worker_that_fails_again_and_again_gets_no_more_while_another_serves() -> None:
    settings = {"breaker_failures_max": 2, "breaker_open_ms": 60_000}
    async with world(decode=(answers(500), decodes), **settings) as w:
        statuses = await ask(w, 8)
        assert statuses.count(500) == 2
        assert len(w.decode[0].received) == 2
        _, body = await w.client.get("/server_info")
        assert [worker["breaker"] for worker in body["workers"]] == ["closed", "open", "closed"]
        assert "baton_router_open_breakers 1.0" in (await w.client.get("/metrics"))[1]


async def test_a_breaker_lets_a_trial_through_later_and_closes_when_it_does_well() -> None:
    async with world(decode=(answers(500),), breaker_failures_max=1, breaker_open_ms=50) as w:
        assert await ask(w) == [500]
        assert await ask(w) == [503]
        w.decode[0].script = decodes
        async with asyncio.timeout(5):
            while await ask(w) != [200]:
                pass
        assert await ask(w, 3) == [200] * 3


async def test_wrong_requests_and_busy_answers_open_no_breaker() -> None:
    async with world(decode=(answers(400),), breaker_failures_max=1) as w:
        assert await ask(w, 3) == [400] * 3
        w.decode[0].script = answers(503)
        assert await ask(w, 3) == [503] * 3
        assert len(w.decode[0].received) == 6


async def test_without_a_budget_nothing_is_tried_again() -> None:
    async with world(decode=(resets, decodes), retries_burst=0, retries_per_request=0) as w:
        assert await ask(w) == [502]
        assert await ask(w) == [200]


# -- degraded service


async def test_without_a_usable_prefill_worker_decode_serves_alone_where_that_is_allowed() -> None:
    async with world(degrade=True) as w:
        await w.prefill[0].stop()
        assert await ask(w, 3) == [200] * 3
        assert "bootstrap_room" not in w.decode[0].received[-1].body
        assert (await w.client.get("/ready"))[0] == 200


async def test_without_a_usable_prefill_worker_and_that_leave_requests_are_refused() -> None:
    async with world() as w:
        await w.prefill[0].stop()
        async with w.client.post() as response:
            assert error_of(await response.json()) == (503, "NO_USABLE_PAIR")


async def test_short_prompts_stay_on_decode_and_long_ones_do_not() -> None:
    async with world(local_prompt_tokens=100) as w:
        await ask(w, 1, {"text": "short"})
        await ask(w, 1, {"input_ids": list(range(99))})
        assert w.prefill[0].received == []
        await ask(w, 1, {"input_ids": list(range(100))})
        await ask(w, 1, {"text": "long " * 100})
        assert len(w.prefill[0].received) == 2


# -- counts


async def test_disconnects_at_any_moment_leave_no_load_behind() -> None:
    async with world((prefills, is_silent), (decodes, is_silent, resets), decode_policy="least_load") as w:

        async def leaves(number: int) -> None:
            request = asyncio.create_task(ask(w))
            await asyncio.wait([request], timeout=(number % 10) / 200)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

        await asyncio.gather(*(leaves(number) for number in range(100)))
        await w.idle()


# -- workers that are not ours


async def test_workers_that_speak_only_sglangs_fields_are_paired_and_follow_the_room() -> None:
    def sglang(workers: list[FakeWorker]) -> None:
        for worker in workers:
            mode = {"disaggregation_mode": worker.role, "disaggregation_bootstrap_port": 8998, "dp_size": 2}
            worker.info = mode | {"served_model_name": "m", "version": "0.5", "internal_states": [{}, {}]}
            worker.loads = [{"dp_rank": rank, "num_running_reqs": 1, "num_used_tokens": 5} for rank in range(2)]

    async with world(prepare=sglang, dp_mode="follow") as w:
        assert await ask(w, 4) == [200] * 4
        bodies = [received.body for received in w.prefill[0].received]
        assert [body["bootstrap_room"] % 2 for body in bodies] == [0, 1, 0, 1]
        assert (bodies[0]["bootstrap_host"], bodies[0]["bootstrap_port"]) == ("127.0.0.1", 8998)
        _, info = await w.client.get("/server_info")
        assert [worker["model"] for worker in info["workers"]] == ["m", "m"]
