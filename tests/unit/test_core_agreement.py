"""Agreement: the lattice, the minimum over a unit, the metadata gate."""

from collections.abc import Sequence
from itertools import product

import pytest

from baton_core.agreement import (
    GateArgs,
    KVPoll,
    Observation,
    SoloGroup,
    Watch,
    agreed_polls,
    merge_status,
    poll_and_all_reduce,
    poll_and_all_reduce_with_staging,
)
from baton_core.errors import Reason
from baton_core.messages import MetadataRow
from baton_core.request import FAKE_HOST

TCP = GateArgs(backend="tcp")
SUCCESS = Observation(poll=KVPoll.Success, progress=3)
WATCH = Watch(rid="r", room=7, attempt=1, host="10.0.0.1", row=0)


class Seen:
    """A poller that always sees the same."""

    def __init__(self, seen: Observation) -> None:
        self.seen = seen

    def poll(self) -> Observation:
        return self.seen


class Rows:
    """Metadata rows of one rank."""

    def __init__(self, *rows: MetadataRow | None) -> None:
        self.rows = rows

    def room_word(self, row: int) -> int:
        found = self.rows[row]
        return 0 if found is None else found.room + 1

    def read(self, row: int) -> MetadataRow | None:
        return self.rows[row]


class Unit:
    """A simulated group: every rank's values are collected first, then each gets the minimum."""

    def __init__(self, ranks: int) -> None:
        self.values: list[list[int]] = [[] for _ in range(ranks)]

    def reduce(self, per_rank: Sequence[Sequence[Observation]]) -> list[list[Observation]]:
        for rank, seen in enumerate(per_rank):
            poll_and_all_reduce([Seen(one) for one in seen], Collect(rank, self.values))
        least = [min(column) for column in zip(*self.values, strict=True)]
        return [
            poll_and_all_reduce([Seen(one) for one in seen], Answer(rank, least)) for rank, seen in enumerate(per_rank)
        ]


class Collect:
    def __init__(self, rank: int, values: list[list[int]]) -> None:
        self.rank, self.values = rank, values

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        self.values[self.rank] = list(values)
        return list(values)


class Answer:
    def __init__(self, rank: int, least: list[int]) -> None:
        self.rank, self.least = rank, least

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        assert len(values) == len(self.least)
        return self.least


ROW = MetadataRow(room=7, attempt=1, first_token=9)


def gated(rows: Rows, watch: Watch = WATCH, args: GateArgs = TCP, seen: Observation = SUCCESS) -> KVPoll:
    return poll_and_all_reduce([Seen(seen)], SoloGroup(), [watch], rows, args)[0].poll


def test_failed_is_sticky_and_otherwise_the_greater_status_stays() -> None:
    for known, news in product(KVPoll, KVPoll):
        merged = merge_status(known, news)
        assert merged == (KVPoll.Failed if KVPoll.Failed in (known, news) else max(known, news))


def test_a_room_is_created_only_by_bootstrapping_or_waiting_for_input() -> None:
    created = [news for news in KVPoll if merge_status(None, news) is not None]
    assert created == [KVPoll.Bootstrapping, KVPoll.WaitingForInput]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_failed_rank_fails_the_request_on_every_rank(ranks: int) -> None:
    failed = Observation(poll=KVPoll.Failed, writers_stopped=True, reason=Reason.TRANSFER_FAILED, text="reset")
    others = Observation(poll=KVPoll.Success, writers_stopped=False, progress=9)
    agreed = Unit(ranks).reduce([[failed if rank == ranks - 1 else others] for rank in range(ranks)])
    assert {one[0].poll for one in agreed} == {KVPoll.Failed}
    assert {one[0].writers_stopped for one in agreed} == {False}
    assert {one[0].reason for one in agreed} == {Reason.TRANSFER_FAILED}
    assert agreed[ranks - 1][0].text == "reset"
    assert agreed[0][0].text == f"rank {ranks - 1}: transfer_failed"


def test_writers_have_stopped_only_when_they_have_on_every_rank() -> None:
    stopped = Observation(poll=KVPoll.Failed, writers_stopped=True)
    assert [one[0].writers_stopped for one in Unit(3).reduce([[stopped]] * 3)] == [True] * 3
    going = Observation(poll=KVPoll.Failed)
    assert [one[0].writers_stopped for one in Unit(3).reduce([[stopped], [going], [stopped]])] == [False] * 3


def test_the_smaller_reason_wins_and_of_equal_ones_the_lower_rank() -> None:
    def failing(reason: Reason) -> Observation:
        return Observation(poll=KVPoll.Failed, reason=reason, text=reason.name)

    corrupt, lost = failing(Reason.METADATA_CORRUPT), failing(Reason.PEER_LOST)
    agreed = Unit(3).reduce([[lost], [corrupt], [corrupt]])
    assert {one[0].reason for one in agreed} == {Reason.METADATA_CORRUPT}
    assert agreed[1][0].text == "METADATA_CORRUPT"
    assert agreed[2][0].text == "rank 1: metadata_corrupt"


def test_progress_and_poll_are_the_least_of_all_ranks_for_every_request() -> None:
    def moving(poll: KVPoll, progress: int) -> Observation:
        return Observation(poll=poll, progress=progress)

    agreed = Unit(2).reduce(
        [
            [moving(KVPoll.Transferring, 4), moving(KVPoll.Success, 8)],
            [moving(KVPoll.WaitingForInput, 6), moving(KVPoll.Success, 8)],
        ]
    )
    for one in agreed:
        assert [(seen.poll, seen.progress) for seen in one] == [(KVPoll.WaitingForInput, 4), (KVPoll.Success, 8)]


def test_success_waits_until_the_row_is_visible() -> None:
    assert gated(Rows(None)) is KVPoll.Transferring
    assert gated(Rows(ROW)) is KVPoll.Success


def test_the_gate_lowers_only_the_copy_that_was_polled() -> None:
    poller = Seen(SUCCESS)
    reduced = poll_and_all_reduce([poller], SoloGroup(), [WATCH], Rows(None), TCP)
    assert reduced[0] == Observation(poll=KVPoll.Transferring, progress=3)
    assert poller.seen.poll is KVPoll.Success


@pytest.mark.parametrize("poll", [one for one in KVPoll if one is not KVPoll.Success])
def test_the_gate_changes_nothing_but_success(poll: KVPoll) -> None:
    assert gated(Rows(None), seen=Observation(poll=poll)) is poll


@pytest.mark.parametrize("given", [bits for bits in product((True, False), repeat=3) if not all(bits)])
def test_the_gate_applies_only_with_all_three_arguments(given: tuple[bool, bool, bool]) -> None:
    watches = [WATCH] if given[0] else None
    rows = Rows(None) if given[1] else None
    args = TCP if given[2] else None
    assert poll_and_all_reduce([Seen(SUCCESS)], SoloGroup(), watches, rows, args)[0].poll is KVPoll.Success


def test_transfers_that_move_nothing_pass_the_gate() -> None:
    fake_host = Watch(rid="r", room=0, attempt=1, host=FAKE_HOST, row=0)
    assert gated(Rows(None), fake_host) is KVPoll.Success
    assert gated(Rows(None), args=GateArgs(backend="fake")) is KVPoll.Success


def test_a_watch_without_a_row_passes_the_gate() -> None:
    assert gated(Rows(), Watch(rid="r", room=7, attempt=1, host="10.0.0.1")) is KVPoll.Success


@pytest.mark.parametrize(("settled", "visible"), list(product((True, False), repeat=2)))
def test_staged_success_waits_for_the_scatter_and_for_the_row(settled: bool, visible: bool) -> None:
    class Ring:
        def settled(self, room: int, attempt: int) -> bool:
            assert (room, attempt) == (7, 1)
            return settled

    rows = Rows(ROW if visible else None)
    reduced = poll_and_all_reduce_with_staging([Seen(SUCCESS)], SoloGroup(), Ring(), [WATCH], rows, TCP)
    assert reduced[0].poll is (KVPoll.Success if settled and visible else KVPoll.Transferring)


def test_the_leaders_row_joins_an_agreed_success_only() -> None:
    still = Observation(poll=KVPoll.Transferring)
    polls = agreed_polls([WATCH, WATCH], [SUCCESS, still], Rows(ROW))
    assert [poll.row for poll in polls] == [ROW, None]
    assert [poll.poll for poll in polls] == [4, 3]
    assert agreed_polls([WATCH], [SUCCESS])[0].row is None
