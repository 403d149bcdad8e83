"""`auto`: shared memory where both ends are on one host and the pool's descriptor arrives, else tcp.

Decode offers both ways in one address; prefill chooses, once for each decode worker, and says why in the log. The choice
is prefill's because only it can try: it takes the boot id for a hint and the descriptor for the proof. A prefill worker
that was told to use one backend chooses too, among one; so every worker fits a decode worker in `auto`.
"""

import json
from dataclasses import asdict, dataclass, replace

import structlog

from baton_core.agreement import KVPoll, Observation, Poller
from baton_core.effects import Push
from baton_core.messages import PageOrder
from baton_core.request import Incarnation, PageId, Room
from baton_engine.transfer.attempts import Key
from baton_engine.transfer.protocol import Sender
from baton_engine.transfer.shm_receiver import ShmReceiver
from baton_engine.transfer.shm_sender import Reach, ShmChannel, ShmSender
from baton_engine.transfer.shm_wire import own_boot_id
from baton_engine.transfer.tcp_receiver import TcpReceiver
from baton_engine.transfer.tcp_sender import TcpSender

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """An `auto` address: where decode listens, and on which host."""

    shm: str
    tcp: str
    boot_id: str

    def to_text(self) -> str:
        """The address in a page order."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_text(text: str) -> "Ways":
        """The address in `text`. Raises ValueError if it is none."""
        try:
            ways = Ways(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"{text!r} is no address of auto: {error}") from error
        if not all(isinstance(value, str) for value in asdict(ways).values()):
            raise ValueError(f"{text!r} is no address of auto")
        return ways


class AutoReceiver:
    """The decode end: expects every attempt on both ways; the writer takes one."""

    backend = "auto"

    def __init__(self, shm: ShmReceiver, tcp: TcpReceiver) -> None:
        self._both = (shm, tcp)
        self.address = Ways(shm=shm.address, tcp=tcp.address, boot_id=own_boot_id()).to_text()

    @property
    def bytes_received(self) -> int:
        """Bytes of pages, both ways."""
        return sum(end.bytes_received for end in self._both)

    def expect(self, room: Room, attempt: int, writer: Incarnation, pages: tuple[PageId, ...], row: int) -> None:
        """Let `writer` fill these pages and this row, by whichever way."""
        for end in self._both:
            end.expect(room, attempt, writer, pages, row)

    def poller(self, room: Room, attempt: int) -> Poller:
        """What both ends see, merged."""
        shm, tcp = self._both
        return _MergedPoller(shm.poller(room, attempt), tcp.poller(room, attempt))

    def revoke(self, room: Room, attempt: int) -> None:
        """On both ways."""
        for end in self._both:
            end.revoke(room, attempt)

    def fence(self, room: Room, attempt: int) -> None:
        """Whatever each way can do."""
        for end in self._both:
            end.fence(room, attempt)

    def forget(self, room: Room, attempt: int) -> None:
        """On both ways."""
        for end in self._both:
            end.forget(room, attempt)

    def close(self) -> None:
        """Both ways."""
        for end in self._both:
            end.close()


@dataclass(frozen=True, slots=True)
class _MergedPoller:
    """One attempt that two ends expect. At most one of them hears of it."""

    one: Poller
    other: Poller

    def poll(self) -> Observation:
        """Failed if either is, otherwise the further of the two; pages are free when nobody writes on either way."""
        a, b = self.one.poll(), self.other.poll()
        lead = min(a, b, key=_poll) if KVPoll.Failed in (a.poll, b.poll) else max(a, b, key=_poll)
        return replace(
            lead, writers_stopped=a.writers_stopped and b.writers_stopped, progress=max(a.progress, b.progress)
        )


def _poll(seen: Observation) -> KVPoll:
    return seen.poll


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a later order must match."""

    peer: Incarnation
    pages_total: int


@dataclass(frozen=True, slots=True)
class _Undecided:
    """An order that waits until shared memory was tried."""

    order: PageOrder
    ways: dict[str, str]
    channel: ShmChannel


class AutoSender:
    """The prefill end: hands every attempt to the backend chosen for its decode worker.

    Not thread-safe: everything happens on the driver's thread. A choice that waits for an answer is made by the next
    `poller` call after the poke that announced it.
    """

    def __init__(self, *, shm: ShmSender | None, tcp: TcpSender | None) -> None:
        ends: dict[str, Sender | None] = {"shm": shm, "tcp": tcp}  # the better way first
        self._ends: dict[str, Sender] = {name: end for name, end in ends.items() if end is not None}
        assert self._ends, "a sender without a way to send"
        self._shm = shm
        self._boot_id = own_boot_id()
        self._default = next(iter(self._ends))
        self._offers: dict[Key, _Offer] = {}
        self._homes: dict[Key, str] = {}  # which end keeps the attempt
        self._undecided: dict[Key, _Undecided] = {}
        self._chosen: dict[Incarnation, str] = {}

    def offer(self, room: Room, attempt: int, peer: Incarnation, pages_total: int) -> None:
        """`peer` may order this attempt."""
        self._offers[(room, attempt)] = _Offer(peer, pages_total)
        self._homes[(room, attempt)] = self._default
        self._ends[self._default].offer(room, attempt, peer, pages_total)

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """Take a page order, by the best way that both sides have."""
        key = (order.room, order.attempt)
        offer = self._offers.get(key)
        if offer is None or offer.peer != peer or key in self._undecided:
            log.info("transfer.order_ignored", room=order.room, attempt=order.attempt, peer=peer)
            return
        ways, same_host = self._ways(order)
        usable = [name for name in self._ends if name in ways]
        if not usable:
            self._ends[self._homes[key]].order(peer, order)  # which refuses it, naming its own backend and theirs
        elif len(usable) == 1:
            reason = f"decode offers {', '.join(ways)}; prefill has {', '.join(self._ends)}"
            self._decide(key, order, usable[0], ways, reason)
        elif self._chosen.get(peer) == "tcp":
            self._decide(key, order, "tcp", ways, "as before")
        elif not same_host:
            self._decide(key, order, "tcp", ways, "decode runs on another host")
        else:
            assert self._shm is not None
            self._undecided[key] = _Undecided(order, ways, self._shm.channel(peer, ways["shm"]))
            self._settle()

    def push(self, push: Push) -> None:
        """Send by the chosen way."""
        self._ends[self._homes[(push.room, push.attempt)]].push(push)

    def poller(self, room: Room, attempt: int) -> Poller:
        """This rank's view of the attempt; Bootstrapping until its way is chosen."""
        if self._undecided:
            self._settle()
        return self._ends[self._homes.get((room, attempt), self._default)].poller(room, attempt)

    def revoke(self, room: Room, attempt: int) -> None:
        """Stop sending, or never begin."""
        self._undecided.pop((room, attempt), None)
        self._home(room, attempt).revoke(room, attempt)

    def fence(self, room: Room, attempt: int) -> None:
        """Whatever its way can do."""
        self._home(room, attempt).fence(room, attempt)

    def forget(self, room: Room, attempt: int) -> None:
        """Drop the attempt."""
        self._home(room, attempt).forget(room, attempt)
        for kept in (self._offers, self._homes, self._undecided):
            kept.pop((room, attempt), None)

    def peer_gone(self, peer: Incarnation) -> None:
        """Keep nothing about this peer, the choice made for it included."""
        self._chosen.pop(peer, None)
        for key in [key for key in self._undecided if self._offers[key].peer == peer]:
            del self._undecided[key]
        for end in self._ends.values():
            end.peer_gone(peer)

    def close(self) -> None:
        """All ways."""
        for end in self._ends.values():
            end.close()

    # -- choosing

    def _home(self, room: Room, attempt: int) -> Sender:
        return self._ends[self._homes.get((room, attempt), self._default)]

    def _ways(self, order: PageOrder) -> tuple[dict[str, str], bool]:
        """The address for each backend that decode offers, and whether decode runs on this host."""
        if order.backend != "auto":
            return {order.backend: order.address}, True
        try:
            ways = Ways.from_text(order.address)
        except ValueError:
            return {self._default: order.address}, True  # which refuses it, quoting the address
        return {"shm": ways.shm, "tcp": ways.tcp}, ways.boot_id == self._boot_id

    def _settle(self) -> None:
        """Decide what could be tried since."""
        for key, waiting in list(self._undecided.items()):
            reach = waiting.channel.reach
            if reach is Reach.CONNECTING:
                continue
            del self._undecided[key]
            if reach is Reach.OPEN:
                self._decide(key, waiting.order, "shm", waiting.ways, "decode's memory is mapped")
            else:
                self._decide(key, waiting.order, "tcp", waiting.ways, waiting.channel.closed_by)

    def _decide(self, key: Key, order: PageOrder, backend: str, ways: dict[str, str], reason: str) -> None:
        offer = self._offers.pop(key)  # decided once: another order of this attempt changes nothing
        if self._chosen.get(offer.peer) != backend:
            self._chosen[offer.peer] = backend
            log.info("transfer.chosen", peer=offer.peer, backend=backend, reason=reason)
        if self._homes[key] != backend:
            self._ends[self._homes[key]].forget(*key)
            self._homes[key] = backend
            self._ends[backend].offer(*key, offer.peer, offer.pages_total)
        self._ends[backend].order(offer.peer, replace(order, backend=backend, address=ways[backend]))
