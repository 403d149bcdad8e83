"""What decode holds of a prompt already is not sent, and nobody writes it: whole units, whatever their layouts."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton_core.agreement import KVPoll
from baton_core.errors import Reason
from baton_core.kv_layout import bytes_fed
from baton_engine.transfer.receiver import PageReceiver
from baton_engine.transfer.shm_wire import Kind
from baton_engine.transfer.tcp_wire import AnswerKind
from contract.test_transfer_units import LAYOUTS, TOKENS
from contract.transfer_pairs import LAYOUT, PREFILL, Pair, Units, make_pair, order_of, row_of
from contract.transfer_writers import ShmWriter, TcpWriter

Make = Callable[..., Units]


@pytest.fixture(params=["tcp", "shm", "auto", "staged", "staged alone"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[Units] = []

    def make(name: str, checksum: str = "") -> Units:
        made.append(Units(str(request.param), tmp_path, *LAYOUTS[name], checksum=checksum))
        return made[-1]

    yield make
    for units in made:
        units.close()


def received_bytes(units: Units) -> int:
    """Bytes that decode's ranks took in."""
    return sum(receiver.bytes_received for receiver in units.receivers if isinstance(receiver, PageReceiver))


@pytest.mark.parametrize("checksum", ["", "prefill, decode"], ids=["plain", "checked"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_only_what_is_not_held_is_sent_and_what_is_held_is_never_written(make: Make, name: str, checksum: str) -> None:
    units = make(name, checksum)
    source, target = units.source, units.target
    whole = target.pages(TOKENS)
    for room, held in enumerate(sorted({1, 2, whole // 2, whole - 1, whole}), 1):
        before = received_bytes(units)
        units.begin(TOKENS, room, held_pages=held)
        units.ready(room)
        pages = len(units.source_pages)
        for first in range(0, pages, 2):
            units.push(first, min(first + 2, pages), room=room)
        units.arrive(room)
        owed = sum(
            bytes_fed(source, member, target, reader, TOKENS, held)
            for member in range(source.members)
            for reader in range(target.members)
        )
        assert received_bytes(units) - before == owed
        for receiver, pool in zip(units.receivers, units.targets, strict=True):
            receiver.forget(room, 1)
            pool.tensor.zero_()
        for sender in units.senders:
            sender.forget(room, 1)


@pytest.mark.parametrize("name", ["TP2 to TP2", "CP2 to TP1", "pages of 8 to 4"])
def test_held_pages_count_as_there_for_prefill_as_soon_as_they_are_ordered(make: Make, name: str) -> None:
    units = make(name)
    units.begin(24, held_pages=4)
    units.ready()
    head = 4 * units.target.page_tokens // units.source.page_tokens
    for member in range(units.source.members):
        assert units.sent(member).progress >= head, "or pushing them would look like a stall"
    units.push(0, head)
    assert all(units.sent(member).progress >= head for member in range(units.source.members))
    assert received_bytes(units) == 0
    units.push(head, len(units.source_pages))
    units.arrive()


@pytest.fixture(params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    yield from make_pair(request.param, tmp_path)


def begin(pair: Pair, expected: int, ordered: int) -> None:
    """Decode expects with so many pages held, and the order that prefill gets says so many."""
    pages = (5, 3, 9)
    pair.receiver.expect(7, 1, PREFILL, LAYOUT, 12, pages, 2, expected)
    pair.offer()
    pair.sender.order("d1/0.0", order_of(pair.receiver, "d1/0.0", LAYOUT, 7, 1, pages, 2, ordered))
    pair.bell.until(lambda: pair.sent().poll is not KVPoll.Bootstrapping, "the order is taken")


def test_a_writer_with_another_idea_of_what_is_held_writes_nothing_that_is(pair: Pair) -> None:
    begin(pair, 2, 0)
    pair.push_all()
    pair.bell.until(lambda: pair.sent().poll is KVPoll.Failed, "it is refused, or cut off")
    assert pair.sent().reason is Reason.TRANSFER_FAILED
    assert not pair.target.tensor[[5, 3]].any()
    assert pair.rows.room_word(2) == 0


def test_a_whole_prompt_that_is_held_needs_only_the_row(pair: Pair) -> None:
    begin(pair, 3, 3)
    assert pair.received().poll is KVPoll.WaitingForInput
    pair.push_all()
    pair.bell.until(lambda: pair.received().poll is KVPoll.Success, "the row is there")
    pair.bell.until(lambda: pair.sent().poll is KVPoll.Success, "prefill knows it")
    assert pair.rows.read(2) == row_of()
    assert not pair.target.tensor.any()


def test_a_tcp_frame_for_a_held_page_ends_the_stream_and_writes_nothing(tmp_path: Path) -> None:
    for pair in make_pair("tcp", tmp_path):
        pair.receiver.expect(7, 1, PREFILL, LAYOUT, 12, (5, 3, 9), 2, 1)
        writer = TcpWriter(pair.receiver)
        nbytes = pair.target.shape.page_bytes
        writer.pages(7, [(1, 0, nbytes)], b"\x01" * nbytes)
        assert writer.hears() == (AnswerKind.ACK, nbytes)
        writer.pages(7, [(0, 0, nbytes)], b"\x01" * nbytes)
        assert writer.is_cut()
        assert not pair.target.tensor[5].any() and pair.target.tensor[3].any()


def test_an_shm_writer_of_an_order_with_other_held_pages_is_refused(tmp_path: Path) -> None:
    for pair in make_pair("shm", tmp_path):
        pair.receiver.expect(7, 1, PREFILL, LAYOUT, 12, (5, 3, 9), 2, 1)
        writer = ShmWriter(pair.receiver)
        assert writer.asks(1, held_pages=0) is Kind.REFUSED
        assert writer.asks(2, held_pages=1) is Kind.GRANT
