"""A lane is a port under fire: it throws one case at a time, and says from time to time whether all is still well."""

import asyncio
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from fuzz.dice import dice_of
from fuzz.wire import Wrong

PAGE_BYTES = os.sysconf("SC_PAGESIZE")
CHECKS = 2
"""Times that all is looked over in one run, the end included."""
GROWTH_BYTES_MAX = 32 << 20
"""By so much the memory of a process may differ after any number of cases."""


class Lane(ABC):
    """One port. `at_once`: cases that may be under way together."""

    name = ""
    at_once = 1

    @abstractmethod
    async def throw(self, dice: Random, number: int) -> None:
        """Case `number`. Raises Wrong where the port does what it must not."""

    @abstractmethod
    async def check(self) -> None:
        """Whether the process lives, and does its work as if nothing had happened. Raises Wrong."""

    async def rest(self) -> None:
        """Keep nothing open; it may go on afterwards."""
        return

    @abstractmethod
    def pids(self) -> Sequence[int]:
        """The processes behind the port, whose memory must stay flat."""


class Failed(Exception):
    """A case went wrong."""

    def __init__(self, *, port: str, seed: int, number: int, error: BaseException) -> None:
        super().__init__(port, seed, number)
        self.port, self.seed, self.number, self.error = port, seed, number, error

    def __str__(self) -> str:
        again = f"python tests/fuzz/run.py --port '{self.port}' --seed {self.seed} --first {self.number} --cases 1"
        return f"port {self.port}, seed {self.seed}, case {self.number}: {self.error}\n    alone: {again}"


def resident_bytes(pid: int) -> int:
    """Memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


async def drive(
    lane: Lane,
    seed: int,
    first: int,
    cases: int,
    *,
    checks: int = CHECKS,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Throw cases `first … first + cases - 1`, and look everything over on the way and at the end.

    Raises Failed naming the case, or the last case before something was found wrong. Memory is counted from a tenth of
    the way on, when caches and pools have their size.
    """
    every, done = max(1, cases // checks), 0
    held: dict[int, int] = {}
    try:
        while done < cases:
            batch = range(first + done, first + min(cases, done + lane.at_once))
            await _throw(lane, seed, batch)
            before, done = done, done + len(batch)
            if not held and done * 10 >= cases:
                held = {pid: resident_bytes(pid) for pid in lane.pids()}
            if before // every != done // every or done >= cases:
                await _look_over(lane, seed, first + done - 1)
                progress(done)
    finally:
        await lane.rest()
    for pid, before_bytes in held.items():
        grown_bytes = resident_bytes(pid) - before_bytes
        if cases >= 1_000 and grown_bytes > GROWTH_BYTES_MAX:
            error = Wrong(f"process {pid} grew by {grown_bytes >> 20} MiB over {cases * 9 // 10} cases")
            raise Failed(port=lane.name, seed=seed, number=first, error=error)


async def _throw(lane: Lane, seed: int, batch: range) -> None:
    """Some cases at once."""
    results = await asyncio.gather(*(_one(lane, seed, number) for number in batch), return_exceptions=True)
    for number, result in zip(batch, results, strict=True):
        if isinstance(result, BaseException):
            raise Failed(port=lane.name, seed=seed, number=number, error=result)


async def _look_over(lane: Lane, seed: int, number: int) -> None:
    await lane.rest()
    try:
        await lane.check()
    except (Wrong, AssertionError, OSError) as error:
        raise Failed(port=lane.name, seed=seed, number=number, error=error) from error


async def _one(lane: Lane, seed: int, number: int) -> None:
    await lane.throw(dice_of(seed, lane.name, number), number)


class Progress:
    """A line that says how far a port is."""

    def __init__(self, port: str, cases: int) -> None:
        self._port, self._cases, self._began_s = port, cases, time.monotonic()

    def __call__(self, done: int) -> None:
        took_s = time.monotonic() - self._began_s
        print(f"{self._port:<10} {done:>9,} of {self._cases:,} cases, {took_s:6.1f} s", file=sys.stderr, flush=True)
