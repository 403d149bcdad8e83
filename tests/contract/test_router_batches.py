"""Prompt lists and n > 1: rooms, merged answers, summed usage, one error for all."""

import json
from typing import Any

import pytest
from aiohttp import web

from contract.fake_workers import FakeWorker, Received, Script, answers, dies_after, error_of, event, stream_head, world


def prompt_of(body: dict[str, Any]) -> str:
    return str(body.get("prompt") or body.get("text") or body.get("messages"))


async def completes(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
    """A decode worker that answers one prompt as OpenAI's routes do, saying what it was asked."""
    body = received.body
    await worker.rooms.room(body["bootstrap_room"]).wait()
    said = f"{prompt_of(body)} {body.get('seed', '')}".strip()
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    head = {"id": f"c-{body['bootstrap_room']}", "object": "text_completion"}
    if not body.get("stream"):
        return web.json_response(head | {"choices": [{"index": 0, "text": said}], "usage": usage})
    response = await stream_head(request)
    for piece in (said, "!"):
        await response.write(event(head | {"choices": [{"index": 0, "text": piece}]}))
    await response.write(event(head | {"choices": [], "usage": usage}))
    await response.write(b"data: [DONE]\n\n")
    return response


async def generates(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
    """The same as SGLang's route does."""
    body = received.body
    await worker.rooms.room(body["bootstrap_room"]).wait()
    answer = {"text": f"{body['text']} {body['sampling_params']}", "meta_info": {"id": body["rid"]}}
    if not body.get("stream"):
        return web.json_response(answer)
    response = await stream_head(request)
    await response.write(event(answer))
    await response.write(b"data: [DONE]\n\n")
    return response


async def test_two_prompts_times_two_samples_are_four_choices_in_order_with_usage_summed() -> None:
    async with world(decode=(completes,)) as w:
        body = {"prompt": ["a", "b"], "n": 2, "seed": 7}
        async with w.client.post("/v1/completions", json=body) as response:
            said = await response.json()
        assert [(one["index"], one["text"]) for one in said["choices"]] == [
            (0, "a 7"),
            (1, "a 8"),
            (2, "b 7"),
            (3, "b 8"),
        ]
        assert said["usage"] == {"prompt_tokens": 10, "completion_tokens": 8, "total_tokens": 18}
        await w.idle()


async def test_part_i_n_plus_j_is_in_room_r_plus_i_n_plus_j_on_both_legs() -> None:
    async with world(decode=(completes,)) as w:
        async with w.client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2}) as response:
            assert response.status == 200
        for worker in (w.prefill[0], w.decode[0]):
            sent = sorted((received.body["bootstrap_room"], received.body["prompt"]) for received in worker.received)
            assert [prompt for _, prompt in sent] == ["a", "a", "b", "b"]
            assert [room - sent[0][0] for room, _ in sent] == [0, 1, 2, 3]
            assert all(received.body["n"] == 1 for received in worker.received)


async def test_a_stream_says_which_sample_every_event_belongs_to_and_ends_once() -> None:
    async with world(decode=(completes,)) as w:
        body = {"messages": [{"role": "user", "content": "q"}], "n": 3, "stream": True}
        async with w.client.post("/v1/chat/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in (await response.read()).split(b"\n\n") if line]
        assert lines[-1] == b"data: [DONE]"
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
        assert len({one["id"] for one in events}) == 1
        assert events[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
        by_index: dict[int, int] = {}
        for one in events[:-1]:
            by_index[one["choices"][0]["index"]] = by_index.get(one["choices"][0]["index"], 0) + 1
        assert by_index == {0: 2, 1: 2, 2: 2}


async def test_generate_answers_a_list_and_gives_each_prompt_its_own_parameters() -> None:
    async with world(decode=(generates,)) as w:
        body = {"text": ["a", "b"], "sampling_params": [{"temperature": 0}, {"temperature": 1}]}
        async with w.client.post(json=body, headers={"x-request-id": "r"}) as response:
            said = await response.json()
        assert [one["text"] for one in said] == ["a {'temperature': 0}", "b {'temperature': 1}"]
        assert [one["meta_info"]["id"] for one in said] == ["r-0", "r-1"]
        async with w.client.post(json=body | {"stream": True}) as response:
            lines = [line for line in (await response.read()).split(b"\n\n") if line]
        assert {json.loads(line[6:])["index"] for line in lines[:-1]} == {0, 1}
        assert lines[-1] == b"data: [DONE]"


async def test_generate_with_samples_answers_a_list_of_them() -> None:
    async with world(decode=(generates,)) as w:
        async with w.client.post(json={"text": "a", "sampling_params": {"n": 2, "seed": 3}}) as response:
            said = await response.json()
        assert [one["text"] for one in said] == ["a {'n': 1, 'seed': 3}", "a {'n': 1, 'seed': 4}"]


async def test_one_part_that_is_refused_is_the_answer_and_ends_the_others() -> None:
    async def refuses_b(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        if received.body["prompt"] == "b":
            await worker.rooms.room(0).wait()
            return await answers(400)(worker, request, received)
        worker.rooms.room(0).set()
        await worker.release.wait()
        return web.json_response({})

    async with world(decode=(refuses_b,)) as w:
        async with w.client.post("/v1/completions", json={"prompt": ["a", "b"]}) as response:
            assert error_of(await response.json()) == (400, "R")
        await w.decode[0].saw_its_connection_closed()
        await w.idle()


@pytest.mark.parametrize("script", [dies_after(event({"id": "x", "choices": [{"index": 0, "text": "a"}]}))])
async def test_a_part_that_breaks_ends_the_stream_with_one_error_event(script: Script) -> None:
    async with world(decode=(script,)) as w:
        body = {"prompt": ["a", "b"], "stream": True}
        async with w.client.post("/v1/completions", json=body) as response:
            lines = [line for line in (await response.read()).split(b"\n\n") if line]
        assert error_of(json.loads(lines[-1].removeprefix(b"data: "))) == (502, "PEER_LOST")
        assert b"[DONE]" not in b"".join(lines)
        await w.idle()


@pytest.mark.parametrize(
    "body",
    [{"prompt": ["a"] * 300}, {"prompt": "a", "n": 1_000}, {"prompt": ["a", "b"], "n": 200}],
    ids=["prompts", "n", "both"],
)
async def test_too_many_parts_are_refused_before_any_worker_sees_one(body: dict[str, Any]) -> None:
    async with world() as w:
        async with w.client.post("/v1/completions", json=body) as response:
            assert error_of(await response.json()) == (400, "INVALID_REQUEST")
        assert w.decode[0].received == []


@pytest.mark.parametrize("body", [{"prompt": [1, 2, 3]}, {"prompt": "a", "n": 1}, {"prompt": "a", "n": "x"}])
async def test_a_request_for_one_answer_passes_as_it_came(body: dict[str, Any]) -> None:
    async with world() as w:
        async with w.client.post("/v1/completions", json=body) as response:
            assert response.status == 200
        assert w.decode[0].received[0].body.items() >= body.items()
