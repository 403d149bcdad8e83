"""The worker's app over real HTTP and a real ipc; only the scheduler behind it is scripted (`scripted_rank`)."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise

import pytest

from baton_io.ipc import Snapshot
from baton_worker.config import Role
from baton_worker.tokenizer import Tokenizer
from baton_worker.worker import State
from contract.scripted_rank import LAYOUT
from contract.worker_apps import LIMITS, ROOM, ScriptedCompanion, Start, events_of, model_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return model_tokenizer()


@pytest.fixture
def start(tokenizer: Tokenizer) -> Start:
    return Start(tokenizer)


async def test_an_answer_has_sglangs_fields(start: Start) -> None:
    async with start() as running:
        answer = await running.ask("echo-1", "Grüße 🎉", return_prompt_token_ids=True)
        body = answer.json()
    assert answer.status_code == 200
    assert (answer.headers["x-baton-incarnation"], answer.headers["x-request-id"]) == ("life1", "echo-1")
    assert body["text"] == "Grüße 🎉"
    assert body["output_ids"] == body["prompt_token_ids"]
    meta = body["meta_info"]
    count = len(body["output_ids"])
    assert meta["id"] == "echo-1"
    assert meta["finish_reason"] == {"type": "length", "length": count}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (count, count, 0)
    assert meta["dp_rank"] == 0
    assert meta["e2e_latency"] > 0
    assert running.worker.units.bad_frames == 1, "the frame that was no message"


async def test_a_prefill_leg_ends_with_length_zero_whatever_its_token_is(start: Start) -> None:
    async with start(Role.PREFILL) as running:
        body = (await running.ask(text="Hello", sampling_params={"stop": "Hello"}, **ROOM)).json()
        refused = await running.ask()
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "invalid_request")


async def test_a_stream_is_cumulative_whole_characters_and_done(start: Start) -> None:
    async with start() as running:
        answer = await running.ask(text="A 🎉 for you", stream=True)
    *chunks, done = events_of(answer)
    texts = [chunk["text"] for chunk in chunks]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert done == "[DONE]"
    assert texts[-1] == "A 🎉 for you"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert not any("�" in text for text in texts)
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks][:-1] == [None] * (len(chunks) - 1)


async def test_a_stop_string_cuts_the_answer_and_stops_the_scheduler(start: Start) -> None:
    async with start() as running:
        body = (await running.ask("hold-1", "END", sampling_params={"stop": ["END"]})).json()
        await running.until_rank_saw("seen{event=StopHere}")
    assert body["text"] == ""
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}


async def test_a_stop_token_is_counted_but_not_shown(start: Start, tokenizer: Tokenizer) -> None:
    (stop_id,) = tokenizer.encode(".")
    async with start() as running:
        params = {"stop_token_ids": [stop_id]}
        body = (await running.ask(text="The end.", sampling_params=params)).json()
        kept = (await running.ask(text="The end.", sampling_params=params | {"no_stop_trim": True})).json()
    assert (body["text"], body["output_ids"][-1]) == ("The end", stop_id)
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    assert kept["text"] == "The end."


async def test_openai_completions_and_chats_have_their_shapes(start: Start) -> None:
    async with start() as running:
        completion = (await running.http.post("/v1/completions", json={"prompt": "Hi there", "model": "any"})).json()
        ask = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        chat = (await running.http.post("/v1/chat/completions", json=ask)).json()
        models = (await running.http.get("/v1/models")).json()
    assert (completion["object"], completion["model"]) == ("text_completion", "any")
    assert completion["choices"][0]["text"] == "Hi there"
    assert completion["usage"]["total_tokens"] == 2 * completion["usage"]["prompt_tokens"]
    assert (chat["object"], chat["choices"][0]["finish_reason"]) == ("chat.completion", "length")
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["usage"]["completion_tokens"] == 3
    assert models["data"][0]["id"] == "smollm2-135m-instruct"


async def test_a_chat_stream_says_role_then_content_then_reason_then_usage(start: Start) -> None:
    async with start() as running:
        ask = {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 4,
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        *chunks, usage, done = events_of(await running.http.post("/v1/chat/completions", json=ask))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} for delta in deltas[1:-1])
    assert "".join(delta["content"] for delta in deltas[1:-1]).startswith("<|im_start|>system")
    assert (deltas[-1], chunks[-1]["choices"][0]["finish_reason"]) == ({}, "length")
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 4, "[DONE]")


async def test_a_failure_before_the_first_token_has_its_own_status_even_in_a_stream(start: Start) -> None:
    async with start() as running:
        for stream in (False, True):
            answer = await running.ask("fail-1", stream=stream)
            assert answer.status_code == 503
            assert answer.json()["error"] == {
                "message": "no such worker",
                "type": "overloaded_error",
                "param": None,
                "code": 503,
                "reason": "lookup_failed",
            }


async def test_a_failure_inside_a_stream_is_an_event_and_no_done(start: Start) -> None:
    async with start() as running:
        ask = {"text": "Hi", "rid": "break-1", "stream": True}
        async with running.http.stream("POST", "/generate", json=ask) as answer:
            lines = answer.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            await running.worker.fresh_snapshot(2_000)  # what the scheduler waits for to fail
            rest = [line async for line in lines if line]
    assert answer.status_code == 200
    assert first["meta_info"]["finish_reason"] is None
    assert [json.loads(line.removeprefix("data: "))["error"]["code"] for line in rest] == [502]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request_in_the_scheduler(start: Start, stream: bool) -> None:
    async with start() as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = json.dumps({"text": "Hi", "rid": "hold-1", "stream": stream}).encode()
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await running.until_rank_saw("live")
        writer.close()
        await running.until_rank_saw("seen{event=Abort}")
        async with asyncio.timeout(1):
            await running.worker.streams.empty()


async def test_an_abort_by_id_is_an_answer_that_says_so(start: Start) -> None:
    async with start() as running:
        asked = asyncio.create_task(running.ask("hold-1"))
        await running.until_rank_saw("live")
        assert (await running.http.post("/abort_request", json={"rid": "nobody"})).status_code == 200
        assert (await running.http.post("/abort_request", json={"rid": "hold-1"})).status_code == 200
        body = (await asked).json()
        others = [asyncio.create_task(running.ask(f"mute-{index}")) for index in range(3)]
        while len(running.worker.streams) < 3:
            await running.worker.fresh_snapshot(2_000)
        await running.http.post("/abort_request", json={"abort_all": True})
        statuses = [(await other).status_code for other in others]
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    assert body["meta_info"]["finish_reason"]["message"] == "aborted by request"
    assert len(body["output_ids"]) == 1
    assert statuses == [200, 200, 200]


async def test_an_id_is_refused_while_live_and_new_to_the_scheduler_afterwards(start: Start) -> None:
    async with start() as running:
        asked = asyncio.create_task(running.ask("hold-1"))
        await running.until_rank_saw("live")
        twice = await running.ask("hold-1")
        await running.http.post("/abort_request", json={"rid": "hold-1"})
        await asked
        again = asyncio.create_task(running.ask("hold-1"))
        await running.until_rank_saw("live")
        stream = running.worker.streams.find("hold-1")
        await running.http.post("/abort_request", json={"rid": "hold-1"})
        answered = (await again).json()
    assert (twice.status_code, twice.json()["error"]["reason"]) == (409, "duplicate_rid")
    assert stream is not None
    assert stream.scheduler_rid == "hold-1#2"
    assert answered["meta_info"]["id"] == "hold-1"


async def test_a_refusal_with_a_room_reaches_the_scheduler_and_one_without_does_not(start: Start) -> None:
    async with start() as running:
        for body, reason in (
            ({"input_ids": [5] * 600}, "context_too_long"),
            ({"text": "Hi", "sampling_params": {"n": 2}}, "invalid_request"),
            ({"text": 5}, "invalid_request"),
        ):
            answer = await running.http.post("/generate", json=body | ROOM)
            assert (answer.status_code, answer.json()["error"]["reason"]) == (400, reason)
            await running.until_rank_saw(f"rejected{{reason={reason}}}")
        seen = (await running.worker.fresh_snapshot(2_000)).gauges["seen{event=Submit}"]
        elsewhere = ROOM | {"bootstrap_host": "10.9.8.7"}
        assert (await running.ask(**elsewhere)).status_code == 400
        assert (await running.ask(sampling_params={"n": 2})).status_code == 400
        gauges = (await running.worker.fresh_snapshot(2_000)).gauges
        metrics = (await running.http.get("/metrics")).text
    assert gauges["seen{event=Submit}"] == seen == 3
    assert 'baton_decode_admission_rejections_total{reason="invalid_request"} 2.0' in metrics
    assert 'baton_decode_requests_total{route="generate",status="400"} 5.0' in metrics


async def test_a_body_may_not_be_too_long_nor_a_budget_nonsense(start: Start) -> None:
    async with start(limits=replace(LIMITS, body_bytes_max=1_000)) as running:
        announced = await running.ask(text="x" * 2_000)
        piecewise = await running.http.post("/generate", content=_pieces(20))
        wrong = await running.http.post("/generate", json={"text": "Hi"}, headers={"x-baton-budget-ms": "soon"})
        absent = await running.http.get("/nowhere")
    assert (announced.status_code, piecewise.status_code, wrong.status_code, absent.status_code) == (413, 413, 400, 404)
    assert all("error" in answer.json() for answer in (announced, piecewise, wrong, absent))


async def _pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * 100


async def test_a_request_the_scheduler_forgets_is_answered_after_its_budget(start: Start) -> None:
    async with start() as running:
        ask = {"text": "Hi", "rid": "mute-1"}
        answer = await running.http.post("/generate", json=ask, headers={"x-baton-budget-ms": "20"})
        await running.until_rank_saw("seen{event=Abort}")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (504, "deadline")


async def test_a_look_up_is_answered_with_what_the_role_found(start: Start) -> None:
    async with start() as running:
        answer = await running.ask("look-1", **ROOM)
    assert answer.json()["error"]["message"] == "room 77"


async def test_operators_see_who_the_worker_is_and_how_it_stands(start: Start) -> None:
    companion = ScriptedCompanion(missing=["registry x: not registered yet"])
    async with start(companion=companion) as running:
        unready = await running.http.get("/ready")
        companion.missing = []
        ready = await running.http.get("/ready")
        info = (await running.http.get("/get_server_info")).json()
        model = (await running.http.get("/model_info")).json()
        loads = (await running.http.get("/v1/loads")).json()
        at_rest = (await running.http.get("/debug/snapshot")).json()
        probe = await running.http.get("/health_generate")
        flushed = await running.http.post("/flush_cache")
    assert (unready.status_code, unready.json()["reasons"]) == (
        503,
        companion.missing or ["registry x: not registered yet"],
    )
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "reasons": [], "progress": None})
    assert (info["role"], info["incarnation"], info["instance"], info["dp_size"]) == ("decode", "life1", "life1", 1)
    assert (info["fingerprint"], info["kv_pages"], info["context_tokens"]) == ("scripted", 64, 512)
    assert info["layout"] == LAYOUT.to_text()
    place = {"dp_rank": 0, "pp_rank": 0, "cp_rank": 0, "tp_rank": 0}
    assert info["ranks"] == [{"rank": 0, "pid": running.worker.units.ranks[0].pid} | place]
    assert model["disaggregation_mode"] == "decode"
    assert loads["loads"][0]["disaggregation"]["mode"] == "decode"
    assert (at_rest["live_requests"], at_rest["snapshot"]["gauges"]["live"]) == (0, 0)
    assert (probe.status_code, flushed.status_code) == (200, 200)


async def test_a_kubernetes_gateway_finds_vllms_gauges_of_the_whole_worker(start: Start) -> None:
    async with start(dp=2) as running:
        for rank, (running_requests, queued, free, cached) in enumerate(((3, 1, 16, 8), (1, 4, 30, 0))):
            gauges = {
                "queue_requests{queue=running}": running_requests,
                "queue_requests{queue=prealloc}": queued,
                "pages": 64,
                "pages_free": free,
                "pages_cached": cached,
                "pages_spare": free + cached,  # nobody reads what is cached
            }
            running.worker.metrics.apply(rank, Snapshot(rank=rank, progress=1, gauges=gauges))
        text = (await running.http.get("/metrics")).text
    model = 'model_name="smollm2-135m-instruct"'
    assert f"vllm:num_requests_running{{{model}}} 4.0" in text
    assert f"vllm:num_requests_waiting{{{model}}} 5.0" in text
    used = (128 - 16 - 8 - 30) / 128
    assert f"vllm:kv_cache_usage_perc{{{model}}} {used}" in text, "a page of the prefix cache alone counts as free"
    assert re.search(r'vllm:cache_config_info\{block_size="16",.*num_gpu_blocks="128"\} 1.0', text)


async def test_a_drain_lets_running_requests_finish_and_takes_no_new_ones(start: Start) -> None:
    async with start() as running:
        asked = asyncio.create_task(running.ask("hold-1"))
        await running.until_rank_saw("live")
        running.worker.terminate()
        refused = await running.ask("echo-2")
        ready = await running.http.get("/ready")
        assert running.worker.state is State.DRAINING
        await running.http.post("/abort_request", json={"rid": "hold-1"})
        assert (await asked).status_code == 200
        async with asyncio.timeout(5):
            assert await running.exit_code == 0
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["reason"] == "draining"
    assert (ready.status_code, ready.json()["reasons"]) == (503, ["the worker is draining"])


async def test_a_drain_that_takes_too_long_ends_what_still_runs(start: Start) -> None:
    async with start(limits=replace(LIMITS, drain_ms=100)) as running:
        asked = asyncio.create_task(running.ask("mute-1"))
        await running.until_rank_saw("live")
        running.worker.terminate()
        answer = await asked
        assert await running.exit_code == 0
    assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "draining")


async def test_a_dead_scheduler_is_one_500_for_everybody_and_the_end_of_the_worker(start: Start) -> None:
    async with start() as running:
        others = [asyncio.create_task(running.ask(f"mute-{index}")) for index in range(3)]
        while len(running.worker.streams) < 3:
            await running.worker.fresh_snapshot(2_000)
        answers = [await running.ask("die-1"), *[await other for other in others]]
        assert await running.exit_code == 1
    assert [answer.status_code for answer in answers] == [500] * 4
    assert {answer.json()["error"]["reason"] for answer in answers} == {"worker_lost"}
    assert "rank 0 exited with code 3" in answers[0].json()["error"]["message"]


async def test_a_scheduler_without_progress_is_killed(start: Start) -> None:
    async with start(limits=replace(LIMITS, loop_stall_ms=400)) as running:
        pid = running.worker.units.ranks[0].pid or 0
        answer = await running.ask("stall-1")
        assert await running.exit_code == 1
    assert answer.status_code == 500
    assert "made no progress for 400 ms" in answer.json()["error"]["message"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_of_many_pauses_and_continuations_at_once_the_last_one_holds_and_none_waits_for_what_is_over(
    start: Start,
) -> None:
    async with start() as running:
        words = ("pause_generation", "continue_generation") * 4
        async with asyncio.timeout(5):
            answers = await asyncio.gather(*(running.http.post(f"/{word}") for word in words))
            last = await running.http.post("/continue_generation")
        assert {answer.status_code for answer in answers} <= {200, 409}
        assert last.status_code == 200
        assert (await running.ask()).status_code == 200
