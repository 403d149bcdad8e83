"""One worker's app side: its units of ranks, the live requests, and whether new ones may come.

    STARTING ── all ranks ready ──> SERVING ── SIGTERM, /drain ──> DRAINING ── no request left ──> OVER (exit 0)
        │                              └─ one of several units lost ──> DRAINING (others finish) ──> OVER (exit 1)
        └─ the only unit, or any under DP attention, is lost: everybody gets one 500 ─────────────> OVER (exit 1)

A unit is lost with its first rank: the rest of it is killed, and no rank is ever restarted alone. `over` is set when the
process should end; `close` then ends the ranks and removes what was left on disk.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, assert_never

import structlog
import zmq.asyncio

from baton_core.effects import LookUp
from baton_core.errors import BatonError, EngineError, Overloaded, Reason, Verdict
from baton_core.events import Abort, AbortAll, DrainBegan, LookupFailed, Resolved, StopHere, Submit
from baton_core.limits import Millis
from baton_core.request import FAKE_HOST, Bootstrap, Request, RequestId, Room, Sampling
from baton_io.ipc import Emits, LoadProgress, LookUps, PeersLost, RankFailed, RankReady, RegisterRanks, Snapshot
from baton_worker.companion import Announcer, Companion
from baton_worker.config import WorkerConfig
from baton_worker.intake import Intake, Prepared
from baton_worker.materials import Materials
from baton_worker.metrics import WorkerMetrics
from baton_worker.nodes import Hub
from baton_worker.placement import Placement
from baton_worker.rank_link import FromRank
from baton_worker.rank_plan import RankPlan
from baton_worker.rank_process import Rank, local_ranks
from baton_worker.streams import RequestStream, Streams
from baton_worker.traces import open_traces
from baton_worker.units import Unit, Units, merged_ready, merged_snapshot

log = structlog.get_logger()


class State(Enum):
    """See the drawing at the top."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    OVER = "over"


class Worker:
    """Composes the parts of a worker's app. Start it, serve its app (`create_app`), wait for `over`, close it."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        materials: Materials,
        own_bootstrap: tuple[str, int],
        companion: Companion,
        announcer: Announcer | None = None,
        clock: Callable[[], Millis],
    ) -> None:
        """`own_bootstrap` is what a leg that leaves out its bootstrap address means; `clock` is monotonic."""
        self.config, self.role = config, materials.role
        self.incarnation, self.model = materials.incarnation, materials.model
        self.own_bootstrap = own_bootstrap
        self.limits = config.limits
        self.parallel = config.parallel
        self.state = State.STARTING
        self.exit_code = 0
        self.over = asyncio.Event()
        self.rank_ready: RankReady | None = None  # of all ranks together
        self.streams = Streams(live_max=self.limits.waiting_max, on_close=self._stream_closed)
        self.metrics = WorkerMetrics(self.role)
        self.traces = open_traces(config, self.role, self.incarnation)
        self.intake = Intake(
            role=self.role,
            tokenizer=materials.tokenizer,
            limits=self.limits,
            dp_size=self.parallel.dp,
            own_bootstrap=own_bootstrap,
            check_host=companion.check_host,
        )
        self._companion, self._announcer = companion, announcer
        forced = config.force_query_prefill_dp_rank
        self._placement = Placement(
            config.load_balance_method, self.parallel.dp, self.streams.live, role=self.role, forced=forced
        )
        self._last_words = ""  # why a scheduler is gone
        self._terminating = self._finishing = False
        self._attending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._registered: dict[RequestId, Room] = {}  # rooms of live requests that registries know
        self._run_dir = Path(tempfile.mkdtemp(prefix="baton-"))
        self._context = zmq.asyncio.Context(io_threads=1)
        self._hub = Hub(config, self.incarnation, self._context, clock, self._rank_said) if config.nnodes > 1 else None
        plan = RankPlan.of(config, materials, incarnation=self.incarnation, run_dir=self._run_dir)
        here = local_ranks(plan, materials.rank_command, self._context, clock, self._rank_said)
        self.units = Units(self.parallel, [*here, *(self._hub.ranks if self._hub else ())])

    @property
    def bad_frames(self) -> int:
        """What came from ranks, or in where the nodes meet, and was no message."""
        return self.units.bad_frames + (0 if self._hub is None else self._hub.bad_frames)

    # -- life

    async def start(self) -> None:
        """Start the ranks of this node and return; readiness comes later. With several nodes, wait for them first."""
        log.info("worker.starting", incarnation=self.incarnation, model=self.model.name, parallel=str(self.parallel))
        if self._hub is None:
            await self._start_ranks([])
        else:
            self._hub.open()
            self._spawn(self._hub.run(), "nodes")
            self._spawn(self._muster(self._hub), "muster")

    async def _muster(self, hub: Hub) -> None:
        await self._start_ranks(await hub.gather())

    async def _start_ranks(self, hosts: list[str]) -> None:
        await asyncio.gather(*(rank.start(hosts) for rank in self.units.ranks))
        log.info("worker.ranks_started", pids=[rank.pid for rank in self.units.ranks])
        for rank in self.units.ranks:
            self._spawn(self._supervise(rank), f"watch over rank {rank.place.rank}")

    def terminate(self) -> None:
        """SIGTERM or Ctrl-C: drain, then end. The second time: end now."""
        if self._terminating:
            self._end(exit_code=1)
        elif self.state is not State.OVER:
            self._terminating = True
            if not self._finishing:
                self._spawn(self._drain_and_end(), "drain")

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those that run may finish."""
        if self.state in (State.STARTING, State.SERVING):
            log.info("worker.draining", live_requests=len(self.streams))
            self.state = State.DRAINING
            self.units.tell_all(DrainBegan())

    async def close(self) -> None:
        """End the ranks and everything else; safe to call at any time."""
        self.state = State.OVER
        if self._attending is not None:
            self._attending.cancel()
            await asyncio.gather(self._attending, return_exceptions=True)
        await asyncio.gather(*(rank.close() for rank in self.units.ranks))
        if self._hub is not None:
            self._hub.close(self.exit_code)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.traces.close()
        self.intake.close()
        self._context.destroy(linger=0)
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
            case State.DRAINING if self._last_words:
                text = f"this worker is ending, retry with another: {self._last_words}"
                raise Overloaded(text, Reason.DRAINING)
            case State.DRAINING | State.OVER:
                raise Overloaded("this worker is draining; retry with another", Reason.DRAINING)
            case _:
                assert_never(self.state)

    def submit(self, prepared: Prepared, rid: RequestId, budget_ms: Millis) -> RequestStream:
        """Hand a request to the scheduler. Raises BatonError when it cannot be taken."""
        self.check_open()
        dp_rank, rejected = self._placement.place(prepared.bootstrap, prepared.routed_dp_rank)
        stream = self.streams.open(rid, dp_rank)
        request = prepared.request(stream.scheduler_rid, budget_ms)
        if rejected is not None:
            request = replace(request, rejected=rejected)
        try:
            self.units[dp_rank].send(Submit(request=request))
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
        self.units[self._placement.choose(bootstrap)].tell(Submit(request=request))

    def abort(self, stream: RequestStream, verdict: Verdict) -> None:
        """End a live request; the scheduler's answer ends the stream, unless `stream.end` did before."""
        if self.streams.find(stream.rid) is stream:
            self.units[stream.dp_rank].tell(Abort(rid=stream.scheduler_rid, verdict=verdict))

    def abort_all(self, verdict: Verdict) -> None:
        """End every live request."""
        self.units.tell_all(AbortAll(verdict=verdict))

    def stop_here(self, stream: RequestStream) -> None:
        """The answer is complete without more tokens."""
        if self.streams.find(stream.rid) is stream:
            self.units[stream.dp_rank].tell(StopHere(rid=stream.scheduler_rid))

    # -- what operators ask

    def unready(self) -> list[str]:
        """Why `/ready` says no; empty when the worker takes requests."""
        reasons = [] if self.state is State.SERVING else [f"the worker is {self.state.value}"]
        reasons += self.units.why_unready()
        return reasons + (self._companion.unready() if self.state is State.SERVING else [])

    async def fresh_snapshots(self, wait_ms: Millis) -> list[Snapshot]:
        """The numbers of every rank as of now, by rank. Raises TimeoutError when one does not answer."""
        return await self.units.fresh_snapshots(wait_ms)

    async def fresh_snapshot(self, wait_ms: Millis) -> Snapshot:
        """The numbers of all units together as of now. Raises TimeoutError when one does not answer."""
        return self.whole(await self.fresh_snapshots(wait_ms))

    def of_leaders(self, snapshots: list[Snapshot]) -> list[Snapshot]:
        """Of the snapshots of all ranks, one a unit: siblings hold the same state."""
        return [one for one in snapshots if self.parallel.place(one.rank).leads]

    def whole(self, snapshots: list[Snapshot]) -> Snapshot:
        """Of the snapshots of all ranks, the sum over the units."""
        return merged_snapshot(self.of_leaders(snapshots))

    # -- what the ranks say

    def _rank_said(self, rank: Rank, message: FromRank) -> None:
        unit = self.units[rank.place.dp_rank]
        match message:
            case Emits():
                self.streams.deliver(message.emits)
            case Snapshot():
                if rank.place.leads:
                    self.metrics.apply(unit.dp_rank, message)
                    self.traces.ended(message.timelines)
                else:
                    self.metrics.apply_member(unit.dp_rank, message)
            case LookUps():
                for lookup in message.lookups:
                    self._spawn(self._look_up(unit, lookup), "look-up")
            case RegisterRanks():
                self._register(message)
            case PeersLost():
                self._companion.forget(message.peers)
            case RankReady():
                self._rank_is_ready(message)
            case LoadProgress():
                pass  # `heard` has it
            case RankFailed():
                log.error("rank.failed", rank=message.rank, error=message.text)
            case _:
                assert_never(message)

    def _rank_is_ready(self, ready: RankReady) -> None:
        log.info(
            "rank.ready",
            rank=ready.rank,
            pid=ready.pid,
            load_seconds=round(ready.load_seconds, 2),
            kv_pages=ready.kv_pages,
            context_tokens=ready.context_tokens,
        )
        readies = self.units.ready
        if readies is None or self.state is State.OVER:
            return
        try:
            self.rank_ready = merged_ready(readies)
        except EngineError as error:
            self._fail(error.verdict.text)
            return
        if self.state is State.STARTING:
            self.state = State.SERVING
            self._attending = self._spawn(self._companion.attend(readies), "companion")

    def _register(self, message: RegisterRanks) -> None:
        if self._announcer is None:
            return
        self._announcer.register(message.rooms)
        for one in message.rooms:
            if self.streams.is_live(one.rid):
                self._registered[one.rid] = one.room
            else:
                self._announcer.close_room(one.room, went_well=False)  # told once: decode's leg may still ask

    def _stream_closed(self, stream: RequestStream) -> None:
        room = self._registered.pop(stream.scheduler_rid, None)
        if room is not None and self._announcer is not None:
            self._announcer.close_room(room, went_well=stream.went_well)

    async def _look_up(self, unit: Unit, lookup: LookUp) -> None:
        try:
            found: Resolved | LookupFailed = await self._companion.look_up(lookup)
        except BatonError as error:
            found = LookupFailed(rid=lookup.rid, verdict=error.verdict)
        unit.tell(found)

    # -- the end

    async def _supervise(self, rank: Rank) -> None:
        what = await rank.watch()
        unit = self.units[rank.place.dp_rank]
        if self.state is not State.OVER and not unit.lost:
            where = "" if self.parallel.dp == 1 else f" of DP rank {unit.dp_rank}"
            text = f"{self.role.value} worker lost its scheduler{where}: {what}"
            self._lose(unit, f"{text}: {rank.heard.last_words}" if rank.heard.last_words else text)

    def _lose(self, unit: Unit, text: str) -> None:
        """A rank of this unit is gone, and so is the unit. Others finish what they have, if they can without it."""
        self._last_words = text
        log.error("unit.lost", dp_rank=unit.dp_rank, what=text, live_requests=self.streams.live(unit.dp_rank))
        unit.lose(text)
        self.streams.end_all(Verdict(reason=Reason.WORKER_LOST, text=text), unit.dp_rank)
        if self.state is State.STARTING or self.parallel.dp_attention or not self.units.live:
            self._fail(text)
            return
        if self._announcer is not None:
            self._announcer.unit_lost(unit.dp_rank)
        self.exit_code = 1
        self.begin_drain()  # now: no request may go to a unit that is gone
        if not self._finishing:
            self._spawn(self._drain_and_end(), "drain without a unit")

    def _fail(self, text: str) -> None:
        """Nothing can go on: everybody gets one 500."""
        self._last_words = text
        self.streams.end_all(Verdict(reason=Reason.WORKER_LOST, text=text))
        self._end(exit_code=1)

    async def _drain_and_end(self) -> None:
        self._finishing = True
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
            said = error.verdict.text if isinstance(error, BatonError) else repr(error)
            self._fail(self._last_words or f"internal error in {task.get_name()}: {said}")
