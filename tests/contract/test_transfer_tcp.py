"""What only the tcp backend has to show: a writer written by hand that stops, lies or does not belong."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_core.agreement import KVPoll
from baton_core.effects import Push
from contract.transfer_pairs import DECODE, SHAPE, Pair, make_pair
from contract.transfer_writers import TcpWriter
from ports import free_port


@pytest.fixture
def tcp_pair(tmp_path: Path) -> Iterator[Pair]:
    yield from make_pair("tcp", tmp_path)


def test_nobody_listening_fails_the_transfer_and_names_the_cause(tcp_pair: Pair) -> None:
    port = free_port()
    tcp_pair.offer()
    tcp_pair.sender.order(DECODE, tcp_pair.order(7, 1, (5, 3, 9), 2, address=f"127.0.0.1:{port}"))
    tcp_pair.sender.push(Push(room=7, attempt=1, first=0, pages=(0,)))
    tcp_pair.bell.until(lambda: tcp_pair.sent().poll is KVPoll.Failed, "the refusal is noticed")
    assert "refused" in tcp_pair.sent().text


def test_a_writer_that_stops_inside_a_frame_holds_the_pages_until_it_is_fenced(tcp_pair: Pair) -> None:
    tcp_pair.expect()
    writer = TcpWriter(tcp_pair.receiver)
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
    tcp_pair.expect()
    writer = TcpWriter(tcp_pair.receiver)
    writer.pages(7, pieces, b"\xff" * sum(piece[2] for piece in pieces))
    assert writer.is_cut()
    assert not tcp_pair.target.tensor.any()
    tcp_pair.bell.until(lambda: tcp_pair.received().poll is KVPoll.Failed, "what it carried fails")


def test_a_writer_may_not_write_what_another_was_expected_to_write(tcp_pair: Pair) -> None:
    tcp_pair.expect()
    stranger = TcpWriter(tcp_pair.receiver, name="p2/0.0")
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
    tcp_pair.push_all()
    tcp_pair.bell.until(lambda: tcp_pair.sent().poll is KVPoll.Success, "a good transfer works beside it")
