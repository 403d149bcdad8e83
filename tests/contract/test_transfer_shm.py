"""What only the shm backend has to show: pages stay held until the writer says it stopped, or is gone."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton_core.agreement import KVPoll
from baton_core.effects import Push
from baton_core.errors import EngineError, Reason
from baton_engine.kv_pool import KVPool, PoolShape, RowMemory
from baton_engine.sealed_memory import SealedWindow
from baton_engine.transfer.attempts import AttemptTable
from baton_engine.transfer.pool_bytes import PoolSource
from baton_engine.transfer.shm_door import ShmDoor
from baton_engine.transfer.shm_wire import Frame, Kind, hello, receive_welcome
from contract.shm_peer import LARGE, ORDER
from contract.transfer_pairs import DECODE, PREFILL, SHAPE, WAIT_S, Bell, Pair, make_pair, row_of
from contract.transfer_writers import ShmWriter

TESTS = Path(__file__).parent.parent
PAGES = (5, 3, 9)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    yield from make_pair("shm", tmp_path)


@pytest.fixture
def large_pair(tmp_path: Path) -> Iterator[Pair]:
    """Pools of pages of 1 MiB."""
    yield from make_pair("shm", tmp_path, LARGE)


class Peer:
    """`shm_peer.py` as a child."""

    def __init__(self, role: str, **arguments: str | int) -> None:
        command = [sys.executable, "-m", "contract.shm_peer", role, json.dumps(arguments)]
        self.process = subprocess.Popen(
            command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, text=True
        )

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def until_stopped(self) -> None:
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "the writer ended instead of stopping itself"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def stopped_writer(pair: Pair, stop_at: int = 3) -> Peer:
    """A writer in the middle of its copies, three pages written, frozen inside the second batch."""
    pair.expect(pages=ORDER)
    writer = Peer("writer", address=pair.receiver.address, stop_at=stop_at)
    assert writer.says() == "asked"
    writer.until_stopped()
    return writer


def written(pair: Pair) -> list[bool]:
    """Which of the ordered pages have been written, in prompt order."""
    return [bool(pair.target.tensor[page].any()) for page in ORDER]


def test_a_stopped_writer_keeps_its_pages_until_it_goes_on_and_then_writes_at_most_its_batch(large_pair: Pair) -> None:
    writer = stopped_writer(large_pair)
    large_pair.receiver.revoke(7, 1)
    large_pair.receiver.fence(7, 1)
    answered_beside(large_pair)
    assert not large_pair.received().writers_stopped
    assert large_pair.received().poll is not KVPoll.Success
    writer.signal(signal.SIGCONT)
    large_pair.bell.until(lambda: large_pair.received().writers_stopped, "the writer says that it stopped")
    assert written(large_pair) == [True] * 4 + [False] * 4
    assert large_pair.rows.room_word(2) == 0
    writer.end()


def test_a_stopped_writer_that_is_killed_gives_its_pages_back(large_pair: Pair) -> None:
    writer = stopped_writer(large_pair)
    large_pair.receiver.revoke(7, 1)
    answered_beside(large_pair)
    assert not large_pair.received().writers_stopped
    writer.end()
    large_pair.bell.until(lambda: large_pair.received().writers_stopped, "its death frees the pages")


def test_a_writer_killed_in_the_middle_fails_its_attempt_and_leaves_nothing_behind(large_pair: Pair) -> None:
    before = open_things()
    writer = stopped_writer(large_pair)
    writer.end()
    large_pair.bell.until(lambda: large_pair.received().poll is KVPoll.Failed, "its death is noticed")
    assert large_pair.received().reason is Reason.TRANSFER_FAILED
    assert "gone" in large_pair.received().text
    large_pair.receiver.revoke(7, 1)
    large_pair.bell.until(lambda: large_pair.received().writers_stopped, "nobody writes any more")
    large_pair.bell.until(lambda: not open_things() - before, "its connection is closed")


def test_a_killed_reader_fails_the_transfer_and_its_memory_is_unmapped(large_pair: Pair, tmp_path: Path) -> None:
    before = open_things()
    reader = Peer("reader", directory=str(tmp_path))
    address = reader.says()
    large_pair.offer(pages=len(ORDER))
    large_pair.sender.order(DECODE, large_pair.order(7, 1, ORDER, 2, address=address))
    large_pair.sender.push(Push(room=7, attempt=1, first=0, pages=(0, 1)))
    large_pair.bell.until(lambda: large_pair.sent().progress == 2, "two pages are there")
    assert open_things() - before
    reader.end()
    large_pair.bell.until(lambda: large_pair.sent().poll is KVPoll.Failed, "its death is noticed")
    large_pair.bell.until(lambda: not open_things() - before, "nothing of the dead is kept")
    large_pair.sender.revoke(7, 1)
    assert large_pair.sent().writers_stopped


def test_a_revoked_writer_stops_within_100_ms(tmp_path: Path) -> None:
    shape = PoolShape(pages=32, layers=8, kv_heads=8, page_tokens=16, head_dim=128, dtype=torch.float32)
    for pair in make_pair("shm", tmp_path, shape):
        pages = tuple(range(32)) * 400  # 12.8 GB: seconds
        pair.begin(pages=pages)
        pair.sender.push(Push(room=7, attempt=1, first=0, pages=pages, row=row_of()))
        pair.bell.until(lambda pair=pair: bool(pair.target.tensor[31].any()), "copying is under way")
        began = time.monotonic()
        pair.receiver.revoke(7, 1)
        pair.bell.until(lambda pair=pair: pair.received().writers_stopped, "the writer stops")
        took_ms = (time.monotonic() - began) * 1000
        assert pair.rows.room_word(2) == 0
        pair.bell.until(lambda pair=pair: pair.sent().poll is KVPoll.Failed, "prefill knows why")
        assert "revoked" in pair.sent().text
        assert took_ms < 100


def test_prefill_revoking_its_own_attempt_stops_and_decode_hears_of_it(pair: Pair) -> None:
    pair.begin()
    pair.sender.push(Push(room=7, attempt=1, first=0, pages=(0,)))
    pair.bell.until(lambda: pair.received().progress == 1, "one page is there")
    pair.sender.revoke(7, 1)
    pair.bell.until(lambda: pair.sent().writers_stopped, "nothing is copied any more")
    pair.bell.until(lambda: pair.received().poll is KVPoll.Failed, "decode is told")
    pair.receiver.revoke(7, 1)
    assert pair.received().writers_stopped


def test_two_hundred_transfers_leave_no_descriptor_and_no_mapping(pair: Pair) -> None:
    pair.begin(room=1)
    pair.push_all(1)
    pair.bell.until(lambda: pair.received(1).poll is KVPoll.Success, "the first one arrives")
    before = open_things()
    for room in range(2, 202):
        pair.begin(room=room)
        pair.push_all(room)
        pair.bell.until(lambda room=room: pair.received(room).poll is KVPoll.Success, "it arrives")
        pair.sender.forget(room, 1)
        pair.receiver.forget(room, 1)
    assert not open_things() - before
    pair.sender.peer_gone(DECODE)
    pair.bell.until(lambda: open_things().total() < before.total(), "a peer that is gone is unmapped")


def open_things() -> Counter[str]:
    """This process's descriptors and its mappings of memfds. What earlier tests left behind may still be going away."""
    targets = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    kinds = [target.split(":")[0] for target in targets if target.startswith(("socket:", "/memfd:", "anon_inode:"))]
    mapped = [line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:baton" in line]
    return Counter(kinds + mapped)


def answered_beside(pair: Pair) -> None:
    """The receiver has dealt with whatever came before: another writer asked and was answered."""
    other = ShmWriter(pair.receiver, "p3/0.0")
    assert other.asks(room=999) is Kind.REFUSED
    other.stream.close()


def test_a_grant_is_refused_to_whoever_it_is_not_for(pair: Pair) -> None:
    pair.expect(attempt=2)
    writer, stranger = ShmWriter(pair.receiver), ShmWriter(pair.receiver, "p2/0.0")
    assert writer.asks(1, room=8) is Kind.REFUSED, "an unknown room"
    assert writer.asks(2, attempt=1) is Kind.REFUSED, "an older attempt that comes late"
    assert writer.asks(3, attempt=2, pages=(5, 3, 8)) is Kind.REFUSED, "an order of the room's earlier life"
    assert stranger.asks(4, attempt=2) is Kind.REFUSED, "another rank"
    assert writer.asks(5, attempt=2) is Kind.GRANT
    assert writer.asks(6, attempt=2) is Kind.REFUSED, "a second writing"


def test_a_revoked_attempt_is_granted_to_nobody(pair: Pair) -> None:
    pair.expect()
    pair.receiver.revoke(7, 1)
    assert pair.received().writers_stopped
    assert ShmWriter(pair.receiver).asks() is Kind.REFUSED
    assert pair.received().writers_stopped


def test_a_granted_writer_is_asked_to_stop_and_holds_the_pages_until_it_says_so(pair: Pair) -> None:
    pair.expect()
    writer = ShmWriter(pair.receiver)
    assert writer.asks(serial=5) is Kind.GRANT
    pair.receiver.revoke(7, 1)
    assert writer.hears() == Frame(kind=Kind.REVOKE, serial=5)
    pair.receiver.fence(7, 1)
    assert writer.hears() == Frame(kind=Kind.REVOKE, serial=5), "asked once more"
    assert not pair.received().writers_stopped
    writer.says(Frame(kind=Kind.STOPPED, serial=5))
    pair.bell.until(lambda: pair.received().writers_stopped, "it stopped")


@pytest.mark.parametrize("end", ["finished", "gone"])
def test_a_revoked_writing_is_over_too_when_it_is_finished_or_its_writer_gone(pair: Pair, end: str) -> None:
    pair.expect()
    writer = ShmWriter(pair.receiver)
    assert writer.asks() is Kind.GRANT
    pair.receiver.revoke(7, 1)
    if end == "finished":
        writer.says(Frame(kind=Kind.FINISHED, serial=1, count=3 * SHAPE.page_bytes))
    else:
        writer.stream.close()  # with REVOKE unread
    pair.bell.until(lambda: pair.received().writers_stopped, end)


def test_a_writing_that_finishes_without_all_pages_or_without_the_row_fails(pair: Pair) -> None:
    writer = ShmWriter(pair.receiver)
    for room, pages in ((7, 2), (8, 3)):
        pair.expect(room)
        assert writer.asks(serial=room, room=room) is Kind.GRANT
        writer.says(Frame(kind=Kind.FINISHED, serial=room, count=pages * SHAPE.page_bytes))
        pair.bell.until(lambda room=room: pair.received(room).poll is KVPoll.Failed, "it is not believed")


@pytest.mark.parametrize("garbage", [b"", b"noise", b"\xff" * 28, bytes(28), b"\xff" * 4096])
def test_garbage_after_the_greeting_is_ignored_and_proves_nothing(pair: Pair, garbage: bytes) -> None:
    pair.expect()
    writer = ShmWriter(pair.receiver)
    assert writer.asks() is Kind.GRANT
    writer.stream.send(garbage)
    assert writer.asks(serial=2, room=8) is Kind.REFUSED, "the conversation goes on"
    pair.receiver.revoke(7, 1)
    assert not pair.received().writers_stopped


def test_half_a_shutdown_or_an_end_of_our_own_does_not_count_as_stopped(pair: Pair) -> None:
    pair.expect()
    writer = ShmWriter(pair.receiver)
    assert writer.asks() is Kind.GRANT
    pair.receiver.close()
    writer.stream.settimeout(WAIT_S)
    assert writer.stream.recv(64) == b"", "decode closed its end"
    pair.receiver.revoke(7, 1)
    assert not pair.received().writers_stopped


@pytest.mark.parametrize(
    "garbage", [None, b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 600], ids=["quiet", "empty", "http", "noise"]
)
def test_a_stranger_on_the_socket_gets_nothing_and_harms_nobody(pair: Pair, garbage: bytes | None) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.connect(pair.receiver.address)
        if garbage is not None:
            stranger.send(garbage)
            with pytest.raises(ConnectionError, match="refused"):
                receive_welcome(stranger)
        pair.begin()
        pair.push_all()
        pair.bell.until(lambda: pair.received().poll is KVPoll.Success, "a good transfer works beside it")


def test_a_writer_of_another_host_is_refused_by_name(pair: Pair) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(pair.receiver.address)
        stranger.send(hello("0" * 36, PREFILL))
        with pytest.raises(ConnectionError, match="boot id"):
            receive_welcome(stranger)


def test_an_order_beyond_the_mapped_pool_fails_instead_of_being_written(pair: Pair) -> None:
    for room, pages, row in ((7, (5, 3, SHAPE.pages), 2), (8, (5, 3, 9), 99)):
        pair.offer(room)
        pair.sender.order(DECODE, pair.order(room, 1, pages, row))
        pair.push_all(room)
        pair.bell.until(lambda room=room: pair.sent(room).poll is KVPoll.Failed, "it is refused")
        assert pair.sent(room).reason is Reason.LAYOUT_MISMATCH


def test_nobody_listening_fails_the_transfer_and_names_the_cause(pair: Pair) -> None:
    pair.offer()
    pair.sender.order(DECODE, pair.order(7, 1, PAGES, 2, address="/nowhere/at/all.kv"))
    pair.bell.until(lambda: pair.sent().poll is KVPoll.Failed, "the missing socket is noticed")
    assert "No such file" in pair.sent().text


@pytest.mark.parametrize(("nbytes", "sealed"), [(4096, False), (8192, True)], ids=["can shrink", "too small"])
def test_memory_that_could_end_in_a_bus_error_is_not_mapped_and_its_descriptor_is_closed(
    nbytes: int, sealed: bool
) -> None:
    memory = os.memfd_create("theirs", os.MFD_ALLOW_SEALING)
    os.truncate(memory, 4096)
    if sealed:
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError, match=f"expected {nbytes}, sealed"):
        SealedWindow(memory, nbytes)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(memory)


def test_a_receiver_removes_its_socket_and_those_of_the_dead_but_not_of_the_living(pair: Pair, tmp_path: Path) -> None:
    dead = tmp_path / "1-dead.kv"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(dead))
    pool, rows = KVPool(SHAPE), RowMemory(1)
    second = ShmDoor(pool, rows, AttemptTable(Bell()), directory=str(tmp_path))
    assert sorted(map(str, tmp_path.iterdir())) == sorted([pair.receiver.address, second.address])
    second.close()
    assert [str(path) for path in tmp_path.iterdir()] == [pair.receiver.address]


def test_a_directory_that_cannot_be_used_is_named() -> None:
    with pytest.raises(EngineError, match="/proc/none"):
        ShmDoor(KVPool(SHAPE), RowMemory(1), AttemptTable(Bell()), directory="/proc/none")


def test_a_pool_on_a_device_is_read_run_by_run_through_its_staging() -> None:
    pool = KVPool(SHAPE)
    pool.tensor.copy_(torch.arange(pool.tensor.numel(), dtype=torch.float32).view(pool.tensor.shape))
    on_host, pool.device = PoolSource(pool), torch.device("cuda")
    staged = PoolSource(pool)
    assert staged.span_bytes_max == 0
    offset = 3 * SHAPE.page_bytes + 64
    assert staged.view(offset, 128).tobytes() == on_host.view(offset, 128).tobytes()


def test_a_writer_that_shuts_half_its_socket_costs_no_time_and_holds_its_pages_until_it_is_gone(pair: Pair) -> None:
    """Once, its thread read nothing again and again, with all the time that a core has."""
    pair.expect()
    writer = ShmWriter(pair.receiver)
    assert writer.asks() is Kind.GRANT
    writer.stream.shutdown(socket.SHUT_WR)
    pair.receiver.revoke(7, 1)
    before_s = time.process_time()
    quiet = threading.Event()
    quiet.wait(0.3)
    assert time.process_time() - before_s < 0.15
    assert not pair.received().writers_stopped
    writer.stream.close()
    pair.bell.until(lambda: pair.received().writers_stopped, "its end frees the pages")
