"""Quotas that several routers share through Redis. Nothing else is shared, and nothing depends on it: while Redis is away
each router counts for itself, and no request waits for it longer than `CALL_S`, nor more than one each `RETRY_S`.

    {baton-quota:NAME}:rate     tokens that are left, and when they were counted, by Redis' clock
    {baton-quota:NAME}:live     the requests under way, each with the time at which it is forgotten: routers die, too
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton_core.limits import Millis
from baton_core.routing.fairness import BUSY_RETRY_S, Quota

CALL_S = 0.25
RETRY_S = 1.0
ENTER = """
local now = redis.call('TIME')
local at = now[1] + now[2] / 1000000
local rate, concurrent, lease = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
if concurrent > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', at)
  if redis.call('ZCARD', KEYS[2]) >= concurrent then return ARGV[5] end
end
if rate > 0 then
  local burst = math.max(1, rate)
  local kept = redis.call('HMGET', KEYS[1], 'tokens', 'at')
  local passed = math.max(0, at - (tonumber(kept[2]) or at))
  local tokens = math.min(burst, (tonumber(kept[1]) or burst) + passed * rate)
  if tokens < 1 then return tostring((1 - tokens) / rate) end
  redis.call('HSET', KEYS[1], 'tokens', tostring(tokens - 1), 'at', string.format('%.6f', at))
  redis.call('EXPIRE', KEYS[1], math.ceil(burst / rate) + 1)
end
if concurrent > 0 then
  redis.call('ZADD', KEYS[2], at + lease, ARGV[4])
  redis.call('PEXPIRE', KEYS[2], math.ceil(lease * 1000) + 1000)
end
return '0'
"""
"""The two rules of `fairness.Meter`, atomically: '0' lets the request in, another number is the seconds to wait."""

log = structlog.get_logger()


class SharedQuotas:
    """One router's way to them. `lease_ms`: after that a request is over, whether its router said so or not."""

    def __init__(self, url: str, password: str | None, *, lease_ms: Millis, on_away: Callable[[], None]) -> None:
        options: dict[str, Any] = {} if password is None else {"password": password}
        # Untyped: the library's own annotations say that every answer is either a value or to be awaited.
        self._redis: Any = Redis.from_url(
            url, protocol=2, socket_timeout=CALL_S, socket_connect_timeout=CALL_S, **options
        )
        self._enter: Any = self._redis.register_script(ENTER)
        self._lease_s = lease_ms / 1000
        self._on_away = on_away
        self._is_away = False
        self._ask_again_s = 0.0
        self._leaving: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Close the connections when cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            with contextlib.suppress(RedisError, OSError):
                await self._redis.aclose()

    async def enter(self, name: str, quota: Quota, ticket: str) -> float | None:
        """0.0: the request may come, and must `leave`; otherwise in how many seconds to ask again. None: Redis is away."""
        loop = asyncio.get_running_loop()
        if self._is_away:
            if loop.time() < self._ask_again_s:
                self._on_away()
                return None
            self._ask_again_s = loop.time() + RETRY_S  # nobody else asks meanwhile
        arguments = [quota.requests_per_s, quota.concurrent_max, self._lease_s, ticket, BUSY_RETRY_S]
        try:
            async with asyncio.timeout(CALL_S):
                wait_s = float(await self._enter(keys=[_key(name, "rate"), _key(name, "live")], args=arguments))
        except (RedisError, OSError, TimeoutError) as error:
            self._missed(error, loop.time())
            return None
        if self._is_away:
            self._is_away = False
            log.info("router.quotas_shared_again")
        return wait_s

    def leave(self, name: str, ticket: str) -> None:
        """A request has ended, or was not let in after all."""
        if not self._is_away:
            task = asyncio.create_task(self._leave(name, ticket))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _leave(self, name: str, ticket: str) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                await self._redis.zrem(_key(name, "live"), ticket)
        except (RedisError, OSError, TimeoutError) as error:
            self._missed(error, asyncio.get_running_loop().time())

    def _missed(self, error: Exception, now_s: float) -> None:
        self._ask_again_s = now_s + RETRY_S
        self._on_away()
        if not self._is_away:
            self._is_away = True
            log.warning("router.quotas_not_shared", cause=str(error) or type(error).__name__)


def _key(name: str, what: str) -> str:
    return f"{{baton-quota:{name}}}:{what}"  # the braces keep both on one node of a cluster
