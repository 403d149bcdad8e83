"""Pipeline stages apply the same consensus, once (S1), and ranks the same gate (S2): whatever happens in between."""

from collections.abc import Collection, Mapping

import pytest

from baton_core.agreement import GateArgs, KVPoll, Observation, SoloGroup, Watch, agreed_polls, poll_and_all_reduce
from baton_core.decode.core import DecodeCore
from baton_core.effects import Effect, Expect, Fence, Forget, Push, Revoke
from baton_core.errors import Reason
from baton_core.events import Abort, AgreedPoll, Observed, PeerGone
from baton_core.machine import Handoff
from baton_core.messages import MetadataRow
from baton_core.prefill.core import PrefillCore
from baton_core.prefill.queue import PrefillBootstrapQueue
from baton_core.request import FinishType, RequestId
from unit.cores import (
    GONE,
    LOST,
    ROOM,
    Bench,
    D,
    P,
    Siblings,
    agreed,
    decode,
    ends,
    greeting,
    hello,
    kinds,
    prefill,
    request,
    row,
    together,
    tokens,
    told,
    transferring,
    with_limits,
)
from unit.cores import accepted as acceptance

READY, FAILED = KVPoll.WaitingForInput, KVPoll.Failed
CORRUPT = {"reason": Reason.METADATA_CORRUPT, "text": "stage 1 says so"}


def prefills(stages: int = 2, **fields: object) -> Siblings[PrefillCore]:
    """Prefill's stages, without a request."""
    return Siblings([prefill(pp_size=stages, **fields) for _ in range(stages)])


def decodes(stages: int = 2, **fields: object) -> Siblings[DecodeCore]:
    """Decode's stages, without a request."""
    return Siblings([decode(pp_size=stages, **fields) for _ in range(stages)])


def accept(bench: Bench[PrefillCore], rid: str = "r", room: int = ROOM, attempt: int = 1) -> list[Effect]:
    """Prefill: both legs are here, page orders are outstanding."""
    bench.submit(request(rid, room))
    return bench.say(hello(room, attempt), D)


def accepted(stages: int = 2) -> Siblings[PrefillCore]:
    """Prefill's stages with one request that waits for page orders."""
    unit = prefills(stages)
    unit.each(accept)
    return unit


def ordered(stages: int = 2) -> Siblings[DecodeCore]:
    """Decode's stages with one request whose pages are ordered."""
    unit = decodes(stages)
    unit.each(transferring)
    return unit


def phases(unit: Siblings[PrefillCore] | Siblings[DecodeCore], rid: str = "r") -> set[str]:
    """The request's phase on every stage."""
    return {one.phase(rid) for one in unit.ranks}


def revokes(effects: list[Effect]) -> int:
    return sum(isinstance(one, Revoke) for one in effects)


# -- the queue asks for a consensus, and applies it


def pop(bench: Bench[PrefillCore], **more: Collection[str]) -> list[Handoff]:
    return bench.core.bootstrap.pop_bootstrapped(**more, polls={}, uncovered_polls={}, now=bench.now)


def test_an_empty_queue_answers_before_it_asks_for_a_consensus() -> None:
    queue = prefill(pp_size=2).core.bootstrap
    assert queue.pop_bootstrapped(polls={}, uncovered_polls={}, now=0) == []
    assert queue.pop_bootstrapped(True, polls={}, uncovered_polls={}, now=0) == ([], [])
    assert decode(pp_size=2).core.prealloc.pop_preallocated(polls={}, uncovered_polls={}, now=0) == []


def test_with_stages_and_requests_a_missing_consensus_is_an_error() -> None:
    bench = prefill(pp_size=2)
    accept(bench)
    with pytest.raises(ValueError, match="PP consensus is required"):
        pop(bench)
    waiting = decode(pp_size=2)
    transferring(waiting)
    with pytest.raises(ValueError, match="PP consensus is required"):
        waiting.core.prealloc.pop_preallocated(polls={}, uncovered_polls={}, now=0)


def test_one_stage_needs_no_consensus() -> None:
    bench = prefill()
    accept(bench)
    assert pop(bench) == []
    polls = {"r": agreed(poll=READY)}
    (req,) = bench.core.bootstrap.pop_bootstrapped(polls=polls, uncovered_polls={}, now=bench.now)
    assert (req.rid, bench.phase()) == ("r", "queued")


def test_the_consensus_alone_says_who_is_ready_and_who_has_failed() -> None:
    bench = prefill(pp_size=2)
    for number, rid in enumerate("abcd", 1):
        accept(bench, rid, number, number)
    ready, failed = bench.core.bootstrap.pop_bootstrapped(
        True, ["a", "c"], ["b", "c"], polls={}, uncovered_polls={}, now=bench.now
    )
    assert ([one.rid for one in ready], [one.rid for one in failed]) == (["a"], ["b", "c"])
    assert [bench.phase(rid) for rid in "abcd"] == ["queued", "revoking", "revoking", "accepted"]
    assert list(bench.core.bootstrap.queue) == ["d"]


def test_a_request_waits_until_every_stage_is_ready() -> None:
    unit = accepted(stages=3)
    unit.observe()
    unit.observe(agreed(poll=KVPoll.Bootstrapping))
    assert phases(unit) == {"accepted"}
    unit.observe(agreed(poll=READY))
    assert phases(unit) == {"queued"}


# -- the fault of the original: between consensus and consumption something arrives


class PollsAgain(PrefillBootstrapQueue):
    """What S1 mends: the consumer looks at its own sender once more instead of applying the consensus."""

    sees: KVPoll = READY

    def _decided(
        self,
        reqs: list[Handoff],
        pp_good_rids: Collection[RequestId] | None,
        pp_bad_rids: Collection[RequestId] | None,
        polls: Mapping[RequestId, AgreedPoll],
    ) -> list[int | None]:
        return [int(self.sees) for _ in reqs]


def test_an_abort_between_consensus_and_consumption_parts_stages_that_poll_again_and_not_ours() -> None:
    original = prefills()
    for one in original.ranks:
        one.core.bootstrap = PollsAgain(one.core.ledger, pp_size=2)
    original.each(accept)
    second = original.ranks[1].core.bootstrap
    assert isinstance(second, PollsAgain)
    second.sees = FAILED  # the abort reached this stage's sender after all stages had agreed on "ready"
    with pytest.raises(AssertionError, match="the siblings diverged"):
        original.observe(agreed(poll=READY))
    assert [one.phase() for one in original.ranks] == ["queued", "revoking"], (
        "stage 0 will compute it, stage 1 will not"
    )

    ours = accepted()
    ours.observe(agreed(poll=READY))  # whatever stage 1 sees meanwhile is in the next consensus
    assert phases(ours) == {"queued"}
    effects = ours.observe(agreed(poll=FAILED, **CORRUPT))
    assert [ends(one) for one in effects] == [[("r", Reason.METADATA_CORRUPT)]] * 2


def test_an_abort_is_an_input_and_precedes_an_older_consensus_on_every_stage() -> None:
    unit = accepted()
    unit.each(lambda bench: bench.step(Abort(rid="r", verdict=GONE)))
    for old in (READY, FAILED):
        assert unit.observe(agreed(poll=old)) == [[], []]
    assert phases(unit) == {"revoking"}
    effects = unit.observe(agreed(poll=FAILED, writers_stopped=True))
    assert [kinds(one) for one in effects] == [["Forget"]] * 2
    assert [one.live for one in unit.ranks] == [[], []]


def test_a_consensus_about_an_earlier_life_of_an_id_says_nothing_about_the_next() -> None:
    unit = accepted()
    old = unit.ranks[0].core.watched()[0].serial
    unit.each(lambda bench: bench.step(Abort(rid="r", verdict=GONE)))
    unit.observe(agreed(poll=FAILED, writers_stopped=True))
    unit.each(lambda bench: accept(bench, room=ROOM + 1))  # the same id and attempt number, another decode worker's
    for poll in (READY, FAILED):
        unit.observe(agreed(poll=poll, writers_stopped=True, serial=old))
    assert phases(unit) == {"accepted"}


# -- what the consensus does not cover


@pytest.mark.parametrize("poll", [one for one in KVPoll if one is not FAILED])
def test_of_an_uncovered_poll_nothing_but_failed_is_applied(poll: KVPoll) -> None:
    bench = prefill(pp_size=2)
    accept(bench)
    ready, failed = bench.core.bootstrap.pop_bootstrapped(
        True, [], [], polls={}, uncovered_polls={"r": int(poll)}, now=bench.now
    )
    assert (ready, failed, bench.phase()) == ([], [], "accepted")


def test_an_uncovered_failure_drains_on_its_stage_at_once_and_everything_else_waits_for_the_consensus() -> None:
    unit = accepted()
    effects = unit.observe(failed_on=1)
    assert effects == [[], [Revoke(room=ROOM, attempt=1)]], "its I/O stops, here alone"
    first, second = (one.core.bootstrap for one in unit.ranks)
    assert (list(first.queue), list(first.draining)) == (["r"], [])
    assert (list(second.queue), list(second.draining)) == ([], ["r"])
    assert unit.observe(failed_on=1) == [[], []], "it is stopped once"
    assert unit.ranks[1].core.watched() != [], "and stays in what the stage reports"
    effects = unit.observe(agreed(poll=FAILED, **CORRUPT))
    assert [kinds(one) for one in effects] == [["Emit", "Tell", "Revoke"], ["Emit", "Tell"]]
    assert [ends(one) for one in effects] == [[("r", Reason.METADATA_CORRUPT)]] * 2
    assert second.draining == {}
    unit.observe(agreed(poll=FAILED, writers_stopped=True))
    assert [one.live for one in unit.ranks] == [[], []]


def test_an_older_consensus_that_was_good_is_applied_in_order_though_one_stage_drains() -> None:
    unit = prefills(pool_pages=24)
    for number, rid in enumerate("abc", 1):
        unit.each(lambda bench, rid=rid, number=number: accept(bench, rid, number, number))
    unit.observe(failed_on=1, rid="b", attempt=2)
    good = [agreed(rid, READY, number) for number, rid in enumerate("abc", 1)]
    unit.observe(*good)
    assert [list(one.core.waiting.queue) for one in unit.ranks] == [["a", "b", "c"]] * 2
    assert unit.ranks[1].core.bootstrap.draining == {}
    sent: list[set[int]] = [set(), set()]
    for _ in range(4):
        for stage, effects in enumerate(unit.each(lambda bench: bench.compute())):
            sent[stage] |= {one.room for one in effects if isinstance(one, Push)}
    assert sent == [{1, 2, 3}, {1, 3}], "the drained stage computes room 2, and sends nothing of it"
    effects = unit.observe(agreed("b", FAILED, 2, **CORRUPT))
    assert [revokes(one) for one in effects] == [1, 0]
    assert [ends(one) for one in effects] == [[("b", Reason.METADATA_CORRUPT)]] * 2


@pytest.mark.parametrize("event", [Abort(rid="r", verdict=GONE), PeerGone(peer=D, verdict=LOST), None])
def test_whatever_ends_a_draining_request_ends_it_on_every_stage_alike(event: Abort | PeerGone | None) -> None:
    unit = accepted()
    unit.observe(failed_on=1)
    effects = unit.each(lambda bench: bench.after(600_000) if event is None else bench.step(event))
    assert [len(ends(one)) for one in effects] == [1, 1]
    assert [revokes(one) for one in effects] == [1, 0]
    assert unit.ranks[1].core.bootstrap.draining == {}
    effects = unit.each(lambda bench: bench.after(2_000))
    assert [kinds(one) for one in effects] == [[Fence.__name__]] * 2
    unit.observe(agreed(poll=FAILED, writers_stopped=True))
    assert [one.live for one in unit.ranks] == [[], []]


# -- decode


def test_ordered_requests_wait_in_decodes_prealloc_queue_until_every_stage_holds_the_order() -> None:
    unit = ordered()
    assert [list(one.core.prealloc.waiters) for one in unit.ranks] == [["r"]] * 2
    unit.observe()
    unit.observe(agreed(poll=READY))
    assert [(one.core.prealloc.waiters, list(one.core.transfer.queue)) for one in unit.ranks] == [({}, ["r"])] * 2
    effects = unit.observe(agreed(row=row(42), progress=3))
    assert [tokens(one) for one in effects] == [[42], [42]]


def test_the_first_consensus_that_covers_a_request_may_be_its_success() -> None:
    unit = ordered()
    effects = unit.observe(agreed(row=row(42), progress=3))
    assert [tokens(one) for one in effects] == [[42], [42]]
    assert phases(unit) == {"arrived"}


def test_a_handshake_that_failed_on_one_stage_is_aborted_on_all() -> None:
    unit = ordered()
    effects = unit.observe(agreed(poll=FAILED, reason=Reason.PEER_LOST))
    assert [ends(one) for one in effects] == [[("r", Reason.PEER_LOST)]] * 2
    assert [len(told(one)) for one in effects] == [1, 1]
    assert phases(unit) == {"revoking"}


def test_decode_drains_an_uncovered_failure_and_keeps_its_pages_until_the_consensus() -> None:
    unit = ordered()
    assert unit.observe(failed_on=0) == [[Revoke(room=ROOM, attempt=1)], []]
    assert [list(one.core.prealloc.draining) for one in unit.ranks] == [["r"], []]
    assert {one.free for one in unit.ranks} == {5}
    unit.observe(agreed(poll=FAILED))
    assert {one.free for one in unit.ranks} == {5}
    effects = unit.observe(agreed(poll=FAILED, writers_stopped=True))
    assert [kinds(one) for one in effects] == [["Forget"]] * 2
    assert {one.free for one in unit.ranks} == {8}


def test_decode_applies_an_older_good_consensus_in_order_of_arrival_though_one_stage_drains() -> None:
    unit = decodes(pool_pages=24)
    for number, rid in enumerate("abc", 1):
        unit.each(lambda bench, rid=rid, number=number: greeting(bench, rid, number))
    for number in (3, 1, 2):  # accepted, and so ordered, in another order than that of arrival
        unit.each(lambda bench, number=number: bench.say(acceptance(number, number), P))
    assert list(unit.ranks[0].core.prealloc.waiters) == ["c", "a", "b"]
    unit.observe(failed_on=1, rid="a", attempt=1)
    unit.observe(*(agreed(rid, READY, number) for number, rid in enumerate("abc", 1)))
    assert [list(one.core.transfer.queue) for one in unit.ranks] == [["a", "b", "c"]] * 2
    effects = unit.observe(agreed("a", FAILED))
    assert [revokes(one) for one in effects] == [1, 0]


def test_pages_that_become_free_between_agreements_are_ordered_at_once_and_alike() -> None:
    unit = decodes(pool_pages=4)
    unit.each(transferring)
    unit.each(lambda bench: transferring(bench, "late", 9, attempt=2))
    assert phases(unit, "late") == {"prealloc"}
    unit.observe(agreed(poll=FAILED))
    effects = unit.observe(agreed(poll=FAILED, writers_stopped=True))
    assert [[type(one) for one in of if isinstance(one, Forget | Expect)] for of in effects] == [[Forget, Expect]] * 2


# -- metadata that is visible on one rank first (S2)


class OneRow:
    """A rank's only metadata row."""

    def __init__(self, found: MetadataRow | None) -> None:
        self.found = found

    def room_word(self, row: int) -> int:
        return 0 if self.found is None else self.found.room + 1

    def read(self, row: int) -> MetadataRow | None:
        return self.found


class Arrived:
    """A receiver that has all pages."""

    def poll(self) -> Observation:
        return Observation(poll=KVPoll.Success, progress=3)


TCP = GateArgs(backend="tcp")


def ranks_with_pages() -> Siblings[DecodeCore]:
    """Two tensor-parallel ranks of a decode unit, all pages there."""
    unit = Siblings([decode(), decode()])
    unit.each(transferring)
    return unit


def ungated(watches: list[Watch], own: OneRow) -> Observed:
    """What S2 mends: the transfer is agreed to have succeeded, and each rank then looks at its own row."""
    polls = [KVPoll.Success if own.found is not None else KVPoll.Transferring]
    return Observed(polls=agreed_polls(watches, [Observation(poll=one, progress=3) for one in polls], own))


def test_metadata_visible_on_one_rank_first_parts_ranks_that_look_after_the_agreement_and_not_ours() -> None:
    rows = [OneRow(row(42)), OneRow(None)]
    original = ranks_with_pages()
    for bench, own in zip(original.ranks, rows, strict=True):
        bench.step(ungated(bench.core.watched(), own))
    assert not original.alike
    assert [one.phase() for one in original.ranks] == ["arrived", "transferring"], "the next reductions do not match"

    ours = ranks_with_pages()
    for visible, phase in ((None, "transferring"), (row(42), "arrived")):
        rows[1].found = visible
        watches = ours.ranks[0].core.watched()
        seen = together(2, lambda rank, group: poll_and_all_reduce([Arrived()], group, watches, rows[rank], TCP))  # noqa: B023
        for bench, reduced in zip(ours.ranks, seen, strict=True):
            bench.step(Observed(polls=agreed_polls(watches, reduced, rows[0])))
        assert ours.alike
        assert {one.phase() for one in ours.ranks} == {phase}


def test_a_row_that_is_another_rooms_on_one_rank_fails_the_request_on_all_for_that_reason() -> None:
    unit = ranks_with_pages()
    rows = [OneRow(row(42)), OneRow(row(42, room=ROOM + 1))]
    watches = unit.ranks[0].core.watched()
    seen = together(2, lambda rank, group: poll_and_all_reduce([Arrived()], group, watches, rows[rank], TCP))
    effects = [
        bench.step(Observed(polls=agreed_polls(watches, reduced, rows[0])))
        for bench, reduced in zip(unit.ranks, seen, strict=True)
    ]
    assert [ends(one) for one in effects] == [[("r", Reason.METADATA_CORRUPT)]] * 2
    assert unit.alike, "texts differ, and nothing depends on them"


def test_the_gate_has_a_deadline_on_every_rank_at_the_same_time() -> None:
    unit = Siblings([decode(with_limits(transfer_stall_ms=50)) for _ in range(2)])
    unit.each(transferring)
    (watch,) = unit.ranks[0].core.watched()
    lowered = poll_and_all_reduce([Arrived()], SoloGroup(), [watch], OneRow(None), TCP)
    unit.observe(*agreed_polls([watch], lowered))
    effects = unit.each(lambda bench: bench.after(50))
    assert [ends(one) for one in effects] == [[("r", Reason.DEADLINE)]] * 2


def test_a_failure_after_the_answer_changes_nothing() -> None:
    unit = ordered()
    unit.observe(agreed(row=row(42), progress=3))
    assert unit.observe(agreed(poll=FAILED, writers_stopped=True)) == [[], []]
    effects = unit.each(lambda bench: [*bench.compute(), *bench.compute()])
    assert [ends(one) for one in effects] == [[("r", FinishType.LENGTH)]] * 2
