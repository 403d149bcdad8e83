"""`baton bench` over HTTP: a small real server streams tokens at known times, or misbehaves as told."""

import asyncio
import io
import json
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton_cli.__main__ import run
from baton_cli.bench.client import HttpEndpoint, check_url, http_session, served_model
from baton_cli.bench.progress import Bar
from baton_cli.bench.prompts import Prompts, poisson_arrivals_s
from baton_cli.bench.runner import Outcome, run_load
from baton_cli.bench.sample import Load, Sample
from baton_cli.bench.stats import summarise
from baton_cli.errors import CliError, Interrupted, UsageError
from baton_cli.show import Screen

FIRST_S, GAP_S = 0.06, 0.03
SLACK_S = 0.025  # of a busy machine
WRONG = {7: "HTTP 503", 8: "error event", 9: "stream ended without [DONE]", 11: "answer of another length"}


class Server:
    """Answers as OpenAI's completions and `/generate` do; the first token id of a prompt in `WRONG` says what goes wrong."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.arrived_s: list[float] = []
        self.now_open = self.most_open = 0
        self.app = web.Application()
        self.app.router.add_post("/v1/completions", self.complete)
        self.app.router.add_post("/generate", self.complete)
        self.app.router.add_get("/v1/models", self.models)

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.arrived_s.append(time.perf_counter())
        body = await request.json()
        self.bodies.append(body)
        if "input_ids" in body:
            prompt, wanted = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        else:
            prompt, wanted = body["prompt"], body["max_tokens"]
        if prompt[0] == 7:
            return web.json_response({"error": {"message": "busy"}}, status=503)
        self.now_open += 1
        self.most_open = max(self.most_open, self.now_open)
        try:
            return await self._stream(request, prompt[0], wanted, generate="input_ids" in body)
        finally:
            self.now_open -= 1

    async def _stream(self, request: web.Request, first_id: int, wanted: int, *, generate: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        tokens = wanted - 1 if first_id == 11 else wanted
        for number in range(tokens):
            await asyncio.sleep(FIRST_S if number == 0 else GAP_S)
            if generate:
                await self._say(response, {"text": "x" * number, "meta_info": _meta(number + 1)})
            else:
                await self._say(response, {"choices": [{"index": 0, "text": f"t{number}"}]})
        if first_id == 8:
            await self._say(response, {"error": {"message": "the peer is gone"}})
        elif not generate:
            await self._say(response, {"choices": [{"text": "", "finish_reason": "length"}]})
            usage = {"completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 3}}
            await self._say(response, {"choices": [], "usage": usage})
        if first_id not in (8, 9):
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _say(self, response: web.StreamResponse, event: dict[str, object]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _meta(completion_tokens: int) -> dict[str, int]:
    return {"completion_tokens": completion_tokens, "cached_tokens": 5}


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    mine = Server()
    served = TestServer(mine.app)
    await served.start_server()
    yield mine, str(served.make_url("")).rstrip("/")
    await served.close()


async def ask(url: str, prompt: Sequence[int], tokens: int, route: str = "/v1/completions") -> Sample:
    async with http_session(request_timeout_seconds=5) as session:
        endpoint = HttpEndpoint(session=session, url=url, route=route, model="tiny")
        return await endpoint.complete(prompt, tokens, time.perf_counter())


async def drive(url: str, load: Load, interrupted: bool = False) -> Outcome:
    async with http_session(request_timeout_seconds=5) as session:
        endpoint = HttpEndpoint(session=session, url=url, route="/v1/completions", model="tiny")
        bar = Bar(Screen(io.StringIO()), "requests", load.requests)
        return await run_load(endpoint, load, Prompts(seed=load.seed), bar, lambda: interrupted)


def load(**changes: object) -> Load:
    fine = {"requests": 6, "input_tokens": 4, "output_tokens": 3, "seed": 1, "concurrency": 3}
    return Load(**(fine | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("route", "cached_tokens"), [("/v1/completions", 3), ("/generate", 5)])
async def test_a_sample_has_the_times_at_which_the_server_sent(
    server: tuple[Server, str], route: str, cached_tokens: int
) -> None:
    sample = await ask(server[1], [100, 200], 4, route)
    assert sample.failure is None
    assert (sample.output_tokens, len(sample.event_times_s), sample.cached_tokens) == (4, 4, cached_tokens)
    assert sample.ttft_ms == pytest.approx(FIRST_S * 1000, abs=SLACK_S * 1000)
    assert sample.tpot_ms == pytest.approx(GAP_S * 1000, abs=SLACK_S * 1000)
    assert sample.gaps_ms == pytest.approx([GAP_S * 1000] * 3, abs=SLACK_S * 1000)


async def test_a_request_asks_for_a_greedy_answer_of_exactly_that_length(server: tuple[Server, str]) -> None:
    await ask(server[1], [100, 200], 2)
    body = server[0].bodies[0]
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([100, 200], 2, 0)
    assert body["ignore_eos"] is True


@pytest.mark.parametrize(("first_id", "failure"), WRONG.items())
async def test_what_goes_wrong_is_a_failure_with_a_name(
    server: tuple[Server, str], first_id: int, failure: str
) -> None:
    assert (await ask(server[1], [first_id], 2)).failure == failure


async def test_a_server_that_is_not_there_is_a_failure_too() -> None:
    sample = await ask("http://127.0.0.1:9", [100], 2)
    assert sample.failure is not None
    assert sample.failure.startswith("connection: ")


async def test_the_model_is_asked_for_and_a_dead_server_named(server: tuple[Server, str]) -> None:
    async with aiohttp.ClientSession() as session:
        assert await served_model(session, server[1]) == "tiny"
        with pytest.raises(CliError, match="baton up"):
            await served_model(session, "http://127.0.0.1:9")


async def test_the_clients_connections_have_nodelay(server: tuple[Server, str]) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    async with http_session(5) as session, session.post(server[1] + "/generate", json=body) as got:
        assert got.connection is not None
        assert got.connection.transport is not None
        found = got.connection.transport.get_extra_info("socket")
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_a_closed_loop_keeps_as_many_open_as_it_is_told_and_does_not_count_the_warm_up(
    server: tuple[Server, str],
) -> None:
    outcome = await drive(server[1], load(warmup_requests=2))
    assert (len(outcome.samples), outcome.unfinished) == (6, 0)
    assert len(server[0].bodies) == 8
    assert server[0].most_open == 3
    assert len({tuple(body["prompt"]) for body in server[0].bodies}) == 8  # type: ignore[arg-type]
    summary = summarise(outcome.samples, client_cpu_share=outcome.client_cpu_share)
    assert summary.itl_ms is not None
    assert summary.itl_ms.count == 12
    assert summary.itl_ms.p50 == pytest.approx(GAP_S * 1000, abs=SLACK_S * 1000)
    assert summary.output_tokens_per_s == pytest.approx(18 / (2 * (FIRST_S + 2 * GAP_S)), rel=0.3)
    assert 0 < summary.client_cpu_share < 1


async def test_an_open_loop_sends_at_its_times_whatever_is_still_open(server: tuple[Server, str]) -> None:
    outcome = await drive(server[1], load(requests=12, concurrency=None, rate_per_s=60.0, seed=5))
    due_s = poisson_arrivals_s(seed=5, rate_per_s=60.0, requests=12)
    arrived_s = server[0].arrived_s
    late_s = [(a - arrived_s[0]) - (d - due_s[0]) for a, d in zip(arrived_s, due_s, strict=True)]
    assert max(late_s) < 2 * SLACK_S
    assert server[0].most_open > 1
    assert all(sample.failure is None for sample in outcome.samples)


async def test_a_run_beyond_its_time_limit_says_how_many_are_missing(server: tuple[Server, str]) -> None:
    outcome = await drive(server[1], load(requests=50, time_limit_seconds=0.3))
    assert outcome.unfinished > 0
    assert len(outcome.samples) + outcome.unfinished == 50


async def test_ctrl_c_ends_a_run(server: tuple[Server, str]) -> None:
    with pytest.raises(Interrupted):
        await drive(server[1], load(requests=500), interrupted=True)


async def test_the_command_prints_a_table_and_writes_json(
    server: tuple[Server, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "baton_cli.interrupt.Interrupt.install", lambda _self: None
    )  # signals belong to the main thread
    path = tmp_path / "run.json"
    argv = ["bench", "serve", "--url", server[1], "--requests", "4", "--concurrency", "2", "--output-tokens", "3"]
    code = await asyncio.to_thread(run, [*argv, "--goodput", "ttft_ms=5000", "--json", str(path)], {})
    text = capsys.readouterr().out
    assert code == 0, text
    assert "time to first token" in text
    assert "goodput within ttft_ms 5000" in text
    record = json.loads(path.read_bytes())
    assert record["settings"]["output_tokens"] == 3
    assert record["summary"]["completed"] == 4


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--url", "localhost:8000"], "scheme"),
        (["--url", "http://127.0.0.1:9", "--plot", "picture.jpg"], ".png"),
        (["--url", "http://127.0.0.1:9", "--requests", "0"], "--requests"),
        (["--url", "http://127.0.0.1:9", "--json", "/no/such/folder/x.json"], "no folder"),
    ],
)
def test_a_wrong_command_line_is_answered_before_anything_is_sent(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "serve", *argv], {}) in (1, 2)
    assert text in capsys.readouterr().err


def test_a_url_may_end_in_a_slash_and_needs_a_scheme() -> None:
    assert check_url("http://127.0.0.1:8000/") == "http://127.0.0.1:8000"
    with pytest.raises(UsageError, match="http://"):
        check_url("127.0.0.1:8000")
