"""What only staging has to show: the ring's books, and that what waits in it is neither done nor written too late."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton_core.agreement import KVPoll
from baton_core.effects import Push
from baton_core.kv_layout import Stripe
from baton_core.request import PageId
from baton_engine.kv_pool import KVPool, RowMemory
from baton_engine.transfer.attempts import AttemptTable
from baton_engine.transfer.pool_bytes import Bytes, PoolTarget
from baton_engine.transfer.receiver import PageReceiver
from baton_engine.transfer.staging import Ring, Slot, StagingRing
from baton_engine.transfer.tcp_door import TcpDoor
from baton_engine.transfer.tcp_wire import FRAME, PIECE, FrameKind
from contract.transfer_pairs import DECODE, LAYOUT, PREFILL, SHAPE, WAIT_S, Bell, Pair, make_sender, order_of, row_of
from contract.transfer_writers import TcpWriter


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), max_size=60))
def test_live_parts_of_the_ring_never_overlap_and_none_is_lost(wishes: list[tuple[int, int]]) -> None:
    ring = Ring(100)
    live: list[Slot] = []
    for nbytes, victim in wishes:
        slot = ring.reserve(nbytes)
        if slot is not None:
            assert slot.start >= 0 and slot.end - slot.start == nbytes and slot.end <= 100
            assert all(slot.end <= one.start or one.end <= slot.start for one in live)
            live.append(slot)
        if victim < len(live):
            ring.release(live.pop(victim))
    for slot in live:
        ring.release(slot)
    assert ring.reserve(100) is not None


def test_above_the_watermark_nothing_is_reserved_until_the_oldest_part_is_back() -> None:
    ring = Ring(100)
    first, second = ring.reserve(60), ring.reserve(40)
    assert first is not None and second is not None
    assert ring.reserve(1) is None
    ring.release(second)
    assert ring.reserve(1) is None, "the oldest is still in use"
    ring.release(first)
    assert ring.reserve(101) is None
    assert ring.reserve(100) is not None


class GatedTarget(PoolTarget):
    """A pool whose writer waits for a word."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.begun, self.gate = threading.Event(), threading.Event()

    def write(self, page: PageId, stripe: Stripe, rows: Bytes) -> None:
        self.begun.set()
        assert self.gate.wait(WAIT_S)
        super().write(page, stripe, rows)


WIDE = replace(LAYOUT, page_tokens=8)


class Gated(Pair):
    """A staged pair whose scattering waits: three pages of prefill are two of decode's."""

    gated: GatedTarget

    def begin_wide(self) -> None:
        self.receiver.expect(7, 1, PREFILL, LAYOUT, 12, (5, 3), 2)
        self.sender.offer(7, 1, DECODE, WIDE, 12)
        self.sender.order(DECODE, order_of(self.receiver, DECODE, WIDE, 7, 1, (5, 3), 2))

    def page(self, ordinal: int) -> torch.Tensor:
        """The tokens of one of prefill's pages, on decode: `[layer, k|v, head, token, dim]`."""
        page, half = divmod(ordinal, 2)
        return self.target.tensor[(5, 3)[page], :, :, :, 4 * half : 4 * half + 4]


@pytest.fixture
def pair() -> Iterator[Gated]:
    wide = replace(SHAPE, page_tokens=8)
    source, target, rows, bell = KVPool(SHAPE), KVPool(wide), RowMemory(4), Bell()
    source.tensor.copy_(torch.arange(1, source.tensor.numel() + 1, dtype=torch.float32).view(source.tensor.shape))
    table, gated = AttemptTable(bell), GatedTarget(target)
    staging = StagingRing(gated, table, bell)
    door = TcpDoor(target, rows, table, host="127.0.0.1", advertise_host="127.0.0.1", staging=staging)
    receiver = PageReceiver(table, WIDE, 0, rows, [door])
    pair = Gated(make_sender("staged", source, bell, LAYOUT), receiver, source, target, rows, bell, moves_bytes=True)
    pair.gated = gated
    yield pair
    gated.gate.set()
    pair.close()


def test_a_handoff_succeeds_on_decode_only_when_everything_is_scattered(pair: Gated) -> None:
    pair.begin_wide()
    pair.push_all()
    pair.bell.until(lambda: pair.sent().poll is KVPoll.Success, "prefill is rid of its pages")
    assert pair.received().progress == 2
    assert pair.received().poll is KVPoll.Transferring
    pair.gated.gate.set()
    pair.bell.until(lambda: pair.received().poll is KVPoll.Success, "it is scattered")
    assert all(torch.equal(pair.page(ordinal), pair.source.tensor[ordinal]) for ordinal in range(3))
    assert pair.rows.read(2) == row_of()


def test_what_is_revoked_in_the_ring_is_not_written_and_its_pages_are_held_only_while_they_are_touched(
    pair: Gated,
) -> None:
    pair.begin_wide()
    for first in range(2):
        pair.sender.push(Push(room=7, attempt=1, first=first, pages=(first,)))
    pair.bell.until(lambda: pair.sent().progress == 2, "two frames are in the ring")
    assert pair.gated.begun.wait(WAIT_S)
    pair.receiver.revoke(7, 1)
    assert not pair.received().writers_stopped, "the first is being scattered"
    pair.gated.gate.set()
    pair.bell.until(lambda: pair.received().writers_stopped, "it has ended")
    staging = pair.receiver.staging
    assert staging is not None
    pair.bell.until(lambda: staging.settled(7, 1), "the second was dropped")
    assert torch.equal(pair.page(0), pair.source.tensor[0])
    assert not pair.page(1).any()


@pytest.mark.parametrize(
    ("first", "count", "nbytes"),
    [(0, 4, 4 * SHAPE.page_bytes), (3, 1, SHAPE.page_bytes), (0, 1, 8), (0, 2**31, SHAPE.page_bytes), (0, 0, 0)],
    ids=["too many pages", "no such page", "too few bytes", "absurd", "nothing"],
)
def test_a_staged_frame_that_does_not_fit_the_plan_ends_the_stream_and_writes_nothing(
    pair: Gated, first: int, count: int, nbytes: int
) -> None:
    pair.gated.gate.set()
    pair.begin_wide()
    writer = TcpWriter(pair.receiver)
    head = FRAME.pack(FrameKind.STAGED, 1, 1, 7, nbytes) + PIECE.pack(first, count, 0)
    writer.stream.sendall(head + b"\xff" * nbytes)
    assert writer.is_cut()
    assert not pair.target.tensor.any()
