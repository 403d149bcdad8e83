"""The prefill core, path by path: events in, effects out."""

from typing import Any

import pytest

from baton_core.agreement import KVPoll
from baton_core.effects import Emit, Offer, Push
from baton_core.errors import Reason, Verdict
from baton_core.events import (
    Abort,
    Continue,
    DrainBegan,
    Pause,
    PauseMode,
)
from baton_core.messages import NotYet, Rejected
from baton_core.request import FinishType
from unit.cores import (
    ACCEPTED,
    GONE,
    LAYOUT,
    PROMPT,
    ROOM,
    D,
    accepted,
    ends,
    hello,
    inflight,
    kinds,
    moves,
    polled,
    prefill,
    probe,
    queued,
    request,
    told,
    with_limits,
)

OFFER = Offer(rid="r", room=ROOM, attempt=1, peer=D, target=LAYOUT.to_text(), prompt_tokens=5, pages_total=3)


# -- the two legs meet


def test_the_hello_joins_a_request_that_waits() -> None:
    bench = prefill()
    assert kinds(bench.submit(request())) == []
    assert bench.phase() == "bootstrapping"
    effects = bench.say(hello(), D)
    assert OFFER in effects
    assert told(effects) == [ACCEPTED]
    assert bench.phase() == "accepted"


def test_a_request_joins_a_hello_that_waits() -> None:
    bench = prefill()
    assert told(bench.say(hello(), D)) == [NotYet(room=ROOM, attempt=1)]
    effects = bench.submit(request())
    assert OFFER in effects
    assert told(effects) == [ACCEPTED]
    assert not bench.core.orphans


def test_a_prompt_is_computed_in_chunks_pushed_page_by_page_and_answered_when_it_has_arrived() -> None:
    bench = prefill()
    queued(bench)
    assert bench.phase() == "queued"
    first = bench.plan()
    assert [(piece.tokens, piece.start, piece.sample) for piece in first.slices] == [(PROMPT[:4], 0, False)]
    assert bench.core.plan() is None, "a step is running"
    push = next(one for one in bench.commit(first) if isinstance(one, Push))
    assert (push.first, push.pages, push.row) == (0, (0, 1), None)
    second = bench.plan()
    assert [(piece.tokens, piece.start, piece.sample) for piece in second.slices] == [(PROMPT[4:], 4, True)]
    push = next(one for one in bench.commit(second, token=33) if isinstance(one, Push))
    assert (push.first, push.pages) == (2, (2,))
    assert push.row is not None
    assert (push.row.first_token, push.row.room, push.row.attempt) == (33, ROOM, 1)
    assert bench.phase() == "inflight"
    effects = bench.step(polled(poll=KVPoll.Success, progress=3))
    assert kinds(effects) == ["Forget", "Emit"]
    emit = next(one for one in effects if isinstance(one, Emit))
    assert emit.tokens == (33,)
    assert ends(effects) == [("r", FinishType.LENGTH)]
    assert (bench.live, bench.free, bench.core.watched()) == ([], 8, [])


def test_a_room_that_ended_well_may_be_used_again_at_once() -> None:
    bench = prefill()
    inflight(bench)
    bench.step(polled())
    bench.submit(request("again"))
    assert told(bench.say(hello(attempt=2), D)) == [accepted(ROOM, 2)]


def test_a_probe_needs_no_peer() -> None:
    bench = prefill()
    assert moves(bench.submit(probe())) == [("intake", "queued")]
    bench.compute()
    effects = bench.compute(token=3)
    assert ends(effects) == [("probe", FinishType.LENGTH)]
    assert bench.free == 8


def test_prompts_are_computed_in_order_of_arrival_and_a_small_one_passes_nobody() -> None:
    bench = prefill(pool_pages=4)
    for rid, room in (("a", 1), ("b", 2), ("c", 3)):
        queued(bench, rid, room)
    assert [piece.rid for piece in bench.plan().slices] == ["a"]
    assert (bench.phase("b"), bench.phase("c")) == ("queued", "queued")


def test_one_step_takes_no_more_sequences_than_may_run() -> None:
    bench = prefill(with_limits(running_max=1, chunk_tokens=64))
    queued(bench, "a", 1)
    queued(bench, "b", 2)
    assert [piece.rid for piece in bench.plan().slices] == ["a"]


def test_an_idle_core_has_nothing_to_plan() -> None:
    assert prefill().core.plan() is None
    assert prefill().core.next_deadline() is None


# -- refusals


def test_a_request_without_a_room_is_refused() -> None:
    assert ends(prefill().submit(request(bootstrap=None))) == [("r", Reason.INVALID_REQUEST)]


@pytest.mark.parametrize("length", [32, 17])
def test_a_prompt_too_long_for_context_or_pool_is_refused_to_both_legs(length: int) -> None:
    bench = prefill()
    bench.say(hello(), D)
    effects = bench.submit(request(prompt=tuple(range(length))))
    assert ends(effects) == [("r", Reason.CONTEXT_TOO_LONG)]
    assert [message.reason for message in told(effects) if isinstance(message, Rejected)] == [Reason.CONTEXT_TOO_LONG]
    assert bench.core.ledger.rooms.tombstones == 0


def test_a_leg_rejected_at_intake_is_retired_and_the_late_hello_hears_the_verdict() -> None:
    bench = prefill()
    verdict = Verdict(reason=Reason.INVALID_REQUEST, text="temperature")
    assert ends(bench.submit(request(rejected=verdict))) == [("r", Reason.INVALID_REQUEST)]
    assert bench.live == []
    (message,) = told(bench.say(hello(), D))
    assert message == Rejected(room=ROOM, attempt=1, reason=Reason.INVALID_REQUEST, text="temperature")
    assert told(bench.say(hello(attempt=2), D)) == [NotYet(room=ROOM, attempt=2)], "a new life"
    assert bench.core.ledger.rejections == {Reason.INVALID_REQUEST: 1}


def test_a_probe_rejected_at_intake_leaves_no_stone() -> None:
    bench = prefill()
    bench.submit(probe(rejected=GONE))
    assert bench.core.ledger.rooms.tombstones == 0


def test_a_full_worker_refuses_with_503() -> None:
    bench = prefill(with_limits(waiting_max=1))
    bench.submit(request("a", 1))
    assert ends(bench.submit(request("b", 2))) == [("b", Reason.WAITING_FULL)]
    assert bench.live == ["a"]


def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has() -> None:
    bench = prefill()
    queued(bench)
    bench.step(DrainBegan())
    assert ends(bench.submit(request("late", 9))) == [("late", Reason.DRAINING)]
    bench.compute()
    bench.compute()
    assert ends(bench.step(polled())) == [("r", FinishType.LENGTH)]


def test_a_second_live_leg_of_a_room_is_refused_and_harms_nobody() -> None:
    bench = prefill()
    bench.submit(request())
    assert ends(bench.submit(request("twin"))) == [("twin", Reason.DUPLICATE_ROOM)]
    rejected = request("rejected", rejected=GONE)
    assert ends(bench.submit(rejected)) == [("rejected", Reason.CLIENT_GONE)]
    assert told(bench.say(hello(), D)) == [ACCEPTED]


def test_an_id_that_is_still_being_closed_is_refused() -> None:
    bench = prefill()
    inflight(bench)
    bench.step(Abort(rid="r", verdict=GONE))
    assert ends(bench.submit(request(room=5))) == [("r", Reason.DUPLICATE_RID)]


@pytest.mark.parametrize(
    ("different", "reason", "words"),
    [
        ({"fingerprint": '{"dtype":"bf16"}'}, Reason.LAYOUT_MISMATCH, ("fp32", "bf16")),
        ({"digest": 1}, Reason.PROMPT_MISMATCH, ("5 tokens", "digest 0000000000000001")),
        ({"prompt_tokens": 6}, Reason.PROMPT_MISMATCH, ("5 tokens", "6")),
        ({"dp_rank": 3}, Reason.DP_CONFLICT, ("rank 0", "rank 3")),
    ],
)
def test_legs_that_do_not_match_are_refused_together_naming_both_values(
    different: dict[str, Any], reason: Reason, words: tuple[str, str]
) -> None:
    bench = prefill()
    bench.submit(request())
    effects = bench.say(hello(**different), D)
    assert ends(effects) == [("r", reason)]
    (message,) = told(effects)
    assert isinstance(message, Rejected)
    assert message.reason is reason
    assert all(word in message.text for word in words)
    assert bench.core.ledger.rooms.tombstones == 0


def test_a_hello_of_another_decode_worker_is_refused_once_the_room_is_taken() -> None:
    bench = prefill()
    queued(bench)
    assert told(bench.say(hello(), D)) == [], "the same hello again"
    for peer, attempt in (("D#2", 1), (D, 2)):
        (message,) = told(bench.say(hello(attempt=attempt), peer))
        assert isinstance(message, Rejected)
        assert message.reason is Reason.DUPLICATE_ROOM


def test_of_two_decode_workers_that_wait_for_one_room_the_first_keeps_it() -> None:
    bench = prefill()
    bench.say(hello(), D)
    (message,) = told(bench.say(hello(), "D#2"))
    assert isinstance(message, Rejected)
    assert message.reason is Reason.DUPLICATE_ROOM
    bench.submit(request())
    assert bench.core.ledger.live["r"].peer == D


def test_too_many_hellos_without_a_request_are_refused_and_their_requests_hear_it() -> None:
    bench = prefill(with_limits(orphan_hellos_max=1))
    bench.say(hello(1), D)
    (message,) = told(bench.say(hello(2), D))
    assert isinstance(message, Rejected)
    assert message.reason is Reason.WAITING_FULL
    assert ends(bench.submit(request(room=2))) == [("r", Reason.WAITING_FULL)]


# -- pause and continue


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_a_paused_prefill_computes_no_further_chunk_and_goes_on_where_it_was(mode: PauseMode) -> None:
    bench = prefill(prefix_cache=True)
    queued(bench)
    plan = bench.plan()
    other = prefill(prefix_cache=True)
    queued(other)
    other.plan()
    bench.step(Pause(mode=mode))
    assert bench.core.digest() != other.core.digest(), "a rank that alone is paused shows"
    bench.commit(plan)
    assert bench.core.plan() is None
    assert ends(bench.step(Abort(rid="nobody", verdict=GONE))) == []
    bench.step(Continue())
    assert [piece.start for piece in bench.plan().slices] == [4]


def test_a_pause_that_aborts_ends_what_prefill_holds() -> None:
    bench = prefill()
    queued(bench)
    assert ends(bench.step(Pause(mode=PauseMode.ABORT))) == [("r", Reason.ABORTED)]
