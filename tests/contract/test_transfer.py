"""The one contract of transfer backends: what every pair of ends owes the driver, over real pools and real sockets."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from baton_core.agreement import KVPoll, Observation
from baton_core.effects import Push
from baton_core.errors import Reason
from baton_core.kv_layout import Layout
from baton_core.messages import MetadataRow, PageOrder
from baton_engine.kv_pool import KVPool, PoolShape, RowMemory
from baton_engine.transfer.fake import FakeReceiver, FakeSender
from baton_engine.transfer.protocol import Receiver, Sender
from baton_engine.transfer.tcp_receiver import TcpReceiver
from baton_engine.transfer.tcp_sender import TcpSender
from baton_engine.transfer.wire import FRAME, GREETING, MAGIC, PIECE, VERSION, FrameKind

PAGES = 12
SHAPE = PoolShape(pages=PAGES, layers=3, kv_heads=2, page_tokens=4, head_dim=8, dtype=torch.float32)
LAYOUT = Layout(page_tokens=4, first_layer=0, end_layer=3, first_head=0, end_head=2, head_dim=8, element_bytes=4)
WAIT_S = 5.0


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
        """Expect and order, as the two drivers do."""
        self.receiver.expect(room, attempt, "P", pages, row)
        self.sender.offer(room, attempt, "D", len(pages))
        self.sender.order("D", self.order(room, attempt, pages, row))

    def order(self, room: int, attempt: int, pages: tuple[int, ...], row: int, **changes: str) -> PageOrder:
        words = {"backend": self.receiver.backend, "address": self.receiver.address, "layout": LAYOUT.to_text()}
        return PageOrder(room=room, attempt=attempt, incarnation="D", pages=pages, row=row, **(words | changes))

    def sent(self, room: int = 7, attempt: int = 1) -> Observation:
        return self.sender.poller(room, attempt).poll()

    def received(self, room: int = 7, attempt: int = 1) -> Observation:
        return self.receiver.poller(room, attempt).poll()


@pytest.fixture(params=["tcp", "fake"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from make_pair(request.param)


@pytest.fixture
def tcp_pair() -> Iterator[Pair]:
    yield from make_pair("tcp")


def make_pair(backend: str) -> Iterator[Pair]:
    source, target, rows, bell = KVPool(SHAPE), KVPool(SHAPE), RowMemory(4), Bell()
    source.tensor.copy_(torch.arange(source.tensor.numel(), dtype=torch.float32).view(source.tensor.shape))
    sender: Sender
    receiver: Receiver
    if backend == "tcp":
        receiver = TcpReceiver(
            target.memory, target.page_bytes, rows, bell, host="127.0.0.1", advertise_host="127.0.0.1"
        )
        sender = TcpSender(source.memory, LAYOUT, "P", bell, connect_timeout_ms=1000)
    else:
        receiver, sender = FakeReceiver(rows, bell), FakeSender(bell)
    yield Pair(sender, receiver, source, target, rows, bell, moves_bytes=backend != "fake")
    sender.close()
    receiver.close()


def row_of(room: int = 7, attempt: int = 1) -> MetadataRow:
    return MetadataRow(room=room, attempt=attempt, first_token=42, prompt_tokens=11)


def test_a_sender_is_bootstrapping_until_it_is_ordered_and_then_waits_for_input(tcp_pair: Pair) -> None:
    tcp_pair.sender.offer(7, 1, "D", 3)
    assert tcp_pair.sent().poll is KVPoll.Bootstrapping
    tcp_pair.receiver.expect(7, 1, "P", (5, 3, 9), 2)
    tcp_pair.sender.order("D", tcp_pair.order(7, 1, (5, 3, 9), 2))
    assert tcp_pair.sent().poll is KVPoll.WaitingForInput


def test_pages_pushed_chunk_by_chunk_arrive_in_the_ordered_pages_and_the_row_comes_last(pair: Pair) -> None:
    pair.begin()
    pair.sender.push(Push(room=7, attempt=1, first=0, pages=(0, 1)))
    pair.bell.until(lambda: pair.sent().progress >= 2, "the first two pages are acknowledged")
    if pair.moves_bytes:
        assert pair.rows.room_word(2) == 0
        assert pair.received().poll is KVPoll.Transferring
    pair.sender.push(Push(room=7, attempt=1, first=2, pages=(2,), row=row_of()))
    pair.bell.until(lambda: pair.sent().poll is KVPoll.Success, "the sender knows that everything arrived")
    assert pair.received().poll is KVPoll.Success
    assert pair.received().progress == 3
    assert pair.rows.room_word(2) != 0
    if pair.moves_bytes:
        assert pair.rows.read(2) == row_of()
        for ordinal, page in enumerate((5, 3, 9)):
            assert torch.equal(pair.target.tensor[page], pair.source.tensor[ordinal])
        untouched = [page for page in range(PAGES) if page not in (5, 3, 9)]
        assert not pair.target.tensor[untouched].any()


def test_a_revoked_attempt_reports_that_nobody_writes_and_can_be_forgotten(pair: Pair) -> None:
    pair.begin()
    pair.receiver.revoke(7, 1)
    pair.sender.revoke(7, 1)
    pair.bell.until(lambda: pair.received().writers_stopped, "the receiver has stopped")
    pair.bell.until(lambda: pair.sent().writers_stopped, "the sender has stopped")
    pair.receiver.forget(7, 1)
    assert pair.received().poll is KVPoll.Failed
    assert pair.received().writers_stopped


def test_a_new_attempt_of_the_same_room_is_a_transfer_of_its_own(pair: Pair) -> None:
    pair.begin(attempt=1)
    pair.receiver.revoke(7, 1)
    pair.sender.revoke(7, 1)
    pair.receiver.forget(7, 1)
    pair.sender.forget(7, 1)
    pair.begin(attempt=2)
    pair.sender.push(Push(room=7, attempt=2, first=0, pages=(0, 1, 2), row=row_of(attempt=2)))
    pair.bell.until(lambda: pair.sent(attempt=2).poll is KVPoll.Success, "the second attempt arrives")


def test_pages_of_a_revoked_attempt_never_land(tcp_pair: Pair) -> None:
    tcp_pair.begin()
    tcp_pair.receiver.revoke(7, 1)
    tcp_pair.receiver.forget(7, 1)
    tcp_pair.sender.push(Push(room=7, attempt=1, first=0, pages=(0, 1, 2), row=row_of()))
    tcp_pair.bell.until(lambda: tcp_pair.sent().poll is KVPoll.Failed, "the sender is refused")
    assert not tcp_pair.target.tensor.any()
    assert tcp_pair.rows.room_word(2) == 0
    tcp_pair.begin(room=8)
    tcp_pair.sender.push(Push(room=8, attempt=1, first=0, pages=(0, 1, 2), row=row_of(8)))
    tcp_pair.bell.until(lambda: tcp_pair.sent(8).poll is KVPoll.Success, "the next transfer works")


def test_an_order_that_was_not_offered_to_that_peer_is_ignored(tcp_pair: Pair) -> None:
    tcp_pair.sender.offer(7, 1, "D", 3)
    tcp_pair.sender.order("D2", tcp_pair.order(7, 1, (5, 3, 9), 2))
    tcp_pair.sender.order("D", tcp_pair.order(8, 1, (5, 3, 9), 2))
    assert tcp_pair.sent().poll is KVPoll.Bootstrapping
    assert tcp_pair.sent(8).poll is KVPoll.Failed


@pytest.mark.parametrize(
    ("changes", "pages", "names"),
    [
        ({"backend": "shm"}, (5, 3, 9), ("tcp", "shm")),
        ({}, (5, 3), ("2 pages", "3")),
        ({"address": "nowhere"}, (5, 3, 9), ("nowhere",)),
        ({"layout": LAYOUT.to_text().replace('"page_tokens": 4', '"page_tokens": 8')}, (5, 3, 9), ("4", "8")),
        ({"layout": "{}"}, (5, 3, 9), ("layout",)),
    ],
)
def test_an_order_that_cannot_be_met_fails_that_attempt_and_names_both_values(
    tcp_pair: Pair, changes: dict[str, str], pages: tuple[int, ...], names: tuple[str, ...]
) -> None:
    tcp_pair.sender.offer(7, 1, "D", 3)
    tcp_pair.sender.order("D", tcp_pair.order(7, 1, pages, 2, **changes))
    seen = tcp_pair.sent()
    assert seen.poll is KVPoll.Failed
    assert seen.reason is Reason.LAYOUT_MISMATCH
    assert all(name in seen.text for name in names)


def test_a_receiver_that_dies_fails_the_transfer_at_the_sender(tcp_pair: Pair) -> None:
    tcp_pair.begin()
    tcp_pair.sender.push(Push(room=7, attempt=1, first=0, pages=(0,)))
    tcp_pair.bell.until(lambda: tcp_pair.sent().progress == 1, "one page is there")
    tcp_pair.receiver.close()
    tcp_pair.bell.until(lambda: tcp_pair.sent().poll is KVPoll.Failed, "the broken stream is noticed")
    assert tcp_pair.sent().reason is Reason.TRANSFER_FAILED


def test_nobody_listening_fails_the_transfer_and_names_the_cause(tcp_pair: Pair) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    tcp_pair.sender.offer(7, 1, "D", 3)
    tcp_pair.sender.order("D", tcp_pair.order(7, 1, (5, 3, 9), 2, address=f"127.0.0.1:{port}"))
    tcp_pair.sender.push(Push(room=7, attempt=1, first=0, pages=(0,)))
    tcp_pair.bell.until(lambda: tcp_pair.sent().poll is KVPoll.Failed, "the refusal is noticed")
    assert "refused" in tcp_pair.sent().text


class Writer:
    """A prefill rank written by hand, to stop where a real one would not."""

    def __init__(self, pair: Pair, name: bytes = b"P") -> None:
        host, port = pair.receiver.address.split(":")
        self.stream = socket.create_connection((host, int(port)))
        self.stream.sendall(GREETING.pack(MAGIC, VERSION, len(name)) + name)

    def pages(self, room: int, pieces: list[tuple[int, int, int]], payload: bytes, attempt: int = 1) -> None:
        nbytes = sum(piece[2] for piece in pieces)
        head = FRAME.pack(FrameKind.PAGES, len(pieces), attempt, room, nbytes)
        self.stream.sendall(head + b"".join(PIECE.pack(*piece) for piece in pieces) + payload)

    def is_cut(self) -> bool:
        self.stream.settimeout(WAIT_S)
        try:
            while self.stream.recv(4096):
                pass
        except ConnectionResetError:
            pass
        return True


def test_a_writer_that_stops_inside_a_frame_holds_the_pages_until_it_is_fenced(tcp_pair: Pair) -> None:
    tcp_pair.receiver.expect(7, 1, "P", (5, 3, 9), 2)
    writer = Writer(tcp_pair)
    nbytes = SHAPE.page_bytes
    writer.pages(7, [(0, 0, nbytes)], os.urandom(nbytes // 2))
    tcp_pair.bell.until(lambda: bool(tcp_pair.target.tensor[5].any()), "half a page is there")
    tcp_pair.receiver.revoke(7, 1)
    assert not tcp_pair.received().writers_stopped
    tcp_pair.receiver.fence(7, 1)
    tcp_pair.bell.until(lambda: tcp_pair.received().writers_stopped, "the fence cuts the writer off")
    assert writer.is_cut()


@pytest.mark.parametrize(
    "pieces",
    [[(3, 0, 16)], [(0, SHAPE.page_bytes - 8, 16)], [(0, 0, 0)], [(2**31, 0, 16)]],
    ids=["no such page", "beyond the page", "empty", "absurd"],
)
def test_a_frame_that_points_outside_the_ordered_pages_ends_the_stream_and_writes_nothing(
    tcp_pair: Pair, pieces: list[tuple[int, int, int]]
) -> None:
    tcp_pair.receiver.expect(7, 1, "P", (5, 3, 9), 2)
    writer = Writer(tcp_pair)
    writer.pages(7, pieces, b"\xff" * sum(piece[2] for piece in pieces))
    assert writer.is_cut()
    assert not tcp_pair.target.tensor.any()
    assert tcp_pair.received().poll is KVPoll.Failed


def test_a_writer_may_not_write_what_another_was_expected_to_write(tcp_pair: Pair) -> None:
    tcp_pair.receiver.expect(7, 1, "P", (5, 3, 9), 2)
    stranger = Writer(tcp_pair, name=b"X")
    stranger.pages(7, [(0, 0, 16)], b"\xff" * 16)
    assert stranger.is_cut()
    assert not tcp_pair.target.tensor.any()
    assert tcp_pair.received().poll is KVPoll.WaitingForInput


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64], ids=["nothing", "http", "noise"])
def test_a_stranger_on_the_port_harms_nobody(tcp_pair: Pair, garbage: bytes) -> None:
    host, port = tcp_pair.receiver.address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(garbage)
    tcp_pair.begin()
    tcp_pair.sender.push(Push(room=7, attempt=1, first=0, pages=(0, 1, 2), row=row_of()))
    tcp_pair.bell.until(lambda: tcp_pair.sent().poll is KVPoll.Success, "a good transfer works beside it")
