"""The prefill end of `shm`: a thread and a mapping of the pool for each decode rank, kept as long as that rank lives.

What a thread does is in `shm_copier`; here is how the driver reaches it, and how it begins and ends. It ends by
unmapping the pool and only then closing its socket, because decode takes the end of file for the end of all writing.
"""

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from enum import Enum

import structlog

from baton_core.agreement import KVPoll, Poller
from baton_core.effects import Push
from baton_core.errors import Reason
from baton_core.kv_layout import Layout, LayoutMismatch, plan
from baton_core.messages import PageOrder
from baton_core.request import Incarnation, PageId, Room
from baton_engine.kv_pool import KVPool
from baton_engine.transfer.attempts import Attempt, AttemptTable, Key, TablePoller
from baton_engine.transfer.protocol import Poke
from baton_engine.transfer.shm_copier import Copier, DecodeMemory, Job, PoolSource, Target
from baton_engine.transfer.shm_wire import hello, own_boot_id, receive_welcome, require_trusted

log = structlog.get_logger(__name__)

CLOSE_TIMEOUT_S = 1.0


class Reach(Enum):
    """How far the way to a decode rank is."""

    CONNECTING = "connecting"
    OPEN = "open"
    CLOSED = "closed"


class ShmSender:
    """Copies pages of `pool`, laid out as `layout`, into decode ranks' pools, in the name of `incarnation`."""

    def __init__(
        self, pool: KVPool, layout: Layout, incarnation: Incarnation, poke: Poke, *, connect_timeout_ms: int
    ) -> None:
        self._source = PoolSource(pool)
        self._layout = layout
        self._greeting = hello(own_boot_id(), incarnation)
        self._connect_timeout_s = connect_timeout_ms / 1000
        self._poke = poke
        self._table = AttemptTable(poke)
        self._orders: dict[Key, tuple[ShmChannel, Target]] = {}
        self._channels: dict[tuple[Incarnation, str], ShmChannel] = {}

    def offer(self, room: Room, attempt: int, peer: Incarnation, pages_total: int) -> None:
        """`peer` may order this attempt."""
        self._table.open(
            Attempt(room=room, attempt=attempt, peer=peer, status=KVPoll.Bootstrapping, pages_total=pages_total)
        )

    def order(self, peer: Incarnation, order: PageOrder) -> None:
        """Take a page order; one that was not offered, or that comes twice, changes nothing."""
        one = self._table.get(order.room, order.attempt)
        if one is None or one.peer != peer or one.status is not KVPoll.Bootstrapping:
            log.info("transfer.order_ignored", room=order.room, attempt=order.attempt, peer=peer)
            return
        try:
            target = self._understand(one, order)
        except (ValueError, LayoutMismatch) as error:
            self._table.fail(one, Reason.LAYOUT_MISMATCH, str(error))
            return
        channel = self.channel(peer, order.address)
        self._orders[(order.room, order.attempt)] = (channel, target)
        self._table.advance(one, KVPoll.WaitingForInput)
        channel.adopt(one, target.pages)

    def push(self, push: Push) -> None:
        """Queue finished pages for the rank that ordered them."""
        one = self._table.get(push.room, push.attempt)
        assert one is not None
        assert (push.room, push.attempt) in self._orders, "pushed before it was ordered"
        channel, target = self._orders[(push.room, push.attempt)]
        assert push.first + len(push.pages) <= len(target.pages), "pushed more than was ordered"
        self._table.advance(one, KVPoll.Transferring)
        channel.put(Job(one, push, target))

    def poller(self, room: Room, attempt: int) -> Poller:
        """This rank's view of the attempt."""
        return TablePoller(self._table, room, attempt)

    def revoke(self, room: Room, attempt: int) -> None:
        """Skip what is queued of the attempt; what is being copied ends with its batch."""
        self._table.revoke(room, attempt)
        self._nudge(room, attempt)

    def fence(self, room: Room, attempt: int) -> None:
        """Nothing to cut: copying depends on nobody, and ends with its batch."""
        self._nudge(room, attempt)

    def forget(self, room: Room, attempt: int) -> None:
        """Drop the attempt and its order."""
        self._table.forget(room, attempt)
        self._orders.pop((room, attempt), None)

    def peer_gone(self, peer: Incarnation) -> None:
        """Unmap the peer's pools and fail what was on its way there."""
        for key in [key for key in self._channels if key[0] == peer]:
            self._channels.pop(key).close()
        self._table.peer_lost(peer, f"decode worker {peer} is gone")

    def close(self) -> None:
        """End every thread; returns when their mappings are gone, or after a second."""
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            channel.close()
        for channel in channels:
            channel.join(CLOSE_TIMEOUT_S)

    def channel(self, peer: Incarnation, address: str) -> "ShmChannel":
        """The way to a decode rank; a closed one is replaced by a new attempt to get there."""
        key = (peer, address)
        channel = self._channels.get(key)
        if channel is None or channel.reach is Reach.CLOSED:
            channel = ShmChannel(
                address, self._greeting, self._source, self._table, self._poke, timeout_s=self._connect_timeout_s
            )
            self._channels[key] = channel
        return channel

    def _nudge(self, room: Room, attempt: int) -> None:
        ordered = self._orders.get((room, attempt))
        if ordered is not None:
            ordered[0].nudge()

    def _understand(self, one: Attempt, order: PageOrder) -> Target:
        if order.backend != "shm":
            raise ValueError(f"transfer backend is shm on prefill and {order.backend} on decode")
        if len(order.pages) != one.pages_total:
            raise ValueError(f"{len(order.pages)} pages are ordered; the prompt has {one.pages_total}")
        if not order.address.startswith("/"):
            raise ValueError(f"{order.address!r} is no path of a socket")
        theirs = Layout.from_text(order.layout)
        return Target(pages=order.pages, row=order.row, page_bytes=theirs.page_bytes, runs=plan(self._layout, theirs))


class ShmChannel:
    """The thread that serves one decode rank, seen from outside. Thread-safe. Once closed it stays closed."""

    def __init__(
        self, path: str, greeting: bytes, source: PoolSource, table: AttemptTable, poke: Poke, *, timeout_s: float
    ) -> None:
        self.reach = Reach.CONNECTING
        self.closed_by = ""
        self._path, self._greeting, self._timeout_s = path, greeting, timeout_s
        self._source, self._table, self._poke = source, table, poke
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._coming: deque[PageId] = deque()  # pages that will be written
        self._closing = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-copy", daemon=True)
        self._thread.start()

    def adopt(self, one: Attempt, pages: Sequence[PageId]) -> None:
        """The attempt will be carried by this channel, into these pages; it fails if the channel does."""
        with self._lock:
            one.carrier = self
            self._coming.extend(pages)
            alive = self._ring()
        if not alive:
            self._table.fail(one, Reason.TRANSFER_FAILED, self.closed_by)

    def put(self, job: Job) -> None:
        """Queue a push; on a channel that has closed, fail it."""
        with self._lock:
            self._jobs.append(job)
            alive = self._ring()
        if not alive:
            self._table.fail(job.one, Reason.TRANSFER_FAILED, self.closed_by)

    def nudge(self) -> None:
        """An attempt was revoked: look for it."""
        with self._lock:
            self._ring()

    def close(self) -> None:
        """End within a batch. Decode sees the end of file when nothing maps its pool here any more."""
        with self._lock:
            self._closing = True
            self._ring()

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        self._thread.join(timeout_s)

    def _ring(self) -> bool:
        if self.reach is Reach.CLOSED:
            return False
        os.eventfd_write(self._bell, 1)
        return True

    # -- the thread

    def _run(self) -> None:
        closed_by = "the copying thread failed"  # stays where a fault of ours ends the thread
        try:
            closed_by = self._live()
        finally:
            self._end(closed_by)

    def _live(self) -> str:
        try:
            stream, memory = _connect(self._path, self._greeting, self._timeout_s)
        except (OSError, ValueError) as error:
            return f"cannot reach decode over shared memory: {error}"
        try:
            with self._lock:
                self.reach = Reach.OPEN
            self._poke()
            self._serve(stream, Copier(stream, memory, self._source, self._table, self, lambda: self._closing))
            return "closed"
        except OSError as error:
            return f"decode ended the connection: {error}"
        finally:
            # In this order: the end of file tells decode that nothing here can write to its pool.
            memory.close()
            stream.close()

    def _serve(self, stream: socket.socket, copier: Copier) -> None:
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        while not self._closing:
            copier.hear()
            self._hand_over(copier)
            copier.sweep()
            if not copier.work():
                poller.register(stream, select.POLLIN | (select.POLLOUT if copier.unsent else 0))
                poller.poll()
                copier.flush()

    def _hand_over(self, copier: Copier) -> None:
        with self._lock:
            try:
                os.eventfd_read(self._bell)
            except BlockingIOError:
                return  # nobody rang
            jobs, self._jobs = self._jobs, deque()
            coming, self._coming = self._coming, deque()
        copier.warm(coming)
        for job in jobs:
            copier.take(job)

    def _end(self, closed_by: str) -> None:
        with self._lock:
            self.closed_by = closed_by
            self.reach = Reach.CLOSED
            self._jobs.clear()
            self._coming.clear()
            os.close(self._bell)
        self._table.carrier_lost(self, closed_by)
        self._poke()


def _connect(path: str, greeting: bytes, timeout_s: float) -> tuple[socket.socket, DecodeMemory]:
    """Greet decode and map its memory. Raises OSError or ValueError."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        stream.settimeout(timeout_s)
        stream.connect(path)
        require_trusted(stream)
        stream.send(greeting)
        memory = DecodeMemory(*receive_welcome(stream))
        stream.settimeout(None)
    except (OSError, ValueError):
        stream.close()
        raise
    return stream, memory
