"""Agreement: the lattice, the minimum over a unit, the metadata gate."""

import timeit
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from baton_core.agreement import (
    GateArgs,
    Group,
    KVPoll,
    Observation,
    SoloGroup,
    Watch,
    agreed_polls,
    merge_status,
    poll_and_all_reduce,
    poll_and_all_reduce_attn_cp_tp_group,
    poll_and_all_reduce_pp,
    poll_and_all_reduce_with_staging,
    ready_and_failed,
)
from baton_core.errors import Reason
from baton_core.messages import MetadataRow
from baton_core.request import FAKE_HOST
from unit.cores import agreed, at_once, meetings, together

TCP = GateArgs(backend="tcp")
SUCCESS = Observation(poll=KVPoll.Success, progress=3)
WATCH = Watch(rid="r", room=7, attempt=1, host="10.0.0.1", row=0, serial=5)


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
    """A simulated stage: its ranks are threads that wait for each other."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def reduce(self, per_rank: Sequence[Sequence[Observation]]) -> list[list[Observation]]:
        def poll(rank: int, group: Group) -> list[Observation]:
            return poll_and_all_reduce([Seen(one) for one in per_rank[rank]], group)

        return together(self.ranks, poll)


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
    seen = Unit(ranks).reduce([[failed if rank == ranks - 1 else others] for rank in range(ranks)])
    assert {one[0].poll for one in seen} == {KVPoll.Failed}
    assert {one[0].writers_stopped for one in seen} == {False}
    assert {(one[0].reason, one[0].rank) for one in seen} == {(Reason.TRANSFER_FAILED, ranks - 1)}
    assert seen[ranks - 1][0].text == "reset"
    assert seen[0][0].text == f"rank {ranks - 1}: transfer_failed"
    assert agreed_polls([WATCH], seen[0])[0].rank == ranks - 1


def test_writers_have_stopped_only_when_they_have_on_every_rank() -> None:
    stopped = Observation(poll=KVPoll.Failed, writers_stopped=True)
    assert [one[0].writers_stopped for one in Unit(3).reduce([[stopped]] * 3)] == [True] * 3
    going = Observation(poll=KVPoll.Failed)
    assert [one[0].writers_stopped for one in Unit(3).reduce([[stopped], [going], [stopped]])] == [False] * 3


def test_the_smaller_reason_wins_and_of_equal_ones_the_lower_rank() -> None:
    def failing(reason: Reason) -> Observation:
        return Observation(poll=KVPoll.Failed, reason=reason, text=reason.name)

    corrupt, lost = failing(Reason.METADATA_CORRUPT), failing(Reason.PEER_LOST)
    seen = Unit(3).reduce([[lost], [corrupt], [corrupt]])
    assert {(one[0].reason, one[0].rank) for one in seen} == {(Reason.METADATA_CORRUPT, 1)}
    assert seen[1][0].text == "METADATA_CORRUPT"
    assert seen[2][0].text == "rank 1: metadata_corrupt"


def test_progress_and_poll_are_the_least_of_all_ranks_for_every_request() -> None:
    def moving(poll: KVPoll, progress: int) -> Observation:
        return Observation(poll=poll, progress=progress)

    seen = Unit(2).reduce(
        [
            [moving(KVPoll.Transferring, 4), moving(KVPoll.Success, 8)],
            [moving(KVPoll.WaitingForInput, 6), moving(KVPoll.Success, 8)],
        ]
    )
    for one in seen:
        assert [(of.poll, of.progress) for of in one] == [(KVPoll.WaitingForInput, 4), (KVPoll.Success, 8)]


def test_what_ranks_exchange_fits_into_64_bits_and_they_exchange_as_much() -> None:
    exchanged: list[Sequence[int]] = []

    class Wire:
        rank, size = 4_095, 4_096

        def all_reduce_min(self, values: Sequence[int]) -> Sequence[int]:
            exchanged.append(values)
            return values

    worst = Observation(poll=KVPoll.Success, writers_stopped=True, reason=max(Reason), progress=2**62)
    poll_and_all_reduce([Seen(worst)], Wire())
    poll_and_all_reduce([Seen(SUCCESS)], Wire())
    assert [len(values) for values in exchanged] == [4, 4]
    assert all(-(2**63) <= value < 2**63 for values in exchanged for value in values)


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
    assert [poll.serial for poll in polls] == [5, 5]
    assert [poll.row for poll in polls] == [ROW, None]
    assert [poll.poll for poll in polls] == [4, 3]
    assert agreed_polls([WATCH], [SUCCESS])[0].row is None


STILL = Observation(poll=KVPoll.Transferring, progress=3)


def test_what_stands_still_is_the_same_fact_as_before() -> None:
    before = agreed_polls([WATCH], [STILL])
    (again,) = agreed_polls([WATCH], [replace(STILL, text="said in other words")], None, before)
    assert again is before[0]
    assert agreed_polls([replace(WATCH, serial=6)], [STILL], None, before) != before, "the next request of that name"
    assert agreed_polls([replace(WATCH, attempt=2)], [STILL], None, before) != before


@pytest.mark.parametrize(
    "news",
    [
        {"poll": KVPoll.Success},
        {"poll": KVPoll.Failed},
        {"progress": 4},
        {"writers_stopped": True},
        {"reason": Reason.PEER_LOST},
        {"rank": 1},
    ],
)
def test_whatever_changes_is_a_new_fact(news: dict[str, Any]) -> None:
    before = agreed_polls([WATCH], [STILL])
    assert agreed_polls([WATCH], [replace(STILL, **news)], None, before) == agreed_polls(
        [WATCH], [replace(STILL, **news)]
    )


def test_a_success_is_read_anew_for_its_row() -> None:
    before = agreed_polls([WATCH], [SUCCESS])
    assert agreed_polls([WATCH], [SUCCESS], Rows(ROW), before)[0].row == ROW


# -- a row that is another's (S2)


@pytest.mark.parametrize("other", [MetadataRow(room=8, attempt=1, first_token=9), replace(ROW, attempt=2)])
def test_a_visible_row_of_another_room_or_attempt_is_a_failure_that_names_both(other: MetadataRow) -> None:
    (one,) = poll_and_all_reduce([Seen(SUCCESS)], SoloGroup(), [WATCH], Rows(other), TCP)
    assert (one.poll, one.reason) == (KVPoll.Failed, Reason.METADATA_CORRUPT)
    assert f"room 7 attempt 1 holds room {other.room} attempt {other.attempt}" in one.text


@pytest.mark.parametrize("poll", [one for one in KVPoll if one is not KVPoll.Success])
def test_a_row_is_judged_only_where_everything_else_has_arrived(poll: KVPoll) -> None:
    other = Rows(replace(ROW, room=8))
    assert gated(other, seen=Observation(poll=poll)) is poll
    assert gated(other, args=GateArgs(backend="fake")) is KVPoll.Success


def test_corruption_on_one_rank_is_agreed_by_all_with_the_rank_that_saw_it() -> None:
    rows = [Rows(ROW), Rows(replace(ROW, room=8)), Rows(ROW)]
    seen = together(3, lambda rank, group: poll_and_all_reduce([Seen(SUCCESS)], group, [WATCH], rows[rank], TCP)[0])
    assert {(one.poll, one.reason, one.rank) for one in seen} == {(KVPoll.Failed, Reason.METADATA_CORRUPT, 1)}


def test_a_row_visible_on_one_rank_first_is_success_on_none() -> None:
    rows = [Rows(ROW), Rows(None)]
    seen = together(2, lambda rank, group: poll_and_all_reduce([Seen(SUCCESS)], group, [WATCH], rows[rank], TCP)[0])
    assert [one.poll for one in seen] == [KVPoll.Transferring] * 2
    alone = [poll_and_all_reduce([Seen(SUCCESS)], SoloGroup(), [WATCH], one, TCP)[0].poll for one in rows]
    assert alone == [KVPoll.Success, KVPoll.Transferring], "each by itself would have gone another way"


# -- the consensus of pipeline stages (S1)


def test_a_consensus_becomes_polls_and_failure_wins() -> None:
    polls = poll_and_all_reduce_pp(["a", "b", "c", "d"], KVPoll.WaitingForInput, ["a", "b"], ["b", "c"])
    assert polls == [KVPoll.WaitingForInput, KVPoll.Failed, KVPoll.Failed, None]
    assert poll_and_all_reduce_pp([], KVPoll.WaitingForInput, [], []) == []


@pytest.mark.parametrize(("good", "bad"), [(None, None), ([], None), (None, [])])
def test_without_a_consensus_there_are_no_polls(good: list[str] | None, bad: list[str] | None) -> None:
    with pytest.raises(ValueError, match="PP consensus is required"):
        poll_and_all_reduce_pp(["a"], KVPoll.WaitingForInput, good, bad)


def test_mapping_a_consensus_takes_at_most_0_3_us_a_request() -> None:
    rids = [f"request-{number:06d}" for number in range(1_024)]
    good, bad = tuple(rids[:900]), tuple(rids[900:1_000])
    best_s = min(timeit.repeat(lambda: poll_and_all_reduce_pp(rids, 2, good, bad), number=5, repeat=40)) / 5
    print(f"poll_and_all_reduce_pp: {best_s / len(rids) * 1e6:.3f} us a request, of {len(rids)}")
    assert best_s / len(rids) <= 0.3e-6


def test_ready_is_what_all_stages_hold_or_are_beyond() -> None:
    polls = [agreed(poll.name, poll) for poll in KVPoll]
    good, bad = ready_and_failed(polls, KVPoll.WaitingForInput)
    assert (good, bad) == (("WaitingForInput", "Transferring", "Success"), ("Failed",))


def test_uncovered_requests_are_reduced_over_context_then_over_tensor_parallel_ranks() -> None:
    seen = [
        [KVPoll.Failed, KVPoll.Success, KVPoll.Success],
        [KVPoll.Success, KVPoll.Success, KVPoll.Transferring],
        [KVPoll.Success, KVPoll.WaitingForInput, KVPoll.Success],
        [KVPoll.Success, KVPoll.Success, KVPoll.Success],
    ]  # rank r is at (cp, tp) = divmod(r, 2)
    over_cp, over_tp = [meetings(2), meetings(2)], [meetings(2), meetings(2)]

    def rank(number: int) -> list[int]:
        cp, tp = divmod(number, 2)
        pollers = [Seen(Observation(poll=one)) for one in seen[number]]
        return poll_and_all_reduce_attn_cp_tp_group(pollers, over_cp[tp][cp], over_tp[cp][tp])

    for reduced in at_once([partial(rank, number) for number in range(4)]):
        assert reduced == [KVPoll.Failed, KVPoll.WaitingForInput, KVPoll.Transferring]


def test_a_rank_by_itself_asks_no_group() -> None:
    pollers = [Seen(SUCCESS), Seen(Observation(poll=KVPoll.Failed))]
    assert poll_and_all_reduce_attn_cp_tp_group(pollers, SoloGroup(), SoloGroup()) == [4, 0]
