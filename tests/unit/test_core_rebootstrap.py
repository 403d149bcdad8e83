"""A retracted request without a backup goes back to prefill as a new attempt; whatever comes of that, no token is lost."""

from dataclasses import replace

import pytest

from baton_core.agreement import KVPoll
from baton_core.effects import Connect, LookUp
from baton_core.errors import Reason, Verdict
from baton_core.events import (
    Abort,
    AbortAll,
    Continue,
    DrainBegan,
    Event,
    LookupFailed,
    Pause,
    PauseMode,
    PeerGone,
    PeerSaid,
    Resolved,
    StopHere,
)
from baton_core.messages import Accepted, Hello, Rejected, RoomFailed
from baton_core.prefill.core import PrefillCore
from baton_core.request import FinishType, prompt_digest
from unit.cores import (
    GONE,
    INFOS,
    LOST,
    PROMPT,
    Bench,
    D,
    P,
    ends,
    kinds,
    moves,
    polled,
    prefill,
    request,
    row,
    sampling,
    tokens,
    told,
)
from unit.paged import answer, storm, until
from unit.reunited import Reunited

AWAY = ("resolving", "greeting", "prealloc", "transferring")
WITHHELD = {"resolving": {"look-up"}, "greeting": {"said"}, "prealloc": set[str](), "transferring": {"arrival"}}
WHOLE = answer(PROMPT, 12)


def away(phase: str, **limits: int) -> Reunited:
    """Two requests in a pool for one and a half: "b", in room 2, has given way, and has come to `phase` as attempt 3."""
    both = Reunited(**limits)
    both.ask("a", 1, 12)
    both.ask("b", 2, 12)
    while not all(both.paged.heard[rid] for rid in "ab"):
        both.compute()
    both.withheld = WITHHELD[phase]
    one = both.decode.core.ledger.live["b"]
    while not one.is_retracted:
        assert both.compute()
    if phase == "transferring":
        both.step(Abort(rid="a", verdict=GONE))
    assert (one.phase.value, one.attempt, one.is_retracted) == (phase, 3, True)
    return both


def goes_on(both: Reunited) -> None:
    """What was withheld comes, perhaps too late; "b" gets the answer that it would have had."""
    both.release()
    both.run()
    assert both.paged.heard["b"] == WHOLE
    assert both.decode.live == both.prefill.live == []
    assert (both.decode.free, both.prefill.free) == (12, 400)
    assert both.decode.core.ledger.rows.free == both.decode.core.limits.metadata_rows  # type: ignore[union-attr]


# -- the way through prefill


@pytest.mark.parametrize("running_max", [64, 3])
def test_eight_long_answers_in_a_pool_for_two_are_what_they_would_have_been(running_max: int) -> None:
    both = Reunited(running_max=running_max)
    for number, rid in enumerate("abcdefgh", 1):
        both.ask(rid, number, 12)
    both.run()
    assert both.paged.heard == dict.fromkeys("abcdefgh", WHOLE)
    memory = both.decode.core.memory
    assert both.decode.core.reentry.arrivals == both.prefill.core.rebootstraps == memory.recomputations >= 3
    assert (memory.fallbacks, memory.backups) == (0, 0)
    assert (both.decode.free, both.prefill.free, both.decode.live, both.prefill.live) == (12, 400, [], [])


def test_decode_asks_the_rank_that_served_it_for_prompt_and_answer_and_what_follows_them() -> None:
    both = away("resolving")
    (one,) = [one for one in both.decode.core.ledger.live.values() if one.rid == "b"]
    made = both.paged.heard["b"]
    assert (one.owned(), one.peer, one.outputs) == ((), None, made)
    effects = both.decode.step(Resolved(rid="b", infos=INFOS))
    connect, tell = [effect for effect in effects if kinds([effect])]
    assert isinstance(connect, Connect)
    (said,) = told([tell])
    known = (*PROMPT, *made)
    assert isinstance(said, Hello) and said.again is not None
    assert (said.room, said.attempt, said.prompt_tokens, said.digest) == (2, 3, len(known), prompt_digest(known))
    assert (said.again.prompt, said.again.bootstrap) == (known, one.request.bootstrap)
    assert said.again.sampling == sampling(max_new_tokens=12 - len(made), output_offset=len(made))


def test_the_look_up_names_the_dp_rank_that_computed_it_before() -> None:
    both = away("prealloc")
    infos = replace(INFOS, dp_rank=3)
    both.decode.core.ledger.live["b"].infos = infos
    effects = both.step(PeerGone(peer=P, verdict=LOST))
    assert moves(effects) == [("prealloc", "retracted")]
    both.decode.core.ledger.live["b"].computes_here = False
    (look_up,) = [one for one in both.step(Continue()) if isinstance(one, LookUp)]
    assert look_up.bootstrap.prefill_dp_rank == 3


def test_the_token_that_prefill_draws_is_the_next_of_the_answer_and_comes_once() -> None:
    both = away("transferring")
    made = len(both.paged.heard["b"])
    effects = both.step(polled("b", attempt=3, row=row(WHOLE[made], attempt=3, room=2, cached_tokens=4), progress=9))
    assert tokens(effects) == [WHOLE[made]]
    one = both.decode.core.ledger.live["b"]
    assert (one.outputs, one.computed, one.is_retracted) == (WHOLE[: made + 1], len(PROMPT) + made, False)
    assert one.cached_tokens == 0, "the client hears of the first handoff's"


def test_the_rest_is_drawn_as_the_whole_would_have_been() -> None:
    whole = sampling(max_new_tokens=12, min_new_tokens=5, seed=9, sample_index=2, logprobs=1, prompt_logprobs_from=0)
    rest = whole.after(4)
    assert (rest.output_offset, rest.max_new_tokens, rest.min_new_tokens) == (4, 8, 1)
    assert (rest.seed, rest.sample_index, rest.logprobs, rest.prompt_logprobs_from) == (9, 2, 1, None)
    assert whole.after(6).min_new_tokens == 0
    assert whole.after(4).after(3) == whole.after(7)


def test_whoever_comes_back_is_served_before_whoever_is_new() -> None:
    both = away("prealloc")
    both.ask("c", 9, 12, prompt=(1,) * 13)
    assert [both.decode.phase(rid) for rid in "bc"] == ["prealloc"] * 2, "either would fit where a is"
    effects = both.step(Abort(rid="a", verdict=GONE))
    assert ("prealloc", "transferring") in moves(effects)
    assert [both.decode.phase(rid) for rid in "bc"] == ["transferring", "prealloc"]
    goes_on(both)


@pytest.mark.parametrize("every", [1, 2, 3, 7, 20])
def test_f04_a_retraction_every_few_steps_skips_no_token(every: int) -> None:
    both = Reunited(pool_pages=160)
    for number, rid in enumerate("ab", 1):
        both.ask(rid, number, 120)
    steps = 0
    while both.compute():
        steps += 1
        if steps % every == 0:
            both.step(Pause(mode=PauseMode.RETRACT))
            both.step(Continue())
    assert both.paged.heard == dict.fromkeys("ab", answer(PROMPT, 120))
    assert both.decode.core.reentry.arrivals >= 100 // every
    assert both.decode.core.memory.fallbacks == 0


# -- where prefill does not help


FAILED = polled("b", KVPoll.Failed, 3, reason=Reason.TRANSFER_FAILED, text="reset")
REFUSED = PeerSaid(peer=P, message=Rejected(room=2, attempt=3, reason=Reason.DRAINING, text="draining"))
ENDED = PeerSaid(peer=P, message=RoomFailed(room=2, attempt=3, reason=Reason.ABORTED, text="aborted"))
BROKEN = PeerGone(peer=P, verdict=LOST)
UNLIKE = PeerSaid(peer=P, message=Accepted(room=2, attempt=3, dp_rank=0, layout="nothing"))
RESTARTED = Resolved(rid="b", infos=replace(INFOS, incarnation="P#2"))
CORRUPT = polled("b", attempt=3, row=row(7, attempt=2, room=2))
UNKNOWN = LookupFailed(rid="b", verdict=Verdict(reason=Reason.LOOKUP_FAILED, text="registry is down"))
FAILURES: list[tuple[str, Event | int]] = [
    ("resolving", UNKNOWN),
    ("resolving", RESTARTED),
    ("resolving", 2_000),
    ("greeting", REFUSED),
    ("greeting", BROKEN),
    ("greeting", UNLIKE),
    ("greeting", 10_000),
    ("prealloc", ENDED),
    ("prealloc", BROKEN),
    ("transferring", ENDED),
    ("transferring", BROKEN),
    ("transferring", FAILED),
    ("transferring", CORRUPT),
    ("transferring", 10_000),
]


@pytest.mark.parametrize(("phase", "failure"), FAILURES)
def test_what_goes_wrong_on_the_way_costs_time_and_no_token(phase: str, failure: Event | int) -> None:
    both = away(phase)
    effects = both.after(failure) if isinstance(failure, int) else both.step(failure)
    assert (phase, "retracted") in moves(effects)
    assert ends(effects) == [] or ends(effects) == [("a", GONE.reason)]
    assert both.decode.core.memory.fallbacks == 1
    both.release()
    both.of_prefill(both.prefill.step(PeerGone(peer=D, verdict=LOST)))  # whatever it was, prefill knows, too
    goes_on(both)
    assert both.decode.core.reentry.arrivals == 0


@pytest.mark.parametrize("phase", AWAY)
def test_prefill_hears_that_decode_does_it_itself_unless_it_knows(phase: str) -> None:
    both = away(phase, rebootstrap_ms=9_000)
    effects = both.after(10_000)
    said = [(one.room, one.attempt) for one in told(effects) if isinstance(one, RoomFailed)]
    assert said == ([(2, 3)] if phase in ("greeting", "transferring") else [])
    both = away(phase)
    if phase != "resolving":
        assert told(both.step(BROKEN)) == []


def test_pages_that_may_still_be_written_stay_behind_and_the_request_goes_on_without_them() -> None:
    both = Reunited(pool_pages=40)
    both.ask("b", 2, 12)
    both.compute()
    both.withheld = {"arrival", "stop"}
    both.step(Pause(mode=PauseMode.RETRACT))
    both.step(Continue())
    one = both.decode.core.ledger.live["b"]
    held, row_held, free = one.pages, one.row, both.decode.free
    assert (one.phase.value, one.attempt) == ("transferring", 2)
    both.step(polled("b", KVPoll.Failed, 2, reason=Reason.TRANSFER_FAILED, text="reset"))
    both.compute()
    assert (one.computes_here, one.phase.value) == (True, "running")
    remains = both.decode.core.ledger.live["b~2"]
    assert (remains.pages, remains.row, remains.phase.value) == (held, row_held, "revoking")
    assert both.decode.free == free - len(one.pages), "they are not free"
    (watch,) = both.decode.core.watched()
    assert (watch.rid, watch.attempt, watch.serial) == ("b~2", 2, remains.serial)
    assert "Fence" in kinds(both.after(2_000))
    assert remains.fenced
    both.run()
    assert both.paged.heard["b"] == WHOLE
    assert both.decode.live == ["b~2"], "in quarantine"
    both.step(polled("b~2", KVPoll.Failed, 2, writers_stopped=True))
    assert (both.decode.live, both.decode.free) == ([], 40)


def test_a_client_whose_id_is_that_of_remains_harms_nobody() -> None:
    both = away("transferring")
    both.withheld = {"arrival", "stop"}
    both.ask("b~3", 9, 2)
    both.step(FAILED)
    assert both.decode.live == ["b", "b~3", "b~3~"]
    effects = both.decode.submit(request("b~3~", 10))
    assert ends(effects) == [("b~3~", Reason.DUPLICATE_RID)]


def test_tries_are_bounded_and_none_means_that_decode_does_it() -> None:
    both = Reunited(pool_pages=160, rebootstraps_max=3)
    both.ask("a", 1, 60)
    while both.compute():
        both.step(Pause(mode=PauseMode.RETRACT))
        both.step(Continue())
    assert both.paged.heard["a"] == answer(PROMPT, 60)
    assert both.decode.core.reentry.arrivals == len(both.hellos) == 3
    both = Reunited(rebootstraps_max=0)
    for number, rid in enumerate("ab", 1):
        both.ask(rid, number, 12)
    both.run()
    assert both.paged.heard == dict.fromkeys("ab", WHOLE)
    assert (both.hellos, both.decode.core.memory.recomputations > 0) == ([], True)


def test_what_has_no_prefill_worker_is_computed_here() -> None:
    paged = storm(backup_pages=0)
    assert until(paged, "computing")
    paged.run()
    assert paged.heard == dict.fromkeys("ab", WHOLE)


def test_a_failed_try_is_not_the_last_one() -> None:
    both = away("greeting")
    both.step(REFUSED)
    assert both.decode.core.ledger.live["b"].computes_here
    both.withheld = set()
    both.step(Abort(rid="a", verdict=GONE))
    while both.decode.phase("b") != "running":
        both.compute()
    both.step(Pause(mode=PauseMode.RETRACT))
    both.step(Continue())
    assert both.decode.core.reentry.arrivals + len(both.hellos) >= 1
    goes_on(both)
    assert both.decode.core.reentry.arrivals == 1


# -- ends on the way


@pytest.mark.parametrize("phase", AWAY)
def test_a_client_that_leaves_ends_it_on_both_sides(phase: str) -> None:
    both = away(phase)
    before = len(both.emitted)
    effects = both.step(Abort(rid="b", verdict=GONE))
    assert ends(effects)[-1] == ("b", Reason.CLIENT_GONE)
    both.release()
    both.run()
    assert not both.decode.core.farewells
    assert (both.decode.live, both.prefill.live) == ([], [])
    assert (both.decode.free, both.prefill.free) == (12, 400)
    assert len(both.emitted) == before, "no client of prefill's waits for it"


@pytest.mark.parametrize("phase", AWAY)
def test_a_stop_string_ends_it_with_what_was_told(phase: str) -> None:
    both = away(phase)
    effects = both.step(StopHere(rid="b"))
    assert ends(effects)[-1] == ("b", FinishType.STOP)
    both.release()
    both.run()
    assert (both.decode.live, both.prefill.live) == ([], [])
    assert (both.decode.free, both.prefill.free) == (12, 400)
    both.ask("again", 2, 12)
    both.run()
    assert both.paged.heard["again"] == WHOLE, "the room may be used again at once"


@pytest.mark.parametrize("phase", AWAY)
def test_its_own_budget_ends_it_and_is_named(phase: str) -> None:
    both = away(phase)
    both.decode.core.ledger.live["b"].deadline_at = both.decode.now + 1
    effects = both.after(1)
    assert ends(effects) == [("b", Reason.DEADLINE)]


# -- time and other lives


def test_a_pause_that_retracts_keeps_them_until_generation_goes_on() -> None:
    both = Reunited(pool_pages=160)
    both.ask("a", 1, 12)
    both.compute()
    both.step(Pause(mode=PauseMode.RETRACT))
    both.after(100)
    assert (both.decode.phase("a"), both.hellos) == ("retracted", [])
    both.step(Continue())
    assert len(both.hellos) == 1
    both.run()
    assert both.paged.heard["a"] == WHOLE


def test_h53_late_words_of_an_earlier_attempt_change_nothing() -> None:
    for phase in AWAY[1:]:
        both = away(phase)
        for message in (
            Accepted(room=2, attempt=2, dp_rank=0, layout=""),
            Rejected(room=2, attempt=2, reason=Reason.DRAINING, text="late"),
            RoomFailed(room=2, attempt=2, reason=Reason.TRANSFER_FAILED, text="late"),
        ):
            assert both.decode.say(message, P) == []
        assert both.decode.step(polled("b", attempt=2, row=row(7, attempt=2, room=2))) == []
        assert both.decode.phase("b") == phase
        if phase == "prealloc":
            assert both.prefill.say(RoomFailed(room=2, attempt=2, reason=Reason.ABORTED, text="late"), D) == []
        goes_on(both)


def test_a_look_up_that_answers_late_changes_nothing() -> None:
    both = away("resolving")
    both.after(2_000)
    assert both.decode.core.ledger.live["b"].computes_here
    for late in (UNKNOWN, Resolved(rid="b", infos=INFOS)):
        assert both.decode.step(late) == []
    goes_on(both)


def test_h11_agreement_admission_and_deadlines_go_on_while_somebody_is_away() -> None:
    both = away("greeting")
    both.withheld = set()
    both.ask("new", 9, 2)
    told_before = len(both.paged.heard["a"])
    for _ in range(3):
        both.compute()
    assert both.paged.heard["new"] == answer(PROMPT, 2)
    assert len(both.paged.heard["a"]) > told_before
    assert both.decode.phase("b") == "greeting"


# -- prefill's side


def test_prefill_makes_the_leg_by_itself_and_answers_no_client() -> None:
    both = away("prealloc")
    (rid,) = both.prefill.live
    one = both.prefill.core.ledger.live[rid]
    assert (rid, one.phase.value, one.peer, one.attempt) == (f"{D}~2.3", "accepted", D, 3)
    assert sorted(emit.rid for emit in both.emitted) == ["a", "b"]
    both.run()
    assert sorted(emit.rid for emit in both.emitted) == ["a", "b"]
    assert both.prefill.core.rebootstraps == 1


def test_prefill_refuses_at_its_door_as_it_would_refuse_a_client() -> None:
    both = away("resolving")
    both.decode.core.ledger.live["b"].deadline_at += 1
    (said,) = told(both.decode.step(Resolved(rid="b", infos=INFOS)))
    assert isinstance(said, Hello)
    for bench, reason in (
        (prefill(pool_pages=3), Reason.CONTEXT_TOO_LONG),
        (prefill(context_tokens=6), Reason.CONTEXT_TOO_LONG),
        (prefill(vocab_size=8), Reason.INVALID_REQUEST),
        (prefill(fingerprint='{"dtype":"bf16"}'), Reason.LAYOUT_MISMATCH),
        (prefill(dp_size=2, dp_rank=1), Reason.DP_CONFLICT),
        (draining(), Reason.DRAINING),
    ):
        effects = bench.say(said, D)
        (answered,) = told(effects)
        assert isinstance(answered, Rejected)
        assert (answered.reason, answered.attempt) == (reason, 3)
        assert ("Emit" not in kinds(effects), bench.live, bench.free) == (True, [], bench.core.ledger.pool.total)
        assert bench.core.ledger.rooms.tombstones == 0


def draining() -> Bench[PrefillCore]:
    """A prefill core that takes nobody any more."""
    bench = prefill()
    bench.step(DrainBegan())
    return bench


def test_prefill_refuses_what_was_changed_on_the_way() -> None:
    both = away("resolving")
    (said,) = told(both.decode.step(Resolved(rid="b", infos=INFOS)))
    assert isinstance(said, Hello)
    (answered,) = told(prefill().say(replace(said, digest=said.digest ^ 1), D))
    assert isinstance(answered, Rejected) and answered.reason is Reason.PROMPT_MISMATCH


def test_a_room_that_is_in_use_on_prefill_is_left_alone() -> None:
    both = away("resolving")
    (said,) = told(both.decode.step(Resolved(rid="b", infos=INFOS)))
    assert isinstance(said, Hello)
    for bench in (prefill(), prefill()):
        bench.submit(request("other", 2))
        if bench.live:
            effects = bench.say(said, D)
        (answered,) = told(effects)
        assert isinstance(answered, Rejected) and answered.reason is Reason.DUPLICATE_ROOM
        assert (bench.live, bench.phase("other")) == (["other"], "bootstrapping")


def test_an_abort_of_everything_on_prefill_costs_decode_a_pause() -> None:
    both = away("prealloc")
    both.of_prefill(both.prefill.step(AbortAll(verdict=GONE)))
    both.settle()
    assert both.decode.core.ledger.live["b"].computes_here
    goes_on(both)


# -- the wire


def test_a_hello_whose_request_is_not_its_own_cannot_be_made() -> None:
    good = request("r", 7, prompt=(1, 2, 3))
    made = {"room": 7, "attempt": 2, "prompt_tokens": 3, "digest": 0, "fingerprint": "", "dp_rank": 0, "layout": ""}
    Hello(**made, again=good)  # type: ignore[arg-type]
    for bad in (
        request("r", 8, prompt=(1, 2, 3)),
        request("r", 7, prompt=(1, 2)),
        request("r", 7, prompt=(1, 2, -1)),
        request("r", 7, prompt=(1, 2, 2**31)),
        request("r", 7, prompt=(1, 2, 3), rejected=GONE),
        request("r", bootstrap=None, prompt=(1, 2, 3)),
        request("r", 7, prompt=(1, 2, 3), host="2.2.2.2"),
    ):
        with pytest.raises(ValueError, match="comes along"):
            Hello(**made, again=bad)  # type: ignore[arg-type]
