"""Baton's router beside sglang-router and vllm-router, in front of the same trivial workers: `bench_router.py --json FILE`.

Core 0 runs the workers and the client, core 1 the router under test (where there are two cores). All routers are
measured in turns, and only ratios within one run count. The peers come from virtual environments of their own
(`--sglang`, `--vllm`); one that is not there is left out.

    worker  asyncio protocol on httptools: answers every path at once with 505 bytes of JSON, or with 32 events, each
            with its record where the router asks for them, as a decode worker of ours would
    client  asyncio protocols: each connection sends its next request when its answer is complete
    CPU     user and system time of the router's process over the requests it served
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httptools
import uvloop

from baton_cli.ports import free_ports

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = ROOT / ".baton/peers"
CONNECTIONS = (1, 16, 64)
REQUEST = json.dumps({"model": "m", "prompt": "x" * 110, "max_tokens": 16}).encode()
CHUNKS = 32
STREAM_REQUEST = json.dumps({"model": "m", "prompt": "x" * 110, "max_tokens": CHUNKS, "stream": True}).encode()
EVENT = b'data: {"id": "c", "choices": [{"index": 0, "text": " token"}]}\n\n'
RECORD = b'baton-part: {"tokens":[12345]}\n\n'
LAST_RECORD = b'baton-last: {"tokens":[12345]}\n\n'
ANSWER = json.dumps({"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "y" * 420}]}).encode()
INFO = {
    "role": None,
    "model": "m",
    "model_path": "m",
    "served_model_name": "m",
    "bootstrap_port": 8998,
    "dp_size": 1,
    "ready": True,
}


@dataclass(frozen=True)
class Figure:
    """One router at one number of connections."""

    rate: float
    p50_us: float
    p99_us: float
    cpu_us: float


class Worker(asyncio.Protocol):
    """Answers at once."""

    def __init__(self) -> None:
        self.parser: Any = httptools.HttpRequestParser(self)
        self.body = b""
        self.tells = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def on_message_begin(self) -> None:
        self.tells = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.tells = self.tells or name == b"x-baton-token-ids"

    def data_received(self, data: bytes) -> None:
        with contextlib.suppress(httptools.HttpParserError):
            self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        asked, self.body = self.body, b""
        if b'"stream":true' in asked.replace(b" ", b""):
            is_told = self.tells
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            self.transport.write(b"x-baton-token-ids: 0\r\n" if is_told else b"")
            self.transport.write(b"transfer-encoding: chunked\r\n\r\n")
            events = [EVENT[:-1] + RECORD if is_told else EVENT] * CHUNKS
            for one in (*events, b"data: [DONE]\n" + (LAST_RECORD if is_told else b"\n")):
                self.transport.write(b"%x\r\n%b\r\n" % (len(one), one))
            self.transport.write(b"0\r\n\r\n")
            return
        body = ANSWER if self.parser.get_method() == b"POST" else json.dumps(INFO).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)


class Caller(asyncio.Protocol):
    """One connection of the client."""

    def __init__(self, call: bytes, until_s: float, took_s: list[float], first_s: list[float]) -> None:
        self.call, self.until_s, self.took_s, self.first_s = call, until_s, took_s, first_s
        self.has_begun = False
        self.parser: Any = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        self.began_s = time.perf_counter()
        self.has_begun = False
        if self.began_s > self.until_s:
            self.transport.close()
            return
        self.transport.write(self.call)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, _data: bytes) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.first_s.append(time.perf_counter() - self.began_s)

    def on_message_complete(self) -> None:
        assert self.parser.get_status_code() == 200, self.parser.get_status_code()
        self.took_s.append(time.perf_counter() - self.began_s)
        self.next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def load(
    port: int, connections: int, seconds: float, body: bytes = REQUEST, first_s: list[float] | None = None
) -> list[float]:
    """Latencies of every request answered in that time; `first_s` takes those of the first byte of each body."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    call = head.encode() + b"\r\n\r\n" + body
    took_s: list[float] = []
    firsts: list[float] = [] if first_s is None else first_s
    until_s, loop = time.perf_counter() + seconds, asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: Caller(call, until_s, took_s, firsts), "127.0.0.1", port)
        for _ in range(connections)
    ]
    await asyncio.gather(*(caller.done for _, caller in made))
    return took_s


def cpu_s(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, pid: int, connections: int, seconds: float) -> Figure:
    """One run, after a short warm-up."""
    await load(port, connections, 0.3)
    before_s, began_s = cpu_s(pid), time.perf_counter()
    took_s = sorted(await load(port, connections, seconds))
    spent_s, wall_s = cpu_s(pid) - before_s, time.perf_counter() - began_s
    p99 = took_s[int(len(took_s) * 0.99)]
    return Figure(len(took_s) / wall_s, statistics.median(took_s) * 1e6, p99 * 1e6, spent_s / len(took_s) * 1e6)


async def measure_streams(port: int, connections: int, seconds: float) -> tuple[float, float]:
    """Events passed on in a second, and the median time to a stream's first event in microseconds."""
    began_s, first_s = time.perf_counter(), list[float]()
    took_s = await load(port, connections, seconds, STREAM_REQUEST, first_s)
    return len(took_s) * CHUNKS / (time.perf_counter() - began_s), statistics.median(first_s) * 1e6


def start(command: list[str], core: int) -> "subprocess.Popen[bytes]":
    """A router on one core, quiet."""
    pinned = ["taskset", "-c", str(core), *command] if os.cpu_count() != 1 else command
    return subprocess.Popen(pinned, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def up(port: int, process: "subprocess.Popen[bytes]", path: str) -> None:
    """Wait until the router says that it can serve."""

    def asks() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    async with asyncio.timeout(30):
        while not await asyncio.to_thread(asks):
            assert process.poll() is None, "the router ended"
            await asyncio.sleep(0.1)


@dataclass(frozen=True)
class Router:
    """What to run, where it listens, and where it says that it is ready."""

    command: list[str]
    port: int
    path: str


def routers_of(prefill: int, decode: int, sglang: Path, vllm: Path) -> dict[str, Router]:
    """Ours, and the peers that are there."""
    workers = [f"http://127.0.0.1:{prefill}", f"http://127.0.0.1:{decode}"]
    port = free_ports(1, taken=0)[0]
    ours = [sys.executable, "-m", "baton_router", "--port", str(port), "--log-level", "warning"]
    found = {"baton": Router([*ours, "--prefill", workers[0], "--decode", workers[1]], port, "/ready")}
    for name, python, module, mode in (
        ("sglang-router", sglang, "sglang_router.launch_router", "--pd-disaggregation"),
        ("vllm-router", vllm, "vllm_router.launch_router", "--vllm-pd-disaggregation"),
    ):
        if python.exists():
            port = free_ports(1, taken=0)[0]
            theirs = [str(python), "-m", module, mode, "--policy", "random", "--port", str(port)]
            theirs += ["--prefill", workers[0], "8998", "--decode", workers[1]]
            theirs += ["--prometheus-port", str(free_ports(1, taken=0)[0]), "--log-level", "error"]
            found[name] = Router(theirs, port, "/readiness")
    return found


Figures = dict[tuple[str, int], list[Figure]]


Streams = dict[tuple[str, int], list[tuple[float, float]]]


async def compare(sglang: Path, vllm: Path, seconds: float, rounds: int) -> tuple[Figures, Streams]:
    """Figures, and of streams events a second and the first event, by router and connections; routers take turns."""
    loop, figures, chunks = asyncio.get_running_loop(), Figures(), Streams()
    workers = [await loop.create_server(Worker, "127.0.0.1", 0) for _ in range(2)]
    prefill, decode = (worker.sockets[0].getsockname()[1] for worker in workers)
    for connections in CONNECTIONS:
        took_s = sorted(await load(decode, connections, seconds))
        direct = Figure(
            len(took_s) / seconds, statistics.median(took_s) * 1e6, took_s[-1 - len(took_s) // 100] * 1e6, 0
        )
        figures["direct", connections] = [direct]
        chunks["direct", connections] = [await measure_streams(decode, connections, seconds)]
    routers = routers_of(prefill, decode, sglang, vllm)
    running = {name: start(router.command, (os.cpu_count() or 1) - 1) for name, router in routers.items()}
    try:
        for name, router in routers.items():
            await up(router.port, running[name], router.path)
        for _ in range(rounds):
            for connections in CONNECTIONS:
                for name, router in routers.items():
                    figure = await measure(router.port, running[name].pid, connections, seconds)
                    figures.setdefault((name, connections), []).append(figure)
                    passed = await measure_streams(router.port, connections, seconds)
                    chunks.setdefault((name, connections), []).append(passed)
    finally:
        for process in running.values():
            process.terminate()
            process.wait(10)
    return figures, chunks


def summary(figures: Figures, chunks: Streams) -> dict[str, Any]:
    """Medians over the rounds by router and connections, and what issue 8 and T8 ask for: ratios within this run."""
    made: dict[str, dict[str, dict[str, float]]] = {}
    for (name, connections), several in figures.items():
        rate, p50, p99, cpu = (
            statistics.median(getattr(figure, field) for figure in several)
            for field in ("rate", "p50_us", "p99_us", "cpu_us")
        )
        passed, first = (statistics.median(one[index] for one in chunks[name, connections]) for index in (0, 1))
        made.setdefault(name, {})[str(connections)] = {
            "json_requests_per_s": rate,
            "p50_us": p50,
            "p99_us": p99,
            "cpu_us_a_request": cpu,
            "p50_added_us": p50 - figures["direct", connections][0].p50_us,
            "chunks_per_s": passed,
            "first_chunk_late_us": first - chunks["direct", connections][0][1],
        }
    ratios = {
        f"{what} over {peer} at {connections}": made["baton"][connections][what] / made[peer][connections][what]
        for peer in ("sglang-router", "vllm-router")
        if peer in made
        for what in ("json_requests_per_s", "chunks_per_s")
        for connections in made["baton"]
    }
    return {"kind": "router", "load_average": os.getloadavg()[0], "routers": made, "ratios": ratios}


def show(made: dict[str, Any]) -> None:
    """Two tables."""
    columns = ("JSON/s", "p50 µs", "p99 µs", "CPU µs", "added µs", "chunks/s", "late µs")
    print(f"{'router':14}{'c':>4}" + "".join(f"{column:>10}" for column in columns))
    for name, by_connections in made["routers"].items():
        for connections, figures in by_connections.items():
            print(f"{name:14}{connections:>4}" + "".join(f"{figure:10.0f}" for figure in figures.values()))
    for what, ratio in made["ratios"].items():
        print(f"{ratio:6.2f}  {what}")


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name in ("sglang", "vllm"):
        default = PEERS / f"{name}-router" / "bin" / "python"
        parser.add_argument(
            f"--{name}", type=Path, default=default, help=f"python of an environment with {name}-router"
        )
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write figures and ratios there; -: print them instead of the tables")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {0})
    made = summary(*uvloop.run(compare(options.sglang, options.vllm, options.seconds, options.rounds)))
    if str(options.json) == "-":
        print(json.dumps(made, indent=1))
        return
    show(made)
    if options.json is not None:
        options.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
