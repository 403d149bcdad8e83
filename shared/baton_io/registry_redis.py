"""Replicas of a registry over one Redis: its stream is the log of all writes, and every replica applies all of it.

    write ──► XADD ──► stream ──► XREAD on every replica ──► apply at the entry's time ──► the writer answers

Time is Redis' own: an entry's id begins with it. So replicas hold equal tables and answer alike. Every few thousand
entries one of them keeps a snapshot, and the log before the last but one is cut off; a replica that starts, or lost touch,
begins at the snapshot.

While Redis is away nothing can be written (503), reads go on from the table, and time stands still: nobody's lease runs out
because nobody could renew it. When it is back the first replica to notice says how long that was, in the log, and all
replicas leave that time out.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton_core.limits import Millis, RegistryLimits
from baton_core.registry import RegistryTable
from baton_io.codec import FrameError
from baton_io.registry_store import WRITES, Outcome, StoreAway, Write, apply, history

log = structlog.get_logger()

LOG = "{baton-registry}:log"
SNAPSHOT = "{baton-registry}:snapshot"
LIFE = "{baton-registry}:incarnation"
LOCK = "{baton-registry}:snapshot-lock"
"""Keys. The braces keep them on one node of a cluster."""

SNAPSHOT_ENTRIES = 2_048
BATCH = 512
BLOCK_MS: Millis = 500
"""How long one read of the log waits; between two, the time is asked for."""
CALL_S = 2.0
"""One answer of Redis, and one write until it is applied here."""
TOUCH_MS: Millis = 2_000
"""Time goes on for so long after Redis last answered."""
LAPSE_S = 10.0
"""A follower that slept for longer may have missed what was cut off, and begins anew."""
RETRY_S = 0.25
LOCK_MS: Millis = 10_000
NOTHING = "0-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """The table after the entry `position`."""

    life: str
    position: str
    skew_ms: Millis
    writes: list[tuple[Millis, bytes]] = field(default_factory=list)


_SNAPSHOTS = msgspec.msgpack.Decoder(_Snapshot)


class _Copy:
    """One replica's state: a table, and how far in the log it is. `skew_ms`: time that is left out."""

    def __init__(self, life: str, limits: RegistryLimits) -> None:
        self.table = RegistryTable(life, limits)
        self.position = NOTHING
        self.skew_ms: Millis = 0

    def take(self, position: str, fields: dict[bytes, bytes]) -> Outcome:
        """Apply one entry. Raises FrameError for what is none of ours; it is passed over."""
        before_ms, self.position = time_of(self.position), position
        at_ms = time_of(position)
        since = fields.get(b"away")
        if since is not None:
            # Others noticed the same absence, or could write meanwhile: then it was not Redis that was away.
            self.skew_ms += max(0, at_ms - max(int(since), before_ms))
            return None
        write: Write = WRITES.decode(fields.get(b"write", b""))
        return apply(self.table, write, at_ms - self.skew_ms)


class RedisStore:
    """See `Store`. `follow` must run."""

    def __init__(
        self, url: str, password: str | None, limits: RegistryLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.generation = 0
        self._limits, self._clock = limits, clock
        self._name = secrets.token_hex(6)
        # The follower's connection waits for entries; it must not be the one that writes.
        self._reader = _client(url, password)
        self._writer = _client(url, password)
        self._copy = _Copy(secrets.token_hex(8), limits)
        self._time_ms: Millis = 0  # Redis', when it last answered …
        self._heard_s: float | None = None  # … and our clock at that moment
        self._is_up = False
        self._applied = 0  # since the last snapshot was looked at
        self._asked = 0
        self._waiting: dict[str, asyncio.Future[Outcome]] = {}

    @property
    def table(self) -> RegistryTable:
        """See `Store`."""
        return self._copy.table

    @property
    def is_up(self) -> bool:
        """See `Store`."""
        return self._is_up

    @property
    def has_loaded(self) -> bool:
        """Whether Redis was ever read."""
        return self._heard_s is not None

    def now(self) -> Millis:
        """See `Store`. Stands still while Redis is away."""
        if self._heard_s is None:
            return 0
        since_ms = int((self._clock() - self._heard_s) * 1000)
        return self._time_ms + min(since_ms, TOUCH_MS) - self._copy.skew_ms

    async def write(self, write: Write) -> Outcome:
        """See `Store`."""
        if not self._is_up:
            raise StoreAway("the Redis of this registry's replicas does not answer")
        self._asked += 1
        ticket = f"{self._name}:{self._asked}"
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = outcome
        try:
            async with asyncio.timeout(CALL_S):
                await self._writer.xadd(LOG, {"write": WRITES.encode(write), "by": ticket})
                return await outcome
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreAway(f"the Redis of this registry's replicas does not answer: {_cause(error)}") from error
        finally:
            del self._waiting[ticket]

    async def follow(self) -> None:
        """Apply the log, until cancelled."""
        try:
            while True:
                try:
                    await self._load()
                    await self._read_on()
                except (RedisError, OSError, TimeoutError, msgspec.MsgspecError, FrameError) as error:
                    if self._is_up or self._heard_s is None:
                        log.warning("registry.redis_away", cause=_cause(error))
                    self._is_up = False
                _heed_cancellation()
                await asyncio.sleep(RETRY_S)
        finally:
            with contextlib.suppress(RedisError, OSError):
                await self._reader.aclose()
                await self._writer.aclose()

    # -- following

    async def _load(self) -> None:
        """Begin at the snapshot, and take the log up to its end; only then replace what we have."""
        await self._reader.set(LIFE, secrets.token_hex(8), nx=True)
        life = (await self._reader.get(LIFE)).decode()
        raw = await self._reader.get(SNAPSHOT)
        copy = _Copy(life, self._limits)
        if raw is not None and (kept := _SNAPSHOTS.decode(raw)).life == life:
            for at_ms, encoded in kept.writes:
                apply(copy.table, WRITES.decode(encoded), at_ms)
            copy.position = kept.position
            copy.skew_ms = kept.skew_ms
        if self._heard_s is not None and not self._is_up and life == self._copy.table.incarnation:
            # Redis' time when it last answered: since then nobody could renew a lease.
            await self._reader.xadd(LOG, {"away": self._time_ms})
        while batch := await self._read(copy.position, None):
            for position, fields in batch:
                self._take(copy, position, fields)
        await self._ask_time()
        self._copy = copy
        self.generation += 1
        self._is_up = True
        log.info("registry.redis_loaded", life=life, position=copy.position, ranks=copy.table.ranks_total)

    async def _read_on(self) -> None:
        """Raises what Redis' client raises; returns when this replica must begin anew."""
        copy = self._copy
        turned_s = self._clock()
        while True:
            batch = await self._read(copy.position, BLOCK_MS)
            _heed_cancellation()
            if self._clock() - turned_s > LAPSE_S:
                return
            turned_s = self._clock()
            for position, fields in batch:
                self._take(copy, position, fields)
            if await self._reader.get(LIFE) != copy.table.incarnation.encode():
                return  # somebody emptied it
            await self._ask_time()
            self._applied += len(batch)
            if self._applied >= SNAPSHOT_ENTRIES:
                self._applied = 0
                await self._keep_snapshot(copy)

    def _take(self, copy: _Copy, position: str, fields: dict[bytes, bytes]) -> None:
        try:
            outcome = copy.take(position, fields)
        except FrameError as error:
            log.error("registry.bad_entry", position=position, cause=str(error))
            return
        waiting = self._waiting.get(fields.get(b"by", b"").decode("utf-8", "replace"))
        if waiting is not None and not waiting.done():
            waiting.set_result(outcome)

    async def _read(self, after: str, block_ms: Millis | None) -> list[tuple[str, dict[bytes, bytes]]]:
        async with asyncio.timeout(CALL_S):
            answer = await self._reader.xread({LOG: after}, count=BATCH, block=block_ms)
        return [(position.decode(), fields) for _, entries in answer or () for position, fields in entries]

    async def _ask_time(self) -> None:
        seconds, micros = await self._reader.time()
        self._time_ms, self._heard_s = seconds * 1000 + micros // 1000, self._clock()

    async def _keep_snapshot(self, copy: _Copy) -> None:
        """One replica at a time; the log is cut where the snapshot before ended, so that laggards miss nothing."""
        if not await self._reader.set(LOCK, self._name, nx=True, px=LOCK_MS):
            return
        raw = await self._reader.get(SNAPSHOT)
        before = NOTHING if raw is None else _SNAPSHOTS.decode(raw).position
        if order_of(before) < order_of(copy.position):
            now = time_of(copy.position) - copy.skew_ms
            writes = [(at_ms, WRITES.encode(one)) for at_ms, one in history(copy.table, now, self._limits.room_ms)]
            snapshot = _Snapshot(
                life=copy.table.incarnation,
                position=copy.position,
                skew_ms=copy.skew_ms,
                writes=writes,
            )
            await self._reader.set(SNAPSHOT, msgspec.msgpack.encode(snapshot))
            await self._reader.xtrim(LOG, minid=before, approximate=False)
        await self._reader.delete(LOCK)


def _heed_cancellation() -> None:
    """Redis' client may turn a cancellation into an error or an answer of its own; it is meant all the same."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def time_of(position: str) -> Millis:
    """Redis' time at which an entry was written."""
    return int(position.partition("-")[0])


def order_of(position: str) -> tuple[int, int]:
    """By which entries follow one another."""
    at_ms, _, number = position.partition("-")
    return int(at_ms), int(number)


def _client(url: str, password: str | None) -> Any:
    """Untyped: the library's own annotations say that every answer is either a value or to be awaited."""
    options: dict[str, Any] = {} if password is None else {"password": password}
    return Redis.from_url(url, protocol=2, socket_timeout=CALL_S, socket_connect_timeout=CALL_S, **options)


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__
