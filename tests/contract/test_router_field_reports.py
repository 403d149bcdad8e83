"""What users of other routers reported (theme H of docs/reliability.md), tried with workers that misbehave on purpose.

How legs fail, one by one, is in test_router_failures; what is scaled says so.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from baton_router.config import RouterConfig
from contract.fake_workers import (
    LONG_MS,
    FakeWorker,
    Received,
    Script,
    World,
    answers,
    decodes,
    decodes_slowly,
    dies_after,
    event,
    is_silent,
    prefills,
    resets,
    running,
    stream_head,
    tells,
    world,
)
from ports import free_port

MIB = 1 << 20


async def ask(w: World, **options: Any) -> int:
    """The status of a request whose answer was read to its end."""
    async with w.client.post(**options) as response:
        await response.read()
        return response.status


@asynccontextmanager
async def alone(**settings: Any) -> AsyncIterator[World]:
    """A router without workers of its own."""
    async with running(RouterConfig(**({"probe_interval_ms": LONG_MS} | settings))) as client:
        yield World(client, [], [])


async def figure(w: World, name: str) -> float:
    _, text = await w.client.get("/metrics")
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


# -- time and executions


async def test_a_prompt_that_takes_many_times_any_other_timeout_is_waited_for() -> None:
    """H04. Scale: 1.5 s, which is fifteen of the longest other timeout, instead of 120 s."""

    async def thinks(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        await asyncio.wait([asyncio.create_task(worker.release.wait())], timeout=1.5)
        return await prefills(worker, request, received)

    short = ("connect_timeout_ms", "worker_silence_ms", "client_silence_ms", "queue_ms")
    async with world((thinks,), probe_interval_ms=20, **dict.fromkeys(short, 100)) as w:
        assert await ask(w) == 200
        assert await figure(w, 'baton_router_retries_total{reason="lost"}') == 0
        await w.idle()


def yields(script: Script, log: list[str], name: str) -> Script:
    """The same, noting each execution whose output can reach the client."""

    async def noted(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        if "bootstrap_room" in received.body:
            await worker.rooms.room(received.body["bootstrap_room"]).wait()
        log.append(name)
        return await script(worker, request, received)

    return noted


@pytest.mark.parametrize(
    ("prefill", "first", "executions"),
    [
        (prefills, dies_after(*(event({"text": "a"}) for _ in range(10))), 1),
        (resets, decodes, 1),
        (prefills, tells(dies_at=2), 2),  # the second goes on with the third token: nothing is yielded twice
    ],
    ids=["decode killed after 10 tokens", "prefill killed after dispatch", "decode that tells its tokens killed"],
)
async def test_nothing_that_was_yielded_is_computed_for_the_client_again(
    prefill: Script, first: Script, executions: int
) -> None:
    """H05: executions at decode, for one request of the client."""
    log: list[str] = []
    async with world((prefill, prefills), (yields(first, log, "first"), yields(tells(), log, "second"))) as w:
        async with w.client.post() as response:
            events = [
                json.loads(one[6:]) for one in (await response.read()).split(b"\n\n") if one.startswith(b"data: {")
            ]
        texts = [one["text"] for one in events if "text" in one]
        assert len(log) == executions
        if script_dies := "error" in events[-1]:
            assert texts == ["a"] * 10
        assert script_dies or texts == list(dict.fromkeys(texts))
        await w.idle()


async def test_a_busy_answer_before_dispatch_is_followed_by_one_execution_elsewhere() -> None:
    """H05: 503 before dispatch."""
    log: list[str] = []
    async with world((prefills,), (answers(503), yields(decodes, log, "second"))) as w:
        assert await ask(w) == 200
        assert log == ["second"]


# -- choice


async def test_prompts_known_nowhere_go_to_the_idle_worker_even_if_it_holds_the_largest_prefix() -> None:
    """H08."""

    def one_is_busy(workers: list[FakeWorker]) -> None:
        workers[0].loads = [{"dp_rank": 0, "num_running_reqs": 30, "num_waiting_reqs": 0}]
        workers[1].loads = [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}]

    async with world((prefills, prefills), prefill_policy="cache_aware", prepare=one_is_busy) as w:
        shared = "a prefix that many share " * 400
        for number in range(10):
            assert await ask(w, json={"text": f"{shared}{number}"}) == 200
        assert [len(worker.received) for worker in w.prefill] == [0, 10]
        for number in range(40):
            assert await ask(w, json={"text": f"{number} {random.Random(number).random()} " * 200}) == 200
        assert [len(worker.received) for worker in w.prefill] == [0, 50]


@pytest.mark.parametrize("source", ["fixed", "file", "operator"])
async def test_load_is_seen_whatever_named_the_workers(source: str, tmp_path: Path) -> None:
    """H11: the spread is the same with static workers and with discovered ones."""
    path = tmp_path / "workers.toml"
    path.write_text("")
    async with world((prefills,), (decodes_slowly,) * 4, wait_ready=False) as fixed:
        urls = [worker.url for worker in fixed.decode]
        if source == "fixed":
            settings: dict[str, Any] = {"decode": tuple(urls)}
        elif source == "file":
            path.write_text("decode = " + json.dumps(urls))
            settings = {"workers_file": str(path), "discovery_interval_ms": 20}
        else:
            settings = {"admin_port": free_port()}
        settings |= {"prefill": (fixed.prefill[0].url,), "decode_policy": "least_load"}
        async with alone(**settings) as w:
            if source == "operator":
                for url in urls:
                    admin = f"http://127.0.0.1:{settings['admin_port']}/workers"
                    async with w.client.session.post(admin, json={"url": url, "role": "decode"}) as answer:
                        assert answer.status == 201
            await w.client.until("/ready", lambda _, body: [one["state"] for one in body["workers"]] == ["ready"] * 5)
            asked = [asyncio.create_task(ask(w)) for _ in range(32)]
            await w.client.until(
                "/server_info", lambda _, body: sum(one["in_flight"] for one in body["workers"][1:]) == 32
            )
            for worker in fixed.decode:
                worker.release.set()
            assert set(await asyncio.gather(*asked)) == {200}
            assert [len(worker.received) for worker in fixed.decode] == [8] * 4


# -- a worker that does not answer


async def test_a_worker_that_accepts_and_never_answers_delays_nobody_else_and_is_ejected() -> None:
    """H13. Scale: a probe each 250 ms instead of each second. A slow machine needs 100 ms to connect a hundred times."""
    settings = {"probe_interval_ms": 250, "connect_timeout_ms": 250, "worker_silence_ms": 3_000, "retries_burst": 256}
    async with world(decode=(is_silent, decodes), **settings) as w:
        took: list[float] = []

        async def one() -> None:
            began_s = time.monotonic()
            assert await ask(w) == 200
            took.append(time.monotonic() - began_s)

        w.decode[0].is_frozen = True
        frozen_s = time.monotonic()
        asked = [asyncio.create_task(one()) for _ in range(100)]
        await w.client.until("/ready", lambda _, body: body["workers"][1]["state"] == "unready")
        # Three probes, each its interval and its time: the last may have begun just before.
        assert time.monotonic() - frozen_s < 4 * (0.25 + 0.25) + 0.5
        healthy = sorted(took)
        assert len(healthy) >= 40 and healthy[-1] < 1.0, "who went to the healthy worker was not held up"
        await asyncio.gather(*asked)  # the others are served elsewhere once the silence is too long
        await w.idle()


# -- bodies


@asynccontextmanager
async def raw(w: World) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the router, by hand."""
    host, port = w.client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=4 * MIB)
    try:
        yield reader, writer
    finally:
        writer.close()


def head(*headers: str) -> bytes:
    lines = ["POST /generate HTTP/1.1", "host: x", "content-type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def status_in(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(10):
        return int((await reader.readline()).split()[1])


async def test_only_a_silent_client_times_out_and_a_slow_one_is_served() -> None:
    """H14. Scale: silence of 0.3 s instead of 30 s; a client that takes five times as long."""
    body = json.dumps({"text": "x" * 100}).encode()
    async with world(client_silence_ms=300) as w, raw(w) as (reader, writer), raw(w) as (slow_reader, slow_writer):
        began_s = time.monotonic()
        writer.write(head(f"content-length: {len(body)}") + body[:50])
        slow_writer.write(head(f"content-length: {len(body)}"))
        for at in range(0, len(body), 5):
            slow_writer.write(body[at : at + 5])
            await slow_writer.drain()
            await asyncio.sleep(0.06)
        assert time.monotonic() - began_s > 1.2
        assert await status_in(slow_reader) == 200
        assert await status_in(reader) == 408
        assert await figure(w, 'baton_router_admission_rejections_total{reason="silent_client"}') == 1
        assert len(w.decode[0].received) == 1
        await w.idle()


async def test_a_worker_that_reads_slowly_is_waited_for() -> None:
    """H14. Scale: 8 MiB at 8 MiB/s, with silence of 0.2 s to both sides, instead of 200 MB at 100 KB/s."""
    size = 8 * MIB

    async def reads_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if not request.startswith(b"POST"):
            info = {"role": "decode", "fingerprint": "same", "incarnation": "1"}
            said = json.dumps(info if b"server_info" in request else {"ready": True}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
            writer.close()
            return
        left = size
        while left > 0:
            left -= len(await reader.read(MIB))
            await asyncio.sleep(1 / 8)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(reads_slowly, "127.0.0.1", 0, limit=MIB)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = {"decode": (url,), "worker_silence_ms": 200, "client_silence_ms": 200, "probe_interval_ms": 20}
    async with server, alone(**settings) as w:
        began_s = time.monotonic()
        assert await ask(w, json={"text": "x" * size}) == 200
        assert time.monotonic() - began_s > 0.6
        await w.idle()


async def test_a_client_that_reads_nothing_holds_its_request_until_the_budget_ends_and_no_longer() -> None:
    """H14: 0 B/s. Scale: a budget of 1 s instead of 10 min."""

    async def floods(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        await worker.rooms.room(received.body["bootstrap_room"]).wait()
        response = await stream_head(request)
        while True:
            await response.write(event({"text": "x" * 65_536}))

    async with world(decode=(floods,)) as w, raw(w) as (_, writer):
        body = b'{"text": "x", "stream": true}'
        writer.write(head(f"content-length: {len(body)}", "x-baton-budget-ms: 1000") + body)
        await asyncio.wait_for(w.decode[0].arrival.wait(), 5)
        w.decode[0].script = decodes
        assert await ask(w) == 200
        await asyncio.wait_for(w.decode[0].received[0].cancelled.wait(), 5)
        await w.idle()


async def chunked(size: int) -> AsyncIterator[bytes]:
    """A body whose length nobody declares."""
    yield b'{"text": "'
    for _ in range(size // MIB):
        yield b"x" * MIB
    yield b'"}'


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
async def test_bodies_up_to_the_limit_pass_and_larger_ones_are_413_before_any_worker_sees_them(
    is_chunked: bool,
) -> None:
    """H16. Scale: up to 50 MB; the limit is 16 MiB, on workers too."""
    async with world() as w:
        for mib, wanted in ((1, 200), (10, 200), (16, 413), (50, 413)):
            body: Any = chunked(mib * MIB) if is_chunked else b'{"text": "' + b"x" * (mib * MIB) + b'"}'
            try:
                async with w.client.post(data=body, headers={"content-type": "application/json"}) as response:
                    assert response.status == wanted, mib
                    said = await response.json()
                assert wanted == 200 or said["error"]["code"] == 413
            except aiohttp.ClientConnectionError:
                assert wanted == 413  # the router closed the connection while the rest was being sent
        assert [len(received.body["text"]) for received in w.decode[0].received] == [MIB, 10 * MIB]
        assert [len(received.body["text"]) for received in w.prefill[0].received] == [MIB, 10 * MIB]
        await w.idle()


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (("content-length: 9",), b'{"text": "longer than nine"}', 400),
        (("content-length: 999",), b'{"text": "shorter"}', 408),
        (("content-length: 20", "content-encoding: gzip"), b"\x1f\x8b" + b"\0" * 18, 400),
        (("content-length: -1",), b"{}", 400),
    ],
    ids=["too small", "too large", "gzip", "negative"],
)
async def test_a_wrong_length_or_a_compressed_body_is_refused(
    headers: tuple[str, ...], body: bytes, status: int
) -> None:
    """H16."""
    async with world(client_silence_ms=200) as w, raw(w) as (reader, writer):
        writer.write(head(*headers) + body)
        assert await status_in(reader) == status
        assert w.decode[0].received == w.prefill[0].received == []
        await w.idle()


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware", "session"])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": "not a list"},
        {"messages": [1, None, {"role": 5}]},
        {"messages": []},
        {"prompt": {"a": 1}},
        {"prompt": [1, "a"]},
        {"prompt": [], "n": 3},
        {"text": ["a", 5]},
        {"text": 7, "session_params": 3},
        {"input_ids": [[1], "x"]},
        {"input_ids": "x", "sampling_params": {"n": "many"}},
        {"n": -1},
        {"user": ["u"], "stream": "yes"},
    ],
    ids=str,
)
async def test_a_body_that_makes_no_sense_is_a_400_and_leaves_no_load(body: dict[str, Any], policy: str) -> None:
    """H19: what the router itself refuses, and what it leaves to the workers to refuse."""
    settings = {"prefill_policy": policy, "decode_policy": policy, "local_prompt_tokens": 0}
    async with world((answers(400),), (answers(400),), **settings) as w:
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            async with w.client.post(path, json=body) as response:
                assert response.status == 400, path
                assert (await response.json())["error"]["message"]
        await w.idle()


# -- keys


def wants(key: str) -> Script:
    """A worker with a key of its own."""

    async def script(worker: FakeWorker, request: web.Request, received: Received) -> web.StreamResponse:
        if received.headers.get("authorization") != f"Bearer {key}":
            said = {"error": {"message": "wrong key", "type": "t", "code": 401}}
            return web.json_response(said, status=401)
        return await (prefills if worker.role == "prefill" else decodes)(worker, request, received)

    return script


@pytest.mark.parametrize(
    ("router_key", "worker_key", "given", "sent", "status"),
    [
        ("r", None, "r", None, 200),
        ("r", None, "x", None, 401),
        (None, "w", "r", "w", 200),
        (None, "w", "r", None, 401),
        ("r", "w", "r", "w", 200),
        ("r", "w", "w", "w", 401),
    ],
    ids=["router's", "router's, wrong", "workers'", "workers', not told to the router", "both", "both, mixed up"],
)
async def test_keys_are_those_of_the_hop_and_a_wrong_one_removes_no_worker(
    router_key: str | None, worker_key: str | None, given: str, sent: str | None, status: int, tmp_path: Path
) -> None:
    """H17: a hundred wrong keys, and the client's secret never goes on."""
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.a]\nkey = "{router_key}"\n')
    scripts = (wants(worker_key), wants(worker_key)) if worker_key else (prefills, decodes)
    settings = {"keys_file": str(path) if router_key else None, "worker_key": sent}
    headers = {"authorization": f"Bearer {given}", "x-api-key": given, "cookie": given}
    async with world((scripts[0],), (scripts[1],), **settings) as w:
        for _ in range(100 if status == 401 else 1):
            assert await ask(w, headers=headers) == status
        _, body = await w.client.get("/ready")
        assert [(one["state"], one["breaker"]) for one in body["workers"]] == [("ready", "closed")] * 2
        for received in w.prefill[0].received + w.decode[0].received:
            assert received.headers.get("authorization") == (f"Bearer {sent}" if sent else None)
            assert not {"x-api-key", "cookie"} & received.headers.keys()
        assert (await w.client.get("/metrics"))[0] == 200
        await w.idle()
