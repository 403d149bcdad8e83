"""Who may go next: a bounded queue with priorities that is fair among keys, and quotas of a key.

Requests up to `running_max` go at once. The next `waiting_max` wait; who waits is ordered by priority, then by turns of
the keys, then by arrival. A full queue refuses, or gives the place of its last one to a request that is before it.
"""

import heapq
from dataclasses import dataclass, field
from enum import Enum

BUSY_RETRY_S = 1.0
"""When to ask again where all places of a key are taken: nobody knows when one is given back."""


class Entry(Enum):
    """What became of a request at the door."""

    RUNS = "runs"
    WAITS = "waits"
    REFUSED = "refused"


@dataclass(order=True, slots=True)
class Ticket:
    """One request in the queue, ordered by when it goes."""

    order: tuple[int, int, int]  # −priority, turn of its key, arrival
    key: str = field(compare=False)
    is_gone: bool = field(compare=False, default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """The answer of the door. `displaced`: one that waited and is refused now in favour of this one."""

    entry: Entry
    ticket: Ticket | None = None
    displaced: Ticket | None = None


RUNS = Entered(entry=Entry.RUNS)


class FairQueue:
    """The door of one router."""

    def __init__(self, *, running_max: int, waiting_max: int) -> None:
        self._running_max = running_max
        self._waiting_max = waiting_max
        self._heap: list[Ticket] = []
        self._turns: dict[str, int] = {}  # key → turn of its latest ticket, only while it waits
        self._turn = 0  # of the latest that went
        self._arrivals = 0
        self.running = 0
        self.waiting = 0

    def enter(self, key: str, priority: int) -> Entered:
        """A request comes. What runs must `leave`; what waits is named by a later `leave`, or calls `withdraw`."""
        if self.running < self._running_max:
            self.running += 1
            return RUNS
        self._arrivals += 1
        turn = max(self._turn, self._turns.get(key, 0)) + 1
        ticket = Ticket((-priority, turn, self._arrivals), key)
        displaced = None
        if self.waiting >= self._waiting_max:
            displaced = max((one for one in self._heap if not one.is_gone), default=None)
            if displaced is None or displaced < ticket:
                return Entered(entry=Entry.REFUSED)
            self.withdraw(displaced)
        self._turns[key] = turn
        heapq.heappush(self._heap, ticket)
        self.waiting += 1
        return Entered(entry=Entry.WAITS, ticket=ticket, displaced=displaced)

    def leave(self) -> Ticket | None:
        """One that ran has ended; who runs in its place."""
        while self._heap:
            ticket = heapq.heappop(self._heap)
            if not ticket.is_gone:
                self.waiting -= 1
                self._turn = max(self._turn, ticket.order[1])
                self._forget_old_turns()
                return ticket
        self.running -= 1
        return None

    def withdraw(self, ticket: Ticket) -> None:
        """One that waited gives up."""
        ticket.is_gone = True
        self.waiting -= 1
        if len(self._heap) > 2 * self.waiting + 64:
            self._heap = [one for one in self._heap if not one.is_gone]
            heapq.heapify(self._heap)

    def _forget_old_turns(self) -> None:
        if len(self._turns) > 2 * self.waiting + 64:
            self._turns = {key: turn for key, turn in self._turns.items() if turn > self._turn}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one key may use; 0 means no limit."""

    requests_per_s: float = 0.0
    concurrent_max: int = 0

    def __post_init__(self) -> None:
        if self.requests_per_s < 0 or self.concurrent_max < 0:
            raise ValueError("requests_per_s and concurrent_max must not be negative")


class Meter:
    """What one key uses: a token bucket that holds a second's worth (at least one), and a count."""

    def __init__(self, quota: Quota, now_s: float) -> None:
        self._quota = quota
        self._burst = max(1.0, quota.requests_per_s)
        self._tokens = self._burst
        self._filled_s = now_s
        self.concurrent = 0

    def enter(self, now_s: float) -> float:
        """0.0: the request may come, and must `leave`. Otherwise in how many seconds to ask again."""
        quota = self._quota
        if quota.concurrent_max and self.concurrent >= quota.concurrent_max:
            return BUSY_RETRY_S
        if quota.requests_per_s:
            self._tokens = min(self._burst, self._tokens + (now_s - self._filled_s) * quota.requests_per_s)
            self._filled_s = now_s
            if self._tokens < 1:
                return (1 - self._tokens) / quota.requests_per_s
            self._tokens -= 1
        self.concurrent += 1
        return 0.0

    def leave(self) -> None:
        """A request that came has ended."""
        self.concurrent -= 1

    def take_back(self) -> None:
        """A request that came is not let in after all: it has used nothing."""
        self.concurrent -= 1
        self._tokens = min(self._burst, self._tokens + 1)
