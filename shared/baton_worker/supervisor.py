"""Starts a rank process, notices when it ends or stops making progress, and ends it. It is never restarted alone.

The rank reads its `RankConfig` as the first line of its stdin. The pipe then stays open: its end tells the rank that
its app died, however that happened.
"""

import asyncio
import contextlib
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence

from baton_core.limits import Limits, Millis
from baton_io.config import to_json
from baton_worker.config import RankConfig

STOP_MS: Millis = 5_000
"""How long a rank may take to leave after `Stop`."""

PINGS_A_STALL = 3
"""A rank that says nothing is asked this often before it counts as stalled."""


class Progress:
    """When a rank was last seen to make progress, by what it says."""

    def __init__(self, stall_ms: Millis, clock: Callable[[], Millis]) -> None:
        self._stall_ms = stall_ms
        self._clock = clock
        self._turns = -1
        self._at: Millis = clock()
        self.loaded = asyncio.Event()

    @property
    def age_ms(self) -> Millis:
        """Time since the rank was last seen to make progress."""
        return self._clock() - self._at

    @property
    def lively(self) -> bool:
        """Whether the rank is loaded and makes progress."""
        return self.loaded.is_set() and self.age_ms < self._stall_ms

    def ready(self) -> None:
        """The rank said that it is ready: from now on it must make progress."""
        self._at = self._clock()
        self.loaded.set()

    def turned(self, turns: int) -> None:
        """The rank reported how many turns its loop has made."""
        if turns != self._turns:
            self._turns = turns
            self._at = self._clock()

    def excuse(self, overslept_ms: Millis) -> None:
        """Whoever watches the rank stood still itself for so long: that is not held against the rank."""
        self._at = min(self._at + max(0, overslept_ms), self._clock())


class Supervisor:
    """One rank process. `progress` is told what the rank said over the ipc."""

    def __init__(
        self,
        command: Sequence[str],
        rank: int,
        limits: Limits,
        *,
        clock: Callable[[], Millis],
        ping: Callable[[], None],
    ) -> None:
        """`command` starts the rank; `ping` asks it for a sign of life; `clock` is monotonic."""
        self._command = tuple(command)
        self._rank = rank
        self._limits = limits
        self._clock = clock
        self._ping = ping
        self._process: Process | None = None
        self.progress = Progress(limits.loop_stall_ms, clock)

    @property
    def pid(self) -> int | None:
        """Process id of the rank, once started."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def left_by_itself(self) -> bool:
        """Whether the process exited, and not by a signal."""
        return self._process is not None and (self._process.returncode or 0) > 0

    async def start(self, config: RankConfig) -> None:
        """Start the process and hand it its configuration."""
        # A session of its own: Ctrl-C in a terminal reaches the app alone, which drains first.
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, start_new_session=True)
        assert self._process.stdin is not None
        self._process.stdin.write(to_json(config).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it died at once: `watch` reports its exit code
            await self._process.stdin.drain()

    async def watch(self) -> str:
        """Wait until the rank is gone, killing it if it stalls; what happened, for people."""
        assert self._process is not None, "watch before start"
        exited = asyncio.ensure_future(self._process.wait())
        stalled = asyncio.ensure_future(self._until_stalled())
        try:
            await asyncio.wait({exited, stalled}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return f"rank {self._rank} {describe_exit(exited.result())}"
            self.kill()
            await exited
            return f"rank {self._rank} {stalled.result()} and was killed"
        finally:
            exited.cancel()
            stalled.cancel()

    async def stop(self) -> None:
        """After `Stop` was sent: wait for the exit, and kill the rank if it does not come."""
        if self._process is None:
            return
        try:
            async with asyncio.timeout(STOP_MS / 1000):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _until_stalled(self) -> str:
        try:
            async with asyncio.timeout(self._limits.start_ms / 1000):
                await self.progress.loaded.wait()
        except TimeoutError:
            return f"was not ready within {self._limits.start_ms} ms (start_ms)"
        longest = self._limits.loop_stall_ms
        while (age := self.progress.age_ms) < longest:
            asleep, pause_ms = self._clock(), min(longest - age, longest // PINGS_A_STALL + 1)
            await asyncio.sleep(pause_ms / 1000)
            # A frozen container stands still as a whole: when it thaws, the rank has done nothing wrong.
            self.progress.excuse(self._clock() - asleep - pause_ms)
            if self.progress.age_ms >= longest // PINGS_A_STALL:
                self._ping()
        return f"made no progress for {longest} ms (loop_stall_ms)"


def describe_exit(code: int) -> str:
    """An exit code for people."""
    if code < 0:
        return f"was ended by signal {signal.Signals(-code).name}"
    return f"exited with code {code}"
