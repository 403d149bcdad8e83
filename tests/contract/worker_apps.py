"""A worker's app that serves real HTTP over a real ipc; only the scheduler behind it is scripted (`scripted_rank`)."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from baton_core.effects import LookUp, RegisterRank
from baton_core.errors import Reason, Verdict
from baton_core.events import BootstrapInfos, LookupFailed, RankEndpoint, Resolved
from baton_core.limits import Limits
from baton_io.ipc import RankReady
from baton_worker.app import create_app
from baton_worker.config import DecodeConfig, PrefillConfig, Role
from baton_worker.materials import Materials
from baton_worker.models import resolve_model
from baton_worker.serving import Site, listen, monotonic_ms, port_of, serve
from baton_worker.tokenizer import Tokenizer
from baton_worker.worker import Worker

SCRIPTED_RANK = Path(__file__).with_name("scripted_rank.py")
LIMITS = Limits(loop_stall_ms=3_000, drain_ms=5_000)
ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_room": 77}


@dataclass
class ScriptedCompanion:
    """A role's part: one allowed host, and look-ups that find one worker."""

    missing: list[str] = field(default_factory=list)
    readies: tuple[RankReady, ...] = ()

    def check_host(self, host: str, _port: int) -> Verdict | None:
        text = f"bootstrap_host {host} is not allowed here"
        return None if host == "127.0.0.1" else Verdict(reason=Reason.INVALID_REQUEST, text=text)

    def unready(self) -> list[str]:
        return self.missing

    async def attend(self, readies: tuple[RankReady, ...]) -> None:
        self.readies = readies
        await asyncio.Event().wait()

    async def look_up(self, lookup: LookUp) -> Resolved | LookupFailed:
        endpoint = RankEndpoint(host="127.0.0.1", port=1)
        infos = BootstrapInfos(incarnation=f"room {lookup.bootstrap.room}", dp_rank=0, endpoints=(endpoint,))
        return Resolved(rid=lookup.rid, infos=infos)

    def forget(self, _peers: tuple[str, ...]) -> None:
        pass


@dataclass
class ScriptedAnnouncer:
    """Notes what registries would be told."""

    told: list[str] = field(default_factory=list)

    def register(self, rooms: tuple[RegisterRank, ...]) -> None:
        self.told += [f"room {one.room} on {one.dp_rank}" for one in rooms]

    def close_room(self, room: int, *, went_well: bool) -> None:
        self.told.append(f"room {room} over" if went_well else f"room {room} over without an answer")

    def unit_lost(self, dp_rank: int) -> None:
        self.told.append(f"unit {dp_rank} lost")


@dataclass
class Running:
    """A worker that serves, and a client of it."""

    worker: Worker
    http: httpx.AsyncClient
    port: int
    exit_code: "asyncio.Task[int]"

    async def ask(self, rid: str = "echo", text: str = "Hello there", **more: Any) -> httpx.Response:
        params = {"max_new_tokens": 64} | more.pop("sampling_params", {})
        return await self.http.post("/generate", json={"text": text, "rid": rid, "sampling_params": params} | more)

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a rank's process."""
        pid = self.worker.units.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what the worker's own tasks bring about."""
        async with asyncio.timeout(5):
            while True:
                if holds():
                    return
                await asyncio.sleep(0.005)

    async def until_rank_saw(self, key: str) -> None:
        """Wait until the scheduler's gauge `key` is above zero; each question is a round trip, so nothing sleeps."""
        async with asyncio.timeout(5):
            while not (await self.worker.fresh_snapshot(2_000)).gauges.get(key):
                pass


def model_tokenizer() -> Tokenizer:
    """The real model's."""
    return Tokenizer.from_gguf(resolve_model("smollm2-135m-instruct").path)


class Start:
    """`async with start() as running`: a worker from its first breath to its last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @asynccontextmanager
    async def __call__(
        self,
        role: Role = Role.DECODE,
        limits: Limits = LIMITS,
        companion: ScriptedCompanion | None = None,
        announcer: ScriptedAnnouncer | None = None,
        **options: Any,
    ) -> AsyncIterator[Running]:
        """`options` are those of the role's configuration."""
        materials = Materials(
            role=role,
            incarnation="life1",
            model=resolve_model("smollm2-135m-instruct"),
            tokenizer=self._tokenizer,
            rank_command=(sys.executable, str(SCRIPTED_RANK)),
        )
        listener = listen("127.0.0.1", 0)
        worker = Worker(
            config=(PrefillConfig if role is Role.PREFILL else DecodeConfig)(limits=limits, **options),
            materials=materials,
            own_bootstrap=("127.0.0.1", 8998),
            companion=companion or ScriptedCompanion(),
            announcer=announcer,
            clock=monotonic_ms,
        )
        port = port_of(listener)
        exit_code = asyncio.create_task(serve(worker, [Site(create_app(worker), listener)]))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            running = Running(worker, http, port, exit_code)
            async with asyncio.timeout(10):
                while (await http.get("/health")).status_code != 200:
                    pass
            yield running
        worker.terminate()
        async with asyncio.timeout(10):
            await exit_code


def events_of(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
