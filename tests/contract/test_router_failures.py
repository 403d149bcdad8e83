"""Every way in which a worker can fail, on either leg: what the client sees, and that nothing of it stays behind."""

import asyncio
import json

import pytest
from aiohttp import web

from contract.fake_workers import (
    FakeWorker,
    Received,
    Script,
    answers,
    decodes,
    dies_after,
    event,
    is_silent,
    prefills,
    resets,
    stream_head,
    world,
)

BUDGET = {"x-baton-budget-ms": "400"}
SOON_S = 0.03


def slowly(script: Script) -> Script:
    """The same, a moment later."""

    async def later(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        moment = asyncio.Event()
        asyncio.get_running_loop().call_later(SOON_S, moment.set)
        await moment.wait()
        return await script(worker, request, received)

    return later


async def has_a_slow_body(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
    """Its head at once, its body a moment later, byte by byte."""
    worker.rooms.room(received.body["bootstrap_room"]).set()
    response = await stream_head(request)
    for byte in event({"text": "slow"}):
        await response.write(bytes((byte,)))
    return response


async def says_html(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
    """Something that is no answer of a model, with status 200."""
    worker.rooms.room(received.body["bootstrap_room"]).set()
    return web.Response(text="<html>", content_type="text/html")


FAILURES = [
    pytest.param(answers(400), 400, id="400"),
    pytest.param(answers(429, retry_after="3"), 429, id="429"),
    pytest.param(answers(500), 500, id="500"),
    pytest.param(answers(503, retry_after="3"), 503, id="503"),
    pytest.param(resets, 502, id="reset"),
    pytest.param(is_silent, 504, id="silence"),
    pytest.param(slowly(answers(422)), 422, id="slow refusal"),
]


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("script", "status"), FAILURES)
async def test_a_failing_prefill_leg_is_told_with_its_status_and_closes_decodes(
    script: Script, status: int, is_stream: bool
) -> None:
    async with world((script,), (decodes,), retries=0) as w:
        async with w.client.post(json={"text": "x", "stream": is_stream}, headers=BUDGET) as response:
            assert response.status == status
            assert (await response.json())["error"]["message"]
        await w.decode[0].saw_its_connection_closed()
        await w.idle()


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("script", "status"), FAILURES)
async def test_a_failing_decode_leg_is_told_with_its_status_and_closes_prefills(
    script: Script, status: int, is_stream: bool
) -> None:
    async with world((is_silent,), (script,), retries=0) as w:
        async with w.client.post(json={"text": "x", "stream": is_stream}, headers=BUDGET) as response:
            assert response.status == status
            assert (await response.json())["error"]["message"]
        await w.prefill[0].saw_its_connection_closed()
        await w.idle()


def says(status: int, reason: str) -> Script:
    """One of our workers, in words."""
    return answers(status, {"error": {"message": f"because of {reason}", "code": status, "reason": reason}})


LOSSES = [(500, "worker_lost"), (502, "peer_lost"), (502, "transfer_failed")]


@pytest.mark.parametrize(("status", "reason"), LOSSES)
async def test_a_worker_that_says_that_it_or_its_peer_is_lost_costs_another_pair_and_no_request(
    status: int, reason: str
) -> None:
    async with world((prefills, prefills), (says(status, reason), decodes)) as w:
        for _ in range(4):
            async with w.client.post() as response:
                assert response.status == 200
        _, text = await w.client.get("/metrics")
        assert 'baton_router_retries_total{reason="peer"} 4.0' in text  # round robin gives it a turn each time
        await w.idle()
    async with world(decode=(says(status, reason),)) as w, w.client.post() as response:
        assert response.status == status
        assert (await response.json())["error"]["message"] == f"because of {reason}"


async def test_a_worker_that_fails_for_another_reason_is_not_asked_a_second_time() -> None:
    async with world(decode=(says(500, "device_fault"), decodes)) as w:
        async with w.client.post() as response:
            assert response.status == 500
        assert w.decode[1].received == []


async def test_a_dead_prefill_worker_is_the_cause_even_where_decode_is_the_first_to_say_so() -> None:
    """Decode hears of the death by its own link, and may be faster than the router's connection."""
    async with world((slowly(resets), prefills), (says(502, "peer_lost"),), retries=1) as w:
        w.decode[0].script = decodes_from_the_second(says(502, "peer_lost"))
        async with w.client.post() as response:
            assert response.status == 200
        assert [len(worker.received) for worker in w.prefill] == [1, 1]
        _, text = await w.client.get("/metrics")
        assert 'baton_router_retries_total{reason="lost"} 1.0' in text


def decodes_from_the_second(first: Script) -> Script:
    async def script(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        return await (first if len(worker.received) == 1 else decodes)(worker, request, received)

    return script


@pytest.mark.parametrize("prefill", [slowly(prefills), has_a_slow_body, says_html], ids=["head", "body", "html"])
async def test_what_is_odd_or_slow_about_prefills_answer_is_not_the_clients_matter(prefill: Script) -> None:
    async with world((prefill,)) as w:
        async with w.client.post(json={"text": "x"}) as response:
            assert (response.status, await response.json()) == (200, {"text": "The capital is Paris."})
        await w.idle()


@pytest.mark.parametrize(
    ("decode", "body", "content_type"),
    [
        (slowly(decodes), b'{"text": "The capital is Paris."}', "application/json"),
        (has_a_slow_body, event({"text": "slow"}), "text/event-stream"),
        (says_html, b"<html>", "text/html"),
    ],
    ids=["head", "body", "html"],
)
async def test_what_is_odd_or_slow_about_decodes_answer_passes_as_it_is(
    decode: Script, body: bytes, content_type: str
) -> None:
    async with world(decode=(decode,)) as w:
        async with w.client.post(json={"text": "x"}) as response:
            assert (response.status, response.content_type) == (200, content_type)
            assert await response.read() == body
        await w.idle()


async def test_fifty_streams_that_break_end_each_with_one_error_event_and_leave_no_load() -> None:
    async with world(decode=(dies_after(event({"text": "a"}), b'data: {"hal'),), breaker_failures_max=100) as w:

        async def one() -> list[bytes]:
            async with w.client.post() as response:
                return [line for line in (await response.read()).split(b"\n\n") if line]

        for lines in await asyncio.gather(*(one() for _ in range(50))):
            said = [json.loads(line.removeprefix(b"data: ")) for line in lines]
            assert said[0] == {"text": "a"}
            assert [one["error"]["code"] for one in said[1:]] == [502]
        await w.idle()


async def test_a_stream_that_breaks_behind_its_end_mark_is_whole() -> None:
    """Its client has everything: an error event after `[DONE]` would be a second ending."""
    whole = event({"text": "a"}) + b"data: [DONE]\n\n"
    async with world(decode=(dies_after(whole),)) as w:
        async with w.client.post() as response:
            assert await response.read() == whole
        await w.idle()


async def test_a_rolling_restart_of_every_decode_worker_fails_no_request() -> None:
    async with world(decode=(decodes, decodes, decodes), probe_interval_ms=20) as w:
        statuses: list[int] = []

        async def load() -> None:
            while len(statuses) < 150:
                async with w.client.post() as response:
                    await response.read()
                    statuses.append(response.status)

        running = [asyncio.create_task(load()) for _ in range(4)]
        for worker in w.decode[:2]:
            worker.ready_answer = (503, {"ready": False, "reasons": ["draining"], "draining": True})
            url = worker.url
            await w.client.until(
                "/server_info",
                lambda _, body, url=url: all(
                    (one["state"], one["in_flight"]) == ("draining", 0) for one in body["workers"] if one["url"] == url
                ),
            )
            await worker.stop()
        await asyncio.gather(*running)
        assert statuses == [200] * len(statuses)
        await w.idle()
