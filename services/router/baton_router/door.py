"""The router's door: who may come in (keys), how much (quotas), when (a bounded, fair queue with priorities).

Without a file of keys everyone is one guest without a quota.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
import structlog

from baton_core.limits import PRIORITY_MOST, Millis
from baton_core.routing.fairness import Entry, FairQueue, Meter, Quota, Ticket
from baton_router.caller import Refused
from baton_router.exchange import Fields
from baton_router.failures import Rejection, turned_away
from baton_router.keys import Holder, KeysError, find, parse_keys
from baton_router.priority import asked_in_head, settle
from baton_router.watched_file import contents

if TYPE_CHECKING:
    from baton_router.shared_quotas import SharedQuotas  # needs the extra redis

KEYS_INTERVAL_MS: Millis = 1_000
EVERYONE = Holder(name="", digest="", quota=Quota(), priority_max=PRIORITY_MOST)

log = structlog.get_logger()


class Admitted(msgspec.Struct, kw_only=True, eq=False):
    """A request that was let in; it must `leave`."""

    holder: Holder
    asked: int | None  # the priority that its head asks for
    meter: Meter | None
    ticket: str | None = None  # of the quota that routers share
    is_running: bool = False


class Door:
    """One router's door. `keys` None: open to everyone."""

    def __init__(
        self,
        *,
        queue: FairQueue,
        keys: Path | None,
        queue_ms: Millis,
        retry_after_ms: Millis,
        on_queue: Callable[[int], None],
        shared: "SharedQuotas | None" = None,
    ) -> None:
        self._queue = queue
        self._path = keys
        self._queue_ms = queue_ms
        self._retry_after_s = retry_after_ms / 1000
        self._on_queue = on_queue
        self._shared = shared
        self._holders: Mapping[str, Holder] = {}
        self._meters: dict[str, Meter] = {}
        self._waiting: dict[int, tuple[Ticket, asyncio.Future[None]]] = {}  # by the identity of arrival

    async def watch(self) -> None:
        """Read the file of keys now and after every change, until cancelled. A wrong file changes nothing."""
        if self._path is None:
            return
        async for content in contents(self._path, KEYS_INTERVAL_MS):
            try:
                self.take_keys(parse_keys(content))
            except KeysError as error:
                log.error("router.keys_refused", path=str(self._path), error=str(error))

    def take_keys(self, holders: Mapping[str, Holder]) -> None:
        """From now on these keys are good; what a holder uses goes on counting unless its quota changed."""
        now_s = time.monotonic()
        before = {holder.name: holder.quota for holder in self._holders.values()}
        self._meters = {
            holder.name: self._meters[holder.name]
            if holder.name in self._meters and before.get(holder.name) == holder.quota
            else Meter(holder.quota, now_s)
            for holder in holders.values()
        }
        self._holders = holders
        log.info("router.keys_read", keys=len(holders))

    async def knock(self, headers: Mapping[bytes, bytes]) -> Admitted:
        """Let in by key and quota. Raises Refused: 401, 429, 400."""
        holder: Holder | None = EVERYONE
        meter: Meter | None = None
        if self._path is not None:
            holder = find(self._holders, headers)
            if holder is None:
                raise _refused(Rejection.UNAUTHORIZED, "a valid API key is needed (authorization: Bearer …)")
            meter = self._meters[holder.name]
        assert holder is not None
        guest = Admitted(holder=holder, asked=asked_in_head(headers), meter=meter)
        if meter is not None:
            # Ours first: what one router has used is a part of what all have, and costs no question.
            wait_s = meter.enter(time.monotonic()) or await self._shared_wait(guest, meter)
            if wait_s:
                text = f"the quota of key {holder.name!r} is used up"
                raise _refused(Rejection.QUOTA, text, wait_s)
        return guest

    async def _shared_wait(self, guest: Admitted, meter: Meter) -> float:
        """0.0: all routers together have used less than the quota, or nobody can say. Else the seconds to wait."""
        shared, holder = self._shared, guest.holder
        if shared is None or holder.quota == Quota():
            return 0.0
        guest.ticket = uuid4().hex
        wait_s: float | None = 1.0
        try:
            wait_s = await shared.enter(holder.name, holder.quota, guest.ticket)
        finally:
            if wait_s:  # refused, or its client left meanwhile
                meter.take_back()
                shared.leave(holder.name, guest.ticket)
        return wait_s or 0.0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.waiting

    async def enter(self, guest: Admitted, fields: Fields) -> None:
        """Wait for a turn. Mutates `fields`: from now on they name the priority that is in force (see `priority`).

        Raises Refused: 400; 503 when the queue is full, or gives the place to another, or takes too long."""
        priority = settle(fields, guest.asked, guest.holder.priority_max)
        entered = self._queue.enter(guest.holder.name, priority)
        if entered.entry is Entry.RUNS:
            guest.is_running = True
            return
        if entered.entry is Entry.REFUSED or entered.ticket is None:
            raise self._full("the router's queue is full")
        if entered.displaced is not None:
            _, place = self._waiting.pop(id(entered.displaced))
            if not place.done():
                place.set_exception(
                    self._full("a request of higher priority took the last place in the router's queue")
                )
        await self._wait(guest, entered.ticket)

    async def _wait(self, guest: Admitted, ticket: Ticket) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[id(ticket)] = ticket, place
        self._on_queue(self._queue.waiting)
        try:
            async with asyncio.timeout(self._queue_ms / 1000):
                await place
            guest.is_running = True
        except TimeoutError as error:
            raise self._full(f"no turn came within {self._queue_ms} ms in the router's queue") from error
        finally:
            if self._waiting.pop(id(ticket), None) is not None:
                self._queue.withdraw(ticket)
            elif place.done() and not place.cancelled() and place.exception() is None:
                guest.is_running = True  # the turn came while its client left: it is given on by `leave`
            self._on_queue(self._queue.waiting)

    def leave(self, guest: Admitted) -> None:
        """The request ended; the next one goes."""
        if guest.meter is not None:
            guest.meter.leave()
        if guest.ticket is not None and self._shared is not None:
            self._shared.leave(guest.holder.name, guest.ticket)
        if not guest.is_running:
            return
        while (following := self._queue.leave()) is not None:
            _, place = self._waiting.pop(id(following))
            if not place.done():  # else its client left this very moment: the one after it goes
                place.set_result(None)
                return

    def _full(self, text: str) -> Refused:
        return _refused(Rejection.QUEUE_FULL, text, self._retry_after_s)


def _refused(rejection: Rejection, text: str, retry_after_s: float = 0.0) -> Refused:
    return Refused(rejection, text, turned_away(rejection, text, retry_after_s=retry_after_s))
