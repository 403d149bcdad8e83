"""The decode core, path by path: events in, effects out."""

import pytest

from baton_core.effects import Connect, Emit, Expect, Forget
from baton_core.errors import Reason
from baton_core.events import (
    Abort,
    DrainBegan,
    Resolved,
    StopHere,
)
from baton_core.messages import Hello, RoomFailed
from baton_core.request import FinishType, TokenLogprob, prompt_digest
from unit.cores import (
    ACCEPTED,
    FINGERPRINT,
    GONE,
    INFOS,
    LAYOUT,
    PROMPT,
    ROOM,
    P,
    arrived,
    decode,
    ends,
    kinds,
    moves,
    polled,
    probe,
    request,
    row,
    running,
    sampling,
    tokens,
    told,
    transferring,
    with_limits,
)

# -- from the door to the answer


def test_a_request_is_looked_up_greeted_ordered_and_streamed() -> None:
    bench = decode()
    effects = bench.submit(request())
    assert kinds(effects) == ["LookUp"]
    effects = bench.step(Resolved(rid="r", infos=INFOS))
    assert [one for one in effects if isinstance(one, Connect)] == [Connect(infos=INFOS)]
    assert told(effects) == [
        Hello(
            room=ROOM,
            attempt=1,
            prompt_tokens=5,
            digest=prompt_digest(PROMPT),
            fingerprint=FINGERPRINT,
            dp_rank=0,
            layout=LAYOUT.to_text(),
        )
    ]
    assert (bench.free, bench.phase()) == (8, "greeting"), "nothing is reserved before prefill accepted"
    effects = bench.say(ACCEPTED, P)
    expect = Expect(
        rid="r", room=ROOM, attempt=1, peer=P, source=LAYOUT.to_text(), prompt_tokens=5, pages=(0, 1, 2), row=0
    )
    assert expect in effects
    assert bench.free == 5, "the prompt: 5 tokens"
    effects = bench.step(polled(row=row(42, cached_tokens=2), progress=3))
    assert Forget(room=ROOM, attempt=1) in effects
    assert tokens(effects) == [42], "the first token is streamed at once"
    plan = bench.plan()
    assert [(piece.tokens, piece.start, piece.output_index) for piece in plan.slices] == [((42,), 5, 1)]
    assert tokens(bench.commit(plan, token=43)) == [43]
    assert bench.free == 5
    effects = bench.compute(token=44)
    assert tokens(effects) == [44]
    assert ends(effects) == [("r", FinishType.LENGTH)]
    assert (bench.live, bench.free, bench.core.watched()) == ([], 8, [])
    assert bench.core.ledger.rows is not None
    assert bench.core.ledger.rows.free == 256


def test_the_first_token_may_be_the_last() -> None:
    bench = decode()
    bench.submit(request(sampling=sampling(max_new_tokens=1)))
    bench.step(Resolved(rid="r", infos=INFOS))
    bench.say(ACCEPTED, P)
    effects = bench.step(polled(row=row(42)))
    assert ends(effects) == [("r", FinishType.LENGTH)]
    assert moves(effects) == [("transferring", "arrived"), ("arrived", "done")]


def test_a_stop_token_ends_the_answer_once_it_is_long_enough() -> None:
    bench = decode()
    bench.submit(request(sampling=sampling(max_new_tokens=9, min_new_tokens=1, stop_token_ids=(42, 50))))
    bench.step(Resolved(rid="r", infos=INFOS))
    bench.say(ACCEPTED, P)
    assert ends(bench.step(polled(row=row(42)))) == [], "one token at least before it may stop"
    effects = bench.compute(token=50)
    emit = next(one for one in effects if isinstance(one, Emit))
    assert emit.finish is not None
    assert (emit.finish.type, emit.finish.matched) == (FinishType.STOP, 50)


@pytest.mark.parametrize(("context", "pages"), [(7, 8), (32, 3)])
def test_a_longer_answer_is_clipped_to_context_and_pool(context: int, pages: int) -> None:
    bench = decode(context_tokens=context, pool_pages=pages)
    most = min(context, 2 * pages) - len(PROMPT)
    bench.submit(request(sampling=sampling(max_new_tokens=100)))
    bench.step(Resolved(rid="r", infos=INFOS))
    bench.say(ACCEPTED, P)
    effects = bench.step(polled(row=row(42)))
    made = len(tokens(effects))
    while not ends(effects):
        effects = bench.compute()
        made += len(tokens(effects))
    assert (made, ends(effects)) == (most, [("r", FinishType.LENGTH)])


def test_the_app_may_stop_an_answer_and_the_running_step_ends_first() -> None:
    bench = decode()
    arrived(bench)
    plan = bench.plan()
    effects = bench.step(StopHere(rid="r"))
    assert ends(effects) == [("r", FinishType.STOP)]
    assert (bench.phase(), bench.free) == ("revoking", 5)
    effects = bench.commit(plan)
    assert kinds(effects) == []
    assert moves(effects)[-1] == ("revoking", "done")
    assert bench.free == 8


def test_stopping_before_the_first_token_or_after_the_end_changes_nothing() -> None:
    bench = decode()
    transferring(bench)
    assert bench.step(StopHere(rid="r")) == []
    assert bench.step(StopHere(rid="unknown")) == []
    bench.step(Abort(rid="r", verdict=GONE))
    assert bench.step(StopHere(rid="r")) == []


def test_a_batch_has_as_many_seats_as_may_run() -> None:
    bench = decode(with_limits(running_max=1))
    for rid, room in (("a", 1), ("b", 2)):
        transferring(bench, rid, room, attempt=len(bench.live) + 1)
    bench.step(polled("a", row=row(room=1)))
    bench.step(polled("b", attempt=2, row=row(room=2, attempt=2)))
    assert [piece.rid for piece in bench.plan().slices] == ["a"]
    assert (bench.phase("a"), bench.phase("b")) == ("running", "arrived")


def test_logprobs_cross_the_handoff_with_the_first_token() -> None:
    bench = decode()
    transferring(bench)
    scored = TokenLogprob(token=42, logprob=-1.0)
    effects = bench.step(polled(row=row(42, logprob=scored)))
    assert [one.logprobs for one in effects if isinstance(one, Emit)] == [(scored,)]


# -- colocated


@pytest.mark.parametrize("one", [request(bootstrap=None), probe("r")])
def test_a_request_without_a_peer_is_computed_here(one: object) -> None:
    bench = decode()
    assert moves(bench.submit(one)) == [("intake", "local"), ("local", "computing")]  # type: ignore[arg-type]
    assert bench.compute() == []
    assert tokens(bench.compute(token=7)) == [7]
    assert bench.phase() == "running"
    assert tokens(bench.compute(token=8)) == [8]
    assert ends(bench.compute(token=9)) == [("r", FinishType.LENGTH)]
    assert bench.free == 8


def test_streams_go_on_while_a_prompt_is_computed_beside_them() -> None:
    bench = decode()
    running(bench)
    bench.submit(request("local", bootstrap=None))
    plan = bench.plan()
    assert [(piece.rid, len(piece.tokens)) for piece in plan.slices] == [("r", 1), ("local", 4)]


def test_a_prompt_waits_for_pages_for_a_seat_and_for_its_turn() -> None:
    bench = decode(pool_pages=6)
    for rid in ("a", "b"):
        bench.submit(request(rid, bootstrap=None))
    assert [piece.rid for piece in bench.plan().slices] == ["a"], "four pages each"
    narrow = decode(with_limits(running_max=1, chunk_tokens=64))
    for rid in ("a", "b"):
        narrow.submit(request(rid, bootstrap=None))
    assert [piece.rid for piece in narrow.plan().slices] == ["a"]
    short = decode(with_limits(chunk_tokens=5))
    for rid in ("a", "b"):
        short.submit(request(rid, bootstrap=None))
    assert [piece.rid for piece in short.plan().slices] == ["a"], "its chunk takes the whole step"


@pytest.mark.parametrize(
    ("steps", "pages", "was"), [(0, 2, "local"), (0, 8, "computing"), (1, 8, "computing"), (2, 8, "running")]
)
def test_a_local_request_aborted_between_steps_is_gone_at_once(steps: int, pages: int, was: str) -> None:
    bench = decode()
    bench.core.ledger.pool.allocate(8 - pages)
    bench.submit(request(bootstrap=None))
    for _ in range(steps):
        bench.compute()
    assert moves(bench.step(Abort(rid="r", verdict=GONE))) == [(was, "failed")]
    assert (bench.live, bench.free) == ([], pages)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_request_aborted_under_a_step_keeps_its_pages_until_the_step_ends(steps: int) -> None:
    bench = decode()
    bench.submit(request(bootstrap=None))
    for _ in range(steps):
        bench.compute()
    plan = bench.plan()
    assert ends(bench.step(Abort(rid="r", verdict=GONE))) == [("r", Reason.CLIENT_GONE)]
    assert (bench.phase(), bench.free) == ("revoking", 5)
    assert kinds(bench.commit(plan)) == []
    assert (bench.live, bench.free) == ([], 8)


# -- refusals


@pytest.mark.parametrize("length", [32, 17])
def test_a_prompt_too_long_is_refused_and_prefill_is_told_when_it_is_found(length: int) -> None:
    bench = decode()
    effects = bench.submit(request(prompt=tuple(range(length))))
    assert ends(effects) == [("r", Reason.CONTEXT_TOO_LONG)]
    assert kinds(effects) == ["LookUp", "Emit"]
    effects = bench.step(Resolved(rid="r", infos=INFOS))
    assert kinds(effects) == ["Connect", "Tell"]
    (message,) = told(effects)
    assert isinstance(message, RoomFailed)
    assert (message.reason, message.greeted) == (Reason.CONTEXT_TOO_LONG, False)
    assert bench.step(Resolved(rid="r", infos=INFOS)) == []


def test_a_colocated_request_rejected_at_intake_is_retired() -> None:
    for one in (request(bootstrap=None, rejected=GONE), probe("r", rejected=GONE)):
        bench = decode()
        assert kinds(bench.submit(one)) == ["Emit"]
        assert bench.live == []


def test_a_second_live_leg_of_a_room_is_refused_and_prefill_is_not_bothered() -> None:
    bench = decode()
    bench.submit(request())
    for rid, rejected in (("twin", None), ("rejected", GONE)):
        effects = bench.submit(request(rid, rejected=rejected))
        assert [rid for rid, _ in ends(effects)] == [rid]
        assert kinds(effects) == ["Emit"]


def test_a_draining_or_full_worker_refuses() -> None:
    bench = decode(with_limits(waiting_max=1))
    bench.submit(request("a", 1))
    assert ends(bench.submit(request("b", 2))) == [("b", Reason.WAITING_FULL)]
    bench = decode()
    bench.step(DrainBegan())
    assert ends(bench.submit(request())) == [("r", Reason.DRAINING)]


def test_an_id_that_is_still_being_closed_is_refused() -> None:
    bench = decode()
    transferring(bench)
    bench.step(Abort(rid="r", verdict=GONE))
    assert ends(bench.submit(request(room=5))) == [("r", Reason.DUPLICATE_RID)]
