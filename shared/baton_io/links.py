"""Control links over ZeroMQ: prefill ranks listen (ROUTER), decode ranks dial (DEALER), `baton_core.link` makes it reliable.

A frame that ZeroMQ cannot take at once is dropped here and repeated there; a frame that does not decode is counted and
dropped. Two kinds of payload travel: room messages for the core, page orders for the transfer backend.
"""

from dataclasses import dataclass

import structlog
import zmq

from baton_core import messages
from baton_core.events import RankEndpoint
from baton_core.limits import Limits, Millis
from baton_core.link import Frame, Heard, Switchboard
from baton_core.request import Incarnation
from baton_io.codec import Codec, FrameError

log = structlog.get_logger(__name__)

FRAMES = Codec({1: Frame})
PAYLOADS = Codec(
    {
        1: messages.Hello,
        2: messages.Accepted,
        3: messages.NotYet,
        4: messages.Rejected,
        5: messages.RoomFailed,
        6: messages.PageOrder,
    }
)
FRAME_BYTES_MAX = 16 * 1024 * 1024
HIGH_WATER_MARK = 8_192
Payload = messages.RoomMessage | messages.PageOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A payload from a peer."""

    peer: Incarnation
    payload: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The conversation with a peer ended."""

    peer: Incarnation
    text: str


News = Said | Lost


class Links:
    """All control links of one rank. `listen` makes it reachable (prefill); `dial` reaches out (decode).

    Not thread-safe: the driver's loop owns it. Sockets to poll are in `sockets`.
    """

    def __init__(self, own: Incarnation, limits: Limits) -> None:
        self._context = zmq.Context(io_threads=1)
        self._board = Switchboard(own, limits)
        self._router: zmq.Socket[bytes] | None = None
        self._routes: dict[Incarnation, bytes] = {}
        self._dealers: dict[Incarnation, zmq.Socket[bytes]] = {}
        self._monitors: dict[Incarnation, zmq.Socket[bytes]] = {}
        self.bad_frames = 0
        self.dropped_frames = 0

    @property
    def sockets(self) -> list["zmq.Socket[bytes]"]:
        """Sockets whose readability means news."""
        router = [] if self._router is None else [self._router]
        return [*router, *self._dealers.values(), *self._monitors.values()]

    @property
    def peers(self) -> tuple[Incarnation, ...]:
        """Peers with an open conversation."""
        return self._board.peers

    def listen(self, host: str) -> int:
        """Take conversations on a free port of `host`, which is returned."""
        router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router = router
        return router.bind_to_random_port(f"tcp://{_bracketed(host)}")

    def dial(self, peer: Incarnation, endpoint: RankEndpoint, now: Millis) -> None:
        """Open a conversation with `peer`, unless one is open."""
        if self._board.knows(peer):
            return
        self._hang_up_socket(peer)
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        self._monitors[peer] = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(f"tcp://{_bracketed(endpoint.host)}:{endpoint.port}")
        self._dealers[peer] = dealer
        self._board.dial(peer, now)

    def send(self, peer: Incarnation, payload: Payload, now: Millis) -> None:
        """Say something to `peer`; without an open conversation it is dropped (its loss was reported)."""
        for frame in self._board.send(peer, PAYLOADS.encode(payload), now):
            self._transmit(frame)

    def receive(self, now: Millis) -> list[News]:
        """Everything that has come in."""
        news: list[News] = []
        self._notice_breaks(now)
        for socket in [*([] if self._router is None else [self._router]), *self._dealers.values()]:
            # What a peer says may end the conversation, and with it the socket.
            while not socket.closed and (parts := self._next(socket)) is not None:
                news += self._take(parts, now)
        return news

    def tick(self, now: Millis) -> list[News]:
        """Repeat, beat, and notice silence."""
        frames, lost = self._board.tick(now)
        for frame in frames:
            self._transmit(frame)
        for peer, _ in lost:
            self._forget(peer)
        return [Lost(peer=peer, text=text) for peer, text in lost]

    def next_due(self) -> Millis | None:
        """When `tick` has something to do next."""
        return self._board.next_due()

    def close(self) -> None:
        """Say goodbye and close; bounded by a short linger."""
        for peer in self._board.peers:
            for frame in self._board.hang_up(peer):
                self._transmit(frame)
        for peer in list(self._dealers):
            self._hang_up_socket(peer)
        if self._router is not None:
            self._router.close(linger=200)
        self._router = None
        self._context.term()

    def _notice_breaks(self, now: Millis) -> None:
        """A broken connection is made again by ZeroMQ; whether the peer still lives must show soon."""
        for peer, monitor in list(self._monitors.items()):
            if self._next(monitor) is not None:
                while self._next(monitor) is not None:
                    pass
                for frame in self._board.suspect(peer, now):
                    self._transmit(frame)

    def _take(self, parts: list[bytes], now: Millis) -> list[News]:
        # A router puts the sender's name in front, a dealer does not; nobody sends more than the frame.
        wanted = 1 if self._router is None else 2
        try:
            if len(parts) != wanted:
                raise FrameError(f"a message of {len(parts)} parts, not {wanted}")
            frame: Frame = FRAMES.decode(parts[-1])
        except FrameError as error:
            self.bad_frames += 1
            log.warning("link.bad_frame", error=str(error))
            return []
        if self._router is not None:
            self._routes[frame.source] = parts[0]
        heard = self._board.receive(frame, now)
        for answer in heard.answers:
            self._transmit(answer)
        news = self._news(heard)
        if not self._board.knows(heard.peer):
            self._forget(heard.peer)
        return news

    def _news(self, heard: Heard) -> list[News]:
        # A conversation that replaces an older one ends that first.
        news: list[News] = [] if heard.lost is None else [Lost(peer=heard.peer, text=heard.lost)]
        for raw in heard.payloads:
            try:
                news.append(Said(peer=heard.peer, payload=PAYLOADS.decode(raw)))
            except FrameError as error:
                self.bad_frames += 1
                log.warning("link.bad_payload", peer=heard.peer, error=str(error))
        return news

    def _next(self, socket: "zmq.Socket[bytes]") -> list[bytes] | None:
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _transmit(self, frame: Frame) -> None:
        raw = FRAMES.encode(frame)
        try:
            if frame.target in self._dealers:
                self._dealers[frame.target].send(raw, zmq.NOBLOCK)
            elif self._router is not None and frame.target in self._routes:
                self._router.send_multipart([self._routes[frame.target], raw], zmq.NOBLOCK)
        except zmq.Again:
            self.dropped_frames += 1

    def _forget(self, peer: Incarnation) -> None:
        self._routes.pop(peer, None)
        self._hang_up_socket(peer)

    def _hang_up_socket(self, peer: Incarnation) -> None:
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            # Our end of the monitor must stay open until nothing is reported any more: ZeroMQ's own thread would wait for
            # ever, holding a lock that closing needs, to report a broken connection to nobody.
            monitor = self._monitors.pop(peer)
            dealer.disable_monitor()
            monitor.close(linger=0)
            dealer.close(linger=200)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        return socket


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
