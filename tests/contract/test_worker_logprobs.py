"""Logprobs on the wire, in SGLang's and in OpenAI's words: a worker's real app over a scripted scheduler."""

from typing import Any

import pytest

from baton_worker.config import Role
from baton_worker.tokenizer import Tokenizer
from contract.worker_apps import ROOM, Running, Start, events_of, model_tokenizer

TEXT = "Grüße 🎉"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return model_tokenizer()


@pytest.fixture
def start(tokenizer: Tokenizer) -> Start:
    return Start(tokenizer)


def entries(tokens: list[int]) -> list[list[Any]]:
    """What the scripted rank says of these tokens, as SGLang writes it."""
    return [[-token / 1000, token, None] for token in tokens]


def tops(tokens: list[int], count: int) -> list[list[list[Any]]]:
    return [[[-token / 1000 - index, token + index, None] for index in range(count)] for token in tokens]


async def meta_of(running: Running, **more: Any) -> dict[str, Any]:
    answer = await running.ask(text=TEXT, return_logprob=True, **more)
    assert answer.status_code == 200, answer.text
    meta: dict[str, Any] = answer.json()["meta_info"]
    return meta


# -- /generate


async def test_a_colocated_worker_gives_the_prompts_logprobs_and_the_answers(
    start: Start, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)
    async with start() as running:
        meta = await meta_of(running, logprob_start_len=0, top_logprobs_num=2)
    assert meta["input_token_logprobs"] == [[None, ids[0], None], *entries(ids[1:])]
    assert meta["output_token_logprobs"] == entries(ids)
    assert meta["input_top_logprobs"] == [None, *tops(ids[1:], 2)]
    assert meta["output_top_logprobs"] == tops(ids, 2)


async def test_by_default_there_are_none_of_the_prompt_and_no_likeliest(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    async with start() as running:
        meta = await meta_of(running)
        silent = (await running.ask(text=TEXT, top_logprobs_num=3, logprob_start_len=0)).json()["meta_info"]
    assert (meta["input_token_logprobs"], meta["output_token_logprobs"]) == ([], entries(ids))
    assert not [key for key in meta if "top_logprobs" in key]
    assert not [key for key in silent if "logprobs" in key], "who does not ask gets nothing"


async def test_the_prompts_logprobs_may_start_anywhere(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    async with start() as running:
        later = await meta_of(running, logprob_start_len=2)
        at_the_end = await meta_of(running, logprob_start_len=len(ids))
        beyond = await running.ask(text=TEXT, return_logprob=True, logprob_start_len=len(ids) + 1)
    assert later["input_token_logprobs"] == entries(ids[2:])
    assert at_the_end["input_token_logprobs"] == []
    assert beyond.status_code == 400
    assert f"{len(ids)} tokens; its logprobs cannot start at {len(ids) + 1}" in beyond.json()["error"]["message"]


async def test_texts_come_with_the_entries_of_who_wants_them(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    async with start() as running:
        meta = await meta_of(running, return_text_in_logprobs=True, logprob_start_len=0)
    assert [text for _, _, text in meta["output_token_logprobs"]] == [tokenizer.decode([token]) for token in ids]
    assert meta["input_token_logprobs"][0] == [None, ids[0], tokenizer.decode(ids[:1])]


async def test_prefill_gives_the_prompts_and_decode_an_empty_list_to_append_to(
    start: Start, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(TEXT)
    async with start(Role.PREFILL) as running:
        prefill = await meta_of(running, logprob_start_len=0, top_logprobs_num=1, **ROOM)
    async with start(Role.DECODE) as running:
        decode = await meta_of(running, logprob_start_len=0, top_logprobs_num=1, **ROOM)
    assert len(prefill["input_token_logprobs"]) == len(prefill["input_top_logprobs"]) == len(ids)
    assert (decode["input_token_logprobs"], decode["input_top_logprobs"]) == ([], [])
    assert decode["output_token_logprobs"] == entries(ids)


async def test_every_event_of_a_stream_has_all_logprobs_so_far(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    async with start() as running:
        ask = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "stream": True}
        *chunks, done = events_of(await running.ask(text=TEXT, **ask))
    assert done == "[DONE]"
    for chunk in chunks:
        meta, count = chunk["meta_info"], len(chunk["output_ids"])
        assert meta["input_token_logprobs"] == [[None, ids[0], None], *entries(ids[1:])]
        assert meta["output_token_logprobs"] == entries(ids[:count])
        assert meta["output_top_logprobs"] == tops(ids[:count], 1)
    assert len(chunks[-1]["output_ids"]) == len(ids)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"top_logprobs_num": 129}, "top_logprobs_num must be between 0 and 128, not 129"),
        ({"top_logprobs_num": -1}, "top_logprobs_num must be between 0 and 128, not -1"),
        ({"top_logprobs_num": "many"}, "top_logprobs_num"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"token_ids_logprob": [5]}, "token_ids_logprob is not supported yet"),
    ],
)
async def test_logprobs_that_cannot_be_had_are_refused_by_name(start: Start, asked: dict[str, Any], names: str) -> None:
    async with start() as running:
        answer = await running.ask(return_logprob=True, **asked)
    assert answer.status_code == 400
    assert names in answer.json()["error"]["message"]


# -- /v1/completions


async def complete(running: Running, **more: Any) -> dict[str, Any]:
    answer = await running.http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 64} | more)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_a_completions_logprobs_are_parallel_lists(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    async with start() as running:
        body = await complete(running, logprobs=2)
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [-token / 1000 for token in ids]
    assert [set(top.values()) for top in logprobs["top_logprobs"]] == [
        {-token / 1000, -token / 1000 - 1} for token in ids
    ]
    for token, start_at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][start_at:].startswith(token)
    assert len(logprobs["tokens"]) == body["usage"]["completion_tokens"]


async def test_a_token_that_is_no_character_is_shown_by_its_bytes(start: Start, tokenizer: Tokenizer) -> None:
    async with start() as running:
        logprobs = (await complete(running, logprobs=0))["choices"][0]["logprobs"]
    pieces = [token for token in logprobs["tokens"] if token.startswith("bytes:")]
    assert "".join(pieces).replace("bytes:", "") == r"\x20\xf0\x9f\x8e\x89"
    own = [{token: logprob} for token, logprob in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)]
    assert logprobs["top_logprobs"] == own, "with 0 the token itself is all there is"


async def test_streamed_logprobs_add_up_to_those_of_the_whole_body(start: Start) -> None:
    async with start() as running:
        for stop in (None, "🎉", "ße 🎉"):
            more = {"logprobs": 1, "stop": stop}
            whole = (await complete(running, **more))["choices"][0]
            ask = {"prompt": TEXT, "max_tokens": 64, "stream": True} | more
            *chunks, done = events_of(await running.http.post("/v1/completions", json=ask))
            added: dict[str, list[Any]] = {key: [] for key in whole["logprobs"]}
            for chunk in chunks:
                for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
                    added[key] += values
            assert done == "[DONE]"
            assert added == whole["logprobs"], stop
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]


# -- /v1/chat/completions


async def chat(running: Running, **more: Any) -> Any:
    ask = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "skip_special_tokens": False}
    return await running.http.post("/v1/chat/completions", json=ask | more)


async def test_a_chats_logprobs_have_text_and_bytes_of_each_token(start: Start, tokenizer: Tokenizer) -> None:
    async with start() as running:
        body = (await chat(running, logprobs=True, top_logprobs=2)).json()
        bare = (await chat(running, logprobs=True)).json()["choices"][0]["logprobs"]
        silent = (await chat(running)).json()["choices"][0]["logprobs"]
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == body["choices"][0]["message"]["content"]
    assert [len(one["top_logprobs"]) for one in content] == [2] * body["usage"]["completion_tokens"]
    assert {key: content[0]["top_logprobs"][0][key] for key in ("token", "logprob", "bytes")} == {
        key: content[0][key] for key in ("token", "logprob", "bytes")
    }
    assert [one["top_logprobs"] for one in bare["content"]] == [[]] * len(content)
    assert silent is None


async def test_a_streamed_chats_logprobs_come_with_their_text(start: Start) -> None:
    async with start() as running:
        whole = (await chat(running, logprobs=True, top_logprobs=1)).json()["choices"][0]
        *chunks, _done = events_of(await chat(running, logprobs=True, top_logprobs=1, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["logprobs"] is None, "the role comes alone"
    content = [one for choice in choices for one in (choice["logprobs"] or {"content": []})["content"]]
    assert content == whole["logprobs"]["content"]
    text, told = "", b""
    for choice in choices:
        text += choice["delta"].get("content") or ""
        told += bytes(byte for one in (choice["logprobs"] or {"content": []})["content"] for byte in one["bytes"])
        assert told.startswith(text.encode())


@pytest.mark.parametrize(
    ("route", "asked", "names"),
    [
        (
            "/v1/chat/completions",
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs must be between 0 and 20, not 21",
        ),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        ("/v1/chat/completions", {"logprobs": 3}, "logprobs"),
        ("/v1/completions", {"logprobs": 21}, "logprobs must be between 0 and 20, not 21"),
        ("/v1/completions", {"logprobs": True}, "logprobs must be a number"),
        ("/v1/completions", {"echo": True}, "echo is not supported yet"),
        ("/v1/completions", {"colour": "red"}, "colour is not a known parameter"),
        ("/v1/chat/completions", {"max_new_tokens": 5}, "max_new_tokens is not a known parameter"),
        ("/v1/chat/completions", {"stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
    ],
)
async def test_openai_parameters_that_cannot_be_honoured_are_refused_by_name(
    start: Start, route: str, asked: dict[str, Any], names: str
) -> None:
    base = {"prompt": "Hi"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    async with start() as running:
        answer = await running.http.post(route, json=base | asked)
    assert answer.status_code == 400
    assert names in answer.json()["error"]["message"]


async def test_openai_parameters_that_ask_for_nothing_are_taken(start: Start) -> None:
    quiet = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "return_hidden_states": False,
        "tools": [],
        "top_logprobs": None,
        "logprobs": False,
        "some_future_key": None,
        "parallel_tool_calls": True,
        "n": 1,
    }
    async with start() as running:
        answer = await chat(running, **quiet)
    assert (answer.status_code, answer.json()["choices"][0]["logprobs"]) == (200, None)
