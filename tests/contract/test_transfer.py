"""The one contract of transfer backends: what every pair of ends owes the driver, over real pools and real sockets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton_core.agreement import KVPoll
from baton_core.effects import Push
from baton_core.errors import Reason
from contract.transfer_pairs import DECODE, LAYOUT, PAGES, Pair, make_pair, row_of


@pytest.fixture(params=["tcp", "shm", "auto", "staged", "fake"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    yield from make_pair(request.param, tmp_path)


@pytest.fixture(params=["tcp", "shm", "auto", "staged"])
def moving_pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """A backend that moves bytes."""
    yield from make_pair(request.param, tmp_path)


def test_a_sender_is_bootstrapping_until_it_is_ordered_and_then_waits_for_input(moving_pair: Pair) -> None:
    moving_pair.offer()
    assert moving_pair.sent().poll is KVPoll.Bootstrapping
    moving_pair.expect()
    moving_pair.sender.order(DECODE, moving_pair.order(7, 1, (5, 3, 9), 2))
    moving_pair.bell.until(lambda: moving_pair.sent().poll is KVPoll.WaitingForInput, "the order is taken")


def test_pages_pushed_chunk_by_chunk_arrive_in_the_ordered_pages_and_the_row_comes_last(pair: Pair) -> None:
    pair.begin()
    pair.sender.push(Push(room=7, attempt=1, first=0, pages=(0, 1)))
    pair.bell.until(lambda: pair.sent().progress >= 2, "the first two pages are acknowledged")
    if pair.moves_bytes:
        pair.bell.until(lambda: pair.received().progress >= 2, "decode has heard of them")
        assert pair.rows.room_word(2) == 0
        assert pair.received().poll is KVPoll.Transferring
    pair.sender.push(Push(room=7, attempt=1, first=2, pages=(2,), row=row_of()))
    pair.bell.until(lambda: pair.sent().poll is KVPoll.Success, "the sender knows that everything arrived")
    pair.bell.until(lambda: pair.received().poll is KVPoll.Success, "decode knows it too")
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
    pair.push_all(attempt=2)
    pair.bell.until(lambda: pair.sent(attempt=2).poll is KVPoll.Success, "the second attempt arrives")


def test_pages_of_a_revoked_attempt_never_land(moving_pair: Pair) -> None:
    moving_pair.begin()
    moving_pair.receiver.revoke(7, 1)
    moving_pair.receiver.forget(7, 1)
    moving_pair.push_all()
    moving_pair.bell.until(lambda: moving_pair.sent().poll is KVPoll.Failed, "the sender is refused")
    assert not moving_pair.target.tensor.any()
    assert moving_pair.rows.room_word(2) == 0
    moving_pair.begin(room=8)
    moving_pair.push_all(8)
    moving_pair.bell.until(lambda: moving_pair.sent(8).poll is KVPoll.Success, "the next transfer works")


def test_an_order_that_was_not_offered_to_that_peer_is_ignored(moving_pair: Pair) -> None:
    moving_pair.offer()
    moving_pair.sender.order("d2/0.0", moving_pair.order(7, 1, (5, 3, 9), 2))
    moving_pair.sender.order(DECODE, moving_pair.order(8, 1, (5, 3, 9), 2))
    assert moving_pair.sent().poll is KVPoll.Bootstrapping
    assert moving_pair.sent(8).poll is KVPoll.Failed


@pytest.mark.parametrize(
    ("changes", "pages", "names"),
    [
        ({"backend": "nixl"}, (5, 3, 9), ("prefill", "nixl on decode")),
        ({}, (5, 3), ("2 pages", "3")),
        ({"address": "nowhere"}, (5, 3, 9), ("nowhere",)),
        (
            {"layout": LAYOUT.to_text().replace('"page_tokens":4', '"page_tokens":8')},
            (5, 3, 9),
            ('"page_tokens":4', '"page_tokens":8'),
        ),
        ({"layout": "{}"}, (5, 3, 9), ("layout",)),
    ],
)
def test_an_order_that_cannot_be_met_fails_that_attempt_and_names_both_values(
    moving_pair: Pair, changes: dict[str, str], pages: tuple[int, ...], names: tuple[str, ...]
) -> None:
    moving_pair.offer()
    moving_pair.sender.order(DECODE, moving_pair.order(7, 1, pages, 2, **changes))
    moving_pair.bell.until(lambda: moving_pair.sent().poll is KVPoll.Failed, "the order is refused")
    seen = moving_pair.sent()
    assert seen.reason is Reason.LAYOUT_MISMATCH
    assert all(name in seen.text for name in names)


def test_a_receiver_that_dies_fails_the_transfer_at_the_sender(moving_pair: Pair) -> None:
    moving_pair.begin()
    moving_pair.sender.push(Push(room=7, attempt=1, first=0, pages=(0,)))
    moving_pair.bell.until(lambda: moving_pair.sent().progress == 1, "one page is there")
    moving_pair.receiver.close()
    moving_pair.bell.until(lambda: moving_pair.sent().poll is KVPoll.Failed, "the broken stream is noticed")
    assert moving_pair.sent().reason is Reason.TRANSFER_FAILED


def test_many_transfers_at_once_each_arrive_in_their_own_pages(moving_pair: Pair) -> None:
    orders = {room: (3 * room, 3 * room + 2, 3 * room + 1) for room in range(4)}
    for room, pages in orders.items():
        moving_pair.begin(room=room, pages=pages, row=room)
    for room in orders:
        moving_pair.sender.push(Push(room=room, attempt=1, first=0, pages=(room, room + 4, room + 8), row=row_of(room)))
    for room, pages in orders.items():
        moving_pair.bell.until(lambda room=room: moving_pair.received(room).poll is KVPoll.Success, "all arrive")
        assert moving_pair.rows.read(room) == row_of(room)
        for target, source in zip(pages, (room, room + 4, room + 8), strict=True):
            assert torch.equal(moving_pair.target.tensor[target], moving_pair.source.tensor[source])


def test_nothing_is_sent_to_a_peer_that_is_gone_and_its_return_is_a_new_beginning(moving_pair: Pair) -> None:
    moving_pair.begin()
    moving_pair.sender.peer_gone(DECODE)
    assert moving_pair.sent().poll is KVPoll.Failed
    assert moving_pair.sent().reason is Reason.PEER_LOST
    moving_pair.sender.revoke(7, 1)
    moving_pair.bell.until(lambda: moving_pair.sent().writers_stopped, "nobody reads the pages")
    moving_pair.begin(room=8)
    moving_pair.push_all(8)
    moving_pair.bell.until(lambda: moving_pair.received(8).poll is KVPoll.Success, "the next transfer works")
