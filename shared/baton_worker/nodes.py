"""A worker on several nodes: node 0's app is the worker, the apps of the others start its ranks there and relay.

    node k   Join(node, host, plan) ──►  node 0       again until it is answered; a newcomer of another plan is refused
             ◄── Welcome(incarnation, hosts)          once all nodes are there: now the ranks start everywhere
             ToRank ◄──► FromRank                     what node 0 and a rank of node k say to each other, as it is
             Gone(rank, what) ──►                     a rank of node k is over
             ◄── Kill(rank), Bye(exit code)           its unit is lost; the worker is over
             Beat ◄──►                                once a second: silence means that the other node is gone

Node k decides nothing but this: without node 0 it ends. Nothing is restarted: the nodes of a worker live and die together.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import structlog
import zmq
import zmq.asyncio

from baton_core.errors import EngineError, Overloaded, Reason
from baton_core.limits import Millis
from baton_core.ranks import Place, share
from baton_core.request import Incarnation
from baton_io.codec import Codec, FrameError
from baton_io.ipc import TO_APP, TO_RANK
from baton_io.registry_client import url_of
from baton_worker.config import WILDCARD_HOSTS, WorkerConfig
from baton_worker.rank_link import FRAME_BYTES_MAX, FromRank, ToRank
from baton_worker.rank_plan import NODES_PORT_OFFSET
from baton_worker.rank_process import Heard, Rank
from baton_worker.supervisor import Progress

log = structlog.get_logger()

BEAT_MS: Millis = 1_000
FRAMES_MAX = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A node is here; `plan` says what it would start, which must be what node 0 wants."""

    node: int
    host: str
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """All nodes are here; start the ranks of this life."""

    incarnation: Incarnation
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """This node does not belong to the worker."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """A frame from or for a rank."""

    rank: int
    frame: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A rank is over."""

    rank: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End this rank at once."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """I am here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """The worker is over; end with this exit code."""

    exit_code: int


TO_HUB = Codec({1: Join, 2: Relay, 3: Gone, 4: Beat})
TO_NODE = Codec({1: Welcome, 2: Refused, 3: Relay, 4: Kill, 5: Beat, 6: Bye})


def plan_text(config: WorkerConfig) -> str:
    """What all nodes of a worker must agree on."""
    return f"{config.parallel} nnodes={config.nnodes} model={config.model} dtype={config.dtype} device={config.device}"


def hub_address(config: WorkerConfig) -> str:
    """Where the apps of the nodes meet."""
    host, port = config.init_address
    return url_of(host, port + NODES_PORT_OFFSET).replace("http://", "tcp://")


def node_socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    """A socket for either end."""
    socket: zmq.asyncio.Socket = context.socket(kind)
    for option, value in (
        (zmq.SNDHWM, FRAMES_MAX),
        (zmq.RCVHWM, FRAMES_MAX),
        (zmq.MAXMSGSIZE, FRAME_BYTES_MAX),
        (zmq.LINGER, 0),
        (zmq.IPV6, 1),
    ):
        socket.setsockopt(option, value)
    return socket


class RemoteRank:
    """A rank of another node, through that node's app."""

    def __init__(self, place: Place, node: int, hub: "Hub", progress: Progress) -> None:
        self.place = place
        self.node = node
        self.heard = Heard(progress)
        self.bad_frames = 0
        self._hub = hub
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        """Its process id on its node, once it is ready."""
        return None if self.heard.ready is None else self.heard.ready.pid

    async def start(self, hosts: Sequence[str]) -> None:
        """Its own app starts it, now that all nodes are here."""

    def send(self, message: ToRank) -> None:
        """Queue a message. Raises Overloaded when its node does not read."""
        if not self._over.done():
            self._hub.tell(self.node, Relay(rank=self.place.rank, frame=TO_RANK.encode(message)))

    async def watch(self) -> str:
        """Wait until its node says that it is over, or is silent itself."""
        return await asyncio.shield(self._over)

    def kill(self) -> None:
        """Have its node end it at once."""
        if not self._over.done():
            with contextlib.suppress(Overloaded):  # its node is as good as silent, and will be
                self._hub.tell(self.node, Kill(rank=self.place.rank))

    async def close(self) -> None:
        """Its node ends it, once the hub says goodbye."""

    def over(self, what: str) -> None:
        """The node says that it is over, or is gone with it."""
        if not self._over.done():
            self._over.set_result(what)


class Hub:
    """Node 0's end: the other nodes' ranks, and what passes between them and the worker."""

    def __init__(
        self,
        config: WorkerConfig,
        incarnation: Incarnation,
        context: zmq.asyncio.Context,
        clock: Callable[[], Millis],
        on_message: Callable[[Rank, FromRank], None],
    ) -> None:
        self._config, self._incarnation, self._clock, self._on_message = config, incarnation, clock, on_message
        self._context = context
        self._socket: zmq.asyncio.Socket | None = None
        self._hosts: dict[int, str] = {0: config.reachable_host}
        self._heard_at: dict[int, Millis] = {}  # by node
        self._names: dict[int, bytes] = {}  # how the socket of each node calls itself
        self._all_here = asyncio.Event()
        self.bad_frames = 0
        """Messages that were none."""
        parallel, stall_ms = config.parallel, config.limits.loop_stall_ms
        self.ranks = [
            RemoteRank(parallel.place(rank), node, self, Progress(stall_ms, clock))
            for node in range(1, config.nnodes)
            for rank in share(parallel.ranks, node, config.nnodes)
        ]
        self._by_rank = {rank.place.rank: rank for rank in self.ranks}

    def open(self) -> None:
        """Listen. Raises EngineError when the port cannot be had."""
        self._socket = node_socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a node that connects again has its old name
        # Where everything else of this worker listens: loopback unless told otherwise (--host).
        host, port = self._config.host, self._config.init_address[1] + NODES_PORT_OFFSET
        listening = f"tcp://*:{port}" if host in WILDCARD_HOSTS else url_of(host, port).replace("http://", "tcp://")
        try:
            self._socket.bind(listening)
        except zmq.ZMQError as error:
            raise EngineError(f"the nodes of this worker cannot meet at {listening}: {error}") from error

    async def run(self) -> None:
        """Read, and watch the other nodes, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read())
            group.create_task(self._beat())

    async def gather(self) -> list[str]:
        """Wait for all nodes, welcome them; where each is reached. Raises EngineError naming who is missing."""
        limit_ms = self._config.limits.start_ms
        try:
            async with asyncio.timeout(limit_ms / 1000):
                await self._all_here.wait()
        except TimeoutError as error:
            missing = ", ".join(str(node) for node in range(self._config.nnodes) if node not in self._hosts)
            raise EngineError(f"node {missing} of this worker did not come within {limit_ms} ms (start_ms)") from error
        hosts = [self._hosts[node] for node in range(self._config.nnodes)]
        for node in range(1, self._config.nnodes):
            self.tell(node, Welcome(incarnation=self._incarnation, hosts=tuple(hosts)))
        return hosts

    def tell(self, node: int, message: Welcome | Relay | Kill | Beat | Bye) -> None:
        """To the app of a node. Raises Overloaded when it takes nothing."""
        if node in self._names and not self._send(self._names[node], message):
            raise Overloaded(f"node {node} does not take messages; try another worker", Reason.WAITING_FULL)

    def _send(self, name: bytes, message: Welcome | Refused | Relay | Kill | Beat | Bye) -> bool:
        if self._socket is None:
            return True
        sent = cast("asyncio.Future[object]", self._socket.send_multipart([name, TO_NODE.encode(message)], zmq.NOBLOCK))
        if isinstance(sent.exception(), zmq.Again):
            return False
        sent.result()
        return True

    def close(self, exit_code: int) -> None:
        """Say goodbye; a node that does not hear it notices the silence."""
        if self._socket is not None:
            for node in self._heard_at:
                with contextlib.suppress(Overloaded):
                    self.tell(node, Bye(exit_code=exit_code))
            self._socket.close(linger=BEAT_MS)
            self._socket = None

    async def _read(self) -> None:
        assert self._socket is not None, "read before open"
        while True:
            sender, *parts = await self._socket.recv_multipart()
            try:
                if len(parts) != 1:
                    raise FrameError(f"a message of {len(parts)} parts")
                message = TO_HUB.decode(parts[0])
            except FrameError as error:
                self.bad_frames += 1
                log.warning("nodes.bad_frame", error=str(error))
                continue
            self._take(sender, message)

    def _take(self, sender: bytes, message: Join | Relay | Gone | Beat) -> None:
        if isinstance(message, Join):
            self._join(sender, message)
            return
        node = next((node for node, name in self._names.items() if name == sender), None)
        if node is None:
            return  # of an earlier life of this worker: it will notice
        self._heard_at[node] = self._clock()
        if isinstance(message, Beat):
            return
        rank = self._by_rank.get(message.rank)
        if rank is None or rank.node != node:
            return
        if isinstance(message, Gone):
            rank.over(message.what)
            return
        try:
            said = TO_APP.decode(message.frame)
        except FrameError:
            rank.bad_frames += 1
            return
        rank.heard.take(said)
        self._on_message(rank, said)

    def _join(self, sender: bytes, join: Join) -> None:
        wanted, node = plan_text(self._config), join.node
        if self._names.get(node) == sender:
            self._heard_at[node] = self._clock()  # it still waits for the others
            return
        if join.plan != wanted or not 0 < node < self._config.nnodes:
            text = f"node {node} would start {join.plan}, but node 0 wants {wanted}: give all nodes the same options"
        elif self._all_here.is_set():
            text = f"node {node} comes too late: the worker began with another; start all nodes together"
        else:
            self._hosts[node], self._names[node], self._heard_at[node] = join.host, sender, self._clock()
            if len(self._hosts) == self._config.nnodes:
                self._all_here.set()
            return
        log.warning("nodes.refused", node=node, text=text)
        self._send(sender, Refused(text=text))

    async def _beat(self) -> None:
        silent_ms = self._config.limits.link_silent_ms
        while True:
            await asyncio.sleep(BEAT_MS / 1000)
            for node, heard_at in self._heard_at.items():
                if self._clock() - heard_at > silent_ms:
                    for rank in self.ranks:
                        if rank.node == node:
                            rank.over(f"rank {rank.place.rank} is on node {node}, silent for {silent_ms} ms")
                    continue
                with contextlib.suppress(Overloaded):  # it is as good as silent, and will be
                    self.tell(node, Beat())
