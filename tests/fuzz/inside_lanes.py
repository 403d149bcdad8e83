"""Ports whose servers are driven in this process: the real object behind a real socket, so that its memory can be looked at.

pages      decode's TCP door with attempts under way: nothing is written but the pages and the row that were ordered
memory     decode's door to shared memory, likewise: what was granted is free again once the writer is gone
unit log   the leader of a unit; its member is always understood, whatever strangers say
rounds     unit 0's leader under DP attention, likewise
nodes      node 0 of a worker on two nodes, likewise
ipc        what app and rank make of each other's bytes: a message, or a frame that is dropped and counted
"""

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

import zmq
import zmq.asyncio

from baton_core.unit_log import Idled, LogEntry
from baton_engine.transfer.shm_wire import order_digest, own_boot_id
from baton_io.codec import FrameError
from baton_io.ipc import TO_APP, TO_RANK, Snapshot
from baton_io.rounds_channel import ConductorRounds, UnitRounds
from baton_io.unit_channel import LeaderChannel, MemberChannel
from baton_worker.config import DecodeConfig
from baton_worker.nodes import TO_HUB, Beat, Hub, Join, Relay, plan_text
from baton_worker.rank_link import RankLink
from baton_worker.serving import monotonic_ms
from contract.transfer_pairs import PAGES, PREFILL, SHAPE, WAIT_S, Pair, make_pair
from fuzz.frame_cases import hub_case, kv_case, note_case, round_case, shm_case, to_app, to_rank
from fuzz.lanes import Lane
from fuzz.wire import Wrong
from ports import free_port

ORDERED, ROW = (5, 3, 9), 2
GATHER_MS = 10_000
NAMES = (b"", b"member 1", b"member 2", b"1", b"\x01", b"\x00\x00\x00\x00\x01")
"""What a stranger calls itself at a ROUTER: nothing, or what a sibling might be called."""
SHARE = 50
"""Cases between two looks at what the members of a unit hear of each other."""


class InsideLane(Lane):
    """A server in this process."""

    def pids(self) -> Sequence[int]:
        return [os.getpid()]

    async def close(self) -> None:
        """End it."""
        self._held.close()

    def __init__(self) -> None:
        self._held = ExitStack()
        self._directory = Path(self._held.enter_context(tempfile.TemporaryDirectory()))


class PairLane(InsideLane):
    """A receiver that expects a handoff in every case."""

    backends: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self._pairs = [self._pair(backend) for backend in self.backends]

    def _pair(self, backend: str) -> Pair:
        pairs = make_pair(backend, self._directory)
        self._held.callback(lambda: next(pairs, None))
        return next(pairs)

    async def throw(self, dice: Random, number: int) -> None:
        await asyncio.to_thread(self._throw, dice, self._pairs[number % len(self._pairs)], number + 1)

    async def check(self) -> None:
        for pair in self._pairs:
            await asyncio.to_thread(self._whole, pair)

    def _throw(self, dice: Random, pair: Pair, room: int) -> None:
        pair.expect(room, pages=ORDERED, row=ROW)
        try:
            self._say(dice, pair, room)
            pair.receiver.revoke(room, 1)
            pair.bell.until(lambda: pair.received(room).writers_stopped, "nobody writes any more")
            self._look(pair)
        finally:
            pair.receiver.forget(room, 1)
        pair.target.tensor.zero_()
        for row in range(4):
            pair.rows.clear(row)

    @abstractmethod
    def _say(self, dice: Random, pair: Pair, room: int) -> None:
        """What the case says, to the end of the connection."""

    def _look(self, pair: Pair) -> None:
        """Nothing but what was ordered has been touched. Raises Wrong."""
        others = [page for page in range(PAGES) if page not in ORDERED]
        if pair.target.tensor[others].any():
            raise Wrong(f"pages beyond {ORDERED} were written")
        rows = [row for row in range(4) if row != ROW and pair.rows.room_word(row)]
        if rows:
            raise Wrong(f"rows {rows} were written, not {ROW} alone")

    def _whole(self, pair: Pair) -> None:
        """A handoff passes as if nothing had happened."""
        pair.begin()
        pair.push_all()
        pair.bell.until(lambda: pair.received().poll.name == "Success", "the next handoff arrives")
        for ordinal, page in enumerate(ORDERED):
            if not bool((pair.target.tensor[page] == pair.source.tensor[ordinal]).all()):
                raise Wrong(f"page {ordinal} of the next handoff is not what was sent")
        pair.bell.until(lambda: pair.sent().poll.name == "Success", "prefill hears of it")
        pair.receiver.forget(7, 1)
        pair.sender.forget(7, 1)
        pair.target.tensor.zero_()
        pair.rows.clear(ROW)


class PagesLane(PairLane):
    """Over TCP, straight and staged."""

    name = "pages"
    backends = ("tcp", "staged")

    def _say(self, dice: Random, pair: Pair, room: int) -> None:
        host, port = pair.receiver.address.rsplit(":", 1)
        attempts = [(room, 1)] * 4 + [(room, 2), (room + 1, 1), (0, 1)]
        said = kv_case(dice, PREFILL, attempts, page_bytes=SHAPE.page_bytes, pages=len(ORDERED))
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), WAIT_S) as stream:
            stream.settimeout(WAIT_S)
            for piece in said:
                stream.sendall(piece)
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(65_536):
                pass


class MemoryLane(PairLane):
    """Over shared memory: the writer never writes, and lies about it."""

    name = "memory"
    backends = ("shm",)

    def _say(self, dice: Random, pair: Pair, room: int) -> None:
        digest = order_digest(ORDERED, ROW, 0)
        attempts = [(room, 1, digest)] * 4 + [(room, 2, digest), (room + 1, 1, digest)]
        said = shm_case(dice, own_boot_id(), PREFILL, attempts)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
            stream.connect(pair.receiver.address)
            stream.settimeout(WAIT_S)
            for message in said:
                stream.send(message)
            if dice.random() < 0.3:
                stream.shutdown(dice.choice((socket.SHUT_WR, socket.SHUT_RDWR)))


class LogLane(InsideLane):
    """Strangers at the log of a unit of two members."""

    name = "unit log"

    def __init__(self) -> None:
        super().__init__()
        self._address = f"ipc://{self._directory}/log"
        self._leader = LeaderChannel(self._address, 2)
        self._member = MemberChannel(self._address, 1)
        joining = threading.Thread(target=self._member.gather, args=(GATHER_MS,))
        joining.start()
        self._leader.gather(GATHER_MS)
        joining.join()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stranger = _stranger(self._context, self._address)
        self._position = 0
        for end in (self._leader, self._member):
            self._held.callback(end.close)
        self._held.callback(lambda: self._context.destroy(linger=0))

    async def throw(self, dice: Random, number: int) -> None:
        message = note_case(dice)
        if message:
            self._stranger.send_multipart(message)
        if dice.random() < 0.02:
            self._stranger.close(linger=200)
            self._stranger = _stranger(self._context, self._address, dice.choice(NAMES))
        if number % SHARE == 0:
            await self._speak()

    async def check(self) -> None:
        await self._speak()
        if not self._leader.bad_frames:
            raise Wrong("frames of strangers are not counted")

    async def _speak(self) -> None:
        """An entry, and a note in answer; nothing of the strangers' is among it."""
        self._position += 1
        self._member.note(Idled(member=1))
        self._leader.send(LogEntry(position=self._position, now=1, inputs=(), results=(), consensus=()))
        notes: list[object] = []
        entries: list[LogEntry] = []
        async with asyncio.timeout(WAIT_S):
            while not notes or not entries:
                notes += self._leader.receive()
                entries += self._member.receive()
                await asyncio.sleep(0)
        if notes != [Idled(member=1)] or [one.position for one in entries] != [self._position]:
            raise Wrong(f"the unit heard {notes} and {entries}")


class RoundsLane(InsideLane):
    """Strangers where the leaders of two units meet."""

    name = "rounds"

    def __init__(self) -> None:
        super().__init__()
        address = f"ipc://{self._directory}/rounds"
        self._conductor, self._unit = ConductorRounds(address, 2), UnitRounds(address, 1)
        joining = threading.Thread(target=self._unit.gather, args=(GATHER_MS,))
        joining.start()
        self._conductor.gather(GATHER_MS)
        joining.join()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._address = address
        self._stranger = _stranger(self._context, address)
        self._number = 0
        for end in (self._conductor, self._unit):
            self._held.callback(end.close)
        self._held.callback(lambda: self._context.destroy(linger=0))

    async def throw(self, dice: Random, number: int) -> None:
        message = round_case(dice)
        if message:
            self._stranger.send_multipart(message)
        if dice.random() < 0.02:
            self._stranger.close(linger=200)
            self._stranger = _stranger(self._context, self._address, dice.choice(NAMES))
        if number % SHARE == 0:
            await self._round()

    async def check(self) -> None:
        await self._round()
        if not self._conductor.bad_frames:
            raise Wrong("frames of strangers are not counted")

    async def _round(self) -> None:
        """One round, wanted by unit 1, is the next one and comes once for both."""
        self._unit.want()
        self._number += 1
        begun: list[list[int]] = [[], []]
        async with asyncio.timeout(WAIT_S):
            while not all(begun):
                begun[0] += self._conductor.begun()
                begun[1] += self._unit.begun()
                await asyncio.sleep(0)
        if begun != [[self._number]] * 2:
            raise Wrong(f"round {self._number} began as {begun}")
        self._conductor.over(self._number)
        self._unit.over(self._number)


class NodesLane(InsideLane):
    """Strangers at node 0 of a worker on two nodes, whose other node has joined."""

    name = "nodes"

    def __init__(self) -> None:
        super().__init__()
        self._hub: Hub | None = None

    async def throw(self, dice: Random, number: int) -> None:
        if self._hub is None:
            await self._open()
        message = hub_case(dice, plan_text(self._config))
        if message:
            await self._stranger.send_multipart(message)
        if number % SHARE == 0:
            await self._heard()

    async def check(self) -> None:
        await self._heard()
        assert self._hub is not None
        if not self._hub.bad_frames:
            raise Wrong("frames of strangers are not counted")

    async def close(self) -> None:
        if self._hub is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._hub.close(0)
            self._context.destroy(linger=0)
        await super().close()

    async def _open(self) -> None:
        port = free_port(in_a_row=3)
        self._config = DecodeConfig(nnodes=2, node_rank=0, dist_init_addr=f"127.0.0.1:{port}", tp=2)
        self._context = zmq.asyncio.Context()
        self._snapshots: asyncio.Queue[object] = asyncio.Queue()
        self._hub = Hub(
            self._config, "life", self._context, monotonic_ms, lambda _rank, said: self._snapshots.put_nowait(said)
        )
        self._hub.open()
        self._reading = asyncio.create_task(self._hub.run())
        address = f"tcp://127.0.0.1:{port + 1}"
        self._node = self._dealer(address, b"node 1")
        await self._node.send(TO_HUB.encode(Join(node=1, host="h", plan=plan_text(self._config))))
        await self._hub.gather()
        self._stranger = self._dealer(address, b"")

    def _dealer(self, address: str, name: bytes) -> zmq.asyncio.Socket:
        dealer: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        if name:
            dealer.setsockopt(zmq.IDENTITY, name)
        dealer.connect(address)
        return dealer

    async def _heard(self) -> None:
        """What a rank of the other node says arrives, and nothing else does."""
        if self._reading.done():
            raise Wrong(f"node 0 does not read any more: {self._reading.exception()!r}")

        said = Snapshot(rank=1, progress=5)
        await self._node.send(TO_HUB.encode(Relay(rank=1, frame=TO_APP.encode(said))))
        async with asyncio.timeout(WAIT_S):
            got = await self._snapshots.get()
        if got != said or not self._snapshots.empty():
            raise Wrong(f"node 0 heard {got}, and {self._snapshots.qsize()} messages more")
        await self._node.send(TO_HUB.encode(Beat()))


class IpcLane(InsideLane):
    """Between an app and its rank: the app's end for real, the rank's as its codec."""

    name = "ipc"

    def __init__(self) -> None:
        super().__init__()
        self._link: RankLink | None = None

    async def throw(self, dice: Random, number: int) -> None:
        if self._link is None:
            await self._open()
        with contextlib.suppress(FrameError):
            TO_RANK.decode(to_rank(dice))
        await self._rank.send(to_app(dice))
        if number % SHARE == 0:
            await self.check()

    async def check(self) -> None:
        if self._reading.done():
            raise Wrong(f"the app does not read any more: {self._reading.exception()!r}")
        self._heard.clear()
        await self._rank.send(TO_APP.encode(Snapshot(rank=0, progress=987_654_321)))
        async with asyncio.timeout(WAIT_S):
            await self._heard.wait()

    async def close(self) -> None:
        if self._link is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._link.close()
            self._context.destroy(linger=0)
        await super().close()

    async def _open(self) -> None:
        address = f"ipc://{self._directory}/rank"
        self._context = zmq.asyncio.Context()
        self._heard = asyncio.Event()
        self._link = RankLink(rank=0, address=address, context=self._context, frames_max=1_000, on_message=self._take)
        self._link.open()
        self._reading = asyncio.create_task(self._link.run())
        self._rank: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        self._rank.connect(address)

    def _take(self, message: object) -> None:
        if isinstance(message, Snapshot) and message.progress == 987_654_321:
            self._heard.set()


def _stranger(context: "zmq.Context[zmq.Socket[bytes]]", address: str, name: bytes = b"") -> "zmq.Socket[bytes]":
    dealer = context.socket(zmq.DEALER)
    if name:
        dealer.setsockopt(zmq.IDENTITY, name)
    dealer.connect(address)
    return dealer


INSIDE: dict[str, type[InsideLane]] = {
    lane.name: lane for lane in (PagesLane, MemoryLane, LogLane, RoundsLane, NodesLane, IpcLane)
}
