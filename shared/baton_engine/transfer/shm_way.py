"""The way by `shm`: a thread and a mapping of the pool for each decode rank, kept as long as that rank lives.

What a thread does is in `shm_copier`; here is how the driver reaches it, and how it begins and ends. It ends by
unmapping the pool and only then closing its socket, because decode takes the end of file for the end of all writing.
"""

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence

from baton_core.errors import Reason
from baton_core.request import Incarnation, PageId
from baton_engine.kv_pool import KVPool
from baton_engine.transfer.attempts import AttemptTable
from baton_engine.transfer.checksum import Checksums
from baton_engine.transfer.flow import Flow
from baton_engine.transfer.pool_bytes import PoolSource
from baton_engine.transfer.protocol import Poke
from baton_engine.transfer.shm_copier import Copier, DecodeMemory
from baton_engine.transfer.shm_wire import hello, own_boot_id, receive_welcome, require_trusted
from baton_engine.transfer.ways import Job, Reach, Target

CLOSE_TIMEOUT_S = 1.0


class ShmWay:
    """Copies pages of `pool` into decode ranks' pools, in the name of rank `own`."""

    name = "shm"

    def __init__(
        self,
        pool: KVPool,
        own: Incarnation,
        table: AttemptTable,
        poke: Poke,
        *,
        connect_timeout_ms: int,
        checksum: bool = False,
    ) -> None:
        self._source = PoolSource(pool)
        self._sums = Checksums(pool.memory) if checksum else None
        self._greeting = hello(own_boot_id(), own)
        self._connect_timeout_s = connect_timeout_ms / 1000
        self._poke = poke
        self._table = table
        self._channels: dict[tuple[Incarnation, str], ShmChannel] = {}

    def check(self, address: str) -> None:
        """It is the path of a socket."""
        if not address.startswith("/"):
            raise ValueError(f"{address!r} is no path of a socket")

    def probe(self, peer: Incarnation, address: str) -> "ShmChannel":
        """The way to a decode rank; a closed one is replaced by a new attempt to get there."""
        key = (peer, address)
        channel = self._channels.get(key)
        if channel is None or channel.reach is Reach.CLOSED:
            channel = ShmChannel(
                address,
                self._greeting,
                self._source,
                self._table,
                self._poke,
                timeout_s=self._connect_timeout_s,
                sums=self._sums,
            )
            self._channels[key] = channel
        return channel

    def prepare(self, flow: Flow, target: Target) -> None:
        """Map the pages before they are written; the attempt fails if decode cannot be reached."""
        self.probe(flow.peer, target.address).adopt(flow, target.pages[target.held_pages :])

    def put(self, job: Job) -> None:
        """Queue finished pages."""
        self.probe(job.flow.peer, job.target.address).put(job)

    def nudge(self, flow: Flow, target: Target) -> None:
        """Nothing to cut: copying depends on nobody, and ends with its batch."""
        channel = self._channels.get((flow.peer, target.address))
        if channel is not None:
            channel.nudge()

    def peer_gone(self, peer: Incarnation) -> None:
        """Unmap the rank's pool."""
        for key in [key for key in self._channels if key[0] == peer]:
            self._channels.pop(key).close()

    def close(self) -> None:
        """End every thread; returns when their mappings are gone, or after a second."""
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            channel.close()
        for channel in channels:
            channel.join(CLOSE_TIMEOUT_S)


class ShmChannel:
    """The thread that serves one decode rank, seen from outside. Thread-safe. Once closed it stays closed."""

    def __init__(
        self,
        path: str,
        greeting: bytes,
        source: PoolSource,
        table: AttemptTable,
        poke: Poke,
        *,
        timeout_s: float,
        sums: Checksums | None,
    ) -> None:
        self.reach = Reach.CONNECTING
        self.closed_by = ""
        self._path, self._greeting, self._timeout_s = path, greeting, timeout_s
        self._source, self._table, self._poke, self._sums = source, table, poke, sums
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._coming: deque[PageId] = deque()  # pages that will be written
        self._closing = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-copy", daemon=True)
        self._thread.start()

    def adopt(self, flow: Flow, pages: Sequence[PageId]) -> None:
        """The flow will be carried by this channel, into these pages; its attempt fails if the channel does."""
        with self._lock:
            flow.carrier = self
            self._coming.extend(pages)
            alive = self._ring()
        if not alive:
            self._table.fail(flow.one, Reason.TRANSFER_FAILED, self.closed_by)

    def put(self, job: Job) -> None:
        """Queue a push; on a channel that has closed, fail it."""
        with self._lock:
            self._jobs.append(job)
            alive = self._ring()
        if not alive:
            self._table.fail(job.flow.one, Reason.TRANSFER_FAILED, self.closed_by)

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
            copier = Copier(stream, memory, self._source, self._table, self, lambda: self._closing, self._sums)
            self._serve(stream, copier)
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
        while True:
            copier.hear()
            self._hand_over(copier)
            # Only here: whoever closes rings too, and the bell has just been read.
            if self._closing:
                return
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
