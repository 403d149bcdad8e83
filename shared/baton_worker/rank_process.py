"""One rank of a worker as its app sees it: a process of its own, what it says, and whether it still gets on.

A rank on this node is a child process behind an ipc link (`LocalRank`); one on another node is reached through the app
there (`baton_worker.nodes`). Neither is ever restarted alone.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq.asyncio

from baton_core.errors import Overloaded
from baton_core.limits import Millis
from baton_core.ranks import Place
from baton_io.ipc import LoadProgress, Ping, RankFailed, RankReady, Snapshot, Stop
from baton_worker.rank_link import FromRank, RankLink, ToRank
from baton_worker.rank_plan import RankPlan
from baton_worker.supervisor import Progress, Supervisor

FRAMES_A_REQUEST = 8
"""Frames that one live request may have under way on the ipc: submit, look-up, stop, abort, with room to spare."""

LAST_WORDS_MS: Millis = 200
"""A rank that ends by itself says why just before: its words may arrive a moment after its exit is noticed."""


class Heard:
    """What one rank has said so far."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.ready: RankReady | None = None
        self.loading: LoadProgress | None = None
        self.snapshot: Snapshot | None = None
        self.last_words = ""
        self.spoke = asyncio.Event()  # its last words
        self._snapshot_wanted: list[asyncio.Future[Snapshot]] = []

    def take(self, message: FromRank) -> None:
        """Note what matters about the rank itself."""
        match message:
            case RankReady():
                self.ready, self.loading = message, None
                self.progress.ready()
            case LoadProgress():
                self.loading = message
            case Snapshot():
                self.snapshot = message
                self.progress.turned(message.progress)
                wanted, self._snapshot_wanted = self._snapshot_wanted, []
                for future in wanted:
                    if not future.done():
                        future.set_result(message)
            case RankFailed():
                self.last_words = message.text
                self.spoke.set()
            case _:
                pass  # the rest is about requests, and the worker's

    def next_snapshot(self) -> "asyncio.Future[Snapshot]":
        """The next snapshot that comes."""
        wanted: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._snapshot_wanted.append(wanted)
        return wanted


class Rank(Protocol):
    """One rank. `heard` is what it said; messages about requests go on to the worker."""

    @property
    def place(self) -> Place:
        """Where it stands in the worker."""
        ...

    @property
    def heard(self) -> Heard:
        """What it has said."""
        ...

    @property
    def bad_frames(self) -> int:
        """Frames from it that were no messages."""
        ...

    @property
    def pid(self) -> int | None:
        """Its process id, on its node, as far as it is known."""
        ...

    async def start(self, hosts: Sequence[str]) -> None:
        """Begin; readiness comes later. `hosts`: where each node is reached, with several nodes."""
        ...

    def send(self, message: ToRank) -> None:
        """Queue a message, or drop it where the rank is over. Raises Overloaded when it does not read."""
        ...

    async def watch(self) -> str:
        """Wait until it is over, ending it if it stalls; what happened, for people."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    async def close(self) -> None:
        """Let it leave, end it if it does not, and drop everything; safe to call at any time."""
        ...


class LocalRank:
    """A rank process of this node."""

    def __init__(
        self,
        rank: int,
        plan: RankPlan,
        command: Sequence[str],
        context: zmq.asyncio.Context,
        *,
        frames_max: int,
        clock: Callable[[], Millis],
        on_message: Callable[[Rank, FromRank], None],
    ) -> None:
        """`command` starts the process; `frames_max` bounds what may be under way on its link."""
        self.place = plan.config.parallel.place(rank)
        self._plan = plan
        self._on_message = on_message
        self._link = RankLink(
            rank=rank,
            address=plan.ipc_address(rank),
            context=context,
            frames_max=frames_max,
            on_message=self._said,
        )
        limits = plan.config.limits
        self._supervisor = Supervisor(command, rank, limits, clock=clock, ping=lambda: self.tell(Ping()))
        self.heard = Heard(self._supervisor.progress)
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, once started."""
        return self._supervisor.pid

    @property
    def bad_frames(self) -> int:
        """Frames from it that were no messages."""
        return self._link.bad_frames

    async def start(self, hosts: Sequence[str]) -> None:
        """Bind the ipc and start the process."""
        self._link.open()
        await self._supervisor.start(self._plan.rank_config(self.place.rank, hosts))
        self._reading = asyncio.create_task(self._link.run(), name=f"link of rank {self.place.rank}")

    def send(self, message: ToRank) -> None:
        """Queue a message, or drop it where the link is closed. Raises Overloaded when the rank does not read."""
        if self._link.is_open:
            self._link.send(message)

    def tell(self, message: ToRank) -> None:
        """As `send`, but a rank that takes nothing is left to the watch over its progress."""
        try:
            self.send(message)
        except Overloaded:
            return

    async def watch(self) -> str:
        """Wait until the process is gone, or what it says cannot be read any more."""
        assert self._reading is not None, "watch before start"
        gone = asyncio.ensure_future(self._supervisor.watch())
        try:
            await asyncio.wait({gone, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                self.kill()
                return f"rank {self.place.rank} cannot be heard any more: {self._reading.exception()!r}"
        finally:
            gone.cancel()
        if self._supervisor.left_by_itself and not self._reading.done():
            try:
                async with asyncio.timeout(LAST_WORDS_MS / 1000):
                    await self.heard.spoke.wait()
            except TimeoutError:
                pass  # it had nothing to say
        return gone.result()

    def kill(self) -> None:
        """End the process at once."""
        self._supervisor.kill()

    async def close(self) -> None:
        """Say stop, wait for the exit, kill if it does not come."""
        if self._supervisor.running:
            self.tell(Stop())
        await self._supervisor.stop()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._link.close()

    def _said(self, message: FromRank) -> None:
        self.heard.take(message)
        self._on_message(self, message)


def local_ranks(
    plan: RankPlan,
    command: Sequence[str],
    context: zmq.asyncio.Context,
    clock: Callable[[], Millis],
    on_message: Callable[[Rank, FromRank], None],
) -> list[LocalRank]:
    """Every rank of this node, not started yet."""
    frames_max = FRAMES_A_REQUEST * plan.config.limits.waiting_max
    return [
        LocalRank(rank, plan, command, context, frames_max=frames_max, clock=clock, on_message=on_message)
        for rank in plan.config.local_ranks
    ]
