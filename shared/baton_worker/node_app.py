"""The app of a node other than the first: it starts this node's ranks, relays what they say, and decides nothing.

    JOINING ── Welcome ──> RELAYING ── Bye, or node 0 is silent ──> OVER
       └── Refused, or nobody answers ──────────────────────────────┘

Its HTTP port answers `/health` only. On SIGTERM it waits for node 0, which drains, at most the drain limit.
"""

import asyncio
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import structlog
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from baton_core.errors import EngineError
from baton_core.limits import Millis
from baton_io.codec import FrameError
from baton_io.ipc import TO_APP, TO_RANK
from baton_worker.config import WorkerConfig
from baton_worker.materials import Materials
from baton_worker.nodes import (
    BEAT_MS,
    TO_HUB,
    TO_NODE,
    Beat,
    Bye,
    Gone,
    Join,
    Kill,
    Refused,
    Relay,
    Welcome,
    hub_address,
    node_socket,
    plan_text,
)
from baton_worker.rank_link import FromRank
from baton_worker.rank_plan import RankPlan
from baton_worker.rank_process import LocalRank, Rank, local_ranks
from baton_worker.serving import Site, listen, monotonic_ms, serve

log = structlog.get_logger()

JOIN_PERIOD_MS: Millis = 200


async def run_node(config: WorkerConfig, materials: Materials) -> int:
    """Serve until the worker is over; the exit status. Raises OSError when the port cannot be had."""
    node = Node(config, materials, monotonic_ms)
    return await serve(node, [Site(node.app(), listen(config.host, config.port))])


class Node:
    """This node's part of the worker."""

    def __init__(self, config: WorkerConfig, materials: Materials, clock: Callable[[], Millis]) -> None:
        self._config, self._materials, self._clock = config, materials, clock
        self.over = asyncio.Event()
        self.exit_code = 0
        self._run_dir = Path(tempfile.mkdtemp(prefix="baton-"))
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket: zmq.asyncio.Socket | None = None
        self._heard_at: Millis = clock()
        self._ranks: dict[int, LocalRank] = {}
        self._life: asyncio.Task[None] | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._terminating = False

    def app(self) -> Starlette:
        """The HTTP app, whose lifespan is this node's life."""

        async def health(_request: HttpRequest) -> Response:
            well = bool(self._ranks) and all(rank.heard.progress.lively for rank in self._ranks.values())
            return PlainTextResponse("OK" if well else "a rank of this node makes no progress", 200 if well else 503)

        @asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            self._life = asyncio.create_task(self._live(), name="node")
            self._life.add_done_callback(self._life_over)
            try:
                yield
            finally:
                await self._close()

        return Starlette(routes=[Route("/health", health)], lifespan=lifespan)

    def terminate(self) -> None:
        """SIGTERM: node 0 drains, and says goodbye. The second time: end now."""
        if self._terminating:
            self._end(1)
        self._terminating = True
        asyncio.get_running_loop().call_later(self._config.limits.drain_ms / 1000, self._end, 1)

    # -- life

    async def _live(self) -> None:
        await self._start(await self._join())
        await self._relay()

    def _life_over(self, life: "asyncio.Task[None]") -> None:
        error = None if life.cancelled() else life.exception()
        if isinstance(error, EngineError):
            log.error("node.failed", error=error.verdict.text)
        elif error is not None:
            log.error("node.failed", exc_info=error)
        self._end(0 if error is None else 1)

    async def _join(self) -> Welcome:
        config = self._config
        self._socket = node_socket(self._context, zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"node {config.node_rank} {uuid.uuid4().hex}".encode())
        self._socket.connect(hub_address(config))
        join = Join(node=config.node_rank, host=config.reachable_host, plan=plan_text(config))
        deadline = self._clock() + config.limits.start_ms
        while self._clock() < deadline:
            self._say(join)
            answer = await self._hear(JOIN_PERIOD_MS)
            if isinstance(answer, Welcome):
                return answer
            if isinstance(answer, Refused):
                raise EngineError(answer.text)
        raise EngineError(
            f"node 0 at {hub_address(config)} did not answer within {config.limits.start_ms} ms (start_ms)"
        )

    async def _start(self, welcome: Welcome) -> None:
        materials = self._materials
        plan = RankPlan.of(self._config, materials, incarnation=welcome.incarnation, run_dir=self._run_dir)
        ranks = local_ranks(plan, materials.rank_command, self._context, self._clock, self._rank_said)
        self._ranks = {rank.place.rank: rank for rank in ranks}
        await asyncio.gather(*(rank.start(welcome.hosts) for rank in self._ranks.values()))
        self._watches = [asyncio.create_task(self._watch(rank)) for rank in self._ranks.values()]
        log.info("node.started", incarnation=welcome.incarnation, ranks=list(self._ranks))

    async def _relay(self) -> None:
        silent_ms = self._config.limits.link_silent_ms
        beat_due = self._heard_at = self._clock()
        while not self.over.is_set():
            now = self._clock()
            if now - self._heard_at > silent_ms:
                raise EngineError(f"node 0 has been silent for {silent_ms} ms: this worker is over")
            if now >= beat_due:
                self._say(Beat())
                beat_due = now + BEAT_MS
            message = await self._hear(beat_due - now)
            if message is not None:
                self._heard_at = self._clock()
                self._take(message)

    def _take(self, message: object) -> None:
        match message:
            case Relay():
                rank = self._ranks.get(message.rank)
                if rank is not None:
                    rank.tell(TO_RANK.decode(message.frame))
            case Kill():
                if message.rank in self._ranks:
                    self._ranks[message.rank].kill()
            case Bye():
                log.info("node.goodbye", exit_code=message.exit_code)
                self._end(message.exit_code)
            case _:
                pass  # a beat, or a welcome said twice

    async def _watch(self, rank: LocalRank) -> None:
        what = await rank.watch()
        if not self.over.is_set():
            log.error("node.rank_lost", rank=rank.place.rank, what=what)
            self.exit_code = 1
            self._say(Gone(rank=rank.place.rank, what=what))

    def _rank_said(self, rank: Rank, message: FromRank) -> None:
        self._say(Relay(rank=rank.place.rank, frame=TO_APP.encode(message)))

    # -- the socket

    def _say(self, message: Join | Relay | Gone | Beat) -> None:
        assert self._socket is not None, "said before joining"
        sent = cast("asyncio.Future[object]", self._socket.send(TO_HUB.encode(message), zmq.NOBLOCK))
        if sent.exception() is not None:
            log.error("node.hub_not_reading", message=type(message).__name__)
            self._end(1)

    async def _hear(self, wait_ms: Millis) -> Any:
        """The next message from node 0, None where none comes in time."""
        assert self._socket is not None, "heard before joining"
        if not await self._socket.poll(max(0, wait_ms)):
            return None
        frame = await self._socket.recv()
        try:
            return TO_NODE.decode(frame)
        except FrameError as error:
            raise EngineError(f"node 0 sent what this node cannot read: {error}") from error

    # -- the end

    def _end(self, exit_code: int) -> None:
        self.exit_code = max(self.exit_code, exit_code)
        self.over.set()

    async def _close(self) -> None:
        self.over.set()
        tasks = [task for task in (self._life, *self._watches) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(rank.close() for rank in self._ranks.values()))
        self._context.destroy(linger=0)
        shutil.rmtree(self._run_dir, ignore_errors=True)
        log.info("node.stopped", exit_code=self.exit_code)
