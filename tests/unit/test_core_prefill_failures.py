"""The prefill core where something fails: the other leg, a transfer, a step, a deadline; and its prefix cache."""

import pytest

from baton_core.agreement import KVPoll
from baton_core.effects import Emit, Fence, Forget, Offer, Push, Revoke
from baton_core.errors import Reason, Verdict
from baton_core.events import (
    Abort,
    AbortAll,
    FlushCache,
    LookupFailed,
    PeerGone,
    Resolved,
    StopHere,
)
from baton_core.messages import Accepted, NotYet, Rejected, RoomFailed
from unit.cores import (
    ACCEPTED,
    FINGERPRINT,
    GONE,
    INFOS,
    LAYOUT,
    LOST,
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
    sampling,
    told,
    with_limits,
)

OFFER = Offer(rid="r", room=ROOM, attempt=1, peer=D, target=LAYOUT.to_text(), prompt_tokens=5, pages_total=3)


def failed(reason: Reason = Reason.ABORTED, attempt: int = 1, room: int = ROOM, greeted: bool = True) -> RoomFailed:
    return RoomFailed(room=room, attempt=attempt, reason=reason, text="decode says so", greeted=greeted)


# -- one leg fails, the other hears of it


def test_decode_failing_first_is_heard_by_the_leg_that_comes_late() -> None:
    bench = prefill()
    bench.say(hello(), D)
    bench.say(failed(), D)
    assert ends(bench.submit(request())) == [("r", Reason.ABORTED)]
    assert bench.core.ledger.rooms.tombstones == 0


def test_decode_failing_at_its_own_door_fails_the_leg_that_waits() -> None:
    bench = prefill()
    bench.submit(request())
    effects = bench.say(failed(greeted=False), D)
    assert ends(effects) == [("r", Reason.ABORTED)]
    assert told(effects) == [], "decode knows"


def test_decode_failing_at_its_own_door_is_remembered_for_the_late_leg() -> None:
    bench = prefill()
    bench.say(failed(greeted=False), D)
    assert ends(bench.submit(request())) == [("r", Reason.ABORTED)]


def test_both_legs_failing_at_their_doors_leave_nothing_to_say() -> None:
    bench = prefill()
    bench.submit(request(rejected=GONE))
    bench.say(failed(greeted=False), D)
    assert bench.core.ledger.rooms.tombstones == 0
    bench.say(failed(greeted=False), D)
    bench.submit(request(rejected=GONE))
    assert bench.core.ledger.rooms.tombstones == 0


def test_bad_news_of_an_earlier_life_changes_nothing() -> None:
    bench = prefill()
    inflight(bench)
    bench.step(polled())
    bench.say(failed(), D)
    assert kinds(bench.submit(request("again"))) == [], "the stale news left no stone"
    bench.say(failed(), D)
    assert bench.phase("again") == "bootstrapping"
    bench.say(hello(attempt=2), D)
    for peer, attempt in ((D, 1), ("D#2", 2)):
        bench.say(failed(attempt=attempt), peer)
    assert bench.phase("again") == "accepted"


def test_bad_news_about_somebody_elses_hello_changes_nothing() -> None:
    bench = prefill()
    bench.say(hello(), D)
    bench.say(failed(greeted=False), "D#2")
    assert ROOM in bench.core.orphans


def test_a_hello_that_comes_again_wipes_what_its_earlier_life_left() -> None:
    bench = prefill()
    bench.say(failed(greeted=False), D)
    bench.say(hello(attempt=2), D)
    assert told(bench.submit(request())) == [accepted(ROOM, 2)]


@pytest.mark.parametrize("message", [ACCEPTED, NotYet(room=ROOM, attempt=1)])
def test_what_only_prefill_says_is_ignored(message: Accepted | NotYet) -> None:
    bench = prefill()
    bench.submit(request())
    assert bench.say(message, D) == []


def test_events_of_decode_are_ignored() -> None:
    bench = prefill()
    bench.submit(request())
    assert bench.step(StopHere(rid="r")) == []
    assert bench.step(Resolved(rid="r", infos=INFOS)) == []
    assert bench.step(LookupFailed(rid="r", verdict=GONE)) == []


def test_a_lost_peer_fails_its_rooms_and_only_those() -> None:
    bench = prefill()
    queued(bench, "theirs", 1)
    bench.submit(request("waits", 2))
    bench.say(hello(3), D)
    bench.say(hello(4), "D#2")
    effects = bench.step(PeerGone(peer=D, verdict=LOST))
    assert ends(effects) == [("theirs", Reason.PEER_LOST)]
    assert told(effects) == []
    assert list(bench.core.orphans) == [4]
    assert ends(bench.submit(request("late", 3))) == [("late", Reason.PEER_LOST)]


# -- aborts, in every phase


def test_an_abort_before_the_hello_is_answered_and_told_when_the_hello_comes() -> None:
    bench = prefill()
    bench.submit(request())
    assert ends(bench.step(Abort(rid="r", verdict=GONE))) == [("r", Reason.CLIENT_GONE)]
    (message,) = told(bench.say(hello(), D))
    assert isinstance(message, Rejected)
    assert message.verdict == GONE


def test_an_abort_keeps_the_pages_until_nobody_reads_them() -> None:
    bench = prefill()
    inflight(bench)
    effects = bench.step(Abort(rid="r", verdict=GONE))
    assert ends(effects) == [("r", Reason.CLIENT_GONE)]
    assert told(effects) == [RoomFailed(room=ROOM, attempt=1, reason=GONE.reason, text=GONE.text)]
    assert Revoke(room=ROOM, attempt=1) in effects
    assert (bench.phase(), bench.free) == ("revoking", 5)
    assert bench.step(polled(poll=KVPoll.Failed)) == []
    assert bench.step(Abort(rid="r", verdict=GONE)) == [], "answered already"
    effects = bench.step(polled(poll=KVPoll.Failed, writers_stopped=True))
    assert Forget(room=ROOM, attempt=1) in effects
    assert moves(effects) == [("revoking", "failed")]
    assert (bench.live, bench.free) == ([], 8)


def test_an_abort_under_a_running_step_waits_for_the_step_too() -> None:
    bench = prefill()
    queued(bench)
    plan = bench.plan()
    bench.step(Abort(rid="r", verdict=GONE))
    bench.step(polled(poll=KVPoll.Failed, writers_stopped=True))
    assert (bench.phase(), bench.free) == ("revoking", 5)
    effects = bench.commit(plan)
    assert kinds(effects) == [], "nothing is pushed any more"
    assert (bench.live, bench.free) == ([], 8)


def test_a_probe_aborted_between_two_steps_is_gone_at_once() -> None:
    bench = prefill()
    bench.submit(probe())
    bench.compute()
    assert moves(bench.step(Abort(rid="probe", verdict=GONE))) == [("forwarding", "failed")]
    assert bench.free == 8


def test_a_probe_aborted_in_the_queue_is_gone_at_once() -> None:
    bench = prefill()
    bench.submit(probe())
    assert moves(bench.step(Abort(rid="probe", verdict=GONE))) == [("queued", "failed")]


def test_aborting_everybody_spares_nobody_and_an_unknown_id_is_nobody() -> None:
    bench = prefill()
    queued(bench, "a", 1)
    bench.submit(request("b", 2))
    assert bench.step(Abort(rid="x", verdict=GONE)) == []
    assert ends(bench.step(AbortAll(verdict=GONE))) == [("a", GONE.reason), ("b", GONE.reason)]


def test_a_room_used_again_while_its_old_life_is_revoked_is_refused_only_under_the_same_attempt() -> None:
    bench = prefill()
    inflight(bench)
    bench.step(Abort(rid="r", verdict=GONE))
    bench.submit(request("again"))
    (message,) = told(bench.say(hello(), "D#2"))
    assert isinstance(message, Rejected)
    assert message.reason is Reason.DUPLICATE_ROOM
    bench.submit(request("and again"))
    assert told(bench.say(hello(attempt=2), D)) == [accepted(ROOM, 2)]


# -- transfers and steps that fail


@pytest.mark.parametrize("state", ["accepted", "queued", "forwarding", "inflight"])
def test_a_broken_transfer_fails_both_legs_with_its_reason(state: str) -> None:
    bench = prefill()
    bench.submit(request())
    bench.say(hello(), D)
    if state != "accepted":
        bench.step(polled(poll=KVPoll.WaitingForInput))
    if state in ("forwarding", "inflight"):
        bench.compute()
    if state == "inflight":
        bench.compute()
    assert bench.phase() == state
    effects = bench.step(polled(poll=KVPoll.Failed, reason=Reason.TRANSFER_FAILED, text="reset", writers_stopped=True))
    assert ends(effects) == [("r", Reason.TRANSFER_FAILED)]
    assert [message.text for message in told(effects) if isinstance(message, RoomFailed)] == [
        f"prefill {'bootstrap' if state == 'accepted' else 'transfer'} failed: reset"
    ]
    assert bench.free == 8


def test_polls_of_another_attempt_or_request_change_nothing() -> None:
    bench = prefill()
    bench.submit(request())
    bench.say(hello(), D)
    assert bench.step(polled(poll=KVPoll.WaitingForInput, attempt=2)) == []
    assert bench.step(polled("other", poll=KVPoll.Failed)) == []
    bench.step(polled(poll=KVPoll.WaitingForInput))
    bench.compute()
    bench.compute()
    assert bench.step(polled(poll=KVPoll.Success, attempt=2)) == []


def test_a_failed_step_fails_everybody_in_it() -> None:
    bench = prefill(with_limits(chunk_tokens=64))
    queued(bench, "a", 1)
    queued(bench, "b", 2)
    fault = Verdict(reason=Reason.DEVICE_FAULT, text="out of memory")
    effects = bench.compute(failed=fault)
    assert ends(effects) == [("a", Reason.DEVICE_FAULT), ("b", Reason.DEVICE_FAULT)]
    assert bench.phase("a") == "revoking"


# -- deadlines


def test_decodes_leg_must_come_in_time() -> None:
    bench = prefill()
    bench.submit(request())
    assert bench.core.next_deadline() == bench.now + 10_000
    assert bench.after(9_999) == []
    effects = bench.after(1)
    assert ends(effects) == [("r", Reason.OTHER_LEG_MISSING)]
    emit = next(one for one in effects if isinstance(one, Emit))
    assert emit.finish is not None
    assert emit.finish.verdict is not None
    assert emit.finish.verdict.text.startswith("prefill: waiting for decode's leg took 10000 ms")


def test_a_hello_without_a_request_is_refused_in_time() -> None:
    bench = prefill()
    bench.say(hello(), D)
    assert bench.core.next_deadline() == bench.now + 10_000
    (message,) = told(bench.after(10_000))
    assert isinstance(message, Rejected)
    assert message.reason is Reason.OTHER_LEG_MISSING
    assert ends(bench.submit(request())) == [("r", Reason.OTHER_LEG_MISSING)]
    bench.say(hello(5), D)
    assert bench.after(5_000) == []


def test_every_wait_ends_with_the_requests_budget_and_names_the_stage() -> None:
    bench = prefill()
    bench.submit(request(budget_ms=300))
    bench.say(hello(), D)
    effects = bench.after(300)
    assert ends(effects) == [("r", Reason.DEADLINE)]
    (message,) = told(effects)
    assert isinstance(message, RoomFailed)
    assert "waiting for decode's page orders" in message.text
    assert "the request's budget" in message.text


def test_a_stalled_transfer_is_ended_and_progress_gives_it_time() -> None:
    bench = prefill()
    inflight(bench)
    bench.after(4_000)
    bench.step(polled(poll=KVPoll.Transferring, progress=1))
    assert bench.after(4_999) == []
    effects = bench.after(1)
    assert ends(effects) == [("r", Reason.DEADLINE)]
    (message,) = told(effects)
    assert isinstance(message, RoomFailed)
    assert "transferring the last pages" in message.text


def test_pushed_pages_must_arrive_while_the_next_chunk_waits_but_nothing_pushed_need_not() -> None:
    bench = prefill()
    queued(bench)
    bench.compute()
    bench.step(polled(poll=KVPoll.Transferring, progress=0))
    assert bench.core.next_deadline() == bench.now + 5_000
    bench.step(polled(poll=KVPoll.Transferring, progress=2))
    assert bench.core.next_deadline() == bench.now + 600_000


def test_a_peer_that_does_not_stop_is_fenced_once() -> None:
    bench = prefill()
    inflight(bench)
    bench.step(Abort(rid="r", verdict=GONE))
    assert bench.core.next_deadline() == bench.now + 2_000
    assert bench.after(2_000) == [Fence(room=ROOM, attempt=1)]
    assert bench.after(60_000) == []
    bench.step(polled(poll=KVPoll.Failed, writers_stopped=True))
    assert (bench.live, bench.free) == ([], 8)


def test_a_revoked_request_that_only_waits_for_its_step_is_not_fenced() -> None:
    bench = prefill()
    bench.submit(probe())
    plan = bench.plan()
    bench.step(Abort(rid="probe", verdict=GONE))
    assert bench.after(600_000) == []
    bench.commit(plan)
    assert bench.live == []


def test_stones_go_with_time() -> None:
    bench = prefill()
    bench.submit(request(rejected=GONE))
    assert bench.core.next_deadline() == bench.now + 60_000
    bench.after(60_000)
    assert bench.core.next_deadline() is None
    assert told(bench.say(hello(), D)) == [NotYet(room=ROOM, attempt=1)]


# -- the prefix cache, and logprobs of the prompt


def test_a_prompt_that_begins_alike_pushes_cached_pages_before_it_computes_the_rest() -> None:
    bench = prefill(prefix_cache=True)
    inflight(bench)
    bench.step(polled())
    assert bench.free == 6, "two full pages stay"
    bench.submit(request("again"))
    bench.say(hello(attempt=2), D)
    bench.step(polled("again", KVPoll.WaitingForInput, attempt=2))
    plan = bench.plan()
    (push,) = [one for one in bench.core.ledger.take_effects() if isinstance(one, Push)]
    assert (push.first, len(push.pages)) == (0, 2)
    assert [(piece.start, piece.tokens) for piece in plan.slices] == [(4, PROMPT[4:])]
    bench.commit(plan)
    emit = next(one for one in bench.step(polled("again", attempt=2)) if isinstance(one, Emit))
    assert emit.cached_tokens == 4
    bench.step(FlushCache())
    assert bench.free == 8


def test_a_faulty_step_leaves_nothing_in_the_cache_and_a_prompt_that_does_not_fit_waits() -> None:
    bench = prefill(prefix_cache=True, pool_pages=4)
    bench.submit(probe("a"))
    bench.submit(probe("b"))
    plan = bench.plan()
    assert [piece.rid for piece in plan.slices] == ["a"]
    bench.commit(plan)
    assert ends(bench.compute(failed=Verdict(reason=Reason.DEVICE_FAULT, text="x"))) == [("a", Reason.DEVICE_FAULT)]
    assert bench.free == 4
    prefill(prefix_cache=False).step(FlushCache())


def test_logprobs_of_the_prompt_come_with_the_first_token() -> None:
    bench = prefill(with_limits(chunk_tokens=64))
    bench.submit(probe(sampling=sampling(logprobs=0, prompt_logprobs_from=0)))
    (piece,) = bench.plan().slices
    assert (piece.score_from, piece.score) == (0, PROMPT[1:])


def test_the_fingerprint_is_compared_as_a_whole() -> None:
    bench = prefill()
    bench.submit(request())
    assert told(bench.say(hello(fingerprint=FINGERPRINT), D)) == [ACCEPTED]
