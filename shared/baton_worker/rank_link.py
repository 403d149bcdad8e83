"""The app's end of the ipc to one rank: a bound ZeroMQ pair socket, one message a tick each way.

The app binds before the rank starts; the rank connects to the address in its `RankConfig`. Sending never waits: what
the app may have outstanding is bounded by its live requests, so a full queue means that the rank no longer reads.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import zmq
import zmq.asyncio

from baton_core.errors import Overloaded, Reason
from baton_core.events import (
    Abort,
    AbortAll,
    Continue,
    DrainBegan,
    FlushCache,
    LookupFailed,
    Pause,
    Resolved,
    StopHere,
    Submit,
)
from baton_io.codec import FrameError
from baton_io.ipc import (
    TO_APP,
    TO_RANK,
    Emits,
    LoadProgress,
    LookUps,
    PeersLost,
    Ping,
    RankFailed,
    RankReady,
    RegisterRanks,
    Snapshot,
    Stop,
)

ToRank = (
    Submit
    | Abort
    | AbortAll
    | StopHere
    | Resolved
    | LookupFailed
    | DrainBegan
    | FlushCache
    | Pause
    | Continue
    | Ping
    | Stop
)
FromRank = RankReady | LoadProgress | Emits | LookUps | RegisterRanks | PeersLost | Snapshot | RankFailed

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Largest frame taken from a rank; ZeroMQ drops the connection of a larger one."""


class RankLink:
    """Sends to one rank and hands what it says to `on_message`, in order, on the event loop."""

    def __init__(
        self,
        *,
        rank: int,
        address: str,
        context: zmq.asyncio.Context,
        frames_max: int,
        on_message: Callable[[FromRank], None],
    ) -> None:
        """`frames_max` bounds the frames queued each way; `context` is shared and outlives the link."""
        self.address = address
        self.bad_frames = 0
        self._rank = rank
        self._frames_max = frames_max
        self._on_message = on_message
        self._context = context
        self._socket: zmq.asyncio.Socket | None = None

    @property
    def is_open(self) -> bool:
        """Whether `send` may be called."""
        return self._socket is not None

    def open(self) -> None:
        """Bind. Raises zmq.ZMQError when the address cannot be bound."""
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, self._frames_max)
        self._socket.setsockopt(zmq.RCVHWM, self._frames_max)
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)

    def send(self, message: ToRank) -> None:
        """Queue `message` for the rank. Raises Overloaded when the rank does not read."""
        assert self._socket is not None, "send before open"
        # With NOBLOCK the future is already done: a result, or Again.
        sent = cast("asyncio.Future[object]", self._socket.send(TO_RANK.encode(message), zmq.NOBLOCK))
        if isinstance(sent.exception(), zmq.Again):
            raise Overloaded(f"rank {self._rank} does not take messages; try another worker", Reason.WAITING_FULL)
        sent.result()

    async def run(self) -> None:
        """Receive until cancelled. A frame that is not one of ours is counted and dropped."""
        assert self._socket is not None, "run before open"
        while True:
            frame = await self._socket.recv()
            try:
                message = TO_APP.decode(frame)
            except FrameError:
                self.bad_frames += 1
                continue
            self._on_message(message)

    def close(self) -> None:
        """Close the socket; what was not sent is dropped."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None
