"""How many look-ups become few: one shared fetch for what is absent, one question for all rooms that wait."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Generic, TypeVar

import aiohttp

from baton_core.limits import Millis
from baton_core.request import Room
from baton_io.registry_client import RegistryError, call

RETRY_PAUSE_MS: Millis = 50
"""Pause before a registry that is not ready, or does not know a room yet, is asked again."""

ROOMS_PER_QUERY = 1_024
"""Rooms in one question; a registry reads bodies of at most 64 KiB."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SharedCache(Generic[K, V]):
    """Values by key, least recently used first out; callers who want the same absent value share one fetch."""

    def __init__(self, entries_max: int, fetch_ms: Millis) -> None:
        self._entries_max = entries_max
        self._fetch_ms = fetch_ms
        self._values: OrderedDict[K, V] = OrderedDict()
        self._fetching: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, fetch: Callable[[], Awaitable[V]]) -> V:
        """The value, fetched within `fetch_ms` if need be. Raises what the fetch raises; a failure is not kept."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        task = self._fetching.get(key)
        if task is None:
            task = self._fetching[key] = asyncio.ensure_future(self._fetch(key, fetch))
            task.add_done_callback(_take_note_of_failure)
        # `wait` leaves the task alone when one caller runs out of time or is cancelled: others wait for it, too.
        await asyncio.wait([task])
        return task.result()

    def drop(self, key: K) -> None:
        """Forget this value; the next caller fetches it."""
        self._values.pop(key, None)

    def drop_where(self, unwanted: Callable[[V], bool]) -> list[K]:
        """Forget every unwanted value; the keys of those."""
        keys = [key for key, value in self._values.items() if unwanted(value)]
        for key in keys:
            del self._values[key]
        return keys

    async def _fetch(self, key: K, fetch: Callable[[], Awaitable[V]]) -> V:
        try:
            async with asyncio.timeout(self._fetch_ms / 1000):
                value = await fetch()
        finally:
            del self._fetching[key]
        self._values[key] = value
        while len(self._values) > self._entries_max:
            self._values.popitem(last=False)
        return value


def _take_note_of_failure(task: "asyncio.Task[V]") -> None:
    """Every caller may have run out of time before the fetch: asyncio would log its failure as one nobody handled."""
    if not task.cancelled():
        task.exception()


class RoomQuery:
    """Asks one registry for the DP ranks of all rooms that wait, in one call, and again after `RETRY_PAUSE_MS`.

    Callers bound their own waiting; the query goes on while anybody waits.
    """

    def __init__(self, url: str, instance: str | None, session: aiohttp.ClientSession, call_ms: Millis) -> None:
        self._url = url
        self._instance = instance
        self._session = session
        self._call_ms = call_ms
        self._waiting: dict[asyncio.Future[int], Room] = {}
        self._fallbacks: dict[asyncio.Future[int], int] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not self._waiting

    async def dp_rank(self, room: Room, fallback: int | None = None) -> int:
        """The DP rank of this room, as soon as the registry knows it; `fallback` if it does not know it at once.

        Raises RegistryError.
        """
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = room
        if fallback is not None:
            self._fallbacks[answer] = fallback
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._ask_while_anybody_waits())
        try:
            return await answer
        finally:
            self._waiting.pop(answer, None)
            self._fallbacks.pop(answer, None)

    async def _ask_while_anybody_waits(self) -> None:
        while self._waiting:
            asked = list(self._waiting.items())[:ROOMS_PER_QUERY]
            try:
                ranks = await self._ask([room for _, room in asked])
            except RegistryError as error:
                for answer, _ in asked:
                    self._finish(answer, RegistryError(str(error)))
                continue
            for answer, room in asked:
                if room in ranks:
                    self._finish(answer, ranks[room])
                elif answer in self._fallbacks:
                    self._finish(answer, self._fallbacks[answer])
                elif answer in self._waiting:
                    # To the end, so that rooms beyond the first question get their turn.
                    self._waiting[answer] = self._waiting.pop(answer)
            if any(answer in self._waiting for answer, _ in asked):
                await asyncio.sleep(RETRY_PAUSE_MS / 1000)

    def _finish(self, answer: "asyncio.Future[int]", outcome: int | RegistryError) -> None:
        self._waiting.pop(answer, None)
        if answer.done():
            return
        if isinstance(outcome, int):
            answer.set_result(outcome)
        else:
            answer.set_exception(outcome)

    async def _ask(self, rooms: list[Room]) -> Mapping[Room, int]:
        url = f"{self._url}/query_dp_ranks"
        body: dict[str, object] = {"bootstrap_rooms": rooms}
        if self._instance is not None:
            body["instance"] = self._instance
        reply = await call(self._session, "POST", url, limit_ms=self._call_ms, body=body)
        if reply.status == 503:
            return {}
        if reply.status != 200:
            raise RegistryError(f"{url} answered {reply.status}: {reply.text}")
        found = reply.json()
        if not isinstance(found, dict) or not all(isinstance(rank, int) for rank in found.values()):
            raise RegistryError(f"{url} answered with something else than ranks by room: {reply.text}")
        return {room: found[str(room)] for room in rooms if str(room) in found}
