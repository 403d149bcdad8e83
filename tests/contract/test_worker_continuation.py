"""A stream told with its tokens, and continued by another worker from wherever it broke off: real apps, scripted ranks."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from baton_router.journal import Journal
from baton_worker.config import Role
from baton_worker.tokenizer import Tokenizer
from contract.worker_apps import ROOM, Running, Start, model_tokenizer

NUMBERS = itertools.count()
TOLD = {"x-baton-token-ids": "1"}
TEXT = "Grüße 🎉 to the dog, and again to the dog."
CHAT = [{"role": "user", "content": TEXT}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 64}}),
    "completion": ("/v1/completions", {"prompt": TEXT, "max_tokens": 64, "stream_options": {"include_usage": True}}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 64, "stream_options": {"include_usage": True}}),
    "generate, logprobs": (
        "/generate",
        {"text": TEXT, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
    ),
    "completion, logprobs": ("/v1/completions", {"prompt": TEXT, "max_tokens": 64, "logprobs": 2}),
    "chat, logprobs": ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 2}),
    "generate, stop": ("/generate", {"text": TEXT, "sampling_params": {"stop": ["and again to the cat", "the dog."]}}),
    "completion, stop": ("/v1/completions", {"prompt": TEXT, "max_tokens": 64, "stop": "again to the dog."}),
    "clipped": ("/v1/completions", {"prompt": TEXT, "max_tokens": 9}),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return model_tokenizer()


@pytest.fixture
def start(tokenizer: Tokenizer) -> Start:
    return Start(tokenizer)


async def stream(running: Running, path: str, body: dict[str, Any], headers: dict[str, str], rid: str = "") -> Any:
    """A stream that gets a token at each ping; the whole answer."""
    headers = headers | {"x-request-id": rid or f"step-{next(NUMBERS)}"}
    asked = asyncio.create_task(running.http.post(path, json=body | {"stream": True}, headers=headers))
    while not asked.done():
        await running.worker.fresh_snapshot(2_000)
    answer = asked.result()
    assert answer.status_code == 200, answer.text
    return answer


def events(raw: bytes) -> list[Any]:
    """What the client is told."""
    told = [one.removeprefix(b"data: ") for one in raw.split(b"\n\n")[:-1]]
    return [str(data) if data == b"[DONE]" else json.loads(data) for data in told]


def view(told: list[Any]) -> dict[str, Any]:
    """What a client makes of a stream, however its tokens were put into events."""
    *answer, done = told
    seen: dict[str, Any] = {"done": done, "ids": set(), "text": "", "logprobs": [], "openings": 0, "finish": []}
    for one in answer:
        if "meta_info" in one:
            assert one["text"].startswith(seen["text"])
            seen |= {"text": one["text"], "ids": seen["ids"] | {one["meta_info"]["id"]}}
            seen["last"] = one | {"meta_info": one["meta_info"] | {"e2e_latency": 0}}
            continue
        seen["ids"].add((one["id"], one["created"], one["model"], one["object"]))
        seen["usage"] = one.get("usage")
        for choice in one["choices"]:
            delta = choice.get("delta", choice)
            seen["openings"] += "role" in delta
            seen["text"] += delta.get("text", delta.get("content", ""))
            seen["logprobs"] += [] if choice["logprobs"] is None else rows(choice["logprobs"])
            seen["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return seen


def rows(logprobs: dict[str, Any]) -> list[Any]:
    """One item a token."""
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(*logprobs.values(), strict=True))


def cuts(raw: bytes) -> list[bytes]:
    """The stream up to each of its records but the last, and a bit more."""
    writes = raw.split(b"\n\n")
    ends = [at for at, write in enumerate(writes, 1) if b"\nbaton-part" in write or write.startswith(b"\nbaton-part")]
    return [b"\n\n".join(writes[:end]) + b"\n\ndata: half an ev" for end in ends]


@pytest.mark.parametrize("name", BODIES)
async def test_wherever_a_stream_breaks_another_worker_goes_on_as_if_it_had_not(start: Start, name: str) -> None:
    path, body = BODIES[name]
    async with start() as running:
        plain = view(events((await stream(running, path, body, {}, "step-plain")).content))
        raw = (await stream(running, path, body, TOLD)).content
        whole = Journal()
        passed = view(events(whole.take(raw)))
        assert whole.is_complete
        assert (passed["text"], passed["logprobs"], passed["finish"]) == (
            plain["text"],
            plain["logprobs"],
            plain["finish"],
        )
        assert len(cuts(raw)) > 5
        for cut in cuts(raw):
            journal = Journal()
            before = journal.take(cut)
            more = {"baton_continuation": json.loads(bytes(journal.continuation()))}
            answer = await stream(running, path, body | more, TOLD)
            assert int(answer.headers["x-baton-token-ids"]) == len(tokens_in(journal))
            journal.resume()
            assert view(events(before + journal.take(answer.content))) == passed
            assert journal.is_complete
            assert tokens_in(journal) == tokens_in(whole)


def tokens_in(journal: Journal) -> list[int]:
    return [token for part in json.loads(bytes(journal.continuation())) for token in part["tokens"]]


async def test_nobody_who_does_not_ask_is_told(start: Start) -> None:
    path, body = BODIES["completion"]
    async with start() as running:
        for headers in ({}, {"x-baton-token-ids": "0"}):
            answer = await stream(running, path, body, headers)
            assert b"baton-" not in answer.content
            assert "x-baton-token-ids" not in answer.headers
        whole = await running.http.post(path, json=body | {"stream_options": None}, headers=TOLD)
        assert b"baton-" not in whole.content


async def told_of(running: Running, path: str, body: dict[str, Any]) -> list[Any]:
    """The records of a whole stream."""
    journal = Journal()
    journal.take((await stream(running, path, body, TOLD)).content)
    parts: list[Any] = json.loads(bytes(journal.continuation()))
    return parts


async def test_a_continuation_keeps_the_seed_of_the_answer_and_draws_less(start: Start) -> None:
    """Without a seed of the client's it follows from the room, and the second room is another."""
    params = {"temperature": 1.0, "max_new_tokens": 20, "min_new_tokens": 10}
    body = {"text": TEXT, "sampling_params": params} | ROOM
    async with start() as running:
        parts = await told_of(running, "/generate", body)
        seed, told = parts[0]["start"]["seed"], sum(len(part["tokens"]) for part in parts[:5])
        again = body | {"bootstrap_room": 78, "baton_continuation": parts[:5]}
        await stream(running, "/generate", again, TOLD)
        gauges = (await running.worker.fresh_snapshot(2_000)).gauges
        assert gauges[f"sampling{{seed={seed},most=20}}"] == gauges[f"sampling{{seed={seed},most={20 - told}}}"] == 1


async def test_a_prefill_worker_computes_the_prompt_and_all_that_was_told(start: Start) -> None:
    async with start() as running:
        parts = await told_of(running, "/generate", {"text": TEXT})
    async with start(Role.PREFILL) as running:
        body = {"text": TEXT, "baton_continuation": parts[:3]} | ROOM
        answer = await stream(running, "/generate", body, TOLD)
        assert b"baton-" not in answer.content
        first, *_ = events(answer.content)
        assert first["output_ids"][:1] == parts[3]["tokens"][:1]
        assert first["meta_info"]["prompt_tokens"] == parts[0]["start"]["prompt_tokens"]


async def test_a_failure_within_the_stream_is_marked_for_the_router(start: Start) -> None:
    async with start() as running:
        async with running.http.stream(
            "POST", "/generate", json={"text": TEXT, "stream": True, "rid": "break"}, headers=TOLD
        ) as answer:
            journal, taken = Journal(), []
            async for chunk in answer.aiter_bytes():
                taken.append(journal.take(chunk))
                if len(taken) == 1:
                    await running.worker.fresh_snapshot(2_000)
        assert len(events(b"".join(taken))) == 1
        assert journal.error is not None
        assert journal.error[0] == 502
        assert json.loads(journal.error[1])["error"]["message"] == "the peer went away"


GOOD = {"rid": "a", "created": 1, "seed": 1, "prompt_tokens": 1, "prompt_digest": 1}


@pytest.mark.parametrize(
    ("parts", "naming"),
    [
        ([], "does not say how the answer began"),
        ([{"tokens": [1]}], "does not say how the answer began"),
        ([{"tokens": [], "start": GOOD}], "no token is given"),
        ([{"tokens": [10**6], "start": GOOD}], "token ids must be between 0"),
        ([{"tokens": [-1], "start": GOOD}], "token ids must be between 0"),
        ([{"tokens": [1], "start": GOOD}], "do not tokenize alike"),
        ([{"tokens": "x"}], "not valid"),
    ],
)
async def test_what_is_no_past_of_this_request_is_refused(start: Start, parts: Any, naming: str) -> None:
    async with start() as running:
        answer = await running.http.post("/generate", json={"text": TEXT, "baton_continuation": parts})
        assert answer.status_code == 400
        assert naming in answer.json()["error"]["message"]


async def test_a_past_that_is_the_whole_answer_is_refused(start: Start) -> None:
    path, body = BODIES["clipped"]
    async with start() as running:
        parts = await told_of(running, path, body)
        answer = await running.http.post(path, json=body | {"baton_continuation": parts})
        assert answer.status_code == 400
        assert "9 of at most 9 tokens are given" in answer.json()["error"]["message"]
        answer = await running.http.post(
            path, json=body | {"max_tokens": 64, "stop": TEXT[:5], "baton_continuation": parts}
        )
        assert "a stop string ends it" in answer.json()["error"]["message"]
