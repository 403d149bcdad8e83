"""Logprobs of the prompt come from prefill and reach the client in decode's answer, streamed or not."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from baton_router.merging import merge, merge_events, scores_in
from contract.fake_workers import (
    FakeWorker,
    Received,
    Script,
    answers,
    decodes,
    dies_after,
    error_of,
    event,
    prefills,
    prefills_and_holds_its_body,
    resets,
    stream_head,
    world,
)

PROMPT = [[None, 5, None], [-0.5, 6, "]},"]]
TOP = [None, [[-0.5, 6, None]]]
OWN = [[-0.25, 7, "a"]]
ASKING = {"text": "x", "return_logprob": True, "logprob_start_len": 0}


def answer(tokens: int = 1, prompt: Any = (), top: Any = (), **more: Any) -> dict[str, Any]:
    """An answer of `/generate`."""
    meta = {"id": "r", "input_token_logprobs": list(prompt), "output_token_logprobs": OWN * tokens}
    return {"text": "a" * tokens, "meta_info": meta | {"input_top_logprobs": list(top)}, **more}


async def judges(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
    """A prefill worker that gives the prompt's logprobs: as events where the client streams, as our own workers do."""
    worker.rooms.room(received.body["bootstrap_room"]).set()
    if not received.body.get("stream"):
        return web.json_response(answer(prompt=PROMPT, top=TOP))
    response = await stream_head(request)
    await response.write(event(answer(prompt=PROMPT, top=TOP)) + b"data: [DONE]\n\n")
    return response


async def judges_when_released(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
    """As `judges`, but its answer comes late; decode's does not wait for it."""
    worker.rooms.room(received.body["bootstrap_room"]).set()
    await worker.release.wait()
    return await judges(worker, request, received)


async def continues(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
    """A decode worker whose answers leave room for the prompt's logprobs; its events come in two pieces each."""
    await worker.rooms.room(received.body["bootstrap_room"]).wait()
    if not received.body.get("stream"):
        return web.json_response(answer(3, extra={"kept": [1.50, "ü"]}))
    response = await stream_head(request)
    for tokens in (1, 2, 3):
        whole = event(answer(tokens))
        await response.write(whole[:40])
        await response.write(whole[40:])
    await response.write(b"data: [DONE]\n\n")
    return response


async def events_of(response: Any) -> list[Any]:
    lines = (await response.read()).decode().split("\n\n")
    return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines if line]


async def test_a_whole_answer_has_prefills_logprobs_in_front_and_is_still_json() -> None:
    async with world((judges,), (continues,)) as w:
        async with w.client.post(json=ASKING) as response:
            raw = await response.read()
            assert (response.status, response.content_type) == (200, "application/json")
            assert response.headers["content-length"] == str(len(raw))
        assert json.loads(raw) == answer(3, prompt=PROMPT, top=TOP, extra={"kept": [1.50, "ü"]})
        await w.idle()


async def test_every_event_of_a_stream_has_prefills_logprobs_and_all_else_is_decodes() -> None:
    async with world((judges,), (continues,)) as w:
        async with w.client.post(json=ASKING | {"stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            *chunks, done = await events_of(response)
        assert chunks == [answer(tokens, prompt=PROMPT, top=TOP) for tokens in (1, 2, 3)]
        assert done == "data: [DONE]"
        await w.idle()


async def test_prefills_answer_may_be_json_though_decode_streams() -> None:
    async def judges_in_json(worker: FakeWorker, _request: web.Request, received: Received) -> web.StreamResponse:
        worker.rooms.room(received.body["bootstrap_room"]).set()
        return web.json_response(answer(prompt=PROMPT))

    async with world((judges_in_json,), (continues,)) as w, w.client.post(json=ASKING | {"stream": True}) as response:
        first = (await events_of(response))[0]
    assert first["meta_info"]["input_token_logprobs"] == PROMPT


async def test_who_does_not_ask_gets_the_very_bytes_and_waits_for_nothing() -> None:
    async with world((prefills_and_holds_its_body,), (continues,)) as w:
        for body in ({"text": "x"}, ASKING | {"return_logprob": False}, ASKING | {"return_logprob": None}):
            async with w.client.post(json=body | {"stream": True}) as response:
                expected = b"".join(event(answer(tokens)) for tokens in (1, 2, 3)) + b"data: [DONE]\n\n"
                assert await response.read() == expected
        async with w.client.post("/v1/completions", json=ASKING) as response:
            assert await response.json() == answer(3, extra={"kept": [1.50, "ü"]})


async def test_without_a_prefill_worker_decodes_own_answer_is_whole() -> None:
    async with world((), (decodes,)) as w, w.client.post(json=ASKING) as response:
        assert (response.status, "text" in await response.json()) == (200, True)


async def test_the_client_gets_nothing_before_prefills_logprobs_and_all_as_soon_as_they_are_there() -> None:
    async with world((judges_when_released,), (continues,)) as w:
        asked = asyncio.create_task(w.client.session.post(w.client.url + "/generate", json=ASKING | {"stream": True}))
        await asyncio.wait_for(w.decode[0].arrival.wait(), 5)
        assert not asked.done()
        w.prefill[0].release.set()
        async with await asked as response:
            assert len(await events_of(response)) == 4
        await w.idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_without_the_prompts_logprobs_is_a_failure_not_half_an_answer(stream: bool) -> None:
    async with world((prefills,), (continues,)) as w:
        async with w.client.post(json=ASKING | {"stream": stream}) as response:
            assert response.status == 502
            error = (await response.json())["error"]
        assert f"prefill worker {w.prefill[0].url} answered without the prompt's logprobs" in error["message"]
        await w.idle()


async def test_a_prefill_leg_that_breaks_costs_a_retry_with_another_pair() -> None:
    async def breaks_once(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        worker.rooms.room(received.body["bootstrap_room"]).set()
        script: Script = resets if len(worker.received) == 1 else judges
        return await script(worker, request, received)

    async with world((breaks_once,), (continues,), retries=1) as w:
        async with w.client.post(json=ASKING) as response:
            assert (await response.json())["meta_info"]["input_token_logprobs"] == PROMPT
        assert len(w.decode[0].received) == 2
        await w.idle()


async def test_decodes_refusal_reaches_the_client_as_ever() -> None:
    async with world((judges,), (answers(400),)) as w, w.client.post(json=ASKING) as response:
        assert (response.status, (await response.json())["error"]["message"]) == (400, "because 400")


async def test_a_stream_that_breaks_after_merged_events_ends_with_an_error_event() -> None:
    dying = dies_after(event(answer(1)), b'data: {"te')
    async with world((judges,), (dying,)) as w, w.client.post(json=ASKING | {"stream": True}) as response:
        first, last = await events_of(response)
    assert first == answer(1, prompt=PROMPT, top=TOP)
    assert error_of(last) == (502, "PEER_LOST")


async def test_a_client_that_leaves_while_logprobs_are_awaited_closes_both_legs() -> None:
    async with world((judges_when_released,), (continues,)) as w:
        asked = asyncio.create_task(w.client.session.post(w.client.url + "/generate", json=ASKING))
        await asyncio.wait_for(asyncio.gather(w.prefill[0].arrival.wait(), w.decode[0].arrival.wait()), 5)
        asked.cancel()
        await w.prefill[0].saw_its_connection_closed()
        await w.idle()


# -- the bytes


def test_only_arrays_that_decode_leaves_room_for_are_filled() -> None:
    scores = scores_in(json.dumps(answer(prompt=PROMPT, top=TOP)).encode(), is_event_stream=False)
    assert scores is not None
    for body in (b'{"text": "a"}', b'{"meta_info": {"id": 1}}', b"[DONE]", b"[1]", b"{", b'{"meta_info": 3}'):
        assert merge(body, scores) is body
    partial = {"meta_info": {"input_token_logprobs": [[-1, 9, None]]}}
    merged = json.loads(merge(json.dumps(partial).encode(), scores))
    assert merged == {"meta_info": {"input_token_logprobs": [*PROMPT, [-1, 9, None]]}}
    assert json.loads(merge(b'{"meta_info": {"input_token_logprobs": null}}', scores))["meta_info"] == {
        "input_token_logprobs": PROMPT
    }


def test_other_lines_of_a_stream_pass_as_they_are() -> None:
    scores = {"input_token_logprobs": b"[null,5,null]"}
    untouched = b': note\r\n\r\nevent: x\nid: 4\ndata:{"error": {}}\n\ndata: [DONE]\n\n'
    assert merge_events(untouched, scores) == untouched
    assert merge_events(b'data:{"meta_info":{"input_token_logprobs":[]}}\r\n\r\n', scores) == (
        b'data: {"meta_info":{"input_token_logprobs":[[null,5,null]]}}\r\n\r\n'
    )


def test_prefills_logprobs_are_found_in_whatever_event_has_them() -> None:
    empty, full = event(answer()), event(answer(prompt=PROMPT, top=TOP))
    found = scores_in(b": hello\n\n" + empty + full + b"data: [DONE]\n\n", is_event_stream=True)
    assert found is not None
    assert json.loads(b"[" + found["input_token_logprobs"] + b"]") == PROMPT
    assert scores_in(empty, is_event_stream=True) == {"input_token_logprobs": b"", "input_top_logprobs": b""}
    assert scores_in(b'data: {"error": {}}\n\n', is_event_stream=True) is None
    assert scores_in(b"\xff", is_event_stream=False) is None
