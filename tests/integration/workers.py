"""Single workers without a router, for tests that send both legs of a room by hand."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from integration.stack import REQUEST_S
from ports import free_port

READY_S = 120.0
STOP_S = 20.0
_ROOMS = itertools.count(1)


class Worker:
    """One process, of any role, started as its command; the log is kept in `directory`. The flag `host` may be IPv6."""

    def __init__(self, role: str, directory: Path, name: str, **flags: object) -> None:
        self.role, self.name = role, name
        self.port, self.bootstrap_port = free_port(), free_port()
        host = str(flags.get("host", "127.0.0.1"))
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        self.log = directory / f"{name}.log"
        given: dict[str, object] = {"port": self.port} | flags
        if role == "prefill":
            given["bootstrap_port"] = self.bootstrap_port
        argv = [sys.executable, "-m", f"baton_{role}"]
        for key, value in given.items():
            argv += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, env=environ)

    def wait(self) -> None:
        """Until it takes requests; fails with its log."""
        deadline = time.monotonic() + READY_S
        while True:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, f"{self.name} is not ready within {READY_S} s: {self.text()}"
            try:
                if httpx.get(f"{self.url}/ready", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)

    def text(self) -> str:
        """The end of its log."""
        return self.log.read_text()[-4_000:]

    def rank_pids(self) -> list[int]:
        """Its scheduler processes, in order of rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    def snapshots(self) -> list[dict[str, Any]]:
        """The gauges of every rank, fresh."""
        answer = httpx.get(f"{self.url}/debug/snapshot", timeout=REQUEST_S).json()
        return [one["gauges"] for one in answer["ranks"]]

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if need be."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def stop_all(workers: Sequence[Worker]) -> None:
    """End them side by side."""
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGTERM)
    for worker in workers:
        worker.stop()


async def answer_of(
    prefill: Worker,
    decode: Worker,
    input_ids: Sequence[int],
    count: int,
    prefill_more: Mapping[str, Any] | None = None,
    **more: Any,
) -> tuple[httpx.Response, httpx.Response]:
    """Both legs of a fresh room, `prefill_more` on prefill's alone; prefill's and decode's answers."""
    body = leg_of(prefill, input_ids, count, **more)
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        bodies = ((prefill, body | dict(prefill_more or {})), (decode, body))
        legs = [client.post(f"{one.url}/generate", json=leg) for one, leg in bodies]
        first, second = await asyncio.gather(*legs)
        return first, second


@asynccontextmanager
async def streamed(
    prefill: Worker, decode: Worker, input_ids: Sequence[int], count: int, **more: Any
) -> AsyncIterator[AsyncIterator[list[int]]]:
    """Both legs of a fresh room, as streams: all the answer's tokens so far, with each event of decode's."""
    body = leg_of(prefill, input_ids, count, stream=True, **more)
    async with httpx.AsyncClient(timeout=REQUEST_S) as client:
        other = asyncio.create_task(client.post(f"{prefill.url}/generate", json=body))
        async with client.stream("POST", f"{decode.url}/generate", json=body) as stream:
            yield _tokens(stream)
        assert (await other).status_code == 200


async def _tokens(stream: httpx.Response) -> AsyncIterator[list[int]]:
    assert stream.status_code == 200, (await stream.aread()).decode()
    async for line in stream.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))["output_ids"]


def leg_of(prefill: Worker, input_ids: Sequence[int], count: int, **more: Any) -> dict[str, Any]:
    """The body that both legs of a fresh room get: a greedy answer of exactly `count` tokens."""
    return {
        "input_ids": list(input_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": next(_ROOMS),
        **more,
    }


def flags_of(layout: Mapping[str, object], model: Path | str, **more: object) -> dict[str, object]:
    """Flags of a small float32 worker with this layout."""
    return {"model": model, "dtype": "float32", "kv_tokens": 4_096, "threads": 1} | dict(layout) | more
