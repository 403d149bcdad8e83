"""The ports of a running stack behind HTTP: links between leaders, and the streams on which pages come."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Sequence
from random import Random

import httpx
import zmq

from baton_engine.transfer.shm_door import SOCKET_SUFFIX
from baton_engine.transfer.shm_wire import own_boot_id
from fuzz.frame_cases import Bait, kv_case, link_case, shm_case, zmq_noise
from fuzz.lanes import Lane
from fuzz.ports import unix_listeners
from fuzz.stand import CONTEXT_TOKENS, ROOMS, Stand
from fuzz.wire import Wrong
from integration.noise import listening_ports

SOCKETS_EVERY = 40
"""Cases that share a ZeroMQ socket."""
BAIT_TOKENS = 20


class LinkLane(Lane):
    """Where decode's leaders dial prefill's. Half of the cases are about a room whose leg really waits there."""

    name = "links"

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._peer = stand.peer()
        rank = stand.pids["prefill rank 0"]
        (self._port,) = listening_ports(rank)
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self._baits: list[asyncio.Task[None]] = []
        self._bait = self._fresh()
        self._client: httpx.AsyncClient | None = None
        self._before = 0.0

    async def throw(self, dice: Random, number: int) -> None:
        if number % SOCKETS_EVERY == 0 or self._dealer is None:
            await self._again()
        if dice.random() < 0.02:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 2) as stream:
                stream.sendall(zmq_noise(dice))
            return
        bait = self._bait if dice.random() < 0.5 else Bait(room=dice.choice((1, 2, 2**63 - 1)), prompt=(1, 2))
        assert self._dealer is not None
        for message in link_case(dice, self._peer, bait, number):
            if message:
                self._dealer.send_multipart(message)

    async def check(self) -> None:
        if self._dealer is not None:
            self._dealer.close(linger=500)
            self._dealer = None
        await asyncio.gather(
            *self._baits, return_exceptions=True
        )  # of a leg that is lost with its worker `whole` tells
        self._baits.clear()
        await self._stand.whole()
        metrics = await self._metrics()
        if not metrics > self._before:
            raise Wrong(f"refused frames are not counted: link_bad_frames_total is {metrics}, was {self._before}")
        self._before = metrics

    def pids(self) -> Sequence[int]:
        return [self._stand.pids["prefill rank 0"], self._stand.pids["prefill"]]

    async def _again(self) -> None:
        """Another socket, and another leg that waits."""
        if self._dealer is not None:
            self._dealer.close(linger=500)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(f"tcp://127.0.0.1:{self._port}")
        self._bait = self._fresh()
        # Let the rank keep up: its queue is deep, and what it drops is not looked at.
        self._baits.append(asyncio.create_task(self._wait_as(self._bait)))
        await asyncio.sleep(0.01)

    @staticmethod
    def _fresh() -> Bait:
        room = next(ROOMS)
        return Bait(room=room, prompt=tuple(2 + (room + position) % 300 for position in range(BAIT_TOKENS)))

    async def _wait_as(self, bait: Bait) -> None:
        """A leg at prefill whose other leg a stranger may speak for; it ends in one way or another."""
        body = {
            "input_ids": bait.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_room": bait.room,
        }
        url = f"http://127.0.0.1:{self._stand.port('prefill')}/generate"
        async with httpx.AsyncClient(timeout=60) as client:
            await client.post(url, json=body, headers={"x-baton-budget-ms": "3000"})

    async def _metrics(self) -> float:
        url = f"http://127.0.0.1:{self._stand.port('prefill')}/debug/snapshot"
        async with httpx.AsyncClient(timeout=60) as client:
            return float((await client.get(url)).json()["ranks"][0]["counters"]["link_bad_frames_total"])


class _DecodeLane(Lane):
    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._rank = stand.pids["decode rank 0"]
        self._writer = stand.peer().name
        self._rooms = itertools.cycle(((1, 1), (2, 2**32 - 1), (2**63 - 1, 1)))

    async def check(self) -> None:
        await self._stand.whole()

    def pids(self) -> Sequence[int]:
        return [self._rank]


class LiveKvLane(_DecodeLane):
    """The port of decode on which pages come over TCP."""

    name = "kv"

    def __init__(self, stand: Stand) -> None:
        super().__init__(stand)
        (self._port,) = listening_ports(self._rank)

    async def throw(self, dice: Random, number: int) -> None:
        said = kv_case(dice, self._writer, [next(self._rooms)], page_bytes=4_096, pages=CONTEXT_TOKENS // 16)
        await asyncio.to_thread(_say, ("127.0.0.1", self._port), said, dice)


class LiveShmLane(_DecodeLane):
    """The unix socket on which decode hands out its memory."""

    name = "shm"

    def __init__(self, stand: Stand) -> None:
        super().__init__(stand)
        # The kernel knows it by the name that it had before it listened.
        paths = [path.with_suffix(SOCKET_SUFFIX) for path in unix_listeners(self._rank)]
        self._path = str(next(path for path in paths if path.exists()))

    async def throw(self, dice: Random, number: int) -> None:
        room, attempt = next(self._rooms)
        said = shm_case(dice, own_boot_id(), self._writer, [(room, attempt, 0)])
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
            stream.connect(self._path)
            stream.settimeout(2)
            for message in said:
                stream.send(message)
            if dice.random() < 0.3:
                stream.shutdown(dice.choice((socket.SHUT_WR, socket.SHUT_RDWR)))


def _say(address: tuple[str, int], said: Sequence[bytes], dice: Random) -> None:
    """Everything, in one piece or many, and then an end of some kind. What is refused in the middle is no matter."""
    with contextlib.suppress(OSError), socket.create_connection(address, 2) as stream:
        stream.settimeout(2)
        for piece in said:
            stream.sendall(piece)
        if dice.random() < 0.5:
            stream.shutdown(socket.SHUT_WR)
            stream.settimeout(0.05)
            while stream.recv(65_536):
                pass
