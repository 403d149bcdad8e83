"""A decode worker is lost within a stream: another pair goes on where it broke off, or the client is told why not."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from contract.fake_workers import (
    PATIENCE_S,
    TOKENS,
    FakeWorker,
    Received,
    Script,
    World,
    answers,
    decodes_slowly,
    dies_after,
    is_silent,
    prefills,
    record,
    stream_head,
    tells,
    told,
    world,
)

WHOLE = {
    path: b"".join(told(path, TOKENS, number) for number in range(len(TOKENS))) + b"data: [DONE]\n\n"
    for path in ("/generate", "/v1/completions")
}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "x", "stream": True},
    "/v1/completions": {"prompt": "x", "stream": True},
}


async def ask(w: World, path: str = "/generate", **more: Any) -> bytes:
    """The whole stream, as bytes."""
    async with w.client.post(path, json=BODIES[path] | more) as response:
        assert response.status == 200
        assert "x-baton-token-ids" not in response.headers
        body: bytes = await response.read()
        return body


def error_in(stream: bytes) -> dict[str, Any]:
    """The error that a stream ends with."""
    last = stream.rstrip(b"\n").split(b"\n\n")[-1]
    error: dict[str, Any] = json.loads(last.removeprefix(b"data: "))["error"]
    return error


async def arrival(worker: FakeWorker) -> None:
    """Its first request is there."""
    async with asyncio.timeout(PATIENCE_S):
        await worker.arrival.wait()


async def metric(w: World, name: str) -> float:
    _, text = await w.client.get("/metrics")
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("dies_at", [1, 2, 3])
@pytest.mark.parametrize("gives_up", [0, 500, 503], ids=["breaks", "rank lost", "draining"])
async def test_the_client_sees_one_stream_as_if_nothing_had_been(path: str, dies_at: int, gives_up: int) -> None:
    async with world(decode=(tells(dies_at=dies_at, gives_up=gives_up), tells())) as w:
        assert await ask(w, path) == WHOLE[path]
        first, second = (received.body for received in w.prefill[0].received)
        assert second["bootstrap_room"] != first["bootstrap_room"]
        assert "baton_continuation" not in first
        assert second["baton_continuation"] == [{"tokens": [number]} for number in range(dies_at)]
        assert w.decode[1].received[0].body == second
        assert w.decode[1].received[0].headers["x-request-id"].endswith("~2")
        reason = "broke" if gives_up else "lost"
        assert await metric(w, f'baton_router_migrations_total{{reason="{reason}"}}') == 1
        assert await metric(w, "baton_router_broken_streams_total") == 0
        await w.idle()


async def test_decode_workers_that_serve_alone_continue_each_other_too() -> None:
    async with world((), (tells(dies_at=2), tells())) as w:
        assert await ask(w) == WHOLE["/generate"]
        assert "bootstrap_room" not in w.decode[1].received[0].body


@pytest.mark.parametrize("second", [tells(), tells(ignores=True)], ids=["tells", "tells nothing"])
async def test_a_stream_of_which_nothing_but_its_head_was_seen_begins_anew(second: Script) -> None:
    async def breaks_at_once(_worker: FakeWorker, request: web.Request, _received: Received) -> web.StreamResponse:
        response = await stream_head(request, {"x-baton-token-ids": "0"})
        await response.write(b'data: {"te')
        assert request.transport is not None
        request.transport.close()
        return response

    async with world(decode=(breaks_at_once, second)) as w:
        assert await ask(w) == WHOLE["/generate"]
        assert "baton_continuation" not in w.decode[1].received[0].body
        await w.idle()


async def test_a_stream_may_move_more_than_once() -> None:
    async with world(decode=(tells(dies_at=1), tells(dies_at=2), tells(dies_at=3), tells())) as w:
        assert await ask(w) == WHOLE["/generate"]
        assert [len(worker.received) for worker in w.decode] == [1, 1, 1, 1]
        await w.idle()


async def test_a_stream_moves_no_more_often_than_it_may() -> None:
    async with world(decode=(tells(dies_at=1), tells(dies_at=2), tells()), migrations=1) as w:
        stream = await ask(w)
        assert stream.startswith(told("/generate", TOKENS, 0) + told("/generate", TOKENS, 1) + b'data: {"error"')
        assert "continued 1 times already" in error_in(stream)["message"]
        assert w.decode[2].received == []
        await w.idle()


async def test_without_a_budget_a_stream_does_not_move() -> None:
    async with world(decode=(tells(dies_at=1), tells()), retries_burst=0, retries_per_request=0) as w:
        assert "the budget of retries is spent" in error_in(await ask(w))["message"]


async def test_a_router_that_shall_not_migrate_asks_for_no_records() -> None:
    async with world(decode=(tells(), tells()), migrations=0) as w:
        assert await ask(w) == WHOLE["/generate"]
        assert "x-baton-token-ids" not in w.decode[0].received[0].headers


async def test_a_worker_that_tells_no_tokens_leaves_an_error_that_says_so() -> None:
    async with world(decode=(dies_after(told("/generate", TOKENS, 0)), tells())) as w:
        error = error_in(await ask(w))
        assert error["code"] == 502
        assert "broke within the answer" in error["message"]
        assert "told no token ids" in error["message"]
        assert w.decode[1].received == []


async def test_a_worker_that_would_begin_anew_is_not_listened_to() -> None:
    async with world(decode=(tells(dies_at=2), tells(ignores=True))) as w:
        stream = await ask(w)
        assert stream.count(b'"text"') == 2
        assert "began a new answer" in error_in(stream)["message"]
        await w.idle()


async def test_a_worker_that_gives_up_by_the_requests_own_fault_is_passed_on_in_its_words() -> None:
    async with world(decode=(tells(dies_at=1, gives_up=504), tells())) as w:
        assert error_in(await ask(w)) == {"message": "the rank is gone", "code": 504, "reason": "worker_lost"}
        assert w.decode[1].received == []


async def test_nobody_else_to_continue_is_said_in_the_stream() -> None:
    async def dies_for_good(worker: FakeWorker, request: web.Request, _received: Received) -> web.StreamResponse:
        response = await stream_head(request, {"x-baton-token-ids": "0"})
        await response.write(record(told("/generate", TOKENS, 0), b"part", {"tokens": [0]}))
        await worker.kill()
        return response

    async with world(decode=(dies_for_good,)) as w:
        stream = await ask(w)
        assert stream.startswith(told("/generate", TOKENS, 0))
        assert "nobody can continue the answer: no decode worker is usable" in error_in(stream)["message"]
        await w.idle()


async def test_a_single_worker_whose_connection_broke_continues_itself() -> None:
    async with world(decode=(tells(dies_at=1),)) as w:
        w.decode[0].script = once(tells(dies_at=1), tells())
        assert await ask(w) == WHOLE["/generate"]


def once(first: Script, then: Script) -> Script:
    async def script(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        return await (first if len(worker.received) == 1 else then)(worker, request, received)

    return script


async def test_a_busy_worker_on_the_way_is_passed_over() -> None:
    async with world(decode=(tells(dies_at=2), answers(503), tells())) as w:
        assert await ask(w) == WHOLE["/generate"]
        assert [len(worker.received) for worker in w.decode] == [1, 1, 1]


async def test_a_refused_continuation_ends_the_stream_with_the_workers_words() -> None:
    async with world(decode=(tells(dies_at=2), answers(400))) as w:
        assert error_in(await ask(w))["message"] == "because 400"
        await w.idle()


async def test_an_answer_of_which_only_the_end_of_the_body_is_missing_is_whole() -> None:
    async def loses_its_end(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        response = await tells()(worker, request, received)
        assert request.transport is not None
        request.transport.close()
        return response

    async with world(decode=(loses_its_end, tells())) as w:
        assert await ask(w) == WHOLE["/generate"]
        assert w.decode[1].received == []


async def test_an_answer_that_is_no_stream_is_computed_anew_by_another_pair() -> None:
    async def dies(_worker: FakeWorker, request: web.Request, _received: Received) -> web.StreamResponse:
        response = await stream_head(request)
        assert request.transport is not None
        request.transport.close()
        return response

    async with world(decode=(dies, tells())) as w:
        async with w.client.post(json={"text": "x"}) as response:
            assert response.status == 200
            await response.read()
        assert "x-baton-token-ids" not in w.decode[1].received[0].headers
        assert "baton_continuation" not in w.decode[1].received[0].body


async def test_fifty_streams_of_a_worker_that_is_killed_all_go_on() -> None:
    """Each has one token when the worker goes, all at once, and then no address answers."""
    begun = asyncio.Semaphore(0)

    async def holds(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        begun.release()
        await worker.rooms.room(received.body["bootstrap_room"]).wait()
        response = await stream_head(request, {"x-baton-token-ids": "0"})
        await response.write(record(told(request.path, TOKENS, 0), b"part", {"tokens": [0]}))
        await worker.release.wait()
        return response

    async with world(decode=(holds, tells())) as w:
        asked = [asyncio.create_task(ask(w)) for _ in range(100)]
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(50):
                await begun.acquire()
        await w.decode[0].kill()
        assert await asyncio.gather(*asked) == [WHOLE["/generate"]] * 100
        assert await metric(w, 'baton_router_migrations_total{reason="lost"}') == 50
        await w.idle()


# -- workers that say nothing

IMPATIENT = {"probe_interval_ms": 50, "connect_timeout_ms": 500, "worker_silence_ms": 700}


def holds_after(count: int) -> Script:
    """A decode worker that stops within its answer until it is released, and then ends it."""

    async def script(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        await worker.rooms.room(received.body["bootstrap_room"]).wait()
        response = await stream_head(request, {"x-baton-token-ids": "0"})
        for number in range(len(TOKENS)):
            if number == count:
                await worker.release.wait()
            kind = b"part" if number < len(TOKENS) - 1 else b"last"
            events = told(request.path, TOKENS, number) + (b"data: [DONE]\n\n" if kind == b"last" else b"")
            await response.write(record(events, kind, {"tokens": [number]}))
        return response

    return script


async def test_a_worker_that_froze_within_a_stream_is_lost_to_it_after_the_time_of_silence() -> None:
    async with world(decode=(holds_after(2), tells()), **IMPATIENT) as w:
        async with w.client.post(json=BODIES["/generate"]) as response:
            await response.content.readuntil(told("/generate", TOKENS, 1))
            w.decode[0].is_frozen = True
            assert (await response.read()).endswith(WHOLE["/generate"][-80:])
        assert w.decode[1].received[0].body["baton_continuation"] == [{"tokens": [0]}, {"tokens": [1]}]
        assert w.decode[0].received[0].cancelled.is_set()
        await w.idle()


async def test_a_worker_that_froze_before_its_first_byte_is_replaced() -> None:
    async with world((prefills, prefills), (is_silent, tells()), **IMPATIENT) as w:
        asked = asyncio.create_task(ask(w))
        await arrival(w.decode[0])
        w.decode[0].is_frozen = True
        assert await asked == WHOLE["/generate"]
        assert await metric(w, 'baton_router_retries_total{reason="lost"}') == 1
        await w.idle()


async def test_a_worker_that_only_thinks_for_long_is_left_to_it() -> None:
    """It answers its probes: many times the time of silence passes, and its stream is its own."""
    async with world(decode=(holds_after(1), tells()), **IMPATIENT) as w:
        asked = asyncio.create_task(ask(w))
        await arrival(w.decode[0])
        before = w.decode[0].probed
        while w.decode[0].probed < before + 20:
            await w.client.get("/health")
        assert not asked.done()
        w.decode[0].release.set()
        assert await asked == WHOLE["/generate"]
        assert w.decode[1].received == []


async def test_a_worker_too_busy_for_probes_keeps_the_streams_that_it_feeds() -> None:
    async def feeds(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        await worker.rooms.room(received.body["bootstrap_room"]).wait()
        response = await stream_head(request, {"x-baton-token-ids": "0"})
        worker.is_frozen = True
        for number in range(40):
            await response.write(record(told("/v1/completions", ("x",), 0), b"part", {"tokens": [number]}))
            await asyncio.wait([asyncio.ensure_future(worker.release.wait())], timeout=0.05)
        await response.write(record(b"data: [DONE]\n\n", b"last", {"tokens": [40]}))
        return response

    async with world(decode=(feeds, tells()), **IMPATIENT) as w:
        assert (await ask(w, "/v1/completions")).count(b'"x"') == 40
        assert w.decode[1].received == []


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_each_part_of_a_batch_moves_by_itself(path: str) -> None:
    prompt = {"text": ["x", "y"]} if path == "/generate" else {"prompt": ["x", "y"]}
    async with world(decode=(tells(dies_at=2), tells())) as w:
        events = [one for one in (await ask(w, path, **prompt)).split(b"\n\n") if one and b"[DONE]" not in one]
        for number in range(2):
            mine = [json.loads(one.removeprefix(b"data: ")) for one in events]
            mine = [one for one in mine if (one["index"] if "index" in one else one["choices"][0]["index"]) == number]
            assert len(mine) == len(TOKENS)
        assert await metric(w, 'baton_router_migrations_total{reason="lost"}') == 1
        await w.idle()


async def test_the_prompts_logprobs_are_asked_for_once_and_stand_in_every_event() -> None:
    async def scores(worker: FakeWorker, _request: web.Request, received: Received) -> web.StreamResponse:
        worker.rooms.room(received.body["bootstrap_room"]).set()
        known = [] if "baton_continuation" in received.body else [[-0.5, 7, None]]
        return web.json_response({"text": "", "meta_info": {"input_token_logprobs": known}})

    async with world((scores,), (tells(dies_at=2), tells())) as w:
        stream = await ask(w, return_logprob=True, logprob_start_len=0)
        events = [json.loads(one.removeprefix(b"data: ")) for one in stream.split(b"\n\n")[:-2]]
        assert len(events) == len(TOKENS)
        assert all(one["meta_info"]["input_token_logprobs"] == [[-0.5, 7, None]] for one in events)


async def test_a_client_can_neither_see_records_nor_claim_a_past() -> None:
    async with world(decode=(tells(),)) as w:
        forged = {"baton_continuation": [{"tokens": [0, 1]}], "rid": "mine"}
        async with w.client.post(json=BODIES["/generate"] | forged, headers={"x-baton-token-ids": "1"}) as response:
            assert await response.read() == WHOLE["/generate"]
        assert "baton_continuation" not in w.decode[0].received[0].body


async def test_a_client_that_leaves_while_its_stream_moves_leaves_nothing_behind() -> None:
    async with world((once_prefills(),), (tells(dies_at=2), decodes_slowly)) as w:
        async with w.client.post(json=BODIES["/generate"]) as response:
            await response.content.readany()
            await arrival(w.decode[1])
        await w.decode[1].saw_its_connection_closed()
        await w.idle()


def once_prefills() -> Script:
    async def script(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        if len(worker.received) == 1:
            return await prefills(worker, request, received)
        await worker.release.wait()
        return web.json_response({})

    return script
