"""A library in another virtual environment as a rival: starts `shim.py` there and talks lines with it."""

import asyncio
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp

from baton_cli.bench.peers.rival import Cell
from baton_cli.bench.prompts import Prompts
from baton_cli.bench.sample import Sample
from baton_cli.errors import CliError, Interrupted
from baton_cli.processes import log_tail

SHIM = Path(__file__).with_name("shim.py")
LOAD_TIMEOUT_SECONDS = 300.0
EVENT_TIMEOUT_SECONDS = 300.0
STOP_TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shim:
    """How to start one."""

    engine: str
    python: Path
    model: Path
    dtype: str
    cores: str
    log: Path


class Lines:
    """The events of a shim, each with the moment at which it arrived."""

    def __init__(self, stream: IO[str]) -> None:
        self._events: queue.SimpleQueue[tuple[float, dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(stream,), name="shim-lines", daemon=True)
        self._thread.start()

    def next(self, timeout_seconds: float) -> tuple[float, dict[str, Any]] | None:
        """The next event; None when the shim ended. Raises queue.Empty after the timeout."""
        return self._events.get(timeout=timeout_seconds)

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._events.put((time.perf_counter(), json.loads(line)))
        self._events.put(None)


class ShimRival:
    """As `Rival`. A round is one or more waves of `concurrency` prompts, each answered as the library does it best."""

    def __init__(self, shim: Shim, process: "subprocess.Popen[str]", lines: Lines, about: dict[str, str]) -> None:
        self.name = shim.engine
        self.about = about
        self.leaders: Sequence[int] = (process.pid,)
        self._shim, self._process, self._lines = shim, process, lines

    async def run(self, session: aiohttp.ClientSession, cell: Cell, prompts: Prompts, round_name: str) -> list[Sample]:
        """As `Rival`."""
        asked = [cell.prompt(prompts, round_name, number) for number in range(cell.requests)]
        origin_s = time.perf_counter()
        samples: list[Sample] = []
        for first in range(0, len(asked), cell.concurrency):
            wave = asked[first : first + cell.concurrency]
            samples += await asyncio.to_thread(self._wave, wave, cell.output_tokens, origin_s)
        return samples

    def pause(self) -> None:
        """A shim waits for a line: it uses no CPU."""

    def resume(self) -> None:
        """Nothing was paused."""

    def _wave(self, prompts: list[list[int]], output_tokens: int, origin_s: float) -> list[Sample]:
        """Ask once; raises CliError when the shim fails."""
        assert self._process.stdin is not None
        times: list[list[float]] = [[] for _ in prompts]
        sent_s = time.perf_counter() - origin_s
        self._process.stdin.write(json.dumps({"prompts": prompts, "output_tokens": output_tokens}) + "\n")
        self._process.stdin.flush()
        while True:
            at_s, event = self._event()
            if event["event"] == "end":
                break
            for index in event["of"]:
                times[index].append(at_s - origin_s)
        return [
            Sample(
                prompt_tokens=len(prompt),
                sent_s=sent_s,
                ended_s=mine[-1] if mine else at_s - origin_s,
                event_times_s=tuple(mine),
                output_tokens=len(mine),
                failure=None if len(mine) == output_tokens else "answer of another length",
            )
            for prompt, mine in zip(prompts, times, strict=True)
        ]

    def _event(self) -> tuple[float, dict[str, Any]]:
        try:
            found = self._lines.next(EVENT_TIMEOUT_SECONDS)
        except queue.Empty as error:
            raise CliError(f"{self.name} said nothing for {EVENT_TIMEOUT_SECONDS:.0f} s") from error
        if found is None:
            raise CliError(_ended(self._shim))
        return found


@contextmanager
def shim_rival(shim: Shim, environ: Mapping[str, str], interrupted: Callable[[], bool]) -> Iterator[ShimRival]:
    """A shim that has loaded its model, for as long as the context lasts. Raises CliError, Interrupted."""
    argv = [str(shim.python), str(SHIM), shim.engine, "--model", str(shim.model)]
    argv += ["--dtype", shim.dtype, "--cores", shim.cores]
    env = dict(environ) | {"OMP_NUM_THREADS": str(len(shim.cores.split(","))), "HF_HUB_OFFLINE": "1"}
    try:
        with open(shim.log, "wb") as log:
            process = subprocess.Popen(
                argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise CliError(f"cannot start {shim.python}: {error}") from error
    try:
        assert process.stdout is not None
        lines = Lines(process.stdout)
        yield ShimRival(shim, process, lines, _await_ready(shim, lines, interrupted))
    finally:
        _stop(process)


def _await_ready(shim: Shim, lines: Lines, interrupted: Callable[[], bool]) -> dict[str, str]:
    deadline_s = time.monotonic() + LOAD_TIMEOUT_SECONDS
    while time.monotonic() < deadline_s:
        if interrupted():
            raise Interrupted
        try:
            found = lines.next(POLL_SECONDS)
        except queue.Empty:
            continue
        if found is None:
            raise CliError(_ended(shim))
        versions: dict[str, str] = found[1]["versions"]
        return versions
    raise CliError(f"{shim.engine} did not load its model in {LOAD_TIMEOUT_SECONDS:.0f} s; see {shim.log}")


def _stop(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _ended(shim: Shim) -> str:
    tail = "\n".join(f"   | {line}" for line in log_tail(str(shim.log)))
    return f"{shim.engine} ended; the end of {shim.log}:\n{tail}"
