"""Pairs of real ends of a transfer backend, each over a pool of its own, for the contract tests."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from baton_core.agreement import KVPoll, Observation
from baton_core.effects import Push
from baton_core.kv_layout import Layout
from baton_core.messages import MetadataRow, PageOrder
from baton_engine.kv_pool import KVPool, PoolShape, RowMemory
from baton_engine.transfer.auto import AutoReceiver, AutoSender
from baton_engine.transfer.fake import FakeReceiver, FakeSender
from baton_engine.transfer.protocol import Receiver, Sender
from baton_engine.transfer.shm_receiver import ShmReceiver
from baton_engine.transfer.shm_sender import ShmSender
from baton_engine.transfer.tcp_receiver import TcpReceiver
from baton_engine.transfer.tcp_sender import TcpSender

PAGES = 12
SHAPE = PoolShape(pages=PAGES, layers=3, kv_heads=2, page_tokens=4, head_dim=8, dtype=torch.float32)
WAIT_S = 10.0


def layout_of(shape: PoolShape) -> Layout:
    """The layout of a rank that holds the whole of `shape`."""
    return Layout(
        page_tokens=shape.page_tokens,
        first_layer=0,
        end_layer=shape.layers,
        first_head=0,
        end_head=shape.kv_heads,
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


@dataclass
class Pair:
    """Both ends of a backend, each with a pool of its own."""

    sender: Sender
    receiver: Receiver
    source: KVPool
    target: KVPool
    rows: RowMemory
    bell: Bell
    moves_bytes: bool

    def begin(self, room: int = 7, attempt: int = 1, pages: tuple[int, ...] = (5, 3, 9), row: int = 2) -> None:
        """Expect and order, as the two drivers do, and wait until prefill may push."""
        self.receiver.expect(room, attempt, "P", pages, row)
        self.sender.offer(room, attempt, "D", len(pages))
        self.sender.order("D", self.order(room, attempt, pages, row))
        self.bell.until(lambda: self.sent(room, attempt).poll is not KVPoll.Bootstrapping, "the order is taken")

    def order(self, room: int, attempt: int, pages: tuple[int, ...], row: int, **changes: str) -> PageOrder:
        layout = layout_of(self.source.shape).to_text()
        words = {"backend": self.receiver.backend, "address": self.receiver.address, "layout": layout}
        return PageOrder(room=room, attempt=attempt, incarnation="D", pages=pages, row=row, **(words | changes))

    def push_all(self, room: int = 7, attempt: int = 1, pages: int = 3) -> None:
        """One push of everything, row included."""
        push = Push(room=room, attempt=attempt, first=0, pages=tuple(range(pages)), row=row_of(room, attempt))
        self.sender.push(push)

    def sent(self, room: int = 7, attempt: int = 1) -> Observation:
        return self.sender.poller(room, attempt).poll()

    def received(self, room: int = 7, attempt: int = 1) -> Observation:
        return self.receiver.poller(room, attempt).poll()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


def row_of(room: int = 7, attempt: int = 1) -> MetadataRow:
    return MetadataRow(room=room, attempt=attempt, first_token=42, prompt_tokens=11)


def make_pair(backend: str, directory: Path, shape: PoolShape = SHAPE) -> Iterator[Pair]:
    """A pair of `backend`, closed afterwards; `directory` is where unix sockets go."""
    source, target, rows, bell = KVPool(shape), KVPool(shape), RowMemory(4), Bell()
    source.tensor.copy_(torch.arange(1, source.tensor.numel() + 1, dtype=torch.float32).view(source.tensor.shape))
    sender, receiver = _ends(backend, source, target, rows, bell, directory)
    pair = Pair(sender, receiver, source, target, rows, bell, moves_bytes=backend != "fake")
    yield pair
    pair.close()


def _ends(
    backend: str, source: KVPool, target: KVPool, rows: RowMemory, bell: Bell, directory: Path
) -> tuple[Sender, Receiver]:
    if backend == "fake":
        return FakeSender(bell), FakeReceiver(rows, bell)
    if backend == "tcp":
        return AutoSender(shm=None, tcp=tcp_sender(source, bell)), tcp_receiver(target, rows, bell)
    if backend == "tcp alone":
        return tcp_sender(source, bell), tcp_receiver(target, rows, bell)
    if backend == "shm":
        return shm_sender(source, bell), ShmReceiver(target, rows, bell, directory=str(directory))
    receiver = AutoReceiver(ShmReceiver(target, rows, bell, directory=str(directory)), tcp_receiver(target, rows, bell))
    return AutoSender(shm=shm_sender(source, bell), tcp=tcp_sender(source, bell)), receiver


def tcp_sender(source: KVPool, bell: Bell) -> TcpSender:
    return TcpSender(source.memory, layout_of(source.shape), "P", bell, connect_timeout_ms=1000)


def shm_sender(source: KVPool, bell: Bell) -> ShmSender:
    return ShmSender(source, layout_of(source.shape), "P", bell, connect_timeout_ms=1000)


def tcp_receiver(target: KVPool, rows: RowMemory, bell: Bell) -> TcpReceiver:
    return TcpReceiver(target.memory, target.page_bytes, rows, bell, host="127.0.0.1", advertise_host="127.0.0.1")
