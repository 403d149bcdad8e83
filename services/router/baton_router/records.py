"""What a router remembers of each target, a worker or one data-parallel rank of it: load, breaker, what became of legs.

Keys are those of `Target`: `url`, or `url@rank`. A rank that fails is left alone while its siblings serve on.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from baton_core.limits import Millis
from baton_core.routing.breaker import Breaker, BreakerLimits, BreakerState
from baton_core.routing.workers import Load, Target

NOBODY: frozenset[str] = frozenset()
SEVERITY = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


@dataclass(slots=True, kw_only=True)
class Record:
    """One target."""

    breaker: Breaker
    has_failed: bool = False  # since it last did well
    served: int = 0  # legs that did well
    failed: int = 0  # legs that failed by the target's own fault


class Records:
    """The records of all targets."""

    def __init__(self, limits: BreakerLimits) -> None:
        self.loads: dict[str, Load] = {}
        self._limits = limits
        self._records: dict[str, Record] = {}
        self._suspects: dict[str, Breaker] = {}  # key → a breaker that may be open

    def of(self, key: str) -> Record:
        """The record of a target, begun where there is none."""
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = Record(breaker=Breaker(self._limits))
        return record

    def load(self, key: str) -> Load:
        """The load of a target, begun where there is none."""
        load = self.loads.get(key)
        if load is None:
            load = self.loads[key] = Load()
        return load

    def began(self, key: str) -> None:
        """A leg goes there."""
        self.load(key).in_flight += 1
        breaker = self._suspects.get(key)
        if breaker is not None:
            breaker.sent(now_ms())

    def served(self, key: str) -> None:
        """A leg did well there."""
        record = self.of(key)
        record.served += 1
        if record.has_failed:
            self._clear(key, record)

    def failed(self, key: str) -> bool:
        """A leg failed there by the target's own fault. True: that opened its breaker."""
        record, now = self.of(key), now_ms()
        before = record.breaker.state(now)
        record.breaker.failed(now)
        record.failed += 1
        record.has_failed = True
        after = record.breaker.state(now)
        if after is BreakerState.OPEN:
            self._suspects[key] = record.breaker
        return after is BreakerState.OPEN and after is not before

    def blocked(self) -> frozenset[str]:
        """The keys whose breaker lets nothing through now."""
        if not self._suspects:
            return NOBODY
        now = now_ms()
        return frozenset(key for key, breaker in self._suspects.items() if not breaker.admits(now))

    def state(self, key: str) -> BreakerState:
        """The breaker of one target."""
        record = self._records.get(key)
        return BreakerState.CLOSED if record is None else record.breaker.state(now_ms())

    def worst(self, targets: Iterable[Target]) -> BreakerState:
        """The most closed of the breakers of several targets."""
        return max((self.state(target.key) for target in targets), key=SEVERITY.index, default=BreakerState.CLOSED)

    def forgive(self, url: str) -> None:
        """A new life at that address starts without the old one's record."""
        for key, record in self._records.items():
            if url_of(key) == url:
                self._clear(key, record)

    def forget(self, url: str) -> None:
        """Nobody names that address any more; legs that still run there keep their count."""
        for key in [key for key in self._records if url_of(key) == url]:
            del self._records[key]
            self._suspects.pop(key, None)
        for key in [key for key, load in self.loads.items() if url_of(key) == url and not load.in_flight]:
            del self.loads[key]

    def _clear(self, key: str, record: Record) -> None:
        record.breaker.succeeded()
        record.has_failed = False
        self._suspects.pop(key, None)


def url_of(key: str) -> str:
    """The address of the worker that a key belongs to."""
    url, mark, rank = key.rpartition("@")
    return url if mark and rank.isdigit() else key


def now_ms() -> Millis:
    """The event loop's clock."""
    return int(asyncio.get_running_loop().time() * 1000)
