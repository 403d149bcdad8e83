"""A real Baton on this machine, started the way a person starts it: `baton up --detach`, and stopped by `baton down`."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ports import free_port

START_S = 120.0
REQUEST_S = 240.0
WAIT_S = 20.0


@dataclass
class Stack:
    """A running stack. `state` is what `state.json` says."""

    directory: Path
    url: str
    state: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def up(directory: Path, *options: str, settings: Sequence[str] = ()) -> "Stack":
        """Start and wait until a real completion has passed through; the console output is kept in `up.log`."""
        port = free_port()
        argv = [sys.executable, "-m", "baton_cli", "up", "--detach", "--state", str(directory), "--port", str(port)]
        for setting in settings:
            argv += ["--set", setting]
        done = subprocess.run([*argv, *options], capture_output=True, text=True, timeout=START_S, check=False)
        (directory / "up.log").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr
        stack = Stack(directory, f"http://127.0.0.1:{port}")
        stack.refresh()
        return stack

    def refresh(self) -> None:
        """Read `state.json` again."""
        self.state = json.loads((self.directory / "state.json").read_text())["processes"]

    def down(self) -> None:
        """Stop everything."""
        argv = [sys.executable, "-m", "baton_cli", "down", "--state", str(self.directory)]
        subprocess.run(argv, capture_output=True, text=True, timeout=START_S, check=True)

    def entries(self, role: str) -> list[dict[str, Any]]:
        """State entries of a role."""
        return [entry for entry in self.state if entry["role"] == role]

    def worker_urls(self) -> list[str]:
        """Every prefill and decode worker."""
        return [entry["url"] for entry in self.state if entry["role"] in ("prefill", "decode")]

    async def snapshots(self) -> list[dict[str, Any]]:
        """The gauges of every worker, fresh."""
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            answers = [await client.get(f"{url}/debug/snapshot") for url in self.worker_urls()]
        return [answer.json()["snapshot"]["gauges"] for answer in answers]

    async def flush(self) -> None:
        """Empty every prefix cache, once nothing is live."""
        await self.idle_snapshots()
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            for url in self.worker_urls():
                answer = await client.post(f"{url}/flush_cache")
                assert answer.status_code == 200, answer.text

    async def idle_snapshots(self) -> list[dict[str, Any]]:
        """The gauges once nothing is live any more; fails if that does not come about."""
        taken: list[dict[str, Any]] = []

        async def quiet() -> bool:
            taken[:] = await self.snapshots()
            return all(gauges["live_requests"] == 0 for gauges in taken)

        await eventually(quiet, "no request is live", lambda: repr(taken))
        return taken


async def eventually(
    holds: Callable[[], Awaitable[bool]], what: str, describe: Callable[[], str] = str, within_s: float = WAIT_S
) -> None:
    """Wait until `holds`, asking again after short pauses; fails with a description when it does not in time."""
    deadline = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}; {describe()}"
        await asyncio.sleep(0.05)


def gold(name: str = "smollm2") -> list[dict[str, Any]]:
    """Prompts with the answers that Transformers gave in float32 (`make gold`)."""
    path = Path(__file__).parent.parent / "gold" / f"{name}.json"
    prompts: list[dict[str, Any]] = json.loads(path.read_text())["prompts"]
    return prompts


def greedy(prompt: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The `/generate` body that asks for a gold prompt's answer."""
    sampling = {"temperature": 0, "max_new_tokens": 32}
    return {"input_ids": prompt["input_ids"], "sampling_params": sampling, **more}


async def ask_all(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[dict[str, Any]]:
    """POST every body to `/generate`, at most `concurrency` at a time; the answers in the order of the bodies."""
    gate = asyncio.Semaphore(concurrency)

    async with httpx.AsyncClient(timeout=REQUEST_S) as client:

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            async with gate:
                answer = await client.post(f"{url}/generate", json=body)
                assert answer.status_code == 200, answer.text
                parsed: dict[str, Any] = answer.json()
                return parsed

        return list(await asyncio.gather(*(ask(body) for body in bodies)))


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
