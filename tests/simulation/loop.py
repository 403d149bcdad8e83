"""An event loop of asyncio whose time is the world's, and the processes that run on it.

Whatever real code of ours awaits (the router, a worker's registrar, its look-ups, the registry) runs here unchanged:
deterministic, and thousands of times faster than the clock. A process is one life of a program: while it is paused
nothing of it runs, and when it is killed nothing that it still does has any effect.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from simulation.invariants import Broken

if TYPE_CHECKING:
    from simulation.world import World


class Process:
    """One life of one program on one host; what it starts carries its mark."""

    def __init__(self, world: "World", host: str) -> None:
        self.world, self.host = world, host
        self.alive, self.paused = True, False
        self._held: deque[Handle] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._context = copy_context()
        self._context.run(OWNER.set, self)

    def __repr__(self) -> str:
        return self.host

    def run(self, call: Callable[..., object], *args: object) -> None:
        """Call something inside this process."""
        self._context.copy().run(call, *args)

    def spawn(self, work: Coroutine[Any, Any, object]) -> "asyncio.Task[Any]":
        """Begin a task of this process, whose failure is a fault of ours."""
        task = self.world.loop.create_task(work, context=self._context.copy())
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and task.exception() is not None and self.alive:
            raise Broken("process", f"{self} failed with {task.exception()!r}") from task.exception()

    def owns(self, task: "asyncio.Task[Any]") -> None:
        """Keep a task until it is over."""
        self._tasks[task] = None
        task.add_done_callback(lambda over: self._tasks.pop(over, None))

    def hold(self, handle: "Handle") -> None:
        """It is paused: this waits until it goes on."""
        self._held.append(handle)

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT."""
        self.paused = False
        while self._held:
            self.world.loop.put(self._held.popleft())

    def kill(self) -> None:
        """SIGKILL: from now on it has no effect on anybody; its connections break."""
        if self.alive:
            self.alive = False
            self.world.wire.reset(self)
            self.end()

    def end(self) -> None:
        """Unwind what it has under way."""
        self.resume()
        for task in list(self._tasks):
            task.cancel()


OWNER: ContextVar[Process | None] = ContextVar("OWNER", default=None)


class Handle:
    """A call that is due now or later."""

    __slots__ = ("args", "call", "context", "is_cancelled", "when_s")

    def __init__(self, call: Callable[..., object], args: tuple[object, ...], context: Context, when_s: float) -> None:
        self.call, self.args, self.context, self.when_s = call, args, context, when_s
        self.is_cancelled = False

    def cancel(self) -> None:
        """Never mind."""
        self.is_cancelled = True

    def cancelled(self) -> bool:
        """Whether it is off."""
        return self.is_cancelled

    def when(self) -> float:
        """When it is due."""
        return self.when_s


class VirtualLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that futures, tasks, timeouts and events need; it is driven by the world's heap."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._ready: deque[Handle] = deque()
        self._is_due = False
        self.faults: list[str] = []  # failures that nobody looked at

    def time(self) -> float:
        """The world's clock, in seconds."""
        return self._world.now / 1000

    def get_debug(self) -> bool:
        """Never."""
        return False

    def is_running(self) -> bool:
        """Always."""
        return True

    def is_closed(self) -> bool:
        """Never."""
        return False

    def call_soon(self, callback: Callable[..., object], *args: object, context: Context | None = None) -> Handle:  # type: ignore[override]
        """See asyncio."""
        handle = Handle(callback, args, context or copy_context(), 0.0)
        self.put(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> Handle:  # type: ignore[override]
        """See asyncio."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> Handle:  # type: ignore[override]
        """See asyncio."""
        handle = Handle(callback, args, context or copy_context(), when)
        self._world.at(max(0, math.ceil(when * 1000 - 1e-6) - self._world.now), self._timed, handle)
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        """See asyncio."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> "asyncio.Task[Any]":  # type: ignore[override]
        """See asyncio; the task belongs to the process in whose context it is made."""
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        owner = OWNER.get() if context is None else context.get(OWNER)
        if owner is not None:
            owner.owns(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Something failed, and nobody looks."""
        self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")

    def put(self, handle: Handle) -> None:
        """Run it as soon as what is before it has run."""
        self._ready.append(handle)
        if not self._is_due:
            self._is_due = True
            self._world.at(0, self.drain)

    def drain(self) -> None:
        """Run all that is due now."""
        self._is_due = False
        while self._ready:
            self._run(self._ready.popleft())

    def _timed(self, handle: Handle) -> None:
        if not handle.is_cancelled:
            self._run(handle)

    def _run(self, handle: Handle) -> None:
        if handle.is_cancelled:
            return
        owner = handle.context.get(OWNER)
        if owner is not None and owner.paused:
            owner.hold(handle)
        else:
            handle.context.run(handle.call, *handle.args)
