"""The router and a fleet that comes and goes: retries, readiness, draining, counting."""

import asyncio
import signal
import sys

import aiohttp
import pytest

from contract.fake_workers import (
    TOKENS,
    Client,
    FakeWorker,
    Rooms,
    answers,
    decodes,
    decodes_slowly,
    error_of,
    event,
    is_silent,
    prefills,
    resets,
    texts,
    world,
)
from ports import free_port

# -- retries


async def test_a_refused_connection_goes_to_the_other_pair_with_a_new_room() -> None:
    async with world((prefills, prefills), (decodes,)) as w:
        await w.prefill[0].stop()
        async with w.client.post() as response:
            assert response.status == 200
            assert await texts(response) == list(TOKENS)
        rooms = [received.body["bootstrap_room"] for received in w.decode[0].received]
        assert w.prefill[1].received[0].body["bootstrap_room"] == rooms[-1]
        assert len(rooms) == len(set(rooms))
        _, metrics = await w.client.get("/metrics")
        assert 'baton_router_retries_total{reason="refused"} 1.0' in metrics
        assert 'baton_router_workers{role="prefill",state="unready"} 1.0' in metrics
        await w.idle()


async def test_a_busy_worker_is_passed_over_where_there_is_another_and_its_leg_is_closed_first() -> None:
    async with world((is_silent, prefills), (answers(503, retry_after="9"), decodes)) as w:
        async with w.client.post() as response:
            assert response.status == 200
            assert await texts(response) == list(TOKENS)
        await w.prefill[0].saw_its_connection_closed()


async def test_a_busy_workers_own_words_reach_the_client_where_there_is_no_other() -> None:
    async with world(decode=(answers(503, retry_after="9"),)) as w, w.client.post() as response:
        assert (response.status, response.headers["retry-after"]) == (503, "9")
        assert (await response.json())["error"]["message"] == "because 503"
        assert len(w.decode[0].received) == 1


async def test_a_lost_connection_is_retried_a_bounded_number_of_times() -> None:
    async with world(decode=(resets,), retries=2) as w:
        async with w.client.post(headers={"x-request-id": "r"}) as response:
            assert response.status == 502
            assert error_of(await response.json()) == (502, "PEER_LOST")
        assert [received.headers["x-request-id"] for received in w.decode[0].received] == ["r", "r~2", "r~3"]
        assert len({received.body["bootstrap_room"] for received in w.decode[0].received}) == 3


async def test_a_wrong_request_is_never_tried_again() -> None:
    async with world((prefills, prefills), (answers(400), answers(400))) as w, w.client.post() as response:
        assert response.status == 400
        assert sum(len(worker.received) for worker in w.decode) == 1


# -- the process


async def test_told_to_stop_the_router_lets_a_stream_finish_and_exits_with_0() -> None:
    rooms = Rooms()
    async with (
        FakeWorker("prefill", rooms, prefills) as prefill,
        FakeWorker("decode", rooms, decodes_slowly) as decode,
        aiohttp.ClientSession() as session,
    ):
        port = free_port()
        command = f"-m baton_router --port {port} --prefill {prefill.url} --decode {decode.url}"
        router = await asyncio.create_subprocess_exec(sys.executable, *command.split())
        client = Client(f"http://127.0.0.1:{port}", session)
        await client.up(lambda: router.returncode is None)
        await client.until("/ready", lambda status, _: status == 200)
        async with client.post() as response:
            await response.content.readany()
            router.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientConnectionError):
                await client.until("/health", lambda status, _: status != 200)
            decode.release.set()
            assert await response.content.read() == event({"text": TOKENS[1]})
        assert await asyncio.wait_for(router.wait(), 5) == 0


# -- readiness


async def test_without_a_usable_pair_requests_and_readiness_say_the_same() -> None:
    def loading(workers: list[FakeWorker]) -> None:
        workers[0].ready_answer = (503, {"ready": False, "reasons": ["loading the model"]})

    async with world(prepare=loading, wait_ready=False, probe_interval_ms=20) as w:
        body = await w.client.until("/ready", lambda _, said: "loading the model" in said["reasons"][0])
        assert not body["ready"]
        async with w.client.post() as response:
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            error = (await response.json())["error"]
            assert error["reason"] == "NO_USABLE_PAIR"
            assert body["reasons"][0] in error["message"]
        assert (await w.client.get("/health"))[0] == 200
        w.prefill[0].ready_answer = (200, {"ready": True})
        await w.client.until("/ready", lambda status, _: status == 200)
        async with w.client.post() as response:
            assert response.status == 200
        _, metrics = await w.client.get("/metrics")
        assert 'baton_router_admission_rejections_total{reason="no_usable_pair"} 1.0' in metrics


async def test_incompatible_fingerprints_are_no_pair() -> None:
    def differ(workers: list[FakeWorker]) -> None:
        workers[0].info["fingerprint"] = "other"

    async with world(prepare=differ) as w, w.client.post() as response:
        assert response.status == 503
        assert "'other'" in (await response.json())["error"]["message"]
        assert (await w.client.get("/ready"))[0] == 503


async def test_a_worker_at_an_address_listed_under_another_role_is_not_used() -> None:
    def flipped(workers: list[FakeWorker]) -> None:
        workers[0].info["role"] = "decode"

    async with world(prepare=flipped, wait_ready=False) as w:
        await w.client.until("/ready", lambda _, said: "it is a decode worker" in said["reasons"][0])


async def test_a_new_incarnation_is_taken_over_and_drain_is_seen() -> None:
    async with world(probe_interval_ms=20) as w:
        w.decode[0].info["incarnation"] = "life-2"
        await w.client.until("/server_info", lambda _, body: body["workers"][1]["incarnation"] == "life-2")
        w.decode[0].ready_answer = (503, {"ready": False, "reasons": ["draining"]})
        w.decode[0].info["state"] = "draining"
        await w.client.until("/ready", lambda status, body: body["workers"][1]["state"] == "draining" and status == 503)


async def test_models_come_from_a_decode_worker_and_admin_calls_go_to_every_worker() -> None:
    async with world() as w:
        assert (await w.client.get("/v1/models"))[1]["data"][0]["id"] == "fake"
        async with w.client.post("/flush_cache", json={}) as response:
            assert (await response.json())["workers"] == {w.prefill[0].url: 200, w.decode[0].url: 200}
        async with w.client.post("/nowhere") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, 404)


async def test_every_request_is_counted_by_route_and_status_and_none_stays_in_flight() -> None:
    async with world() as w:
        for _ in range(3):
            async with w.client.post("/v1/chat/completions") as response:
                await response.read()
        await w.idle()
        _, metrics = await w.client.get("/metrics")
        assert 'baton_router_requests_total{route="/v1/chat/completions",status="200"} 3.0' in metrics
        assert "baton_router_ttft_seconds_count 3.0" in metrics
