"""Who gives way when decode's pool runs out: with a backup or without, for priority or a pause; answers are exact always."""

from dataclasses import replace

import pytest

from baton_core.agreement import KVPoll
from baton_core.effects import Backup, Emit, Restore
from baton_core.errors import Reason
from baton_core.events import Abort, Continue, Pause, PauseMode, PeerGone, Resolved, StopHere
from baton_core.machine import Phase
from baton_core.request import FinishType
from unit.cores import (
    GONE,
    INFOS,
    LOST,
    PROMPT,
    P,
    accepted,
    decode,
    ends,
    kinds,
    moves,
    polled,
    request,
    row,
    sampling,
    tokens,
    with_limits,
)
from unit.paged import BETS, Paged, answer, ask, copied, local, storm, until

# -- retraction with a backup


def test_the_shortest_answer_gives_way_and_its_pages_stay_until_they_are_copied_everywhere() -> None:
    paged = storm()
    bench = paged.bench
    rid = until(paged, "backing_up")
    (effect,) = paged.copies
    one = bench.core.ledger.live[rid]
    assert isinstance(effect, Backup)
    assert rid == "b", "of two that are alike, the younger one"
    assert (one.is_retracted, one.pages[: len(effect.pages)]) == (True, effect.pages)
    assert (bench.free, bench.core.ledger.slots.free) == (0, 512 - len(effect.slots))
    assert not paged.compute(), "the other waits for a page"
    watches = bench.core.watched()
    assert [(watch.rid, watch.attempt, watch.row) for watch in watches] == [("b", -1, None)]
    bench.step(polled("b", KVPoll.Transferring, -1))
    assert bench.phase("b") == "backing_up", "one rank is not through"
    paged.copy()
    assert (bench.phase("b"), bench.free, one.pages) == ("retracted", 6, ())
    assert (one.owned(), bench.core.watched()) == (("host backup",), [])
    assert paged.compute()


def test_a_retracted_answer_goes_on_exactly_where_it_was() -> None:
    paged = storm()
    until(paged, "backing_up")
    told = list(paged.heard["b"])
    until(paged, "restoring")
    one = paged.bench.core.ledger.live["b"]
    (effect,) = paged.copies
    assert isinstance(effect, Restore)
    assert one.pages[: len(effect.pages)] == effect.pages
    assert paged.heard["b"] == told
    paged.copy()
    assert (one.phase, one.is_retracted, one.slots) == (Phase.ARRIVED, False, ())
    plan = paged.bench.plan()
    (piece,) = [one for one in plan.slices if one.rid == "b"]
    assert (piece.tokens, piece.start, piece.output_index) == ((told[-1],), 4 + len(told), len(told))


@pytest.mark.parametrize("backup_pages", [512, 7, 0])
@pytest.mark.parametrize("running_max", [64, 3])
def test_eight_long_answers_in_a_pool_for_two_are_what_they_would_have_been(
    backup_pages: int, running_max: int
) -> None:
    paged = storm(count=8, backup_pages=backup_pages, running_max=running_max)
    paged.run()
    assert paged.heard == {rid: answer(PROMPT, 12) for rid in "abcdefgh"}
    memory = paged.bench.core.memory
    assert memory.backups + memory.recomputations >= 3
    assert (memory.backups > 0) == (backup_pages > 0)
    assert (paged.bench.free, paged.bench.core.ledger.slots.free, paged.bench.live) == (12, backup_pages, [])


def test_requests_with_a_peer_go_on_alone_once_they_have_answered() -> None:
    paged = Paged(decode(with_limits(**BETS), pool_pages=12))
    bench = paged.bench
    for number, rid in enumerate("abc", 1):
        ask(bench, rid, number, 12)
    for number, rid in enumerate("abc", 1):
        for page, first in zip(bench.core.ledger.live[rid].pages, (0, 2, 4), strict=True):
            paged.pages[page] = [*PROMPT, -1][first : first + 2]
        first = answer(PROMPT, 1)[0]
        paged.perform(bench.step(polled(rid, attempt=number, row=row(first, attempt=number, room=number))))
    until(paged, "backing_up")
    assert ends(bench.step(PeerGone(peer=P, verdict=LOST))) == []
    paged.run()
    assert paged.heard == {rid: answer(PROMPT, 12) for rid in "abc"}
    assert paged.bench.core.memory.backups >= 1


def test_every_retraction_doubles_what_is_counted_on_so_that_nobody_is_retracted_many_times() -> None:
    paged = storm(count=3)
    memory, live = paged.bench.core.memory, paged.bench.core.ledger.live
    rid = until(paged, "backing_up")
    assert len(live[rid].outputs) >= 4
    assert memory.pages_expected(live[rid]) == 9, "all that it may ever need"
    paged.run()
    assert memory.backups <= 5
    bench = decode(with_limits(**BETS), context_tokens=2_048, pool_pages=1_024)
    local(bench, "r", 1_000)
    bench.compute()
    one = bench.core.ledger.live["r"]
    expected = []
    for one.retractions in range(4):
        expected.append(bench.core.memory.pages_expected(one))
    assert expected == [8, 8, 9, 15]


# -- retraction without one


def test_without_room_on_the_host_prompt_and_answer_are_computed_again_in_bounded_chunks() -> None:
    paged = storm(backup_pages=0)
    rid = until(paged, "retracted")
    one = paged.bench.core.ledger.live[rid]
    made = len(one.outputs)
    assert (one.pages, one.owned(), one.is_retracted) == ((), (), True)
    assert until(paged, "computing") == rid
    paged.bench.core.ledger.limits = replace(paged.bench.core.ledger.limits, chunk_tokens=4)
    pieces = []
    while one.phase is Phase.COMPUTING:
        plan = paged.bench.plan()
        pieces += [piece for piece in plan.slices if piece.rid == rid]
        paged.bench.commit(plan, token=answer(PROMPT, made + 1)[-1])
    known = (*PROMPT, *answer(PROMPT, made))
    assert tuple(token for piece in pieces for token in piece.tokens) == known
    assert max(len(piece.tokens) for piece in pieces) == 4
    assert [piece.sample for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].output_index == made
    assert (one.phase, one.is_retracted, one.outputs) == (Phase.RUNNING, False, answer(PROMPT, made + 1))


def test_prompt_logprobs_are_told_once_though_the_prompt_is_computed_twice() -> None:
    bench = decode(with_limits(**BETS))
    asked = sampling(max_new_tokens=6, logprobs=1, prompt_logprobs_from=0)
    bench.submit(request(bootstrap=None, sampling=asked))
    (piece,) = bench.plan().slices
    assert piece.score == PROMPT[1:]
    paged = storm(backup_pages=0)
    for one in paged.bench.core.ledger.live.values():
        object.__setattr__(one.request.sampling, "logprobs", 1)
        object.__setattr__(one.request.sampling, "prompt_logprobs_from", 0)
    until(paged, "retracted")
    until(paged, "computing")
    assert [piece.score for piece in paged.bench.plan().slices] == [()] * len(paged.bench.live)


def test_a_copy_that_failed_is_made_good_by_computing() -> None:
    for phase in ("backing_up", "restoring"):
        paged = storm()
        rid = until(paged, phase)
        paged.copy(KVPoll.Failed)
        one = paged.bench.core.ledger.live[rid]
        assert (one.slots, one.planned, one.is_retracted) == ((), 0, True)
        paged.run()
        assert paged.heard == {rid: answer(PROMPT, 12) for rid in "ab"}
        assert (paged.bench.free, paged.bench.core.ledger.slots.free) == (12, 512)


# -- ends


@pytest.mark.parametrize("phase", ["backing_up", "restoring"])
def test_pages_and_slots_under_a_copy_stay_until_it_is_over_on_every_rank(phase: str) -> None:
    paged = storm(count=2)
    bench = paged.bench
    rid = until(paged, phase)
    for other in [one for one in bench.live if one != rid]:
        bench.step(Abort(rid=other, verdict=GONE))
    free, slots = bench.free, bench.core.ledger.slots.free
    assert ends(bench.step(Abort(rid=rid, verdict=GONE))) == [(rid, Reason.CLIENT_GONE)]
    assert (bench.phase(rid), bench.free, bench.core.ledger.slots.free) == ("revoking", free, slots)
    effects = bench.after(2_000)
    assert kinds(effects) == [], "a copy ends by itself; nobody is fenced"
    effects = bench.step(copied(paged.copies[0]))
    assert moves(effects)[-1] == ("revoking", "failed")
    assert (bench.free, bench.core.ledger.slots.free, bench.live) == (12, 512, [])


@pytest.mark.parametrize("backup_pages", [512, 0])
def test_a_client_that_leaves_or_stops_while_its_request_waits_is_answered_at_once(backup_pages: int) -> None:
    for event, outcome in (
        (Abort(rid="b", verdict=GONE), ("b", Reason.CLIENT_GONE)),
        (StopHere(rid="b"), ("b", FinishType.STOP)),
    ):
        paged = storm(backup_pages=backup_pages, running_max=2)
        assert until(paged, "retracted") == "b"
        assert ends(paged.bench.step(event)) == [outcome]
        assert (paged.bench.live, paged.bench.core.ledger.slots.free) == (["a"], backup_pages)


def test_deadlines_pass_while_a_request_is_retracted_and_name_what_it_waited_for() -> None:
    paged = storm()
    rid = until(paged, "retracted")
    effects = paged.bench.after(600_000)
    (end,) = [one.finish for one in effects if isinstance(one, Emit) and one.rid == rid]
    assert end is not None and end.verdict is not None
    assert "waiting for KV pages after a retraction" in end.verdict.text
    assert [reason for _, reason in ends(effects)] == [Reason.DEADLINE] * 2


def test_agreement_and_admission_go_on_while_somebody_is_retracted() -> None:
    paged = storm()
    bench = paged.bench
    until(paged, "backing_up")
    ask(bench, "new", 9, 2, attempt=3)
    assert bench.phase("new") == "prealloc"
    bench.step(Abort(rid="a", verdict=GONE))
    assert bench.phase("new") == "transferring", "the pages of the one that left"
    effects = bench.step(polled("new", attempt=3, row=row(7, attempt=3, room=9)))
    assert tokens(effects) == [7]
    assert bench.phase("b") == "backing_up"


# -- priority


def test_the_lesser_priority_gives_way_first_however_long_its_answer_is() -> None:
    paged = storm(count=0)
    paged.perform(local(paged.bench, "low", 12))
    for _ in range(4):
        paged.compute()
    paged.perform(local(paged.bench, "high", 12, priority=5))
    assert until(paged, "backing_up") == "low"
    paged.run()
    assert paged.heard == {rid: answer(PROMPT, 12) for rid in ("low", "high")}


@pytest.mark.parametrize("backup_pages", [512, 0])
def test_a_greater_priority_takes_the_pages_of_lesser_ones_and_of_no_equal(backup_pages: int) -> None:
    paged = storm(count=0, answer_share_start_percent=100, backup_pages=backup_pages)
    bench = paged.bench
    paged.perform(local(bench, "low", 12))
    paged.compute()
    paged.perform(local(bench, "equal", 12))
    assert (bench.phase("low"), bench.phase("equal")) == ("running", "local")
    paged.perform(local(bench, "high", 12, priority=1))
    assert bench.phase("low") == ("backing_up" if backup_pages else "retracted")
    while paged.copies:
        paged.copy()
    assert bench.phase("high") == "computing"
    paged.run()
    assert paged.heard == {rid: answer(PROMPT, 12) for rid in ("low", "equal", "high")}
    assert list(paged.ended) == ["high", "low", "equal"], "and who was retracted stands before who never ran"


# -- pause and continue


def test_a_pause_in_place_computes_nothing_and_everything_else_goes_on() -> None:
    paged = storm(count=1)
    paged.compute()
    paged.bench.step(Pause(mode=PauseMode.IN_PLACE))
    assert not paged.compute()
    ask(paged.bench, "new", 9, 3, attempt=2)
    paged.bench.step(polled("new", attempt=2, row=row(7, attempt=2, room=9)))
    assert paged.bench.phase("new") == "arrived"
    assert ends(paged.bench.step(Abort(rid="new", verdict=GONE))) == [("new", Reason.CLIENT_GONE)]
    paged.bench.step(Continue())
    paged.run()
    assert paged.heard["a"] == answer(PROMPT, 12)


def test_a_pause_that_aborts_ends_everything_and_takes_new_requests() -> None:
    paged = storm(count=2)
    effects = paged.bench.step(Pause(mode=PauseMode.ABORT))
    assert ends(effects) == [("a", Reason.ABORTED), ("b", Reason.ABORTED)]
    paged.perform(local(paged.bench, "c", 12))
    assert not paged.compute()
    paged.bench.step(Continue())
    paged.run()
    assert paged.heard["c"] == answer(PROMPT, 12)


@pytest.mark.parametrize("phase", ["running", "computing", "backing_up", "retracted", "restoring"])
def test_a_pause_that_retracts_keeps_nothing_of_the_old_weights(phase: str) -> None:
    paged = storm(count=3, chunk_tokens=4)
    bench = paged.bench
    until(paged, phase)
    paged.perform(bench.step(Pause(mode=PauseMode.RETRACT)))
    while paged.copies:
        paged.copy()
    waits = [one for one in bench.core.ledger.live.values() if one.outputs]
    assert {one.phase for one in waits} <= {Phase.RETRACTED}
    assert (bench.free, bench.core.ledger.slots.free) == (12, 512)
    assert not paged.compute()
    bench.step(Continue())
    paged.run()
    assert paged.heard == {rid: answer(PROMPT, 12) for rid in "abc"}


def test_a_step_under_way_ends_before_its_requests_are_retracted() -> None:
    paged = storm(count=1)
    paged.compute()
    plan = paged.bench.plan()
    paged.bench.step(Pause(mode=PauseMode.RETRACT))
    assert paged.bench.phase("a") == "running"
    effects = paged.bench.commit(plan, token=50)
    assert tokens(effects) == [50], "F04: what was drawn is told"
    assert (paged.bench.phase("a"), paged.bench.free) == ("retracted", 12)


# -- ranks


@pytest.mark.parametrize("backup_pages", [512, 0])
def test_three_ranks_that_hear_the_same_hold_the_same_through_every_retraction(backup_pages: int) -> None:
    ranks = [storm(count=8, backup_pages=backup_pages) for _ in range(3)]
    while True:
        went_on = {rank.compute() for rank in ranks}
        assert len({rank.bench.core.digest() for rank in ranks}) == 1
        assert len(went_on) == 1
        waiting = bool(ranks[0].copies)
        for rank in ranks if waiting else ():
            rank.copy()
        assert len({rank.bench.core.digest() for rank in ranks}) == 1
        if went_on == {False} and not waiting:
            break
    assert all(rank.heard == {rid: answer(PROMPT, 12) for rid in "abcdefgh"} for rank in ranks)


def test_what_one_rank_alone_retracts_shows() -> None:
    ranks = [storm() for _ in range(2)]
    for rank in ranks:
        until(rank, "backing_up")
    assert ranks[0].bench.core.digest() == ranks[1].bench.core.digest()
    ranks[0].copy()
    assert ranks[0].bench.core.digest() != ranks[1].bench.core.digest()
    paused = [storm() for _ in range(2)]
    paused[0].bench.step(Pause(mode=PauseMode.IN_PLACE))
    assert paused[0].bench.core.digest() != paused[1].bench.core.digest()


# -- field reports, theme F


@pytest.mark.parametrize("backup_pages", [512, 40, 0])
def test_f01_sixty_four_long_answers_in_a_pool_of_their_prompts_and_a_third_all_come(backup_pages: int) -> None:
    limits = with_limits(**{**BETS, "backup_pages": backup_pages, "running_max": 64, "overtakings_max": 4})
    paged = Paged(decode(limits, pool_pages=250, context_tokens=64))
    wanted = {f"r{number}": [number, *PROMPT[1:]] for number in range(64)}
    for rid, prompt in wanted.items():
        paged.perform(local(paged.bench, rid, 40, prompt=tuple(prompt)))
    paged.run()
    assert paged.heard == {rid: answer(prompt, 40) for rid, prompt in wanted.items()}
    assert paged.bench.core.memory.backups + paged.bench.core.memory.recomputations < 64 * 6
    assert paged.bench.core.steps.count < 64 * 40, "several run side by side all the time"
    assert (paged.bench.free, paged.bench.core.ledger.slots.free) == (250, backup_pages)


@pytest.mark.parametrize("every", [1, 2, 3, 7, 20, 50])
def test_f04_a_retraction_every_few_steps_skips_no_token(every: int) -> None:
    paged = Paged(decode(with_limits(**BETS), pool_pages=160, context_tokens=400))
    for rid in "ab":
        paged.perform(local(paged.bench, rid, 120))
    steps = 0
    while paged.compute():
        steps += 1
        if steps % every == 0:
            paged.perform(paged.bench.step(Pause(mode=PauseMode.RETRACT)))
            paged.perform(paged.bench.step(Continue()))
    assert paged.heard == {rid: answer(PROMPT, 120) for rid in "ab"}


def test_f05_a_prompt_gets_all_its_pages_at_once_or_none() -> None:
    bench = decode(with_limits(**BETS), pool_pages=6)
    for number, rid in enumerate("ab", 1):
        bench.submit(request(rid, number, prompt=(1,) * 9))
        bench.step(Resolved(rid=rid, infos=INFOS))
        bench.say(accepted(number, number), P)
    held = [len(one.pages) for one in bench.core.ledger.live.values()]
    assert held == [5, 0], "two halves would wait for each other for ever"


def test_h11_one_that_cannot_come_back_stops_neither_arrivals_nor_answers_nor_transfers() -> None:
    paged = storm(count=3)
    bench = paged.bench
    rid = until(paged, "retracted")
    ask(bench, "new", 9, 2, attempt=4)
    effects = bench.step(Abort(rid=rid, verdict=GONE))
    assert ends(effects) == [(rid, Reason.CLIENT_GONE)]
    paged.perform(effects)
    assert until(paged, "transferring") == "new"
    effects = bench.step(polled("new", attempt=4, row=row(7, attempt=4, room=9)))
    assert tokens(effects) == [7]
    paged.perform(effects)
    paged.run()
    assert set(paged.ended) == {*"abc", "new"}
