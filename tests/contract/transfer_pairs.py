"""Real ends of a transfer backend, each over a pool of its own, for the contract tests: in pairs, and in whole units."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from baton_core.agreement import KVPoll, Observation, SoloGroup, Watch, poll_and_all_reduce_with_staging
from baton_core.effects import Push
from baton_core.kv_layout import UnitLayout, readers, writers
from baton_core.messages import MetadataRow, PageOrder
from baton_core.ranks import Member
from baton_engine.kv_pool import KVPool, PoolShape, RowMemory
from baton_engine.transfer.attempts import AttemptTable
from baton_engine.transfer.fake import FakeReceiver, FakeSender
from baton_engine.transfer.pool_bytes import PoolTarget
from baton_engine.transfer.protocol import Receiver, Sender
from baton_engine.transfer.receiver import Door, PageReceiver
from baton_engine.transfer.sender import PageSender
from baton_engine.transfer.shm_door import ShmDoor
from baton_engine.transfer.shm_way import ShmWay
from baton_engine.transfer.staging import StagingRing
from baton_engine.transfer.tcp_door import TcpDoor
from baton_engine.transfer.tcp_way import TcpWay
from baton_engine.transfer.ways import Way

PAGES = 12
SHAPE = PoolShape(pages=PAGES, layers=3, kv_heads=2, page_tokens=4, head_dim=8, dtype=torch.float32)
WAIT_S = 10.0
RING_BYTES = 12_000
"""So small that some frames of a test find it full."""
PREFILL, DECODE = "p1/0.0", "d1/0.0"
"""The names of the ranks that lead the two units."""


def layout_of(shape: PoolShape) -> UnitLayout:
    """The layout of a unit of one rank that holds the whole of `shape`."""
    return UnitLayout(
        page_tokens=shape.page_tokens,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        element_bytes=shape.dtype.itemsize,
    )


LAYOUT = layout_of(SHAPE)


class Bell:
    """A poke that tests can wait on."""

    def __init__(self) -> None:
        self._rung = threading.Condition()

    def __call__(self) -> None:
        with self._rung:
            self._rung.notify_all()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait, woken by pokes, until `holds`."""
        deadline = time.monotonic() + WAIT_S
        with self._rung:
            while not holds():
                left = deadline - time.monotonic()
                assert left > 0, f"not within {WAIT_S} s: {what}"
                self._rung.wait(min(left, 0.02))


def make_sender(
    ways: str, pool: KVPool, bell: Bell, layout: UnitLayout, member: Member = 0, *, checksum: bool = False
) -> Sender:
    """Prefill's end as its rank builds it for these `--transfer` values."""
    if ways == "fake":
        return FakeSender(layout, bell)
    table, name = AttemptTable(bell), f"p1/0.{member}"
    made: list[Way] = []
    if ways in ("auto", "shm"):
        made.append(ShmWay(pool, name, table, bell, connect_timeout_ms=1000, checksum=checksum))
    if ways in ("auto", "tcp", "staged", "staged alone"):
        staged = ways.startswith("staged")
        made.append(TcpWay(pool, name, table, connect_timeout_ms=1000, staged=staged, checksum=checksum))
    return PageSender(table, layout, member, made)


def make_receiver(
    doors: str,
    pool: KVPool,
    rows: RowMemory,
    bell: Bell,
    directory: Path,
    layout: UnitLayout,
    member: Member = 0,
    *,
    checksum: bool = False,
) -> Receiver:
    """Decode's end likewise; `directory` is where unix sockets go."""
    if doors == "fake":
        return FakeReceiver(rows, bell)
    table = AttemptTable(bell)
    made: list[Door] = []
    if doors in ("auto", "shm"):
        made.append(ShmDoor(pool, rows, table, directory=str(directory)))
    if doors in ("auto", "tcp", "staged", "staged alone"):
        staging = StagingRing(PoolTarget(pool), table, bell, RING_BYTES) if doors == "staged" else None
        made.append(TcpDoor(pool, rows, table, host="127.0.0.1", advertise_host="127.0.0.1", staging=staging))
    return PageReceiver(table, layout, member, rows, made, checksum=checksum)


@dataclass
class Pair:
    """Both ends of a backend, each the only rank of its unit, with a pool of its own."""

    sender: Sender
    receiver: Receiver
    source: KVPool
    target: KVPool
    rows: RowMemory
    bell: Bell
    moves_bytes: bool

    @property
    def layout(self) -> UnitLayout:
        return layout_of(self.source.shape)

    def expect(self, room: int = 7, attempt: int = 1, pages: tuple[int, ...] = (5, 3, 9), row: int = 2) -> None:
        tokens = len(pages) * self.layout.page_tokens
        self.receiver.expect(room, attempt, PREFILL, self.layout, tokens, pages, row)

    def offer(self, room: int = 7, attempt: int = 1, pages: int = 3) -> None:
        self.sender.offer(room, attempt, DECODE, self.layout, pages * self.layout.page_tokens)

    def begin(self, room: int = 7, attempt: int = 1, pages: tuple[int, ...] = (5, 3, 9), row: int = 2) -> None:
        """Expect and order, as the two drivers do, and wait until prefill may push."""
        self.expect(room, attempt, pages, row)
        self.offer(room, attempt, len(pages))
        self.sender.order(DECODE, self.order(room, attempt, pages, row))
        self.bell.until(lambda: self.sent(room, attempt).poll is not KVPoll.Bootstrapping, "the order is taken")

    def order(self, room: int, attempt: int, pages: tuple[int, ...], row: int, **changes: str) -> PageOrder:
        return order_of(self.receiver, DECODE, self.layout, room, attempt, pages, row, **changes)

    def push_all(self, room: int = 7, attempt: int = 1, pages: int = 3) -> None:
        """One push of everything, row included."""
        push = Push(room=room, attempt=attempt, first=0, pages=tuple(range(pages)), row=row_of(room, attempt))
        self.sender.push(push)

    def sent(self, room: int = 7, attempt: int = 1) -> Observation:
        return self.sender.poller(room, attempt).poll()

    def received(self, room: int = 7, attempt: int = 1) -> Observation:
        return seen_by(self.receiver, room, attempt)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def seen_by(receiver: Receiver, room: int, attempt: int) -> Observation:
    """What a decode rank sees, by itself: with staging, Success waits until everything is scattered."""
    poller = receiver.poller(room, attempt)
    if receiver.staging is None:
        return poller.poll()
    watch = Watch(rid="a", room=room, attempt=attempt, host="")
    (seen,) = poll_and_all_reduce_with_staging([poller], SoloGroup(), receiver.staging, [watch])
    return seen


def order_of(
    receiver: Receiver,
    name: str,
    unit: UnitLayout,
    room: int,
    attempt: int,
    pages: tuple[int, ...],
    row: int,
    held_pages: int = 0,
    **changes: str,
) -> PageOrder:
    """What the rank called `name` orders."""
    words = {"backend": receiver.backend, "address": receiver.address, "layout": unit.to_text()}
    words |= changes
    return PageOrder(room=room, attempt=attempt, incarnation=name, pages=pages, row=row, held_pages=held_pages, **words)


def row_of(room: int = 7, attempt: int = 1) -> MetadataRow:
    return MetadataRow(room=room, attempt=attempt, first_token=42, prompt_tokens=11)


def make_pair(backend: str, directory: Path, shape: PoolShape = SHAPE) -> Iterator[Pair]:
    """A pair of `backend`, closed afterwards; `directory` is where unix sockets go."""
    source, target, rows, bell = KVPool(shape), KVPool(shape), RowMemory(4), Bell()
    source.tensor.copy_(torch.arange(1, source.tensor.numel() + 1, dtype=torch.float32).view(source.tensor.shape))
    sender = make_sender(backend, source, bell, layout_of(shape))
    receiver = make_receiver(backend, target, rows, bell, directory, layout_of(shape))
    pair = Pair(sender, receiver, source, target, rows, bell, moves_bytes=backend != "fake")
    yield pair
    pair.close()


class Units:
    """Two whole units: a sender and a pool for each rank of prefill's, a receiver, a pool and rows for decode's.

    Every number of the source pools is one of a kind and says which token, layer, k|v, head and dimension it is.
    """

    def __init__(
        self, backend: str, directory: Path, source: UnitLayout, target: UnitLayout, *, checksum: str = ""
    ) -> None:
        sends, wants = "prefill" in checksum, "decode" in checksum
        self.source, self.target, self.bell = source, target, Bell()
        self.sources = [pool_of(source, member) for member in range(source.members)]
        self.targets = [pool_of(target, member) for member in range(target.members)]
        self.rows = [RowMemory(4) for _ in self.targets]
        self.senders = [
            make_sender(backend, pool, self.bell, source, member, checksum=sends)
            for member, pool in enumerate(self.sources)
        ]
        self.receivers = [
            make_receiver(backend, pool, rows, self.bell, directory, target, member, checksum=wants)
            for member, (pool, rows) in enumerate(zip(self.targets, self.rows, strict=True))
        ]

    def begin(self, tokens: int, room: int = 7, absent: tuple[Member, ...] = (), held_pages: int = 0) -> None:
        """Fill the prompt's pages; expect and offer everywhere; order, except from the ranks of prefill in `absent`."""
        self.tokens, self.held_pages = tokens, held_pages
        self.source_pages = scattered(self.source.pages(tokens))
        self.target_pages = scattered(self.target.pages(tokens), step=7)
        for member, pool in enumerate(self.sources):
            for ordinal, page in enumerate(self.source_pages):
                pool.tensor[page] = content(self.source, member, ordinal)
        for sender in self.senders:
            sender.offer(room, 1, DECODE, self.target, tokens)
        for member, receiver in enumerate(self.receivers):
            receiver.expect(room, 1, PREFILL, self.source, tokens, self.target_pages, 2, held_pages)
            for writer in writers(self.source, self.target, member):
                if writer not in absent:
                    self.order(member, writer, room)

    def order(self, member: Member, writer: Member, room: int = 7) -> None:
        """A rank of decode orders from a rank of prefill."""
        name = f"d1/0.{member}"
        order = order_of(self.receivers[member], name, self.target, room, 1, self.target_pages, 2, self.held_pages)
        self.senders[writer].order(name, order)

    def ready(self, room: int = 7) -> None:
        """Wait until every sender may be pushed to."""
        for member, sender in enumerate(self.senders):
            self.bell.until(
                lambda sender=sender: sender.poller(room, 1).poll().poll is not KVPoll.Bootstrapping,
                f"sender {member} has its orders",
            )

    def push(self, first: int, end: int, members: tuple[Member, ...] | None = None, room: int = 7) -> None:
        """The source pages `first … end-1`, on all ranks or on some; with the last one goes the row."""
        row = row_of(room) if end == len(self.source_pages) else None
        push = Push(room=room, attempt=1, first=first, pages=self.source_pages[first:end], row=row)
        for member, sender in enumerate(self.senders):
            if members is None or member in members:
                sender.push(push)

    def sent(self, member: Member, room: int = 7) -> Observation:
        return self.senders[member].poller(room, 1).poll()

    def received(self, member: Member, room: int = 7) -> Observation:
        return seen_by(self.receivers[member], room, 1)

    def arrive(self, room: int = 7) -> None:
        """Wait until all ranks of both units say Success; then everything must be where it belongs, and nothing else."""
        for member in range(self.target.members):
            self.bell.until(lambda m=member: self.received(m, room).poll is KVPoll.Success, f"decode {member}")
            assert self.received(member, room).progress == len(self.target_pages)
        for member in range(self.source.members):
            self.bell.until(lambda m=member: self.sent(m, room).poll is KVPoll.Success, f"prefill {member}")
            assert self.sent(member, room).progress == len(self.source_pages)
        for member in range(self.target.members):
            self.check(member)
            assert self.rows[member].read(2) == row_of(room)

    def check(self, member: Member) -> None:
        """One rank's pages, number by number."""
        size, held = self.target.page_tokens, self.held_pages
        for ordinal, page in enumerate(self.target_pages[held:], held):
            tokens = min(size, self.tokens - ordinal * size)
            expected = content(self.target, member, ordinal)
            assert torch.equal(self.targets[member].tensor[page][..., :tokens, :], expected[..., :tokens, :])
        untouched = [page for page in range(POOL_PAGES) if page not in self.target_pages[held:]]
        assert not self.targets[member].tensor[untouched].any()

    def feeds(self, member: Member) -> bool:
        """Whether anybody reads from this rank of prefill."""
        return bool(readers(self.source, self.target, member))

    def close(self) -> None:
        for end in (*self.senders, *self.receivers):
            end.close()


POOL_PAGES = 32


def scattered(count: int, step: int = 5) -> tuple[int, ...]:
    """Page ids in no order."""
    return tuple((3 + step * index) % POOL_PAGES for index in range(count))


def pool_of(layout: UnitLayout, member: Member) -> KVPool:
    share = layout.member(member)
    return KVPool(
        PoolShape(
            pages=POOL_PAGES,
            layers=share.end_layer - share.first_layer,
            kv_heads=share.end_head - share.first_head,
            page_tokens=layout.page_tokens,
            head_dim=layout.head_dim,
            dtype=torch.float32,
        )
    )


def content(layout: UnitLayout, member: Member, ordinal: int) -> torch.Tensor:
    """What one rank's page of that ordinal holds: `[layer, k|v, head, token, dim]`."""
    share = layout.member(member)
    layer = torch.arange(share.first_layer, share.end_layer).view(-1, 1, 1, 1, 1)
    value = torch.arange(2).view(1, -1, 1, 1, 1)
    head = torch.arange(share.first_head, share.end_head).view(1, 1, -1, 1, 1)
    token = torch.arange(ordinal * layout.page_tokens, (ordinal + 1) * layout.page_tokens).view(1, 1, 1, -1, 1)
    dim = torch.arange(layout.head_dim)
    numbers = (((token * layout.layers + layer) * 2 + value) * layout.kv_heads + head) * layout.head_dim + dim + 1
    return numbers.to(torch.float32)
