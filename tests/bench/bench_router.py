"""Baton's router beside sglang-router and vllm-router, in front of the same trivial workers: `bench_router.py --json FILE`.

Core 0 runs the workers and the client, core 1 the router under test (where there are two cores). All routers are
measured in turns, and only ratios within one run count. The peers come from virtual environments of their own
(`--sglang`, `--vllm`); one that is not there is left out.

    worker  asyncio protocol on httptools: answers every path at once with 505 bytes of JSON, or with events, each with
            its record where the router asks for them, as a worker of ours would: decode with 32, prefill with the one
            that a prefill worker has (`--prefill-events 32`: as many as decode, as this bench had it before)
    client  asyncio protocols: each connection sends its next request when its answer is complete
    direct  the same client without a router, which sends one leg, to decode
    by hand the same, but sends both legs itself on two connections, and waits for both: what a router adds to that is
            its own; what it adds to `direct` has the second leg in it, for which client and workers take time, too
    CPU     user and system time of the router's process over the requests it served; of client and workers without one
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
from functools import partial
from pathlib import Path
from typing import Any

import httptools
import uvloop

from baton_cli.ports import free_ports

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = ROOT / ".baton/peers"
CONNECTIONS = (1, 16, 64)
DIRECT, BY_HAND = "direct", "by hand"
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
    """Answers at once; a stream has that many events, and its end."""

    def __init__(self, events: int) -> None:
        self.events = events
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
            events = [EVENT[:-1] + RECORD if is_told else EVENT] * self.events
            for one in (*events, b"data: [DONE]\n" + (LAST_RECORD if is_told else b"\n")):
                self.transport.write(b"%x\r\n%b\r\n" % (len(one), one))
            self.transport.write(b"0\r\n\r\n")
            return
        body = ANSWER if self.parser.get_method() == b"POST" else json.dumps(INFO).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)


class Caller:
    """One client: sends each request on all of its connections at once, and the next when every answer is complete."""

    def __init__(self, call: bytes, until_s: float, took_s: list[float], first_s: list[float]) -> None:
        self.call, self.until_s, self.took_s, self.first_s = call, until_s, took_s, first_s
        self.connections: list[Connection] = []
        self.open = self.missing = 0  # connections; answers to the request under way
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(self, ports: tuple[int, ...]) -> "Caller":
        """Connect, and send the first request."""
        loop = asyncio.get_running_loop()
        for port in ports:
            _, connection = await loop.create_connection(lambda: Connection(self), "127.0.0.1", port)
            self.connections.append(connection)
            self.open += 1
        self.next()
        return self

    def next(self) -> None:
        self.began_s = time.perf_counter()
        self.missing = len(self.connections)
        is_over = self.began_s > self.until_s
        for connection in self.connections:
            if is_over:
                connection.transport.close()
            else:
                connection.has_begun = False
                connection.transport.write(self.call)

    def began(self, connection: "Connection") -> None:
        """The body of an answer begins; that of the last connection is what a client would read."""
        if connection is self.connections[-1]:
            self.first_s.append(time.perf_counter() - self.began_s)

    def answered(self) -> None:
        """One answer is complete."""
        self.missing -= 1
        if not self.missing:
            self.took_s.append(time.perf_counter() - self.began_s)
            self.next()

    def lost(self) -> None:
        """One connection is closed."""
        self.open -= 1
        if not self.open and not self.done.done():
            self.done.set_result(None)


class Connection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.has_begun = False
        self.parser: Any = httptools.HttpResponseParser(self)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, _data: bytes) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.caller.began(self)

    def on_message_complete(self) -> None:
        assert self.parser.get_status_code() == 200, self.parser.get_status_code()
        self.caller.answered()

    def connection_lost(self, _error: Exception | None) -> None:
        self.caller.lost()


async def load(
    ports: tuple[int, ...], connections: int, seconds: float, body: bytes = REQUEST, first_s: list[float] | None = None
) -> list[float]:
    """Latencies of every request answered in that time; `first_s` takes those of the first byte of each body."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    call = head.encode() + b"\r\n\r\n" + body
    took_s: list[float] = []
    firsts: list[float] = [] if first_s is None else first_s
    until_s = time.perf_counter() + seconds
    callers = [await Caller(call, until_s, took_s, firsts).connect(ports) for _ in range(connections)]
    await asyncio.gather(*(caller.done for caller in callers))
    return took_s


def cpu_s(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(ports: tuple[int, ...], pid: int, connections: int, seconds: float) -> Figure:
    """One run, after a short warm-up."""
    await load(ports, connections, 0.3)
    before_s, began_s = cpu_s(pid), time.perf_counter()
    took_s = sorted(await load(ports, connections, seconds))
    spent_s, wall_s = cpu_s(pid) - before_s, time.perf_counter() - began_s
    p99 = took_s[int(len(took_s) * 0.99)]
    return Figure(len(took_s) / wall_s, statistics.median(took_s) * 1e6, p99 * 1e6, spent_s / len(took_s) * 1e6)


async def measure_streams(ports: tuple[int, ...], connections: int, seconds: float) -> tuple[float, float]:
    """Events passed on in a second, and the median time to a stream's first event in microseconds."""
    began_s, first_s = time.perf_counter(), list[float]()
    took_s = await load(ports, connections, seconds, STREAM_REQUEST, first_s)
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


async def compare(
    sglang: Path, vllm: Path, seconds: float, rounds: int, prefill_events: int
) -> tuple[Figures, Streams]:
    """Figures, and of streams events a second and the first event, by router and connections; routers take turns."""
    loop, figures, chunks = asyncio.get_running_loop(), Figures(), Streams()
    workers = [await loop.create_server(partial(Worker, events), "127.0.0.1", 0) for events in (prefill_events, CHUNKS)]
    prefill, decode = (worker.sockets[0].getsockname()[1] for worker in workers)
    routers = routers_of(prefill, decode, sglang, vllm)
    running = {name: start(router.command, (os.cpu_count() or 1) - 1) for name, router in routers.items()}
    try:
        for name, router in routers.items():
            await up(router.port, running[name], router.path)
        under_test = {DIRECT: ((decode,), os.getpid()), BY_HAND: ((prefill, decode), os.getpid())}
        under_test |= {name: ((router.port,), running[name].pid) for name, router in routers.items()}
        for _ in range(rounds):
            for connections in CONNECTIONS:
                for name, (ports, pid) in under_test.items():
                    figure = await measure(ports, pid, connections, seconds)
                    figures.setdefault((name, connections), []).append(figure)
                    passed = await measure_streams(ports, connections, seconds)
                    chunks.setdefault((name, connections), []).append(passed)
    finally:
        for process in running.values():
            process.terminate()
            process.wait(10)
    return figures, chunks


def summary(figures: Figures, chunks: Streams) -> dict[str, Any]:
    """Medians over the rounds by router and connections, and what issue 8 and T8 ask for: ratios within this run."""
    made: dict[str, dict[str, dict[str, float]]] = {}

    def median(name: str, connections: int, field: str) -> float:
        return statistics.median(getattr(figure, field) for figure in figures[name, connections])

    def streams(name: str, connections: int, index: int) -> float:
        return statistics.median(one[index] for one in chunks[name, connections])

    for name, connections in figures:
        p50, first = median(name, connections, "p50_us"), streams(name, connections, 1)
        made.setdefault(name, {})[str(connections)] = {
            "json_requests_per_s": median(name, connections, "rate"),
            "p50_us": p50,
            "p99_us": median(name, connections, "p99_us"),
            "cpu_us_a_request": median(name, connections, "cpu_us"),
            "p50_added_us": p50 - median(DIRECT, connections, "p50_us"),
            "p50_added_by_hand_us": p50 - median(BY_HAND, connections, "p50_us"),
            "chunks_per_s": streams(name, connections, 0),
            "first_chunk_late_us": first - streams(DIRECT, connections, 1),
            "first_chunk_late_by_hand_us": first - streams(BY_HAND, connections, 1),
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
    columns = ("JSON/s", "p50 µs", "p99 µs", "CPU µs", "added µs", "by hand", "chunks/s", "late µs", "by hand")
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
    parser.add_argument("--prefill-events", type=int, default=1, help="of a stream of prefill's [default 1]")
    parser.add_argument("--json", type=Path, help="write figures and ratios there; -: print them instead of the tables")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {0})
    measured = compare(options.sglang, options.vllm, options.seconds, options.rounds, options.prefill_events)
    made = summary(*uvloop.run(measured))
    if str(options.json) == "-":
        print(json.dumps(made, indent=1))
        return
    show(made)
    if options.json is not None:
        options.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
