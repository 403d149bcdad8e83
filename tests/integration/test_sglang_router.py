"""PyPI's `sglang-router`, unmodified, in PD mode in front of our workers: the same text as through our own router.

It lives in a virtual environment of its own, `.baton/peers/sglang-router`, which the first run makes.
"""

import asyncio
import json
import os
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.stack import Stack, eventually, gold, greedy
from ports import free_port

VERSION = "0.3.2"
PEERS = Path(__file__).parents[2] / ".baton" / "peers"
INSTALL_S = 300.0
START_S = 60.0
MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
CHAT = {"model": "smollm2-135m-instruct", "messages": MESSAGES, "temperature": 0, "max_tokens": 16}


def installed(package: str, version: str) -> Path:
    """An interpreter of its own that has that package; skips where it cannot be installed."""
    home = PEERS / package
    interpreter = home / "bin" / "python"
    asks = [str(interpreter), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    if (
        interpreter.exists()
        and subprocess.run(asks, capture_output=True, text=True, check=False).stdout.strip() == version
    ):
        return interpreter
    venv.create(home, with_pip=True, clear=True)
    install = [str(interpreter), "-m", "pip", "install", "--quiet", f"{package}=={version}"]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{package} {version} was not installed within {INSTALL_S} s")
    if done.returncode != 0:
        pytest.skip(f"{package} {version} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    return interpreter


@pytest.fixture(scope="module")
def python() -> Path:
    return installed("sglang-router", VERSION)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = ("prefill.chunk_tokens=64", "prefill.kv_tokens=4096", "decode.kv_tokens=4096")
    running = Stack.up(tmp_path_factory.mktemp("sglang"), "--dtype", "float32", "--transfer", "tcp", settings=settings)
    yield running
    running.down()


@pytest.fixture(scope="module")
def peer(python: Path, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an sglang-router in front of the stack's two workers."""
    prefill, decode = stack.entries("prefill")[0], stack.entries("decode")[0]
    port = free_port()
    argv = [str(python), "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    argv += ["--prefill", prefill["url"], str(prefill["bootstrap_port"]), "--decode", decode["url"]]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    log = tmp_path_factory.mktemp("peer") / "sglang-router.log"
    with running(argv, log) as process:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(ready(url, process, log))
        yield url


@contextmanager
def running(argv: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process, ended with its block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the router says that it has both workers."""
    async with httpx.AsyncClient(timeout=5) as http:

        async def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return (await http.get(f"{url}/readiness")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(answers, "sglang-router is ready", log.read_text, within_s=START_S)


async def post(url: str, body: dict[str, Any]) -> Any:
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(url, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(url: str, body: dict[str, Any]) -> list[Any]:
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(url, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def chat_text(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


@pytest.mark.parametrize("name", ["chat-capital", "prose-1", "prose-129"])
async def test_generate_gives_the_gold_answer_streamed_or_not(stack: Stack, peer: str, name: str) -> None:
    prompt = next(prompt for prompt in gold() if prompt["name"] == name)
    ours = await post(f"{stack.url}/generate", greedy(prompt))
    theirs = await post(f"{peer}/generate", greedy(prompt))
    streamed = (await events(f"{peer}/generate", greedy(prompt)))[-1]
    assert theirs["output_ids"] == ours["output_ids"] == prompt["output_ids"]
    assert theirs["text"] == ours["text"] == streamed["text"]


async def test_a_chat_gives_the_same_text_streamed_or_not(stack: Stack, peer: str) -> None:
    route = "/v1/chat/completions"
    ours, theirs = await post(stack.url + route, CHAT), await post(peer + route, CHAT)
    content = ours["choices"][0]["message"]["content"]
    assert "Paris" in content
    assert theirs["choices"][0]["message"]["content"] == content
    assert (theirs["usage"]["completion_tokens"], theirs["choices"][0]["finish_reason"]) == (
        ours["usage"]["completion_tokens"],
        "stop",
    )
    assert chat_text(await events(peer + route, CHAT)) == content


async def test_the_prompts_logprobs_are_put_together_by_either_router(stack: Stack, peer: str) -> None:
    prompt = next(prompt for prompt in gold() if prompt["name"] == "prose-17")
    body = greedy(prompt, return_logprob=True, logprob_start_len=0)
    ours = (await post(f"{stack.url}/generate", body))["meta_info"]
    theirs = (await post(f"{peer}/generate", body))["meta_info"]
    for field in ("input_token_logprobs", "output_token_logprobs"):
        assert [entry[1:] for entry in theirs[field]] == [entry[1:] for entry in ours[field]]
        numbers = [[entry[0] for entry in meta[field] if entry[0] is not None] for meta in (theirs, ours)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
    assert len(theirs["input_token_logprobs"]) == 17


async def test_a_wrong_request_is_a_400_through_it_too(peer: str) -> None:
    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.post(f"{peer}/generate", json={"text": "a", "sampling_params": {"temperature": -1}})
    assert answer.status_code == 400


async def test_a_stream_that_its_client_cuts_stops_both_legs_within_a_second(stack: Stack, peer: str) -> None:
    await stack.idle_snapshots()
    sampling = {"max_new_tokens": 2_000, "ignore_eos": True}
    body = {"text": "Tell me everything.", "sampling_params": sampling, "stream": True}
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", f"{peer}/generate", json=body) as answer,
    ):
        assert answer.status_code == 200
        await anext(answer.aiter_lines())
        assert any(gauges["live_requests"] > 0 for gauges in await stack.snapshots())

    async def free() -> bool:
        return all(gauges["live_requests"] == 0 for gauges in await stack.snapshots())

    await eventually(free, "both legs are gone", within_s=1.0)
