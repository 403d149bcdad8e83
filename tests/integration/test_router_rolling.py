"""The router in front of real workers that are killed, drained and restarted under load: nobody notices.

Issue 8's "Done when", on two prefill and two decode workers with a tiny model in float32, whose answers the oracle knows.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from integration.stack import START_S, Stack, eventually
from integration.workers import Worker, answer_of, flags_of, stop_all
from ports import free_port
from tiny_folders import MARGIN, VOCAB, save_folder
from tiny_models import oracle

TOKENS = 240
CANDIDATES, PROMPT_TOKENS = 64, 8
STREAMS = 50
SETTINGS = [f"{role}.{what}" for role in ("prefill", "decode") for what in ("kv_tokens=32768", "threads=1")]
SETTINGS += ["router.probe_interval_ms=200"]

Prompt = tuple[list[int], list[int]]


@dataclass
class Fleet:
    """A running stack, a second router in front of the same workers, and prompts with the answers that count."""

    stack: Stack
    prompts: list[Prompt]
    folder: Path  # of the model
    routers: list["Router"] = field(default_factory=list)


class Router:
    """One replica; its argv is that of the stack's own, but for the port."""

    def __init__(self, stack: Stack, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._argv = [sys.executable, "-m", "baton_router", "--port", str(self.port), "--probe-interval-ms", "200"]
        for entry in stack.state:
            if entry["role"] in ("prefill", "decode"):
                self._argv += [f"--{entry['role']}", entry["url"]]
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=log)

    def stop(self) -> int:
        """SIGTERM: it drains. Its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    async def ready(self) -> None:
        """Until it has all of its workers."""

        async def has_all() -> bool:
            assert self.process.poll() is None, self._log.read_text()[-2_000:]
            try:
                async with httpx.AsyncClient(timeout=5) as http:
                    body = (await http.get(f"{self.url}/ready")).json()
            except httpx.TransportError:
                return False
            return all(worker["state"] == "ready" for worker in body["workers"])

        await eventually(has_all, "the router has all workers", within_s=30)


def sure_answers(model: "torch.nn.Module") -> list[Prompt]:
    """Prompts with long greedy answers, in which the oracle is sure of every token."""
    random = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, VOCAB, (CANDIDATES, PROMPT_TOKENS), generator=random)
    made = model.generate(  # type: ignore[operator]
        prompts,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    best = torch.stack(made.scores, 1).topk(2).values
    sure = ((best[..., 0] - best[..., 1]) > MARGIN).all(1)
    found = [
        (prompt, sequence[PROMPT_TOKENS:])
        for prompt, sequence, is_sure in zip(prompts.tolist(), made.sequences.tolist(), sure.tolist(), strict=True)
        if is_sure
    ]
    assert len(found) >= 4, "the oracle is hardly ever sure"
    return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = oracle("llama", vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=4_096)
    folder = save_folder(tmp_path_factory.mktemp("models") / "tiny", model)
    shape = ("--model", str(folder), "--prefill", "2", "--decode", "2", "--dtype", "float32")
    logs = tmp_path_factory.mktemp("rolling")
    stack = Stack.up(logs, *shape, settings=SETTINGS)
    made = Fleet(stack, sure_answers(model), folder)
    try:
        made.routers = [Router(stack, logs / f"router-{index}.log") for index in range(2)]
        yield made
    finally:
        for router in made.routers:
            router.process.kill()
            router.process.wait()
        stack.down()


def body_of(prompt: Prompt, **more: object) -> dict[str, object]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {"input_ids": prompt[0], "sampling_params": sampling, **more}


@dataclass
class Stream:
    """A streamed answer as its client sees it: the text after each event, or an error."""

    prompt: Prompt
    texts: list[str] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    error: object = None


async def follow(http: httpx.AsyncClient, url: str, stream: Stream) -> None:
    async with http.stream("POST", f"{url}/generate", json=body_of(stream.prompt, stream=True)) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                stream.error = event.get("error")
                if stream.error is None:
                    stream.texts.append(event["text"])
                    stream.output_ids = event["output_ids"]


async def texts_of(fleet: Fleet) -> dict[int, str]:
    """The text of each prompt's answer, taken in quiet."""
    texts = {}
    async with httpx.AsyncClient(timeout=60) as http:
        for number, prompt in enumerate(fleet.prompts):
            answer = (await http.post(f"{fleet.routers[0].url}/generate", json=body_of(prompt))).json()
            assert answer["output_ids"] == prompt[1], "the oracle's answer"
            texts[number] = answer["text"]
    return texts


async def migrations(url: str) -> float:
    async with httpx.AsyncClient(timeout=10) as http:
        lines = (await http.get(f"{url}/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("baton_router_migrations_total"))


def restart(stack: Stack, role: str, index: int, *options: str) -> None:
    argv = [sys.executable, "-m", "baton_cli", "restart", "--state", str(stack.directory), role, str(index), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stack.refresh()


async def test_killing_a_decode_worker_with_fifty_streams_running_loses_none_of_them(fleet: Fleet) -> None:
    """R9, with real workers: every client gets the whole text, each event going on from the one before."""
    router = fleet.routers[0]
    await router.ready()
    texts = await texts_of(fleet)
    numbers = list(itertools.islice(itertools.cycle(range(len(fleet.prompts))), STREAMS))
    streams = [Stream(fleet.prompts[number]) for number in numbers]
    victim = next(entry for entry in fleet.stack.entries("decode") if entry["index"] == 0)
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
        tasks = [asyncio.create_task(follow(http, router.url, one)) for one in streams]

        async def all_run() -> bool:
            return all(one.texts for one in streams)

        await eventually(all_run, "all streams have begun", within_s=60)
        assert not any(task.done() for task in tasks), "all of them are still running"
        for pid in (victim["pid"], *(rank["pid"] for rank in victim["ranks"])):
            os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
    assert [one.error for one in streams] == [None] * STREAMS
    assert [one.output_ids for one in streams] == [one.prompt[1] for one in streams]
    assert [one.texts[-1] for one in streams] == [texts[number] for number in numbers]
    for one in streams:
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(one.texts))
    assert await migrations(router.url) >= STREAMS / 4
    await asyncio.to_thread(restart, fleet.stack, "decode", 0, "--kill")
    await router.ready()


class Balancer:
    """What stands before two routers: takes them in turn, and the other one where a connection is refused."""

    def __init__(self, routers: list[Router]) -> None:
        self._routers = routers
        self._turns = itertools.count()

    async def ask(self, http: httpx.AsyncClient, prompt: Prompt, is_stream: bool) -> None:
        """One request; fails unless the answer is whole and right."""
        turn = next(self._turns)
        try:
            await self._ask_one(http, self._routers[turn % 2].url, prompt, is_stream)
        except httpx.ConnectError:
            await self._ask_one(http, self._routers[(turn + 1) % 2].url, prompt, is_stream)

    async def _ask_one(self, http: httpx.AsyncClient, url: str, prompt: Prompt, is_stream: bool) -> None:
        if is_stream:
            stream = Stream(prompt)
            await follow(http, url, stream)
            assert (stream.error, stream.output_ids) == (None, prompt[1])
        else:
            answer = await http.post(f"{url}/generate", json=body_of(prompt))
            assert (answer.status_code, answer.json().get("output_ids")) == (200, prompt[1]), answer.text


@asynccontextmanager
async def load(fleet: Fleet, served: list[float]) -> AsyncIterator[None]:
    """Six clients that keep asking, each second time for a stream; the first failure fails the test."""
    balancer, is_over = Balancer(fleet.routers), asyncio.Event()

    async def client(number: int) -> None:
        # A connection for each request: one that is kept could be closed by a draining router just as it is used.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http:
            for turn in itertools.count(number):
                if is_over.is_set():
                    return
                await balancer.ask(http, fleet.prompts[turn % len(fleet.prompts)], turn % 2 == 0)
                served.append(time.monotonic())

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(client(number))
        try:
            yield
        finally:
            is_over.set()


async def test_a_rolling_restart_of_every_worker_and_of_both_routers_under_load_fails_no_request(fleet: Fleet) -> None:
    served: list[float] = []
    for router in fleet.routers:
        await router.ready()
    async with load(fleet, served):
        for role, index in (("decode", 0), ("decode", 1), ("prefill", 0), ("prefill", 1)):
            before = len(served)
            await asyncio.to_thread(restart, fleet.stack, role, index)  # SIGTERM: it drains, then starts anew
            for router in fleet.routers:
                await router.ready()
            assert len(served) > before, f"{role} {index} was restarted under load"
        for router in fleet.routers:
            before = len(served)
            assert await asyncio.to_thread(router.stop) == 0
            router.start()
            await router.ready()
            assert len(served) > before
    assert len(served) > 50
    for gauges in await fleet.stack.idle_snapshots():
        assert gauges["pages_free"] + gauges["pages_cached"] == gauges["pages"]


async def test_health_is_at_hand_while_many_long_prompts_are_computed(fleet: Fleet) -> None:
    """I07. Scale: 32 prompts of 3,500 tokens instead of 64k, for as long as they take."""
    await fleet.routers[0].ready()
    prefill = fleet.stack.entries("prefill")[0]["url"]
    bodies = [
        {
            "input_ids": [2 + (number * 37 + position * 7) % (VOCAB - 2) for position in range(3_500)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        }
        for number in range(32)
    ]
    statuses: list[int] = []
    async with httpx.AsyncClient(timeout=120) as http, httpx.AsyncClient(timeout=1.0) as probe:
        asked = [asyncio.create_task(http.post(f"{fleet.routers[0].url}/generate", json=body)) for body in bodies]

        async def all_answered() -> bool:
            statuses.append((await probe.get(f"{prefill}/health")).status_code)
            return all(task.done() for task in asked)

        await eventually(all_answered, "all prompts are computed", within_s=100)
        assert {(await task).status_code for task in asked} == {200}
        assert set(statuses) == {200} and len(statuses) > 10
        assert (await http.get(f"{prefill}/health_generate")).status_code == 200


async def test_a_worker_is_healthy_and_ready_only_when_its_first_request_succeeds(fleet: Fleet, tmp_path: Path) -> None:
    """I10: asked from the start of its process on, again and again."""
    flags = flags_of({}, fleet.folder)
    prefill, decode = (Worker(role, tmp_path, role, **flags) for role in ("prefill", "decode"))
    seen: dict[str, list[int]] = {}
    try:
        async with httpx.AsyncClient(timeout=2) as http:

            async def is_up(url: str) -> bool:
                try:
                    status = (await http.get(url)).status_code
                except httpx.TransportError:
                    return False
                seen.setdefault(url, []).append(status)
                return status == 200

            async def all_up() -> bool:
                urls = [f"{one.url}/{path}" for one in (prefill, decode) for path in ("health", "ready")]
                return all([await is_up(url) for url in urls])

            await eventually(all_up, "both workers are healthy and ready", within_s=100)
        prompt, wanted = fleet.prompts[0]
        answers = await answer_of(prefill, decode, prompt, TOKENS)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[1].json()["output_ids"] == wanted
        for url, statuses in seen.items():
            assert statuses == sorted(statuses, reverse=True), f"{url}: 200 is the last word"
    finally:
        stop_all([prefill, decode])
