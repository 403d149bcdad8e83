"""Data-parallel ranks as targets, seen from outside: modes, load, breakers, metrics, conversations, batches."""

from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from contract.fake_workers import FakeWorker, Received, Rooms, Script, World, answers, decodes, prefills, world

RANKS = 4


def ranked(**info: Any) -> Any:
    """Workers of four ranks that also say this."""

    def prepare(workers: list[FakeWorker]) -> None:
        for worker in workers:
            worker.info |= {"dp_size": RANKS, "bootstrap_port": urlsplit(worker.url).port} | info

    return prepare


async def ask(w: World, count: int = 1, body: dict[str, Any] | None = None, **options: Any) -> list[int]:
    statuses = []
    for _ in range(count):
        async with w.client.post(json=body or {"text": "x"}, **options) as response:
            await response.read()
            statuses.append(response.status)
    return statuses


def bodies(worker: FakeWorker) -> list[dict[str, Any]]:
    return [received.body for received in worker.received]


# -- modes


@pytest.mark.parametrize(
    "announced",
    [{"follow_bootstrap_room": True}, {"load_balance_method": "follow_bootstrap_room"}, {"fingerprint": None}],
    ids=["baton", "sglang", "says nothing"],
)
async def test_auto_follows_the_room_where_prefill_does(announced: dict[str, Any]) -> None:
    async with world(prepare=ranked(**announced)) as w:
        await ask(w, 8)
        assert [body["bootstrap_room"] % RANKS for body in bodies(w.prefill[0])] == [0, 1, 2, 3] * 2
        assert not [key for body in bodies(w.prefill[0]) for key in body if "rank" in key]
        assert [body["routed_dp_rank"] for body in bodies(w.decode[0])] == [0, 1, 2, 3] * 2
        assert not [body for body in bodies(w.decode[0]) if "disagg_prefill_dp_rank" in body]


@pytest.mark.parametrize(
    "announced",
    [{"follow_bootstrap_room": False}, {"load_balance_method": "round_robin"}, {}],
    ids=["baton", "sglang", "an older one of ours"],
)
async def test_auto_injects_where_prefill_does_not_follow_and_the_room_agrees(announced: dict[str, Any]) -> None:
    async with world(prepare=ranked(**announced)) as w:
        await ask(w, 8)
        for rank, (prefill, decode) in enumerate(zip(bodies(w.prefill[0]), bodies(w.decode[0]), strict=True)):
            assert prefill["routed_dp_rank"] == decode["disagg_prefill_dp_rank"] == rank % RANKS
            assert decode["routed_dp_rank"] == rank % RANKS
            assert prefill["bootstrap_room"] % RANKS == rank % RANKS


@pytest.mark.parametrize("follows", [True, False])
async def test_auto_asks_the_registry_about_a_worker_that_says_nothing(follows: bool) -> None:
    def prepare(workers: list[FakeWorker]) -> None:
        prefill, decode = workers
        prefill.info = {"role": None, "bootstrap_port": urlsplit(prefill.url).port}  # not even its size
        prefill.topology = {"follow_bootstrap_room": follows, "dp_size": 2, "attn_tp_size": 1}
        decode.info |= {"fingerprint": None}

    async with world(prepare=prepare) as w:
        await ask(w, 4)
        sent = bodies(w.prefill[0])
        assert [body["bootstrap_room"] % 2 for body in sent] == [0, 1, 0, 1]
        assert [body.get("routed_dp_rank") for body in sent] == ([None] * 4 if follows else [0, 1, 0, 1])
        assert w.prefill[0].topology_asked == [""]


async def test_the_registry_is_asked_about_the_instance_where_both_legs_meet_there() -> None:
    async with FakeWorker("prefill", Rooms(), prefills) as registry:
        registry.topology = {"follow_bootstrap_room": True, "dp_size": RANKS}
        async with world(prepare=ranked(instance="p 7"), registry=urlsplit(registry.url).netloc) as w:
            await ask(w, 2)
            assert registry.topology_asked == ["p 7"]
            assert "routed_dp_rank" not in bodies(w.prefill[0])[1]


async def test_off_leaves_the_ranks_to_the_workers() -> None:
    async with world(prepare=ranked(follow_bootstrap_room=False), dp_mode="off") as w:
        await ask(w, 4)
        assert not [
            key for worker in (w.prefill[0], w.decode[0]) for body in bodies(worker) for key in body if "rank" in key
        ]


async def test_register_publishes_the_rank_and_leaves_it_to_decode_to_look_it_up() -> None:
    async with world(prepare=ranked(follow_bootstrap_room=False), dp_mode="register") as w:
        await ask(w, 3)
        prefill = bodies(w.prefill[0])
        assert w.prefill[0].registered == [
            {"bootstrap_room": body["bootstrap_room"], "dp_rank": rank} for rank, body in enumerate(prefill)
        ]
        assert [body["routed_dp_rank"] for body in prefill] == [0, 1, 2]
        assert not [body for body in bodies(w.decode[0]) if "disagg_prefill_dp_rank" in body]


# -- load, breakers, metrics


@pytest.mark.parametrize("mode", ["follow", "inject"])
@pytest.mark.parametrize("policy", ["round_robin", "least_load"])
async def test_load_stays_even_over_the_ranks_of_several_workers(mode: str, policy: str) -> None:
    settings = {"dp_mode": mode, "prefill_policy": policy, "decode_policy": policy}
    async with world((prefills,) * 2, (decodes,) * 2, prepare=ranked(), **settings) as w:
        await ask(w, 80)
        places = Counter((n, body["bootstrap_room"] % RANKS) for n, one in enumerate(w.prefill) for body in bodies(one))
        decoded = Counter((n, body["routed_dp_rank"]) for n, one in enumerate(w.decode) for body in bodies(one))
        for counted in (places, decoded):
            assert len(counted) == 8
            if policy == "round_robin":
                assert set(counted.values()) == {10}
            else:  # one request at a time: all loads are 0, ties are broken by chance
                assert max(counted.values()) <= 30


async def test_a_rank_with_much_to_do_is_passed_over_and_its_siblings_are_not() -> None:
    def busy(workers: list[FakeWorker]) -> None:
        ranked()(workers)
        workers[1].loads = [
            {"dp_rank": rank, "num_running_reqs": 90 * (rank == 2), "num_used_tokens": 1, "max_total_num_tokens": 9_999}
            for rank in range(RANKS)
        ]

    async with world(prepare=busy, decode_policy="power_of_two") as w:
        await ask(w, 24)
        decoded = Counter(body["routed_dp_rank"] for body in bodies(w.decode[0]))
        assert 2 not in decoded
        assert len(decoded) > 1


def fails_on(rank: int) -> Script:
    """A decode worker one unit of which is gone."""

    async def script(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        told: Script = answers(500) if received.body["routed_dp_rank"] == rank else decodes
        return await told(worker, request, received)

    return script


async def test_a_rank_that_fails_again_and_again_gets_no_more_and_its_siblings_serve_on() -> None:
    settings = {"breaker_failures_max": 2, "breaker_open_ms": 60_000}
    async with world(decode=(fails_on(1),), prepare=ranked(), **settings) as w:
        statuses = await ask(w, 23)
        assert statuses.count(500) == 2
        assert Counter(body["routed_dp_rank"] for body in bodies(w.decode[0])) == {0: 7, 1: 2, 2: 7, 3: 7}
        _, info = await w.client.get("/server_info")
        shown = info["workers"][1]
        assert shown["breaker"] == "open"
        assert [rank["breaker"] for rank in shown["ranks"]] == ["closed", "open", "closed", "closed"]
        _, text = await w.client.get("/metrics")
        labels = f'{{dp_rank="1",role="decode",worker="{w.decode[0].url}"}}'
        assert f"baton_router_target_breaker_open{labels} 1.0" in text
        legs = (
            f'baton_router_target_legs_total{{dp_rank="1",outcome="failed",role="decode",worker="{w.decode[0].url}"}}'
        )
        assert f"{legs} 2.0" in text
        assert (
            f'baton_router_target_inflight_requests{{dp_rank="0",role="prefill",worker="{w.prefill[0].url}"}}' in text
        )
        assert "baton_router_open_breakers 1.0" in text


async def test_a_full_rank_is_followed_by_another_worker_and_then_by_a_sibling() -> None:
    async def full(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        told: Script = answers(503) if received.body["routed_dp_rank"] == 0 else decodes
        return await told(worker, request, received)

    async with world(decode=(full, decodes), prepare=ranked(), prefill_policy="random") as w:
        assert await ask(w) == [200]
        assert [len(worker.received) for worker in w.decode] == [1, 1]
    async with world(decode=(full,), prepare=ranked()) as w:
        assert await ask(w) == [200]
        assert [body["routed_dp_rank"] for body in bodies(w.decode[0])] == [0, 1]


async def test_a_whole_worker_has_series_too() -> None:
    async with world() as w:
        await ask(w, 3)
        _, text = await w.client.get("/metrics")
        labels = f'{{dp_rank="",outcome="served",role="decode",worker="{w.decode[0].url}"}}'
        assert f"baton_router_target_legs_total{labels} 3.0" in text


# -- conversations and batches


@pytest.mark.parametrize("policy", ["session", "consistent_hash"])
async def test_conversations_stay_on_their_ranks_and_are_spread(policy: str) -> None:
    async with world(
        (prefills,) * 2, (decodes,) * 2, prepare=ranked(), prefill_policy=policy, decode_policy=policy
    ) as w:
        homes = []
        for conversation in range(12):
            before = [len(worker.received) for worker in (*w.prefill, *w.decode)]
            await ask(w, 3, headers={"x-session-id": f"s-{conversation}"})
            seen = [worker.received[n:] for worker, n in zip((*w.prefill, *w.decode), before, strict=True)]
            assert sorted(map(len, seen)) == [0, 0, 3, 3]
            ranks = {
                (one.body["bootstrap_room"] % RANKS, one.body.get("routed_dp_rank")) for some in seen for one in some
            }
            assert len(ranks) <= 2
            homes.append(next(one.body["routed_dp_rank"] for some in seen[2:] for one in some))
        assert len(set(homes)) > 1


@pytest.mark.parametrize("mode", ["follow", "inject"])
async def test_the_parts_of_a_batch_are_spread_over_the_ranks_in_rooms_that_lead_there(mode: str) -> None:
    async with world(prepare=ranked(), dp_mode=mode) as w:
        body = {"text": ["a", "b", "c", "d"], "sampling_params": {"n": 2}}
        assert await ask(w, 1, body) == [200]
        sent = bodies(w.prefill[0])
        assert len({one["bootstrap_room"] for one in sent}) == 8
        assert Counter(one["bootstrap_room"] % RANKS for one in sent) == dict.fromkeys(range(RANKS), 2)
        assert Counter(one["routed_dp_rank"] for one in bodies(w.decode[0])) == dict.fromkeys(range(RANKS), 2)


async def test_the_samples_of_one_prompt_share_a_rank_where_the_policy_values_its_cache() -> None:
    async with world(prepare=ranked(), dp_mode="follow", prefill_policy="cache_aware") as w:
        prompt = "You are a helpful assistant. " * 40
        assert await ask(w, 1, {"text": prompt, "sampling_params": {"n": 4}}) == [200]
        assert len({one["bootstrap_room"] % RANKS for one in bodies(w.prefill[0])}) == 1
        assert len({one["routed_dp_rank"] for one in bodies(w.decode[0])}) == 4


async def test_what_a_client_says_about_ranks_is_overwritten() -> None:
    async with world(prepare=ranked(follow_bootstrap_room=False)) as w:
        await ask(w, 1, {"text": "x", "routed_dp_rank": 3, "data_parallel_rank": 3, "disagg_prefill_dp_rank": 3})
        told = bodies(w.decode[0])[0]
        assert (told["routed_dp_rank"], told["disagg_prefill_dp_rank"]) == (0, 0)
        assert "data_parallel_rank" not in told
