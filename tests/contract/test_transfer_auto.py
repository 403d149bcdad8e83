"""How `auto` chooses: shared memory where it can be had, else tcp, and why; and what fits what."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from baton_core.agreement import KVPoll
from baton_core.errors import Reason
from baton_core.messages import PageOrder
from baton_engine.kv_pool import KVPool, RowMemory
from baton_engine.transfer.receiver import PageReceiver
from baton_engine.transfer.ways import Doors
from contract.transfer_pairs import DECODE, LAYOUT, SHAPE, Bell, Pair, make_receiver, make_sender


class Fleet:
    """One source, one target, and every kind of end over them."""

    def __init__(self, directory: Path) -> None:
        self.source, self.target, self.rows, self.bell = KVPool(SHAPE), KVPool(SHAPE), RowMemory(4), Bell()
        self.source.tensor.fill_(1.0)
        self._directory = directory
        self._pairs: list[Pair] = []

    def pair(self, prefill: str, decode: str) -> Pair:
        """A pair of ends started with these `--transfer` values."""
        sender = make_sender(prefill, self.source, self.bell, LAYOUT)
        receiver = make_receiver(decode, self.target, self.rows, self.bell, self._directory, LAYOUT)
        pair = Pair(sender, receiver, self.source, self.target, self.rows, self.bell, moves_bytes=True)
        self._pairs.append(pair)
        return pair

    def travelled(self) -> set[str]:
        """By which ways bytes came."""
        receiver = self._pairs[-1].receiver
        assert isinstance(receiver, PageReceiver)
        return {door.name for door in receiver.doors if door.bytes_received}

    def close(self) -> None:
        for pair in self._pairs:
            pair.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def transfer(pair: Pair, room: int = 7, change: Callable[[PageOrder], dict[str, str]] = lambda order: {}) -> None:
    """One whole transfer, whose order is changed on its way."""
    pair.expect(room)
    pair.offer(room)
    order = pair.order(room, 1, (5, 3, 9), 2)
    pair.sender.order(DECODE, pair.order(room, 1, (5, 3, 9), 2, **change(order)))
    pair.bell.until(lambda: pair.sent(room).poll is KVPoll.WaitingForInput, "the order is taken")
    pair.push_all(room)
    pair.bell.until(lambda: pair.received(room).poll is KVPoll.Success, "everything arrives")
    pair.bell.until(lambda: pair.sent(room).poll is KVPoll.Success, "and the sender knows")
    assert torch.equal(pair.target.tensor[5], pair.source.tensor[0])


@pytest.mark.parametrize(
    ("prefill", "decode", "way"),
    [
        ("auto", "auto", "shm"),
        ("auto", "tcp", "tcp"),
        ("auto", "shm", "shm"),
        ("tcp", "auto", "tcp"),
        ("shm", "auto", "shm"),
        ("tcp", "tcp", "tcp"),
        ("shm", "shm", "shm"),
    ],
)
def test_any_two_workers_with_a_way_in_common_use_the_best_of_those(
    fleet: Fleet, prefill: str, decode: str, way: str
) -> None:
    pair = fleet.pair(prefill, decode)
    with capture_logs() as lines:
        transfer(pair)
        transfer(pair, room=8)
    assert fleet.travelled() == {way}
    chosen = [line for line in lines if line["event"] == "transfer.chosen"]
    assert [line["backend"] for line in chosen] == [way], "said once"
    assert chosen[0]["reason"]


@pytest.mark.parametrize(("prefill", "decode"), [("tcp", "shm"), ("shm", "tcp")])
def test_two_workers_with_nothing_in_common_are_told_both_values(fleet: Fleet, prefill: str, decode: str) -> None:
    pair = fleet.pair(prefill, decode)
    pair.begin()
    assert pair.sent().poll is KVPoll.Failed
    assert pair.sent().reason is Reason.LAYOUT_MISMATCH
    assert f"{prefill} on prefill and {decode} on decode" in pair.sent().text


def from_another_host(order: PageOrder) -> dict[str, str]:
    ways = Doors.from_text(order.address)
    return {"address": Doors(shm=ways.shm, tcp=ways.tcp, boot_id="another").to_text()}


def from_another_container(order: PageOrder) -> dict[str, str]:
    ways = Doors.from_text(order.address)
    return {"address": Doors(shm="/not/mounted/here.kv", tcp=ways.tcp, boot_id=ways.boot_id).to_text()}


@pytest.mark.parametrize(
    ("change", "reason"), [(from_another_host, "another host"), (from_another_container, "No such file")]
)
def test_where_shared_memory_cannot_be_had_tcp_carries_and_the_log_says_why(
    fleet: Fleet, change: Callable[[PageOrder], dict[str, str]], reason: str
) -> None:
    pair = fleet.pair("auto", "auto")
    with capture_logs() as lines:
        transfer(pair, change=change)
    assert fleet.travelled() == {"tcp"}
    assert reason in next(line for line in lines if line["event"] == "transfer.chosen")["reason"]


def test_the_choice_is_forgotten_with_the_peer(fleet: Fleet) -> None:
    pair = fleet.pair("auto", "auto")
    transfer(pair, change=from_another_container)
    transfer(pair, room=8)
    assert fleet.travelled() == {"tcp"}, "remembered"
    pair.sender.peer_gone(DECODE)
    transfer(pair, room=9)
    assert fleet.travelled() == {"tcp", "shm"}


def test_an_attempt_revoked_before_the_choice_is_never_sent(fleet: Fleet) -> None:
    pair = fleet.pair("auto", "auto")
    pair.expect()
    pair.offer()
    pair.sender.order(DECODE, pair.order(7, 1, (5, 3, 9), 2))
    pair.sender.revoke(7, 1)
    assert pair.sent().writers_stopped
    pair.sender.forget(7, 1)
    transfer(pair, room=8)
    assert pair.sent().poll is KVPoll.Failed


def test_an_order_that_comes_twice_changes_nothing(fleet: Fleet) -> None:
    pair = fleet.pair("auto", "auto")
    transfer(pair)
    pair.sender.order(DECODE, pair.order(7, 1, (5, 3, 9), 2, **from_another_host(pair.order(7, 1, (5, 3, 9), 2))))
    assert pair.sent().poll is KVPoll.Success


@pytest.mark.parametrize("text", ["nowhere", "[]", "{}", '{"shm": 1, "tcp": 2, "boot_id": 3}'])
def test_an_address_that_is_none_says_so(text: str) -> None:
    with pytest.raises(ValueError):
        Doors.from_text(text)
