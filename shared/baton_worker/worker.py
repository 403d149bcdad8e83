"""One worker's app side: the rank process and its ipc, the live requests, and whether new ones may come.

    STARTING ── rank ready ──> SERVING ── SIGTERM, /drain ──> DRAINING ── no request left ──> OVER (exit 0)
        └────────────── the rank is lost: everybody gets one 500 ──────────────┴────────────> OVER (exit 1)

`over` is set when the process should end; `close` then ends the rank and removes what was left on disk.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, assert_never

import structlog

from baton_core.effects import LookUp
from baton_core.errors import BatonError, EngineError, Overloaded, Reason, Verdict
from baton_core.events import Abort, AbortAll, DrainBegan, LookupFailed, Resolved, StopHere, Submit
from baton_core.limits import Millis
from baton_core.request import FAKE_HOST, Bootstrap, Incarnation, Request, RequestId, Sampling
from baton_io.ipc import Emits, LoadProgress, LookUps, PeersLost, Ping, RankFailed, RankReady, Snapshot, Stop
from baton_worker.config import RankConfig, WorkerConfig
from baton_worker.intake import Intake, Prepared
from baton_worker.materials import Materials
from baton_worker.metrics import WorkerMetrics
from baton_worker.rank_link import FromRank, RankLink, ToRank
from baton_worker.streams import RequestStream, Streams
from baton_worker.supervisor import Supervisor

log = structlog.get_logger()

FRAMES_A_REQUEST = 8
"""Frames that one live request may have under way on the ipc: submit, look-up, stop, abort, with room to spare."""


class State(Enum):
    """See the drawing at the top."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    OVER = "over"


class Companion(Protocol):
    """What a role adds to the common worker."""

    def check_host(self, host: str, port: int) -> Verdict | None:
        """Why requests may not name this bootstrap address; None if they may."""

    def unready(self) -> list[str]:
        """Why the worker is not ready yet, for people; empty when nothing is missing."""

    async def attend(self, ready: RankReady) -> None:
        """Run while the rank serves. Cancelled after the last request: the time to say goodbye to others."""

    async def look_up(self, lookup: LookUp) -> Resolved | LookupFailed:
        """Find the prefill worker of a room."""

    def forget(self, peers: tuple[Incarnation, ...]) -> None:
        """What is cached about these workers is stale."""


class Worker:
    """Composes the parts of a worker's app. Start it, serve its app (`create_app`), wait for `over`, close it."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        materials: Materials,
        own_bootstrap: tuple[str, int],
        companion: Companion,
        clock: Callable[[], Millis],
    ) -> None:
        """`own_bootstrap` is what a leg that leaves out its bootstrap address means; `clock` is monotonic."""
        self.config, self.role = config, materials.role
        self.incarnation, self.model = materials.incarnation, materials.model
        self.own_bootstrap = own_bootstrap
        self.limits = config.limits
        self.state = State.STARTING
        self.exit_code = 0
        self.over = asyncio.Event()
        self.rank_ready: RankReady | None = None
        self.load_progress: LoadProgress | None = None
        self.streams = Streams(live_max=self.limits.waiting_max)
        self.metrics = WorkerMetrics(self.role)
        self.intake = Intake(
            role=self.role,
            tokenizer=materials.tokenizer,
            limits=self.limits,
            own_bootstrap=own_bootstrap,
            check_host=companion.check_host,
        )
        self._companion = companion
        self._last_words = ""  # why the scheduler is gone
        self._terminating = False
        self._attending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._snapshot_wanted: list[asyncio.Future[Snapshot]] = []
        self._run_dir = Path(tempfile.mkdtemp(prefix="baton-"))
        frames_max = FRAMES_A_REQUEST * self.limits.waiting_max
        self.link = RankLink(rank=0, run_dir=self._run_dir, frames_max=frames_max, on_message=self._rank_said)
        rank_config = RankConfig.of(
            config,
            role=self.role,
            rank=0,
            incarnation=self.incarnation,
            ipc_address=self.link.address,
            model_path=str(self.model.path),
            model_name=self.model.name,
        )
        self.supervisor = Supervisor(materials.rank_command, rank_config, clock=clock, ping=lambda: self.tell(Ping()))

    # -- life

    async def start(self) -> None:
        """Bind the ipc, start the rank and return; readiness comes later."""
        self.link.open()
        await self.supervisor.start()
        log.info("worker.starting", incarnation=self.incarnation, model=self.model.name, rank_pid=self.supervisor.pid)
        self._spawn(self.link.run(), "rank link")
        self._spawn(self._supervise(), "supervisor")

    def terminate(self) -> None:
        """SIGTERM or Ctrl-C: drain, then end. The second time: end now."""
        if self._terminating:
            self._end(exit_code=1)
        elif self.state is not State.OVER:
            self._terminating = True
            self._spawn(self._drain_and_end(), "drain")

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those that run may finish."""
        if self.state in (State.STARTING, State.SERVING):
            log.info("worker.draining", live_requests=len(self.streams))
            self.state = State.DRAINING
            self.tell(DrainBegan())

    async def close(self) -> None:
        """End the rank and everything else; safe to call at any time."""
        self.state = State.OVER
        if self._attending is not None:
            self._attending.cancel()
            await asyncio.gather(self._attending, return_exceptions=True)
        if self.supervisor.running:
            self.tell(Stop())
        await self.supervisor.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.intake.close()
        self.link.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)
        log.info("worker.stopped", exit_code=self.exit_code)

    # -- requests

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus output. Raises as `check_open` before the rank is ready."""
        self.check_open()
        assert self.rank_ready is not None
        return self.rank_ready.context_tokens

    def check_open(self) -> None:
        """Raise BatonError unless new requests are taken."""
        match self.state:
            case State.SERVING:
                return
            case State.STARTING:
                raise Overloaded("this worker is starting: its model is not loaded yet; retry later")
            case State.OVER if self._last_words:
                raise EngineError(self._last_words, Reason.WORKER_LOST)
            case State.DRAINING | State.OVER:
                raise Overloaded("this worker is draining; retry with another", Reason.DRAINING)
            case _:
                assert_never(self.state)

    def submit(self, prepared: Prepared, rid: RequestId, budget_ms: Millis) -> RequestStream:
        """Hand a request to the scheduler. Raises BatonError when it cannot be taken."""
        self.check_open()
        stream = self.streams.open(rid)
        try:
            self.link.send(Submit(request=prepared.request(stream.scheduler_rid, budget_ms)))
        except Overloaded:
            self.streams.close(stream)
            raise
        return stream

    def refuse(self, rid: RequestId, bootstrap: Bootstrap | None, verdict: Verdict) -> None:
        """A request was refused here: where it has a room, the scheduler tells the other leg."""
        if bootstrap is None or bootstrap.host == FAKE_HOST or self.rank_ready is None or self.state is State.OVER:
            self.metrics.count(f"admission_rejections_total{{reason={verdict.reason.name.lower()}}}")
            return
        request = Request(
            rid=self.streams.scheduler_rid(rid), prompt=(), sampling=Sampling(), bootstrap=bootstrap, rejected=verdict
        )
        self.tell(Submit(request=request))

    def abort(self, stream: RequestStream, verdict: Verdict) -> None:
        """End a live request; the scheduler's answer ends the stream, unless `stream.end` did before."""
        if self.streams.find(stream.rid) is stream:
            self.tell(Abort(rid=stream.scheduler_rid, verdict=verdict))

    def abort_all(self, verdict: Verdict) -> None:
        """End every live request."""
        self.tell(AbortAll(verdict=verdict))

    def stop_here(self, stream: RequestStream) -> None:
        """The answer is complete without more tokens."""
        if self.streams.find(stream.rid) is stream:
            self.tell(StopHere(rid=stream.scheduler_rid))

    # -- what operators ask

    def unready(self) -> list[str]:
        """Why `/ready` says no; empty when the worker takes requests."""
        reasons = [] if self.state is State.SERVING else [f"the worker is {self.state.value}"]
        if self.rank_ready is not None and not self.supervisor.progressing:
            reasons.append(f"rank 0 has made no progress for {self.supervisor.progress_age_ms} ms")
        return reasons + (self._companion.unready() if self.state is State.SERVING else [])

    async def fresh_snapshot(self, wait_ms: Millis) -> Snapshot:
        """The scheduler's numbers as of now. Raises TimeoutError when it does not answer."""
        wanted: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._snapshot_wanted.append(wanted)
        self.tell(Ping())
        async with asyncio.timeout(wait_ms / 1000):
            return await wanted

    def tell(self, message: ToRank) -> None:
        """Send to the rank what cannot be refused; a rank that takes nothing is left to the watch over its progress."""
        if not self.link.is_open:
            return
        try:
            self.link.send(message)
        except Overloaded as error:
            log.warning("rank.not_reading", message=type(message).__name__, error=str(error))

    # -- what the rank says

    def _rank_said(self, message: FromRank) -> None:
        match message:
            case Emits():
                self.streams.deliver(message.emits)
            case Snapshot():
                self._snapshot(message)
            case LookUps():
                for lookup in message.lookups:
                    self._spawn(self._look_up(lookup), "look-up")
            case PeersLost():
                self._companion.forget(message.peers)
            case RankReady():
                self._rank_is_ready(message)
            case LoadProgress():
                self.load_progress = message
            case RankFailed():
                self._last_words = message.text
                log.error("rank.failed", rank=message.rank, error=message.text)
            case _:
                assert_never(message)

    def _rank_is_ready(self, ready: RankReady) -> None:
        self.rank_ready, self.load_progress = ready, None
        self.supervisor.loaded()
        if self.state is State.STARTING:
            self.state = State.SERVING
            self._attending = self._spawn(self._companion.attend(ready), "companion")
        log.info(
            "rank.ready",
            pid=ready.pid,
            load_seconds=round(ready.load_seconds, 2),
            kv_pages=ready.kv_pages,
            context_tokens=ready.context_tokens,
        )

    def _snapshot(self, snapshot: Snapshot) -> None:
        self.supervisor.progressed(snapshot.progress)
        self.metrics.apply(snapshot)
        wanted, self._snapshot_wanted = self._snapshot_wanted, []
        for future in wanted:
            if not future.done():
                future.set_result(snapshot)

    async def _look_up(self, lookup: LookUp) -> None:
        try:
            found: Resolved | LookupFailed = await self._companion.look_up(lookup)
        except BatonError as error:
            found = LookupFailed(rid=lookup.rid, verdict=error.verdict)
        self.tell(found)

    # -- the end

    async def _supervise(self) -> None:
        what = await self.supervisor.watch()
        if self.state is State.OVER:
            return
        text = f"{self.role.value} worker lost its scheduler: {what}"
        self._last_words = f"{text}: {self._last_words}" if self._last_words else text
        log.error("rank.lost", what=what, live_requests=len(self.streams))
        self.streams.end_all(Verdict(reason=Reason.WORKER_LOST, text=self._last_words))
        self._end(exit_code=1)

    async def _drain_and_end(self) -> None:
        self.begin_drain()
        try:
            async with asyncio.timeout(self.limits.drain_ms / 1000):
                await self.streams.empty()
        except TimeoutError:
            text = f"this worker stops: the request did not finish within {self.limits.drain_ms} ms (drain_ms)"
            verdict = Verdict(reason=Reason.DRAINING, text=text)
            log.warning("worker.drain_cut", live_requests=len(self.streams))
            self.abort_all(verdict)
            self.streams.end_all(verdict)
        self._end(exit_code=0)

    def _end(self, *, exit_code: int) -> None:
        self.state = State.OVER
        self.exit_code = max(self.exit_code, exit_code)
        self.over.set()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # Nothing may die unseen: a worker without one of its parts only looks alive.
            log.error("worker.task_failed", task=task.get_name(), exc_info=error)
            self._last_words = self._last_words or f"internal error in {task.get_name()}: {error!r}"
            self.streams.end_all(Verdict(reason=Reason.WORKER_LOST, text=self._last_words))
            self._end(exit_code=1)
