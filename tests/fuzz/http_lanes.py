"""The HTTP ports of a running stack."""

import asyncio
import json
from collections.abc import Sequence
from random import Random
from typing import Any
from urllib.parse import quote

import httpx

from fuzz.http_cases import HttpCase, http_case, request
from fuzz.lanes import Lane
from fuzz.stand import Stand
from fuzz.wire import Caller, Reply, Wrong

WAITING_REASONS = {"waiting_full", "draining"}
"""Why a worker may turn somebody away: its queue is really full."""
PAUSED = {"prefill", "decode"}
"""Ports at which generation may be paused."""
GO_ON_EVERY_S = 1.0


class HttpLane(Lane):
    """One HTTP port; `name` says whose."""

    at_once = 16

    def __init__(self, name: str, stand: Stand) -> None:
        self.name = name
        self._stand = stand
        self._says = "registry" if name == "own registry" else name
        self._callers: asyncio.Queue[Caller] = asyncio.Queue()
        for _ in range(self.at_once):
            self._callers.put_nowait(Caller("127.0.0.1", stand.port(name)))
        self._going_on: asyncio.Task[None] | None = None
        self.statuses: dict[int, int] = {}

    async def throw(self, dice: Random, number: int) -> None:
        case = http_case(self._says, dice)
        caller = await self._callers.get()
        try:
            self._begin_going_on()
            reply = await (caller.whole(case) if case.whole else caller.broken(case))
        finally:
            self._callers.put_nowait(caller)
        if reply is not None:
            self.statuses[reply.status] = self.statuses.get(reply.status, 0) + 1
            self._judge(case, reply)

    def pids(self) -> Sequence[int]:
        return self._stand.pids_behind(self.name)

    async def check(self) -> None:
        if self._says == "admin":
            await self._remove_strangers()
        await self._stand.whole()

    async def _remove_strangers(self) -> None:
        """Workers that the cases added are probed for ever, as they should be."""
        url = f"http://127.0.0.1:{self._stand.port('admin')}/workers"
        ours = set(self._stand.stack.worker_urls())
        async with httpx.AsyncClient(timeout=30) as client:
            known = {worker["url"] for worker in (await client.get(url)).json()["workers"]}
            for stranger in known - ours:
                removed = await client.delete(f"{url}/{quote(stranger, safe='')}")
                if removed.status_code != 200:
                    raise Wrong(f"{stranger!r} was added and cannot be removed: {removed.text}")

    def _begin_going_on(self) -> None:
        if self._says in PAUSED and self._going_on is None:
            self._going_on = asyncio.create_task(self._go_on())

    async def _go_on(self) -> None:
        """A case may pause the worker, several times in one packet of which nobody awaits the end: no pause lasts long."""
        async with Caller("127.0.0.1", self._stand.port(self.name)) as caller:
            while True:
                await caller.whole(HttpCase(raw=request("POST", "/continue_generation", b""), whole=True))
                await asyncio.sleep(GO_ON_EVERY_S)

    async def rest(self) -> None:
        """Close every connection that is kept, so that what is open afterwards is a leak."""
        if self._going_on is not None:
            over, _ = await asyncio.wait([self._going_on], timeout=2 * GO_ON_EVERY_S)  # whatever was said is understood
            self._going_on.cancel()
            await asyncio.wait([self._going_on])
            for ended in over:
                ended.result()  # which it does by raising alone
            self._going_on = None
        for _ in range(self._callers.qsize()):
            caller = self._callers.get_nowait()
            await caller.__aexit__(None, None, None)
            self._callers.put_nowait(caller)

    def _judge(self, case: HttpCase, reply: Reply) -> None:
        """No 5xx, and whatever is refused is refused in words."""
        if reply.status >= 500 and not self._may_fail(case, reply):
            raise Wrong(f"{reply.status} {reply.body[:600]!r} to {case.raw[:3_000]!r}")
        if reply.status == 400 and not reply.body:
            raise Wrong(f"400 without a word to {case.raw[:3_000]!r}")

    def _may_fail(self, case: HttpCase, reply: Reply) -> bool:
        """The answers of 500 and more that are right, each for a reason of its own."""
        said = _error(reply)
        if reply.status == 504 and _budget(case.raw):
            return True  # the client itself gave it no time
        if self._says == "prefill" and reply.status == 504:
            return said.get("reason") == "other_leg_missing"  # a leg that is right, and alone: nobody sent the other
        if self._says == "registry" and reply.status == 503:
            return case.target.startswith("/route") or b"ready" in reply.body  # SGLang's word for "not registered yet"
        if self._says == "router" and case.target == "/docs":
            return False
        return False


def _error(reply: Reply) -> dict[str, Any]:
    try:
        said = json.loads(reply.body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return said if isinstance(said, dict) else {}


def _budget(raw: bytes) -> bool:
    return b"x-baton-budget-ms" in raw.partition(b"\r\n\r\n")[0].lower()
