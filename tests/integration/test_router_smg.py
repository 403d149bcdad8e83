"""PyPI's `smg`, unmodified, in PD mode in front of our workers: every policy of the issue, and with DP awareness.

It lives in a virtual environment of its own, `.baton/peers/smg`, which the first run makes. Both workers have two DP ranks.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from integration.stack import Stack, eventually
from integration.test_sglang_router import events, installed, post, ready, running
from ports import free_port
from tiny_folders import VOCAB, save_folder, sure_prompts
from tiny_models import oracle

VERSION = "1.13.0"
LENGTHS, COUNT = (5, 40, 150), 10
MODES = {
    "random": ("--policy", "random"),
    "round_robin": ("--policy", "round_robin"),
    "cache_aware": ("--policy", "cache_aware"),
    "dp_aware": ("--policy", "round_robin", "--dp-aware"),
}


@dataclass
class Workers:
    """A running stack, and prompts with the answers that count."""

    stack: Stack
    prompts: list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    model = oracle("llama", vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=4_096)
    folder = save_folder(tmp_path_factory.mktemp("models") / "tiny", model)
    settings = [f"{role}.{what}" for role in ("prefill", "decode") for what in ("dp=2", "kv_tokens=4096", "threads=1")]
    # smg names prefill's rank itself and draws any room: as with SGLang, prefill must not insist that the room says which.
    settings += ["prefill.load_balance_method=round_robin"]
    stack = Stack.up(tmp_path_factory.mktemp("smg"), "--model", str(folder), "--dtype", "float32", settings=settings)
    try:
        yield Workers(stack, sure_prompts(model, LENGTHS, COUNT))
    finally:
        stack.down()


@pytest.fixture(scope="module", params=MODES)
def peer(
    request: pytest.FixtureRequest, workers: Workers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The mode, and the address of an smg in front of the stack's two workers."""
    prefill, decode = workers.stack.entries("prefill")[0], workers.stack.entries("decode")[0]
    port = free_port()
    argv = [str(installed("smg", VERSION)), "-m", "smg.launch_router", "--pd-disaggregation", *MODES[request.param]]
    argv += ["--prefill", prefill["url"], str(prefill["bootstrap_port"]), "--decode", decode["url"]]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    log = tmp_path_factory.mktemp("peer") / "smg.log"
    with running(argv, log) as process:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(ready(url, process, log))
        yield request.param, url


def greedy(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True},
    } | more


async def test_every_answer_is_the_oracles_streamed_or_not(workers: Workers, peer: tuple[str, str]) -> None:
    mode, url = peer
    ranks = set()
    for prompt, wanted in workers.prompts * 3:
        whole = await post(f"{url}/generate", greedy(prompt))
        streamed = (await events(f"{url}/generate", greedy(prompt)))[-1]
        assert whole["output_ids"] == streamed["output_ids"] == wanted
        assert whole["text"] == streamed["text"]
        ranks |= {whole["meta_info"]["dp_rank"], streamed["meta_info"]["dp_rank"]}
    assert ranks == {0, 1}, f"{mode} uses both ranks of decode"


async def test_completions_chats_and_logprobs_are_those_of_our_own_router(
    workers: Workers, peer: tuple[str, str]
) -> None:
    _, url = peer
    ours = workers.stack.url
    async with httpx.AsyncClient(timeout=30) as http:
        name = (await http.get(f"{ours}/v1/models")).json()["data"][0]["id"]  # smg chooses workers by it
    completion = {"model": name, "prompt": "The baker walked", "temperature": 0, "max_tokens": COUNT}
    chat = {"model": name, "messages": [{"role": "user", "content": "a basket of pears"}], "temperature": 0}
    for route, body, at in (
        ("/v1/completions", completion, lambda choice: choice["text"]),
        ("/v1/chat/completions", chat | {"max_tokens": 5}, lambda choice: choice["message"]["content"]),
    ):
        mine, theirs = await post(ours + route, body), await post(url + route, body)
        assert at(theirs["choices"][0]) == at(mine["choices"][0])
        assert theirs["usage"]["completion_tokens"] == mine["usage"]["completion_tokens"]
    asking = greedy(workers.prompts[0][0], return_logprob=True, logprob_start_len=0)
    mine, theirs = [(await post(f"{one}/generate", asking))["meta_info"] for one in (ours, url)]
    assert [one[1:] for one in theirs["input_token_logprobs"]] == [one[1:] for one in mine["input_token_logprobs"]]
    assert len(theirs["input_token_logprobs"]) == LENGTHS[0]


async def test_a_wrong_request_is_a_400_and_a_client_that_leaves_frees_both_legs(
    workers: Workers, peer: tuple[str, str]
) -> None:
    _, url = peer
    async with httpx.AsyncClient(timeout=30) as http:
        wrong = await http.post(f"{url}/generate", json={"text": "a", "sampling_params": {"temperature": -1}})
        assert wrong.status_code == 400
        body = greedy(workers.prompts[0][0], stream=True) | {
            "sampling_params": {"max_new_tokens": 3_000, "ignore_eos": True}
        }
        async with http.stream("POST", f"{url}/generate", json=body) as answer:
            assert answer.status_code == 200
            await anext(answer.aiter_lines())

    async def free() -> bool:
        return all(gauges["live_requests"] == 0 for gauges in await workers.stack.snapshots())

    await eventually(free, "both legs are gone", within_s=5.0)
