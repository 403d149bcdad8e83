"""Registrar and Peers against real registries: restarts, black holes, ambiguity, superseding, shared fetches."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from baton_core.effects import LookUp
from baton_core.errors import Overloaded, Reason, Verdict
from baton_core.events import BootstrapInfos, LookupFailed, RankEndpoint, Resolved
from baton_core.limits import Limits, RegistrarLimits
from baton_core.ranks import Parallel
from baton_core.registration import Layout
from baton_core.request import Bootstrap
from baton_io.peers import BootstrapAllow, Handshake, Peers, learn_registered_hosts
from baton_io.registrar import Registrar, Registration
from contract.registry_servers import listening_socket, monotonic_ms, registry, serving, worker_app

LAYOUT = Layout(attn_tp_size=2, attn_cp_size=1, dp_size=2, pp_size=1, page_size=16, kv_cache_dtype="float32")
BY_QUERY = replace(LAYOUT, follow_bootstrap_room=False)
FAST = RegistrarLimits(lease_ms=1_000, retry_first_ms=10, retry_max_ms=50, room_renew_ms=200)
ROOMS_ONCE = replace(FAST, room_renew_ms=60_000)
LIMITS = Limits(lookup_ms=400)


def registration(name: str = "p0", life: str = "life1", layout: Layout = LAYOUT, port: int = 1) -> Registration:
    """A worker of this layout; its ranks listen on consecutive ports, in the order of their numbers."""
    parallel = Parallel(tp=layout.attn_tp_size, pp=layout.pp_size, dp=layout.dp_size, cp=layout.attn_cp_size)
    places = [parallel.place(rank) for rank in range(parallel.ranks)]
    ranks = [
        (
            place.dp_rank,
            RankEndpoint(
                host="127.0.0.1",
                port=10 * port + place.rank,
                tp_rank=place.tp_rank,
                cp_rank=place.cp_rank,
                pp_rank=place.pp_rank,
            ),
        )
        for place in places
    ]
    return Registration(
        instance=name,
        incarnation=life,
        fingerprint="fp",
        layout=layout,
        ranks=tuple(ranks),
        http_host="127.0.0.1",
        http_port=port,
    )


def look_up(port: int, *, room: int = 4, instance: str | None = None, dp_rank: int | None = None) -> LookUp:
    bootstrap = Bootstrap(host="127.0.0.1", port=port, room=room, instance=instance, prefill_dp_rank=dp_rank)
    return LookUp(rid="r", bootstrap=bootstrap)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as one:
        yield one


@asynccontextmanager
async def registering(
    session: aiohttp.ClientSession, *ports: int, worker: Registration | None = None, limits: RegistrarLimits = FAST
) -> AsyncIterator[Registrar]:
    """A registrar that runs while the block does."""
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    registrar = Registrar(urls, worker or registration(), session, limits, monotonic_ms, jitter=lambda: 0.0)
    task = asyncio.create_task(registrar.run())
    try:
        yield registrar
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(holds: Callable[[], bool], limit_s: float = 5.0) -> None:
    """Wait for a condition that another task brings about."""
    async with asyncio.timeout(limit_s):
        while True:
            if holds():
                return
            await asyncio.sleep(0.005)


async def resolved(peers: Peers, lookup: LookUp) -> Resolved:
    answer = await peers.resolve(lookup)
    assert isinstance(answer, Resolved), answer
    return answer


async def failed(peers: Peers, lookup: LookUp, *, naming: str) -> LookupFailed:
    answer = await peers.resolve(lookup)
    assert isinstance(answer, LookupFailed) and naming in answer.verdict.text, answer
    return answer


# -- registrar


async def test_a_worker_registers_every_rank_and_decode_finds_them(session: aiohttp.ClientSession) -> None:
    async with registry() as port, registering(session, port) as registrar:
        assert not registrar.registered()
        await until(registrar.registered)
        answer = await resolved(Peers(session, LIMITS), look_up(port, room=5))
    assert answer.infos.incarnation == "life1/1.0" and answer.infos.dp_rank == 1
    assert [(rank.tp_rank, rank.port) for rank in answer.infos.endpoints] == [(0, 12), (1, 13)]


async def test_a_worker_that_starts_before_its_registry_registers_once_it_is_there(
    session: aiohttp.ClientSession,
) -> None:
    bound = listening_socket()
    port = bound.getsockname()[1]
    bound.close()
    async with registering(session, port) as registrar:
        await until(lambda: "cannot be reached" in registrar.status()[f"http://127.0.0.1:{port}"])
        assert not registrar.registered()
        async with registry(port=port):
            await until(registrar.registered)


async def test_ranks_and_open_rooms_return_after_the_registry_was_killed_and_restarted_empty(
    session: aiohttp.ClientSession,
) -> None:
    bound = listening_socket()
    port = bound.getsockname()[1]
    bound.close()
    async with registering(session, port, worker=registration(layout=BY_QUERY), limits=ROOMS_ONCE) as registrar:
        registrar.open_room(7, 1)
        async with registry("first", port):
            await until(registrar.registered)
        await until(lambda: "again" in registrar.status()[f"http://127.0.0.1:{port}"])
        assert registrar.registered(), "a dead registry does not make the worker unready"
        async with registry("second", port):
            answer = await resolved(Peers(session, Limits(lookup_ms=5_000)), look_up(port, room=7))
    assert answer.infos.dp_rank == 1 and answer.infos.incarnation == "life1/1.0"


async def test_a_worker_that_its_registry_forgot_registers_again(session: aiohttp.ClientSession) -> None:
    async with registry() as port, registering(session, port) as registrar:
        await until(registrar.registered)
        url = f"http://127.0.0.1:{port}/v1/instances/p0"
        async with session.delete(url) as answer:
            assert answer.status == 200
        await resolved(Peers(session, Limits(lookup_ms=5_000)), look_up(port, instance="p0"))


async def test_one_dead_registry_delays_no_other_and_is_named_in_the_status(session: aiohttp.ClientSession) -> None:
    bound = listening_socket()
    dead = bound.getsockname()[1]
    async with registry() as port, registering(session, dead, port) as registrar:
        await resolved(Peers(session, Limits(lookup_ms=5_000)), look_up(port, instance="p0"))
        assert not registrar.registered()
        status = registrar.status()
    bound.close()
    assert "not registered yet" in status[f"http://127.0.0.1:{dead}"]
    assert "registered for" in status[f"http://127.0.0.1:{port}"]


async def test_a_refused_worker_is_not_registered_and_says_why(session: aiohttp.ClientSession) -> None:
    async with registry() as port, serving(worker_app("life1")) as http_port:
        old = replace(registration(), http_port=http_port)
        async with registering(session, port, worker=old) as first:
            await until(first.registered)
            new = replace(registration(life="life2"), http_port=http_port)
            async with registering(session, port, worker=new) as second:
                await until(lambda: "still answers" in second.status()[f"http://127.0.0.1:{port}"])
                assert not second.registered() and first.registered()


async def test_a_new_life_supersedes_one_that_no_longer_answers(session: aiohttp.ClientSession) -> None:
    peers = Peers(session, LIMITS)
    async with registry() as port:
        async with registering(session, port) as first:
            await until(first.registered)
            old = await resolved(peers, look_up(port))
        async with registering(session, port, worker=registration(life="life2", port=2)) as second:
            await until(second.registered)
            cached = await resolved(peers, look_up(port))
            peers.forget("life1/1.1")  # the link to any rank of that life
            new = await resolved(peers, look_up(port))
    assert old.infos == cached.infos and old.infos.incarnation == "life1/0.0"
    assert new.infos.incarnation == "life2/0.0" and new.infos.endpoints[0].port == 20


async def test_a_worker_that_deregisters_is_gone_at_once(session: aiohttp.ClientSession) -> None:
    async with registry() as port:
        async with registering(session, port) as registrar:
            await until(registrar.registered)
        await registrar.deregister()
        await failed(Peers(session, LIMITS), look_up(port), naming="0 workers registered")


async def test_deregistering_from_a_registry_that_is_gone_raises_nothing(session: aiohttp.ClientSession) -> None:
    async with registry() as port, registering(session, port) as registrar:
        await until(registrar.registered)
    await registrar.deregister()


async def test_open_rooms_are_bounded(session: aiohttp.ClientSession) -> None:
    limits = replace(FAST, rooms_max=1)
    registrar = Registrar([], registration(), session, limits, monotonic_ms, jitter=lambda: 0.0)
    registrar.open_room(1, 0)
    with pytest.raises(Overloaded, match="rooms_max"):
        registrar.open_room(2, 0)
    registrar.close_room(1, went_well=True)
    registrar.open_room(2, 0)


async def test_a_worker_of_all_axes_is_found_unit_by_unit_in_the_order_of_members(
    session: aiohttp.ClientSession,
) -> None:
    layout = replace(LAYOUT, attn_cp_size=2, pp_size=2)
    async with registry() as port, registering(session, port, worker=registration(layout=layout)) as registrar:
        await until(registrar.registered)
        infos = (await resolved(Peers(session, LIMITS), look_up(port, room=3))).infos
    assert (infos.incarnation, infos.dp_rank) == ("life1/1.0", 1)
    assert [rank.port for rank in infos.endpoints] == list(range(18, 26)), "endpoints[i] is member i"
    assert [(rank.pp_rank, rank.cp_rank, rank.tp_rank) for rank in infos.endpoints] == [
        (pp, cp, tp) for pp in (0, 1) for cp in (0, 1) for tp in (0, 1)
    ]


async def test_many_rooms_are_told_in_few_calls(session: aiohttp.ClientSession) -> None:
    worker, limits = registration(layout=BY_QUERY), replace(ROOMS_ONCE, lease_ms=60_000)
    async with registry() as port, registering(session, port, worker=worker, limits=limits) as registrar:
        await until(registrar.registered)
        for room in range(1, 3_001):
            registrar.open_room(room, room % 3 % 2)
        peers = Peers(session, Limits(lookup_ms=5_000))
        answers = [await resolved(peers, look_up(port, room=room)) for room in (1, 2_998, 3_000)]
        async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
            metrics = await answer.text()
    assert [answer.infos.dp_rank for answer in answers] == [1, 1, 0]
    assert 'requests_total{route="POST /register_dp_rank",status="200"} 3.0' in metrics


async def test_a_room_is_told_where_its_request_points_if_that_is_ours_and_else_everywhere(
    session: aiohttp.ClientSession,
) -> None:
    peers = Peers(session, LIMITS)
    worker = registration(layout=BY_QUERY)
    async with registry("a") as one, registry("b") as two, registering(session, one, two, worker=worker) as registrar:
        await until(registrar.registered)
        registrar.open_room(7, 1, f"http://localhost:{one}")
        registrar.open_room(8, 1, "http://10.9.9.9:8998")
        assert (await resolved(peers, look_up(one, room=7))).infos.dp_rank == 1
        await failed(peers, look_up(two, room=7), naming="the DP rank of room 7 within")
        for port in (one, two):
            assert (await resolved(peers, look_up(port, room=8))).infos.dp_rank == 1


async def test_a_room_that_is_over_before_it_was_told_is_told_once(session: aiohttp.ClientSession) -> None:
    bound = listening_socket()
    port = bound.getsockname()[1]
    bound.close()
    async with registering(session, port, worker=registration(layout=BY_QUERY)) as registrar:
        registrar.open_room(7, 1)
        registrar.close_room(7, went_well=False)
        async with registry(port=port):
            answer = await resolved(Peers(session, Limits(lookup_ms=5_000)), look_up(port, room=7))
    assert answer.infos.dp_rank == 1


async def test_a_room_is_taken_back_when_it_went_well_and_may_run_elsewhere_at_once(
    session: aiohttp.ClientSession,
) -> None:
    peers = Peers(session, Limits(lookup_ms=5_000))
    async with registry() as port, registering(session, port, worker=registration(layout=BY_QUERY)) as registrar:
        await until(registrar.registered)
        registrar.open_room(7, 0)
        assert (await resolved(peers, look_up(port, room=7))).infos.dp_rank == 0
        registrar.close_room(7, went_well=True)
        await until(lambda: not registrar._links[0]._news.has_any)
        asking = asyncio.create_task(resolved(peers, look_up(port, room=7)))
        registrar.open_room(7, 1)
        assert (await asking).infos.dp_rank == 1, "nobody is sent to where the room ran before"


async def test_a_room_that_failed_is_found_by_its_late_leg_and_then_taken_back(session: aiohttp.ClientSession) -> None:
    limits = replace(ROOMS_ONCE, room_kept_ms=300)
    worker = registration(layout=BY_QUERY)
    async with registry() as port, registering(session, port, worker=worker, limits=limits) as registrar:
        await until(registrar.registered)
        registrar.open_room(7, 1)
        registrar.close_room(7, went_well=False)
        assert (await resolved(Peers(session, LIMITS), look_up(port, room=7))).infos.dp_rank == 1
        await until(lambda: registrar._links[0]._news.due() is None)
        await until(lambda: not registrar._links[0]._news.has_any)
        await failed(Peers(session, LIMITS), look_up(port, room=7), naming="the DP rank of room 7 within")


async def test_a_registry_that_restarted_is_noticed_with_the_next_room_long_before_the_lease(
    session: aiohttp.ClientSession,
) -> None:
    limits = replace(ROOMS_ONCE, lease_ms=60_000)
    bound = listening_socket()
    port = bound.getsockname()[1]
    bound.close()
    async with registering(session, port, worker=registration(layout=BY_QUERY), limits=limits) as registrar:
        registrar.open_room(7, 1)
        async with registry("first", port):
            await until(registrar.registered)
            await resolved(Peers(session, LIMITS), look_up(port, room=7))
        async with registry("second", port):
            registrar.open_room(8, 0)
            peers = Peers(session, Limits(lookup_ms=5_000))
            answers = [await resolved(peers, look_up(port, room=room)) for room in (7, 8)]
    assert [answer.infos.dp_rank for answer in answers] == [1, 0]


async def test_a_lost_unit_leaves_and_the_others_stay_also_after_a_restart_of_the_registry(
    session: aiohttp.ClientSession,
) -> None:
    bound = listening_socket()
    port = bound.getsockname()[1]
    bound.close()
    async with registering(session, port) as registrar:
        async with registry("first", port):
            await until(registrar.registered)
            registrar.lose_unit(1)
            peers = Peers(session, LIMITS)
            async with asyncio.timeout(5):
                while isinstance(await Peers(session, LIMITS).resolve(look_up(port, room=5)), Resolved):
                    pass
            await failed(peers, look_up(port, room=5), naming="answered 404: Bootstrap info not found for dp_rank=1")
            assert (await resolved(peers, look_up(port, room=4))).infos.dp_rank == 0
        async with registry("second", port):
            peers = Peers(session, Limits(lookup_ms=5_000))
            assert (await resolved(peers, look_up(port, room=4))).infos.dp_rank == 0
            await failed(peers, look_up(port, room=5), naming="answered 404")


class PlainRegistry:
    """What a worker sees of an unmodified SGLang registry: no headers of ours, one room a call."""

    def __init__(self) -> None:
        self.rooms: list[object] = []
        self.app = FastAPI()

        @self.app.put("/route")
        async def route() -> Response:
            return Response("OK")

        @self.app.post("/register_dp_rank")
        async def register(request: Request) -> Response:
            body = await request.json()
            self.rooms.append((body["bootstrap_room"], body["dp_rank"]))
            return Response("OK")


async def test_a_plain_sglang_registry_is_told_room_by_room(session: aiohttp.ClientSession) -> None:
    plain = PlainRegistry()
    async with (
        serving(plain.app) as port,
        registering(session, port, worker=registration(layout=BY_QUERY)) as registrar,
    ):
        for room in (5, 6, 7):
            registrar.open_room(room, room % 2)
        await until(lambda: len(plain.rooms) == 3)
    assert plain.rooms == [(5, 1), (6, 0), (7, 1)]


def test_a_registration_must_name_each_rank_once() -> None:
    with pytest.raises(ValueError, match="4 ranks"):
        replace(registration(), ranks=registration().ranks[:3])


# -- peers


async def test_a_cached_pair_survives_the_death_of_its_registry(session: aiohttp.ClientSession) -> None:
    peers = Peers(session, LIMITS)
    async with registry() as port, registering(session, port) as registrar:
        await until(registrar.registered)
        before = await resolved(peers, look_up(port))
    assert (await resolved(peers, look_up(port))).infos == before.infos
    peers.forget("life1/0.0")
    verdict = (await failed(peers, look_up(port), naming=f"http://127.0.0.1:{port}")).verdict
    assert verdict.reason is Reason.LOOKUP_FAILED and "check that the prefill worker" in verdict.text


async def test_a_worker_that_restarted_with_another_layout_between_two_answers_is_asked_anew(
    session: aiohttp.ClientSession,
) -> None:
    peers = Peers(session, LIMITS)
    async with registry() as port:
        async with registering(session, port) as first:
            await until(first.registered)
            assert (await resolved(peers, look_up(port, room=4))).infos.incarnation == "life1/0.0"
        wider = registration(life="life2", layout=replace(LAYOUT, attn_tp_size=4, dp_size=3), port=2)
        async with registering(session, port, worker=wider) as second:
            await until(second.registered)
            answers = [await resolved(peers, look_up(port, room=room)) for room in (5, 4)]
    assert [answer.infos.incarnation for answer in answers] == ["life2/2.0", "life2/1.0"], "room mod the new dp_size"
    assert [len(answer.infos.endpoints) for answer in answers] == [4, 4]


async def test_an_unknown_instance_name_and_an_ambiguous_one_say_what_is_there(session: aiohttp.ClientSession) -> None:
    peers = Peers(session, LIMITS)
    async with (
        registry() as port,
        registering(session, port) as first,
        registering(session, port, worker=registration("p1", "other", port=2)) as second,
    ):
        await until(lambda: first.registered() and second.registered())
        await failed(peers, look_up(port), naming="add instance= one of: p0, p1")
        await failed(peers, look_up(port, instance="p9"), naming="p9 is not registered here; known: p0, p1")
        assert (await resolved(peers, look_up(port, instance="p1"))).infos.incarnation == "other/0.0"


async def test_a_black_hole_costs_the_look_up_limit_and_no_more(session: aiohttp.ClientSession) -> None:
    bound = listening_socket()
    bound.listen(1)  # takes connections into its backlog and never answers
    port = bound.getsockname()[1]
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    started = monotonic_ms()
    answers = await asyncio.gather(*(Peers(session, LIMITS).resolve(look_up(port)) for _ in range(3)))
    took = monotonic_ms() - started
    bound.close()
    assert all(isinstance(answer, LookupFailed) and "400 ms" in answer.verdict.text for answer in answers), answers
    assert 350 <= took < 1_200
    await asyncio.sleep(0)
    gc.collect()
    assert unhandled == [], "the shared fetch failed after its callers had left: that is nobody's surprise"


async def test_a_worker_that_becomes_ready_within_the_limit_is_waited_for(session: aiohttp.ClientSession) -> None:
    async with registry() as port:
        waiting = asyncio.create_task(Peers(session, Limits(lookup_ms=5_000)).resolve(look_up(port)))
        async with registering(session, port):
            assert isinstance(await waiting, Resolved)


async def test_an_unknown_room_is_asked_for_until_the_limit_and_then_named(session: aiohttp.ClientSession) -> None:
    peers = Peers(session, LIMITS)
    async with registry() as port, registering(session, port, worker=registration(layout=BY_QUERY)) as registrar:
        await until(registrar.registered)
        await failed(peers, look_up(port, room=99), naming="the DP rank of room 99 within 400 ms")
        asking = [asyncio.create_task(peers.resolve(look_up(port, room=room))) for room in (100, 101)]
        registrar.open_room(100, 0)
        registrar.open_room(101, 1)
        answers = [await task for task in asking]
    assert [answer.infos.dp_rank for answer in answers if isinstance(answer, Resolved)] == [0, 1]


async def test_a_rank_in_the_request_wins_and_an_impossible_one_is_400(session: aiohttp.ClientSession) -> None:
    peers = Peers(session, LIMITS)
    async with registry() as port, registering(session, port) as registrar:
        await until(registrar.registered)
        assert (await resolved(peers, look_up(port, room=4, dp_rank=1))).infos.dp_rank == 1
        answer = await failed(peers, look_up(port, dp_rank=2), naming="has 2 DP ranks")
    assert answer.verdict.status == 400


@pytest.mark.parametrize(
    ("layout", "forced"), [(BY_QUERY, False), (BY_QUERY, True)], ids=["prefill only", "both sides"]
)
async def test_a_forced_prefill_registers_its_rooms_and_decode_finds_them_with_or_without_the_switch(
    session: aiohttp.ClientSession, layout: Layout, forced: bool
) -> None:
    peers = Peers(session, LIMITS, forced=forced)
    async with registry() as port, registering(session, port, worker=registration(layout=layout)) as registrar:
        await until(registrar.registered)
        registrar.open_room(4, 1)  # room mod dp_size says 0: somebody routed it
        assert (await resolved(peers, look_up(port, room=4))).infos.dp_rank == 1


async def test_a_switch_on_decode_alone_costs_a_question_and_no_request(session: aiohttp.ClientSession) -> None:
    peers = Peers(session, LIMITS, forced=True)
    async with registry() as port, registering(session, port) as registrar:
        await until(registrar.registered)
        started = monotonic_ms()
        answers = [await resolved(peers, look_up(port, room=room)) for room in (4, 5)]
        took = monotonic_ms() - started
        registrar.open_room(6, 1)
        await until(lambda: not registrar._links[0]._news.has_any)
        told = await resolved(peers, look_up(port, room=6))
    assert [answer.infos.dp_rank for answer in answers] == [0, 1], "prefill follows, or it has failed the request"
    assert told.infos.dp_rank == 1, "what the registry knows wins"
    assert took < 350, "nobody waits for a room that nobody registers"


class Stranger:
    """A plain SGLang registry: topology and one rank; no headers, no routes of ours."""

    def __init__(self, topology: object, rank: object = None, status: int = 200) -> None:
        self.calls = 0
        self.app = FastAPI()

        @self.app.get("/route")
        async def route(request: Request) -> Response:
            self.calls += 1
            asks_for_topology = request.query_params["target_tp_rank"] == "-1"
            content = topology if asks_for_topology else rank
            return Response(content, status) if isinstance(content, str) else JSONResponse(content, status)


SGLANG_TOPOLOGY = {
    "attn_tp_size": 1,
    "attn_cp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "page_size": 1,
    "kv_cache_dtype": "auto",
    "follow_bootstrap_room": True,
    "a_key_of_tomorrow": [1],
}


async def test_a_plain_sglang_registry_yields_a_life_made_of_the_rank_addresses(session: aiohttp.ClientSession) -> None:
    peers = Peers(session, LIMITS)
    async with serving(Stranger(SGLANG_TOPOLOGY, {"rank_ip": "10.0.0.1", "rank_port": 5}).app) as port:
        first = await resolved(peers, look_up(port))
    async with serving(Stranger(SGLANG_TOPOLOGY, {"rank_ip": "10.0.0.1", "rank_port": 6}).app, port):
        peers.forget(first.infos.incarnation)
        second = await resolved(peers, look_up(port))
    assert first.infos.incarnation.startswith("addr-") and first.infos.incarnation != second.infos.incarnation


async def test_concurrent_look_ups_share_one_fetch_and_one_that_is_cancelled_fails_no_other(
    session: aiohttp.ClientSession,
) -> None:
    peers = Peers(session, LIMITS)
    stranger = Stranger(SGLANG_TOPOLOGY, {"rank_ip": "10.0.0.1", "rank_port": 5})
    async with serving(stranger.app) as port:
        tasks = [asyncio.create_task(peers.resolve(look_up(port, room=room))) for room in range(1, 51)]
        await until(lambda: stranger.calls > 0)
        tasks[0].cancel()
        answers = await asyncio.gather(*tasks[1:])
    assert all(isinstance(answer, Resolved) for answer in answers) and stranger.calls == 2


@pytest.mark.parametrize(
    ("stranger", "naming"),
    [
        (Stranger("{not json"), "malformed JSON"),
        (Stranger({"attn_tp_size": 1}), "attn_cp_size is missing"),
        (Stranger(SGLANG_TOPOLOGY, {"rank_ip": "10.0.0.1"}), "rank_port is missing"),
        (Stranger("nothing here", status=404), "answered 404: nothing here"),
        (Stranger("boom", status=500), "answered 500: boom"),
        (Stranger("not yet", status=503), "answered 503: not yet"),
    ],
)
async def test_a_registry_that_answers_nonsense_fails_the_request_naming_it(
    session: aiohttp.ClientSession, stranger: Stranger, naming: str
) -> None:
    async with serving(stranger.app) as port:
        answer = await failed(Peers(session, LIMITS), look_up(port), naming=naming)
    assert answer.verdict.reason is Reason.LOOKUP_FAILED and f":{port}" in answer.verdict.text


class Faulty:
    """A registry that answers for the layout, and then: nothing, an end, or only the first rank of two."""

    def __init__(self, *, answers_ranks: int) -> None:
        self.asked = asyncio.Event()
        self.calls = 0
        self.app = FastAPI()

        @self.app.get("/route")
        async def route(request: Request) -> Response:
            rank = int(request.query_params["target_tp_rank"])
            if rank == -1:
                return JSONResponse(SGLANG_TOPOLOGY | {"attn_tp_size": 2})
            self.calls += 1
            self.asked.set()
            if rank < answers_ranks:
                return JSONResponse({"rank_ip": "10.0.0.1", "rank_port": 5 + rank})
            if answers_ranks:
                return Response(f"no rank {rank}", 404)
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")


async def test_a_registry_that_dies_in_the_look_up_fails_the_request_at_once(session: aiohttp.ClientSession) -> None:
    peers, faulty = Peers(session, Limits(lookup_ms=10_000)), Faulty(answers_ranks=0)
    async with serving(faulty.app) as port:
        looking = asyncio.create_task(peers._setup_bootstrap_infos(look_up(port).bootstrap))
        await faulty.asked.wait()
    async with asyncio.timeout(2):
        handshake = await looking
    assert handshake.infos is None, "defined, and empty: nobody stumbles over it"
    assert handshake.failure is not None and handshake.failure.reason is Reason.LOOKUP_FAILED
    assert f"http://127.0.0.1:{port}" in handshake.failure.text
    wide = registration(layout=replace(LAYOUT, dp_size=1))
    async with registry(port=port), registering(session, port, worker=wide) as registrar:
        await until(registrar.registered)
        assert (await resolved(peers, look_up(port))).infos.incarnation == "life1/0.0", (
            "nothing of the failure was kept"
        )


async def test_a_registry_that_names_the_layout_and_never_a_rank_costs_the_limit(
    session: aiohttp.ClientSession,
) -> None:
    async with serving(Faulty(answers_ranks=0).app) as port:
        answer = await failed(Peers(session, LIMITS), look_up(port), naming="the addresses of DP rank 0 within 400 ms")
    assert answer.verdict.reason is Reason.LOOKUP_FAILED


async def test_an_answer_for_only_some_ranks_is_a_failure_and_never_half_an_entry(
    session: aiohttp.ClientSession,
) -> None:
    peers, faulty = Peers(session, LIMITS), Faulty(answers_ranks=1)
    async with serving(faulty.app) as port:
        for _ in range(2):
            await failed(peers, look_up(port), naming="answered 404: no rank 1")
    assert faulty.calls == 4, "both ranks are asked for again: only complete sets are kept"


def test_the_original_fault_is_a_failure_that_a_later_success_overwrites() -> None:
    """S4 as it was: the look-up fails, its caller goes on to WaitingForInput all the same."""

    class Original(Handshake):
        def complete(self, infos: BootstrapInfos) -> None:
            self.infos = infos

    verdict = Verdict(reason=Reason.LOOKUP_FAILED, text="registry down")
    infos = BootstrapInfos(incarnation="life1/0.0", dp_rank=0, endpoints=())
    outcomes = []
    for handshake in (Original(), Handshake()):
        handshake.fail(verdict)
        handshake.complete(infos)
        outcomes.append((handshake.infos, handshake.failure))
    assert outcomes[0] == (infos, verdict), "failed and ready at the same time"
    assert outcomes[1] == (None, verdict)


async def test_a_failure_that_was_recorded_is_overwritten_by_nothing(session: aiohttp.ClientSession) -> None:
    bound = listening_socket()
    port = bound.getsockname()[1]
    bound.close()
    handshake = await Peers(session, LIMITS)._setup_bootstrap_infos(look_up(port).bootstrap)
    cause = handshake.failure
    assert handshake.infos is None and cause is not None
    async with registry(port=port), registering(session, port) as registrar:
        await until(registrar.registered)
        later = await resolved(Peers(session, LIMITS), look_up(port))
    handshake.complete(later.infos)
    assert handshake.infos is None and handshake.failure is cause


# -- allow-list


async def test_hosts_registered_at_a_registry_become_allowed(session: aiohttp.ClientSession) -> None:
    worker = replace(registration(), http_host="10.7.7.7", bootstrap_host="prefill-0")
    async with registry() as port, registering(session, port, worker=worker) as registrar:
        urls = [f"http://127.0.0.1:{port}"]
        allow = BootstrapAllow(urls)
        assert allow.check("10.7.7.7", 1) is not None
        await until(registrar.registered)
        learning = asyncio.create_task(learn_registered_hosts(allow, urls, session, interval_ms=20))
        await until(lambda: allow.check("10.7.7.7", 1) is None)
        assert allow.check("prefill-0", 8_998) is None
        learning.cancel()
        await asyncio.wait([learning])
