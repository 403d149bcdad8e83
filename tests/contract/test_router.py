"""The router between a real client and real HTTP workers: delivery, failure, cancellation, deadlines."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from baton_core.limits import Limits
from baton_router.exchange import IDS_AT_ONCE, request_id
from contract.fake_workers import (
    TOKENS,
    Client,
    FakeWorker,
    Script,
    answers,
    decodes_slowly,
    dies_after,
    error_of,
    event,
    is_silent,
    prefills_and_holds_its_body,
    resets,
    stream_head,
    texts,
    world,
)

# -- a request that goes well


async def test_both_legs_get_the_same_body_and_the_client_gets_decodes_answer() -> None:
    async with world() as w:
        async with w.client.post("/v1/completions", json={"prompt": "x", "n": 1, "seed": 2**70}) as response:
            assert (response.status, await response.json()) == (200, {"text": "".join(TOKENS)})
            assert response.content_type == "application/json"
        sent = w.prefill[0].received[0].body
        assert sent == w.decode[0].received[0].body
        assert {key: sent[key] for key in ("prompt", "n", "seed")} == {"prompt": "x", "n": 1, "seed": 2**70}
        assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("127.0.0.1", 8998)
        assert 1 <= sent["bootstrap_room"] < 2**63
        await w.idle()


async def test_the_stream_starts_while_prefills_body_is_still_open() -> None:
    async with world((prefills_and_holds_its_body,)) as w:
        async with w.client.post() as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert await texts(response) == list(TOKENS)
        assert not w.prefill[0].release.is_set()
        w.prefill[0].release.set()
        await w.idle()


async def test_tokens_come_one_by_one_as_decode_sends_them() -> None:
    async with world(decode=(decodes_slowly,)) as w, w.client.post() as response:
        assert await response.content.readany() == event({"text": TOKENS[0]})
        w.decode[0].release.set()
        assert await response.content.read() == event({"text": TOKENS[1]})


async def shares_where_decode_says(told: str) -> tuple[float, dict[str, float]]:
    """A time to first token and its published parts, where decode's head says this of its own."""

    async def decodes(_worker: FakeWorker, request: web.Request, _received: object) -> web.StreamResponse:
        response = await stream_head(request, {"x-baton-first-token-us": told})
        await response.write(event({"text": TOKENS[0]}))
        return response

    async with world(decode=(decodes,)) as w:
        async with w.client.post() as response:
            assert await texts(response) == [TOKENS[0]]
            assert "x-baton-first-token-us" not in response.headers
        await w.idle()
        _, metrics = await w.client.get("/metrics")
    parts = re.findall(r'ttft_stage_seconds_sum\{stage="(\w+)"\} (\S+)', metrics)
    return float(re.findall(r"ttft_seconds_sum (\S+)", metrics)[0]), {stage: float(sum_s) for stage, sum_s in parts}


async def test_a_time_to_first_token_is_the_routers_and_decodes_and_a_rest() -> None:
    whole_s, parts_s = await shares_where_decode_says("10")
    assert parts_s["decode"] == pytest.approx(1e-5)
    assert min(parts_s.values()) > 0 and sum(parts_s.values()) == pytest.approx(whole_s)


async def test_a_decode_worker_that_claims_more_time_than_there_was_gets_what_there_was() -> None:
    whole_s, parts_s = await shares_where_decode_says("999999999999")
    assert parts_s["unattributed"] == 0 and sum(parts_s.values()) == pytest.approx(whole_s)


@pytest.mark.parametrize("told", ["", "-5", "1e3", "9" * 13, "x"])
async def test_a_decode_worker_that_says_no_number_has_its_time_told_apart_by_nobody(told: str) -> None:
    whole_s, parts_s = await shares_where_decode_says(told)
    assert whole_s > 0 and set(parts_s.values()) == {0}


async def test_prefill_is_left_to_finish_after_decode_is_done_and_its_connection_serves_again() -> None:
    async with world((prefills_and_holds_its_body,)) as w:
        for _ in range(2):
            async with w.client.post() as response:
                await response.read()
            w.prefill[0].release.set()
            await w.idle()
        assert not any(received.cancelled.is_set() for received in w.prefill[0].received)


async def test_a_large_body_passes_and_one_above_the_limit_is_refused_before_any_worker_sees_it() -> None:
    async with world(limits=Limits(body_bytes_max=9 << 20)) as w:
        async with w.client.post(json={"text": "x" * (8 << 20)}) as response:
            assert response.status == 200
        assert len(w.decode[0].received[0].body["text"]) == 8 << 20

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b" " * (1 << 20)

        for data in (b" " * (10 << 20), pieces()):  # declared, and chunked
            async with w.client.post(data=data) as response:
                assert response.status == 413
                assert error_of(await response.json()) == (413, "INVALID_REQUEST")
        assert len(w.decode[0].received) == 1


@pytest.mark.parametrize(
    "data", [b"", b"[1]", b'{"text": }', b'"text"', b"\xff", b'{"a": NaN}', b'{"a":' + b"[" * 9999]
)
async def test_a_body_that_is_not_a_json_object_is_refused_in_the_workers_envelope(data: bytes) -> None:
    async with world() as w:
        async with w.client.post(data=data) as response:
            assert response.status == 400
            assert error_of(await response.json()) == (400, "INVALID_REQUEST")
        assert w.prefill[0].received == w.decode[0].received == []


async def test_what_a_client_says_about_rooms_and_ranks_is_overwritten() -> None:
    forged = {"bootstrap_host": "evil", "bootstrap_port": 1, "bootstrap_room": [7], "bootstrap_instance": "evil"}
    ranks = {"routed_dp_rank": 3, "data_parallel_rank": 3, "disagg_prefill_dp_rank": 3}
    async with world() as w:
        async with w.client.post(json={"text": "x"} | forged | ranks) as response:
            assert response.status == 200
        sent = w.decode[0].received[0].body
        assert set(sent) == {"text", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
        assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("127.0.0.1", 8998)


async def test_with_a_registry_both_legs_meet_there_and_name_the_instance() -> None:
    async with world(registry="registry.local:9100") as w:
        async with w.client.post(json={"text": "x"}) as response:
            assert response.status == 200
        sent = w.decode[0].received[0].body
        assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("registry.local", 9100)
        assert sent["bootstrap_instance"] == "prefill-1"


async def test_without_any_prefill_worker_decode_serves_alone() -> None:
    async with world(()) as w:
        async with w.client.post(json={"text": "x", "bootstrap_room": 5}) as response:
            assert await response.json() == {"text": "".join(TOKENS)}
        assert w.decode[0].received[0].body == {"text": "x"}


async def test_the_clients_request_id_goes_to_both_legs_and_comes_back() -> None:
    async with world() as w:
        async with w.client.post(headers={"x-request-id": "mine-1", "authorization": "Bearer secret"}) as response:
            assert response.headers["x-request-id"] == "mine-1"
        for worker in (w.prefill[0], w.decode[0]):
            assert worker.received[0].headers["x-request-id"] == "mine-1"
            assert "authorization" not in worker.received[0].headers
        async with w.client.post(headers={"x-request-id": "x" * 500}) as response:
            assert len(response.headers["x-request-id"]) == 32


def test_a_new_request_id_is_never_given_twice() -> None:
    ids = {request_id({}) for _ in range(3 * IDS_AT_ONCE)}
    assert len(ids) == 3 * IDS_AT_ONCE
    assert {len(one) for one in ids} == {32}


# -- a leg that fails


@pytest.mark.parametrize("stream", [True, False])
async def test_prefills_rejection_reaches_the_client_and_closes_decodes_leg(stream: bool) -> None:
    async with world((answers(400),), (is_silent,)) as w:
        async with w.client.post(json={"text": "x", "stream": stream}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["message"] == "because 400"
        await w.decode[0].saw_its_connection_closed()
        await w.idle()


@pytest.mark.parametrize("status", [400, 409, 429, 500])
async def test_decodes_failure_reaches_the_client_with_its_status_and_closes_prefills_leg(status: int) -> None:
    async with world((is_silent,), (answers(status, retry_after="7"),)) as w:
        async with w.client.post() as response:
            assert response.status == status
            assert (await response.json())["error"]["message"] == f"because {status}"
            assert response.headers["retry-after"] == "7"
        await w.prefill[0].saw_its_connection_closed()
        await w.idle()


async def test_prefills_rejection_still_gives_its_status_when_decode_has_sent_only_its_head() -> None:
    async def sends_its_head(worker: FakeWorker, request: Any, received: Any) -> Any:
        response = await stream_head(request)
        worker.rooms.room(1).set()
        await worker.release.wait()
        return response

    async def rejects_late(worker: FakeWorker, request: Any, received: Any) -> Any:
        await worker.rooms.room(1).wait()
        return await answers(400)(worker, request, received)

    async with world((rejects_late,), (sends_its_head,)) as w, w.client.post() as response:
        assert response.status == 400


async def test_the_wrong_request_is_told_rather_than_what_followed_from_it() -> None:
    async def rejects_after_decode_failed(worker: FakeWorker, request: Any, received: Any) -> Any:
        await worker.rooms.room(0).wait()
        return await answers(422)(worker, request, received)

    async def fails_first(worker: FakeWorker, request: Any, received: Any) -> Any:
        asyncio.get_running_loop().call_later(0.01, worker.rooms.room(0).set)
        return await answers(500)(worker, request, received)

    async with world((rejects_after_decode_failed,), (fails_first,)) as w, w.client.post() as response:
        assert response.status == 422


async def test_an_echo_of_a_cancellation_never_hides_the_cause() -> None:
    async with world((answers(499),), (answers(500),)) as w, w.client.post() as response:
        assert response.status == 500


async def test_a_failure_without_words_gets_the_envelope() -> None:
    async def says_nothing(_worker: FakeWorker, _request: Any, _received: Any) -> Any:
        return web.Response(status=500)

    async with world(decode=(says_nothing,)) as w, w.client.post() as response:
        assert error_of(await response.json()) == (500, "PEER_LOST")


# -- a stream that breaks


async def test_a_stream_that_breaks_ends_with_one_valid_error_event_and_closes_prefills_leg() -> None:
    async with world((is_silent,), (dies_after(event({"text": "a"})),)) as w:
        async with w.client.post() as response:
            assert response.status == 200
            first, last = (await response.read()).split(b"\n\n")[:2]
            assert json.loads(first.removeprefix(b"data: ")) == {"text": "a"}
            assert error_of(json.loads(last.removeprefix(b"data: "))) == (502, "PEER_LOST")
        await w.prefill[0].saw_its_connection_closed()
        assert len(w.decode[0].received) == 1  # never replayed
        _, metrics = await w.client.get("/metrics")
        assert "baton_router_broken_streams_total 1.0" in metrics


async def test_half_an_event_before_the_break_is_held_back() -> None:
    async with world(decode=(dies_after(event({"text": "a"}), b'data: {"te'),)) as w, w.client.post() as response:
        events = [one for one in (await response.read()).split(b"\n\n") if one]
        assert len(events) == 2
        assert all(json.loads(one.removeprefix(b"data: ")) for one in events)


async def test_an_event_that_comes_in_pieces_is_whole_for_the_client() -> None:
    whole = event({"text": "a"}) + event({"text": "b"})

    async def in_pieces(_worker: FakeWorker, request: Any, _received: Any) -> Any:
        response = await stream_head(request)
        for cut in range(0, len(whole), 5):
            await response.write(whole[cut : cut + 5])
        return response

    async with world(decode=(in_pieces,)) as w, w.client.post() as response:
        assert await response.read() == whole


async def test_decodes_stream_goes_on_when_prefill_fails_after_it_began() -> None:
    async def breaks_when_released(worker: FakeWorker, request: Any, received: Any) -> Any:
        worker.rooms.room(received.body["bootstrap_room"]).set()
        await worker.release.wait()
        return await resets(worker, request, received)

    async with world((breaks_when_released,), (decodes_slowly,)) as w, w.client.post() as response:
        assert await response.content.readany() == event({"text": TOKENS[0]})
        w.prefill[0].release.set()
        await w.client.until("/server_info", lambda _, body: body["workers"][0]["in_flight"] == 0)
        w.decode[0].release.set()
        assert await response.content.read() == event({"text": TOKENS[1]})


async def test_a_plain_answer_that_breaks_is_not_taken_for_whole() -> None:
    async def breaks(_worker: FakeWorker, request: Any, _received: Any) -> Any:
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "100"})
        await response.prepare(request)
        await response.write(b'{"text": "hal')
        request.transport.close()
        return response

    async with world(decode=(breaks,)) as w, w.client.post(json={"text": "x"}) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


# -- the client goes, or time does


@pytest.mark.parametrize("decode", [is_silent, decodes_slowly], ids=["before the first byte", "within the stream"])
async def test_a_client_that_goes_away_closes_both_legs_within_a_second(decode: Script) -> None:
    async with world((prefills_and_holds_its_body,), (decode,)) as w:
        request = asyncio.create_task(read_one(w.client))
        await asyncio.wait_for(asyncio.gather(w.prefill[0].arrival.wait(), w.decode[0].arrival.wait()), 5)
        if decode is decodes_slowly:
            await request
        request.cancel()
        await asyncio.gather(w.prefill[0].saw_its_connection_closed(), w.decode[0].saw_its_connection_closed())
        await w.idle()


async def read_one(client: Client) -> None:
    """Read the first bytes of a stream and close the connection."""
    async with client.post() as response:
        await response.content.readany()
        response.close()


async def test_the_requests_budget_ends_it_naming_the_stage() -> None:
    async with world((is_silent,), (is_silent,)) as w:
        async with w.client.post(headers={"x-baton-budget-ms": "150"}) as response:
            assert response.status == 504
            error = (await response.json())["error"]
        assert error["reason"] == "DEADLINE"
        assert "150 ms" in error["message"]
        assert f"waiting for the first bytes of {w.decode[0].url}" in error["message"]
        await asyncio.gather(w.prefill[0].saw_its_connection_closed(), w.decode[0].saw_its_connection_closed())
        assert 0 < int(w.decode[0].received[0].headers["x-baton-budget-ms"]) <= 150
        async with w.client.post(headers={"x-baton-budget-ms": "soon"}) as response:
            assert response.status == 400


async def test_a_stream_past_its_budget_ends_with_an_error_event() -> None:
    async with world(decode=(decodes_slowly,), limits=Limits(request_budget_ms=200)) as w, w.client.post() as response:
        last = (await response.read()).split(b"\n\n")[1]
        assert error_of(json.loads(last.removeprefix(b"data: "))) == (504, "DEADLINE")
