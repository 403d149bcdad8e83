"""The contract of transfers between whole units: several prefill ranks feed one decode rank, and the reverse."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from baton_core.agreement import KVPoll
from baton_core.errors import Reason
from baton_core.kv_layout import UnitLayout, row_writer, writers
from baton_engine.transfer.shm_wire import Frame, Kind
from baton_engine.transfer.tcp_wire import AnswerKind
from contract.transfer_pairs import DECODE, Units, content
from contract.transfer_writers import ShmWriter, TcpWriter

TOKENS = 18
ONE = UnitLayout(layers=3, kv_heads=2, head_dim=4, element_bytes=4, page_tokens=4)
TWELVE = replace(ONE, kv_heads=12)
SINGLE = replace(ONE, kv_heads=1)
LAYOUTS = {
    "TP1 to TP2": (ONE, replace(ONE, tp=2)),
    "TP2 to TP1": (replace(ONE, tp=2), ONE),
    "TP2 to TP2": (replace(ONE, tp=2), replace(ONE, tp=2)),
    "TP2 to TP3": (replace(TWELVE, tp=2), replace(TWELVE, tp=3)),
    "TP4 to TP3": (replace(TWELVE, tp=4), replace(TWELVE, tp=3)),
    "PP2 to PP1": (replace(ONE, pp=2), ONE),
    "PP1 to PP2": (ONE, replace(ONE, pp=2)),
    "CP2 to TP1": (replace(ONE, cp=2), ONE),
    "CP2 to TP2": (replace(ONE, cp=2), replace(ONE, tp=2)),
    "replicated to whole": (replace(SINGLE, tp=2), SINGLE),
    "whole to replicated": (SINGLE, replace(SINGLE, tp=2)),
    "replicated to more replicated": (replace(ONE, tp=4), replace(SINGLE, kv_heads=2, tp=8)),
    "pages of 4 to 8": (ONE, replace(ONE, page_tokens=8)),
    "pages of 8 to 4": (replace(ONE, page_tokens=8), ONE),
    "pages of 4 to 6": (ONE, replace(ONE, page_tokens=6)),
    "everything at once": (
        replace(TWELVE, tp=2, pp=2, cp=2, page_tokens=6),
        replace(TWELVE, tp=3, pp=3, page_tokens=4),
    ),
}

Make = Callable[[str], Units]


@pytest.fixture(params=["tcp", "shm", "auto", "staged", "staged alone"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(backend: str, tmp_path: Path) -> Iterator[Make]:
    made: list[Units] = []

    def make(name: str) -> Units:
        made.append(Units(backend, tmp_path, *LAYOUTS[name]))
        return made[-1]

    yield make
    for units in made:
        units.close()


@pytest.mark.parametrize("tokens", [TOKENS, 3, 24], ids="{} tokens".format)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_number_arrives_where_it_belongs_chunk_by_chunk(make: Make, name: str, tokens: int) -> None:
    units = make(name)
    units.begin(tokens)
    units.ready()
    pages = len(units.source_pages)
    for first in range(0, pages, 2):
        units.push(first, min(first + 2, pages))
    units.arrive()


@pytest.mark.parametrize("name", ["TP2 to TP1", "PP2 to PP1", "CP2 to TP2", "everything at once"])
def test_a_row_that_comes_before_another_rank_s_pages_ends_nothing(make: Make, name: str) -> None:
    units = make(name)
    units.begin(TOKENS)
    units.ready()
    speakers = {row_writer(units.source, units.target, member) for member in range(units.target.members)}
    speakers &= set(writers(units.source, units.target, 0))
    units.push(0, len(units.source_pages), members=tuple(speakers))
    units.bell.until(lambda: units.rows[0].room_word(2) != 0, "the row of decode's first rank is there")
    assert units.received(0).poll is not KVPoll.Success
    assert units.received(0).progress < len(units.target_pages)
    others = tuple(member for member in range(units.source.members) if member not in speakers)
    units.push(0, len(units.source_pages), members=others)
    units.arrive()


def test_a_sender_waits_until_all_that_read_from_it_have_ordered(make: Make) -> None:
    units = make("TP2 to TP3")
    units.begin(TOKENS, absent=(0, 1))
    assert writers(units.source, units.target, 1) == (0, 1)
    units.order(0, 0)
    assert [units.sent(member).poll for member in (0, 1)] == [KVPoll.Bootstrapping] * 2
    units.order(1, 0)
    units.bell.until(lambda: units.sent(0).poll is KVPoll.WaitingForInput, "both readers of rank 0 have ordered")
    assert units.sent(1).poll is KVPoll.Bootstrapping
    units.order(1, 1)
    units.order(2, 1)
    units.ready()
    units.push(0, len(units.source_pages))
    units.arrive()


def test_a_rank_that_nobody_reads_from_waits_for_no_order_and_ends_with_the_last_push(make: Make) -> None:
    units = make("replicated to whole")
    units.begin(TOKENS, absent=(0,))
    assert not units.feeds(1)
    assert units.sent(1).poll is KVPoll.WaitingForInput
    assert units.sent(1).progress == len(units.source_pages)
    assert units.sent(0).poll is KVPoll.Bootstrapping
    units.order(0, 0)
    units.ready()
    units.push(0, 2)
    assert units.sent(1).poll is KVPoll.Transferring
    units.push(2, len(units.source_pages))
    assert units.sent(1).poll is KVPoll.Success
    units.arrive()


def test_progress_is_the_share_of_all_writers_on_decode_and_of_the_slowest_reader_on_prefill(make: Make) -> None:
    units = make("TP2 to TP1")
    units.begin(16)
    units.ready()
    units.push(0, 3, members=(0,))
    units.bell.until(lambda: units.sent(0).progress == 3, "three of four pages of the one half are there")
    units.bell.until(lambda: units.received(0).progress == 1, "which is 3/8 of four pages")
    units.push(0, 4, members=(1,))
    units.bell.until(lambda: units.received(0).progress == 3, "and 4/8 more")
    assert units.received(0).poll is KVPoll.Transferring


@pytest.mark.parametrize("name", ["TP2 to TP1", "PP2 to PP1"])
def test_one_writer_that_dies_fails_the_attempt_and_the_others_write_no_more(make: Make, name: str) -> None:
    units = make(name)
    units.begin(TOKENS)
    units.ready()
    units.push(0, 2)
    for member in (0, 1):
        units.bell.until(lambda m=member: units.sent(m).progress >= 2, "both have begun")
    units.senders[0].close()
    units.bell.until(lambda: units.received(0).poll is KVPoll.Failed, "its end is noticed")
    assert units.received(0).reason is Reason.TRANSFER_FAILED
    units.receivers[0].revoke(7, 1)
    units.bell.until(lambda: units.received(0).writers_stopped, "the other, too, has stopped")
    before = units.targets[0].tensor.clone()
    units.push(2, len(units.source_pages), members=(1,))
    units.bell.until(lambda: units.sent(1).poll is KVPoll.Failed, "it was told to stop, or is refused")
    assert (units.targets[0].tensor == before).all()
    assert units.rows[0].room_word(2) == 0


def test_one_writer_that_never_comes_holds_up_its_attempt_and_no_pages(make: Make) -> None:
    units = make("TP2 to TP1")
    units.begin(TOKENS)
    units.ready()
    units.push(0, len(units.source_pages), members=(1,))
    units.bell.until(lambda: units.sent(1).poll is KVPoll.Success, "one half is there")
    units.bell.until(lambda: units.received(0).poll is KVPoll.Transferring, "decode knows it, too")
    assert not units.received(0).writers_stopped
    units.receivers[0].revoke(7, 1)
    units.bell.until(lambda: units.received(0).writers_stopped, "nobody writes")
    before = units.targets[0].tensor.clone()
    units.push(0, len(units.source_pages), members=(0,))
    units.bell.until(lambda: units.sent(0).poll is KVPoll.Failed, "it comes too late")
    assert (units.targets[0].tensor == before).all()


def test_one_reader_that_revokes_fails_the_sender_and_both_sides_let_go_of_their_pages(make: Make) -> None:
    units = make("TP1 to TP2")
    units.begin(TOKENS)
    units.ready()
    units.push(0, 2)
    units.bell.until(lambda: units.sent(0).progress >= 2, "both readers have two pages")
    units.receivers[1].revoke(7, 1)
    units.bell.until(lambda: units.received(1).writers_stopped, "the revoking one is free")
    units.push(2, len(units.source_pages))
    units.bell.until(lambda: units.sent(0).poll is KVPoll.Failed, "the sender has failed as a whole")
    units.senders[0].revoke(7, 1)
    units.bell.until(lambda: units.sent(0).writers_stopped, "it reads no more")
    units.receivers[0].revoke(7, 1)
    units.bell.until(lambda: units.received(0).writers_stopped, "the other is free, too")
    for end in (*units.senders, *units.receivers):
        end.forget(7, 1)
    units.begin(TOKENS, room=8)
    units.ready(room=8)
    units.push(0, len(units.source_pages), room=8)
    units.arrive(room=8)


def test_a_rank_that_is_gone_fails_just_the_attempts_that_it_feeds_or_reads(make: Make) -> None:
    units = make("TP2 to TP2")
    units.begin(TOKENS)
    units.ready()
    for ends in (units.receivers, units.senders):
        for end in ends:
            end.peer_gone("p1/0.1")
            end.peer_gone("d1/0.1")
            end.peer_gone("d2/0.0")
    for seen in (units.received(1), units.sent(1)):
        assert (seen.poll, seen.reason) == (KVPoll.Failed, Reason.PEER_LOST)
    for seen in (units.received(0), units.sent(0)):
        assert seen.poll is KVPoll.WaitingForInput


def ordered_early(make: Make) -> Units:
    """Both readers of the one sender have ordered before it offers."""
    units = make("TP1 to TP2")
    units.begin(TOKENS)
    units.senders[0].revoke(7, 1)
    units.senders[0].forget(7, 1)
    units.order(1, 0)
    units.order(0, 0)
    return units


def test_an_order_that_comes_before_its_offer_is_kept_for_it(make: Make) -> None:
    units = ordered_early(make)
    assert units.sent(0).poll is KVPoll.Failed, "it is not known"
    units.senders[0].offer(7, 1, DECODE, units.target, TOKENS)
    units.ready()
    units.push(0, len(units.source_pages))
    units.arrive()


def test_early_orders_of_a_rank_that_is_gone_are_dropped(make: Make) -> None:
    units = ordered_early(make)
    units.senders[0].peer_gone("d1/0.1")
    units.senders[0].offer(7, 1, DECODE, units.target, TOKENS)
    assert units.sent(0).poll is KVPoll.Bootstrapping
    units.order(1, 0)
    units.ready()


def test_an_order_from_a_rank_that_reads_nothing_here_is_ignored(make: Make) -> None:
    units = make("TP2 to TP2")
    units.begin(TOKENS, absent=(0, 1))
    units.order(1, 0)
    assert units.sent(0).poll is KVPoll.Bootstrapping
    units.order(0, 0)
    units.bell.until(lambda: units.sent(0).poll is KVPoll.WaitingForInput, "the right one is taken")


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_written_once_all_writers_have_stopped_whenever_that_is(make: Make, seed: int) -> None:
    random = Random(seed)
    units = make(random.choice(list(LAYOUTS)))
    for room in range(1, 6):
        units.begin(TOKENS, room=room)
        units.ready(room=room)
        pages = len(units.source_pages)
        cuts = {member: sorted({0, random.randrange(pages), pages}) for member in range(units.source.members)}
        pushes = [(member, *ends) for member, at in cuts.items() for ends in pairwise(at)]
        pushes.sort(key=lambda push: (push[1], random.random()))
        revoked_after = random.randrange(len(pushes))
        for member, first, end in pushes[:revoked_after]:
            units.push(first, end, members=(member,), room=room)
        for receiver in units.receivers:
            receiver.revoke(room, 1)
        for member in range(units.target.members):
            units.bell.until(lambda m=member, r=room: units.received(m, r).writers_stopped, "decode's pages are free")
        before = [pool.tensor.clone() for pool in units.targets]
        words = [rows.room_word(2) for rows in units.rows]
        for member, first, end in pushes[revoked_after:]:
            units.push(first, end, members=(member,), room=room)
        for sender in units.senders:
            sender.revoke(room, 1)
        for member in range(units.source.members):
            units.bell.until(lambda m=member, r=room: units.sent(m, r).writers_stopped, "prefill's pages are free")
        assert all((pool.tensor == was).all() for pool, was in zip(units.targets, before, strict=True))
        assert words == [rows.room_word(2) for rows in units.rows]
        for end_of in (*units.senders, *units.receivers):
            end_of.forget(room, 1)


@pytest.mark.parametrize("backend", ["fake"], indirect=True)
def test_the_null_backend_has_units_too(make: Make) -> None:
    units = make("everything at once")
    units.begin(TOKENS)
    units.ready()
    units.push(0, 1)
    units.push(1, len(units.source_pages))
    for member in range(units.source.members):
        assert units.sent(member).poll is KVPoll.Success
        assert units.sent(member).progress == len(units.source_pages)
    for member in range(units.target.members):
        assert units.received(member).poll is KVPoll.Success
        assert units.rows[member].room_word(2) != 0


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[Callable[[str], Units]]:
    """Decode's one rank, fed by two halves that are written by hand."""
    made: list[Units] = []

    def make(backend: str) -> Units:
        units = Units(backend, tmp_path, *LAYOUTS["TP2 to TP1"])
        made.append(units)
        units.begin(4, absent=(0, 1))
        return units

    yield make
    for units in made:
        units.close()


def test_pages_stay_held_until_the_last_granted_writer_says_that_it_stopped(halves: Make) -> None:
    units = halves("shm")
    first, second = (ShmWriter(units.receivers[0], f"p1/0.{member}") for member in (0, 1))
    order = {"pages": units.target_pages, "row": 2}
    assert first.asks(5, **order) is Kind.GRANT
    assert second.asks(9, **order) is Kind.GRANT
    units.receivers[0].revoke(7, 1)
    assert first.hears() == Frame(kind=Kind.REVOKE, serial=5)
    assert second.hears() == Frame(kind=Kind.REVOKE, serial=9)
    first.says(Frame(kind=Kind.STOPPED, serial=5))
    units.bell.until(lambda: units.received(0).poll is KVPoll.Failed, "one has stopped")
    assert not units.received(0).writers_stopped
    second.stream.close()
    units.bell.until(lambda: units.received(0).writers_stopped, "the other is gone")


def test_a_fence_cuts_off_every_writer_that_stopped_inside_a_frame(halves: Make) -> None:
    units = halves("tcp")
    first, second = (TcpWriter(units.receivers[0], f"p1/0.{member}") for member in (0, 1))
    for writer, offset in ((first, 0), (second, 64)):
        writer.pages(7, [(0, offset, 64)], os.urandom(32))
    page = units.targets[0].tensor[units.target_pages[0]].flatten()
    units.bell.until(lambda: bool(page[:8].any() and page[16:24].any()), "half of each frame is there")
    units.receivers[0].revoke(7, 1)
    assert not units.received(0).writers_stopped
    units.receivers[0].fence(7, 1)
    units.bell.until(lambda: units.received(0).writers_stopped, "both are cut off")
    assert first.is_cut() and second.is_cut()


def test_a_row_is_taken_only_from_the_rank_that_owes_it_and_bytes_only_as_many_as_are_owed(halves: Make) -> None:
    units = halves("tcp")
    assert row_writer(units.source, units.target, 0) == 0
    owed = content(units.source, 1, 0).numel() * 4
    second = TcpWriter(units.receivers[0], "p1/0.1")
    second.pages(7, [(0, 0, 64)], bytes(64))
    assert second.hears() == (AnswerKind.ACK, 64)
    second.row(7)
    assert second.is_cut()
    assert units.rows[0].room_word(2) == 0
    units = halves("tcp")
    first = TcpWriter(units.receivers[0], "p1/0.0")
    first.pages(7, [(0, 0, owed), (0, 0, 8)], bytes(owed + 8))
    assert first.is_cut()
    units.bell.until(lambda: units.received(0).poll is KVPoll.Failed, "what it carried fails")


def test_each_writer_hears_that_it_is_done_when_its_own_share_is_there(halves: Make) -> None:
    units = halves("tcp")
    owed = content(units.source, 1, 0).numel() * 4
    second, first = (TcpWriter(units.receivers[0], f"p1/0.{member}") for member in (1, 0))
    second.pages(7, [(0, 0, owed)], bytes(owed))
    assert second.hears() == (AnswerKind.DONE, owed)
    first.pages(7, [(0, 0, owed)], bytes(owed))
    assert first.hears() == (AnswerKind.ACK, owed)
    assert units.received(0).progress == 1
    assert units.received(0).poll is KVPoll.Transferring
    first.row(7)
    assert first.hears() == (AnswerKind.DONE, owed)
    assert units.received(0).poll is KVPoll.Success
