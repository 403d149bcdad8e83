"""Every way in which a worker can fail, on either leg: what the client sees, and that nothing of it stays behind."""

import asyncio
import json
import time

import aiohttp
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

BUDGET_S = 0.4
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


async def ends_after_its_head(_worker: FakeWorker, request: web.Request, _received: Received) -> web.StreamResponse:
    """Status 200, and then nothing but the end of the connection."""
    await stream_head(request)
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def breaks_within_json(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
    """Half of an answer that is no stream."""
    response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "99"})
    await response.prepare(request)
    await response.write(b'{"text": "hal')
    assert request.transport is not None
    request.transport.close()
    return response


async def has_no_words(_worker: FakeWorker, _request: web.Request, _received: Received) -> web.StreamResponse:
    """A status and nothing else."""
    return web.Response(status=500)


def streams_error(status: int) -> Script:
    """Status 200, and an error as the first event, in two pieces: SGLang does that."""

    async def script(_worker: FakeWorker, request: web.Request, _received: Received) -> web.StreamResponse:
        response = await stream_head(request)
        said = event({"error": {"message": "told late", "type": "t", "code": status}}) + b"data: [DONE]\n\n"
        await response.write(said[:12])
        await response.write(said[12:])
        return response

    return script


WHOLE = "whole"  # the client gets the good answer
HALF = "half"  # … its beginning, and then an error event, or the connection's end where it is no stream
MODES: dict[str, tuple[Script, int | str, int | str]] = {  # what prefill's failing, and decode's, is to the client
    "400": (answers(400), 400, 400),
    "422 late": (slowly(answers(422)), 422, 422),
    "429": (answers(429, retry_after="3"), 429, 429),
    "500": (answers(500), 500, 500),
    "502": (answers(502), 502, 502),
    "503": (answers(503, retry_after="3"), 503, 503),
    "504": (answers(504), 504, 504),
    "no words": (has_no_words, 500, 500),
    "reset": (resets, 502, 502),
    "end after head": (ends_after_its_head, 502, 502),
    "silence": (is_silent, 504, 504),
    "400 in stream": (streams_error(400), 400, 400),
    "503 in stream": (streams_error(503), 503, 503),
    "half a first event": (dies_after(b'data: {"te'), 502, HALF),
    "half a stream": (dies_after(event({"text": "a"}), b'data: {"te'), 502, HALF),
    "half an answer": (breaks_within_json, 502, HALF),
    "slow head": (slowly(prefills), WHOLE, WHOLE),
    "slow body": (has_a_slow_body, WHOLE, WHOLE),
    "html": (says_html, WHOLE, WHOLE),
}
KINDS: dict[str, dict[str, object]] = {
    "stream": {"stream": True},
    "whole": {"stream": False},
    "stream with logprobs": {"stream": True, "return_logprob": True, "logprob_start_len": 0},
    "whole with logprobs": {"stream": False, "return_logprob": True, "logprob_start_len": 0},
}
SOON_ENOUGH_S = 1.0
"""The client hears of a failure within a second; silence is told when the budget ends."""


def matrix() -> list[object]:
    """Every way to fail, on either leg, for every kind of request. What is good in the end has tests below."""
    return [
        pytest.param(leg, mode, kind, id=f"{leg}, {mode}, {kind}")
        for mode, (_, *ends) in MODES.items()
        for leg, end in zip(("prefill", "decode"), ends, strict=True)
        for kind in KINDS
        if end != WHOLE and not (end == HALF and "logprobs" in kind)  # test_router_merging has those
    ]


@pytest.mark.parametrize(("leg", "mode", "kind"), matrix())
async def test_a_leg_that_fails_is_told_in_time_with_its_status_and_closes_the_other(
    leg: str, mode: str, kind: str
) -> None:
    script, *ends = MODES[mode]
    end = ends[leg == "decode"]
    scripts = ((script,), (decodes,)) if leg == "prefill" else ((is_silent,), (script,))
    async with world(*scripts, retries=0) as w:
        began_s = time.monotonic()
        async with w.client.post(json={"text": "x", **KINDS[kind]}, headers=BUDGET) as response:
            if end != HALF:
                assert response.status == end
                error = (await response.json())["error"]
                assert error["message"] and error["type"] and error["code"] == end
                assert response.headers.get("retry-after") == ("3" if mode in ("429", "503") else None)
            elif response.content_type == "text/event-stream":
                *told, last = [json.loads(line[6:]) for line in (await response.read()).split(b"\n\n") if line]
                assert (response.status, last["error"]["code"]) == (200, 502)
                assert told == [{"text": "a"}] * (mode == "half a stream")
            else:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
        assert time.monotonic() - began_s < SOON_ENOUGH_S + (BUDGET_S if mode == "silence" else 0)
        other = w.decode[0] if leg == "prefill" else w.prefill[0]
        await other.saw_its_connection_closed()
        await w.idle()
        _, text = await w.client.get("/metrics")
        blamed = [line for line in text.splitlines() if 'outcome="failed"' in line and other.url in line]
        assert [line.rpartition(" ")[2] for line in blamed] == ["0.0"], "the other worker is not to blame"


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
