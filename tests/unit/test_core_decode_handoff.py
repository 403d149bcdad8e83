"""The decode core between look-up and arrival, and where something fails later on."""

from collections.abc import Callable

import pytest

from baton_core.agreement import KVPoll
from baton_core.decode.core import DecodeCore
from baton_core.effects import Emit, Expect, Fence, LookUp, Revoke
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
from baton_core.messages import Hello, MetadataRow, NotYet, Rejected, RoomFailed
from unit.cores import (
    ACCEPTED,
    GONE,
    INFOS,
    LOST,
    ROOM,
    Bench,
    P,
    accepted,
    arrived,
    decode,
    ends,
    greeting,
    hello,
    moves,
    polled,
    request,
    row,
    running,
    sampling,
    told,
    transferring,
    with_limits,
)

_BEGIN: dict[str, Callable[[Bench[DecodeCore]], object]] = {
    "greeting": greeting,
    "transferring": transferring,
    "arrived": arrived,
    "running": running,
}


# -- look-up and handshake


def test_a_failed_look_up_fails_the_request_and_nothing_is_remembered() -> None:
    bench = decode()
    bench.submit(request())
    verdict = Verdict(reason=Reason.LOOKUP_FAILED, text="registry is down")
    assert ends(bench.step(LookupFailed(rid="r", verdict=verdict))) == [("r", Reason.LOOKUP_FAILED)]
    assert not bench.core.farewells
    assert bench.step(Resolved(rid="r", infos=INFOS)) == []


def test_a_request_that_ends_during_its_look_up_owes_prefill_a_word() -> None:
    bench = decode()
    bench.submit(request())
    bench.step(Abort(rid="r", verdict=GONE))
    (message,) = told(bench.step(Resolved(rid="r", infos=INFOS)))
    assert message == RoomFailed(room=ROOM, attempt=1, reason=GONE.reason, text=GONE.text, greeted=False)


def test_a_look_up_that_takes_too_long_fails_and_the_word_is_kept_a_while() -> None:
    bench = decode()
    bench.submit(request())
    effects = bench.after(2_000)
    assert ends(effects) == [("r", Reason.DEADLINE)]
    assert bench.core.next_deadline() == bench.now + 2_000
    (message,) = told(bench.step(Resolved(rid="r", infos=INFOS)))
    assert isinstance(message, RoomFailed)
    assert message.reason is Reason.DEADLINE
    bench.submit(request("s", 5))
    bench.step(Abort(rid="s", verdict=GONE))
    bench.after(2_000)
    assert not bench.core.farewells
    assert bench.step(Resolved(rid="s", infos=INFOS)) == []


def test_words_owed_are_bounded() -> None:
    bench = decode(with_limits(tombstones_max=2))
    for room in (1, 2, 3):
        bench.submit(request(f"r{room}", room, rejected=GONE))
    assert list(bench.core.farewells) == ["r2", "r3"]


def test_an_answer_of_the_registry_that_comes_twice_is_taken_once() -> None:
    bench = decode()
    greeting(bench)
    assert bench.step(Resolved(rid="r", infos=INFOS)) == []


@pytest.mark.parametrize("kind", [Rejected, RoomFailed])
def test_prefills_refusal_ends_the_request_with_its_verdict(kind: type[Rejected] | type[RoomFailed]) -> None:
    bench = decode()
    greeting(bench)
    effects = bench.say(kind(room=ROOM, attempt=1, reason=Reason.PROMPT_MISMATCH, text="5 and 6"), P)
    assert ends(effects) == [("r", Reason.PROMPT_MISMATCH)]
    assert told(effects) == [], "prefill knows"


@pytest.mark.parametrize(("peer", "attempt", "room"), [("P#0", 1, ROOM), (P, 2, ROOM), (P, 1, 5)])
def test_what_is_said_by_another_life_or_about_another_attempt_changes_nothing(
    peer: str, attempt: int, room: int
) -> None:
    bench = decode()
    greeting(bench)
    assert bench.say(accepted(room, attempt), peer) == []
    assert bench.say(Rejected(room=room, attempt=attempt, reason=Reason.ABORTED, text=""), peer) == []


def test_what_needs_no_answer_gets_none() -> None:
    bench = decode()
    greeting(bench)
    assert bench.say(NotYet(room=ROOM, attempt=1), P) == []
    assert bench.say(hello(), P) == []
    assert bench.step(FlushCache()) == []
    bench.say(ACCEPTED, P)
    assert bench.say(ACCEPTED, P) == [], "accepted already"


def test_every_request_is_an_attempt_of_its_own() -> None:
    bench = decode()
    arrived(bench)
    bench.step(StopHere(rid="r"))
    (message,) = told(greeting(bench, "again"))
    assert message.attempt == 2


def test_the_hello_says_how_long_decode_waits() -> None:
    bench = decode()
    bench.submit(request(budget_ms=700))
    bench.now += 200
    (message,) = told(bench.step(Resolved(rid="r", infos=INFOS)))
    assert isinstance(message, Hello)


# -- reservation and transfer


def test_accepted_requests_wait_in_order_for_pages_and_rows() -> None:
    bench = decode(with_limits(metadata_rows=1))
    transferring(bench, "a", 1)
    transferring(bench, "b", 2, attempt=2)
    assert (bench.phase("a"), bench.phase("b")) == ("transferring", "prealloc")
    effects = bench.step(polled("a", row=row(room=1)))
    assert [one.row for one in effects if isinstance(one, Expect)] == [0], "the row is free again"
    assert bench.phase("b") == "transferring"
    bench = decode(pool_pages=6)
    transferring(bench, "a", 1)
    transferring(bench, "b", 2, attempt=2)
    assert bench.phase("b") == "prealloc"
    assert ends(bench.step(Abort(rid="b", verdict=GONE))) == [("b", Reason.CLIENT_GONE)]
    bench.step(Abort(rid="a", verdict=GONE))
    bench.step(polled("a", poll=KVPoll.Failed, writers_stopped=True))
    assert bench.free == 6


@pytest.mark.parametrize("wrong", [row(token=-1), row(token=97), row(cached_tokens=2**31), row(cached_tokens=1_000)])
def test_a_row_with_a_token_or_a_count_that_cannot_be_is_corruption_and_reaches_no_step(wrong: MetadataRow) -> None:
    bench = decode(vocab_size=97)
    transferring(bench)
    assert ends(bench.step(polled(row=wrong))) == [("r", Reason.METADATA_CORRUPT)]
    assert bench.core.plan() is None


@pytest.mark.parametrize("wrong", [None, row(attempt=2), row(room=5)])
def test_a_row_that_is_empty_or_of_another_room_or_attempt_is_corruption(wrong: object) -> None:
    bench = decode()
    transferring(bench)
    effects = bench.step(polled(row=wrong))
    assert ends(effects) == [("r", Reason.METADATA_CORRUPT)]
    assert Revoke(room=ROOM, attempt=1) in effects
    (message,) = told(effects)
    assert isinstance(message, RoomFailed)
    assert bench.core.ledger.live["r"].kv_receiver == 1
    bench.step(polled(poll=KVPoll.Failed, writers_stopped=True))
    assert (bench.live, bench.free) == ([], 8)


def test_a_broken_transfer_fails_both_legs_and_frees_pages_at_once_if_its_writers_stopped() -> None:
    bench = decode()
    transferring(bench)
    broken = polled(poll=KVPoll.Failed, reason=Reason.TRANSFER_FAILED, text="reset", writers_stopped=True)
    effects = bench.step(broken)
    assert ends(effects) == [("r", Reason.TRANSFER_FAILED)]
    assert (bench.live, bench.free) == ([], 8)


def test_a_transfer_that_fails_without_a_reason_still_has_one() -> None:
    bench = decode()
    transferring(bench)
    assert ends(bench.step(polled(poll=KVPoll.Failed))) == [("r", Reason.TRANSFER_FAILED)]


def test_pages_stay_until_the_writers_stopped_and_a_stuck_writer_is_fenced() -> None:
    bench = decode()
    transferring(bench)
    effects = bench.step(Abort(rid="r", verdict=GONE))
    assert Revoke(room=ROOM, attempt=1) in effects
    assert bench.step(polled(poll=KVPoll.Failed)) == []
    assert bench.after(2_000) == [Fence(room=ROOM, attempt=1)]
    assert bench.free == 5
    bench.step(polled(poll=KVPoll.Failed, writers_stopped=True))
    assert bench.free == 8
    assert bench.core.ledger.rows is not None
    assert bench.core.ledger.rows.free == 256


def test_the_row_must_follow_the_pages_in_time() -> None:
    bench = decode()
    transferring(bench)
    bench.step(polled(poll=KVPoll.Transferring, progress=2))
    assert bench.after(9_000) == [], "pages are outstanding: prefill watches over them"
    bench.step(polled(poll=KVPoll.Transferring, progress=3))
    bench.step(polled(poll=KVPoll.Transferring, progress=3))
    effects = bench.after(5_000)
    assert ends(effects) == [("r", Reason.DEADLINE)]
    (message,) = told(effects)
    assert isinstance(message, RoomFailed)
    assert "waiting for the KV cache" in message.text


def test_polls_of_another_attempt_or_request_change_nothing() -> None:
    bench = decode()
    transferring(bench)
    assert bench.step(polled(attempt=2, row=row())) == []
    assert bench.step(polled("other", row=row())) == []
    assert bench.phase() == "transferring"


# -- failures later on


def test_a_lost_peer_fails_only_requests_that_still_need_it() -> None:
    bench = decode(pool_pages=32)
    arrived(bench)
    transferring(bench, "waits", 5, attempt=2)
    bench.submit(request("unresolved", 6))
    effects = bench.step(PeerGone(peer=P, verdict=LOST))
    assert ends(effects) == [("waits", Reason.PEER_LOST)]
    assert told(effects) == []
    assert bench.phase() == "arrived"


def test_prefill_failing_after_the_cache_has_arrived_ends_nothing_here() -> None:
    """Its last acknowledgement was lost: prefill's leg fails, and the answer that could be had is given."""
    bench = decode()
    running(bench)
    assert bench.say(RoomFailed(room=ROOM, attempt=1, reason=Reason.TRANSFER_FAILED, text=""), P) == []
    assert bench.phase() == "running"


def test_an_abort_of_a_waiting_request_tells_prefill() -> None:
    bench = decode()
    greeting(bench)
    assert told(bench.step(Abort(rid="r", verdict=GONE))) == [
        RoomFailed(room=ROOM, attempt=1, reason=GONE.reason, text=GONE.text)
    ]
    bench = decode()
    arrived(bench)
    assert moves(bench.step(Abort(rid="r", verdict=GONE))) == [("arrived", "failed")]
    assert bench.step(Abort(rid="r", verdict=GONE)) == []


def test_aborting_everybody_spares_nobody() -> None:
    bench = decode()
    bench.submit(request("a", 1))
    bench.submit(request("b", bootstrap=None))
    effects = bench.step(AbortAll(verdict=GONE))
    assert ends(effects) == [("a", GONE.reason), ("b", GONE.reason)]
    assert list(bench.core.farewells) == ["a"]


def test_a_failed_step_fails_everybody_in_it() -> None:
    bench = decode(pool_pages=32)
    running(bench)
    bench.submit(request("local", bootstrap=None))
    fault = Verdict(reason=Reason.DEVICE_FAULT, text="out of memory")
    assert ends(bench.compute(failed=fault)) == [("r", fault.reason), ("local", fault.reason)]
    assert bench.live == []


@pytest.mark.parametrize(
    ("ms", "state", "stage", "reason"),
    [
        (10_000, "greeting", "waiting for prefill's leg", Reason.OTHER_LEG_MISSING),
        (600_000, "prealloc", "waiting for KV pages", Reason.DEADLINE),
        (600_000, "transferring", "waiting for the KV cache", Reason.DEADLINE),
        (600_000, "arrived", "waiting for a place in the batch", Reason.DEADLINE),
        (600_000, "running", "decoding", Reason.DEADLINE),
    ],
)
def test_every_wait_ends_and_names_its_stage(ms: int, state: str, stage: str, reason: Reason) -> None:
    bench = decode()
    if state == "prealloc":
        transferring(bench, "first", 1)
        bench.submit(request("r", sampling=sampling(max_new_tokens=9)))
        bench.step(Resolved(rid="r", infos=INFOS))
        bench.say(accepted(ROOM, 2), P)
    else:
        _BEGIN[state](bench)
    assert bench.phase() == state
    effects = bench.after(ms)
    emit = next(one for one in effects if isinstance(one, Emit) and one.rid == "r")
    assert emit.finish is not None
    verdict = emit.finish.verdict
    assert verdict is not None
    assert verdict.reason is reason
    assert verdict.text.startswith(f"decode: {stage} took ")


def test_views_of_a_handoff_follow_its_machine() -> None:
    bench = decode()
    bench.submit(request())
    view = bench.core.ledger.live["r"]
    assert (view.conclude_state, view.bootstrap_infos, view.kv_receiver) == (KVPoll.Bootstrapping, None, None)
    bench.step(Resolved(rid="r", infos=INFOS))
    assert view.bootstrap_infos == INFOS
    bench.say(ACCEPTED, P)
    assert (view.conclude_state, view.kv_receiver) == (KVPoll.Transferring, 1)
    assert view.owned() == ("pages", "row", "transfer")


def test_a_look_up_names_where_the_room_meets() -> None:
    bench = decode()
    one = request()
    (look_up,) = [effect for effect in bench.submit(one) if isinstance(effect, LookUp)]
    assert (look_up.rid, look_up.bootstrap) == ("r", one.bootstrap)
