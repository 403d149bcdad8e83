"""The prefix cache of decode: what a request leaves behind, what the next one needs no more, and what never enters it."""

from typing import Any

import pytest

from baton_core.agreement import KVPoll
from baton_core.decode.core import DecodeCore
from baton_core.effects import Effect, Expect
from baton_core.errors import Reason, Verdict
from baton_core.events import Abort, Continue, FlushCache, Pause, PauseMode, Resolved
from unit.cores import (
    GONE,
    INFOS,
    PROMPT,
    Bench,
    P,
    accepted,
    decode,
    polled,
    probe,
    request,
    row,
    sampling,
    tokens,
    with_limits,
)
from unit.paged import BETS, Paged, answer, copied, local, until

Tokens = tuple[int, ...]


def cached(**fields: Any) -> Bench[DecodeCore]:
    """A decode core with a prefix cache, 16 pages of 2 tokens."""
    limits = fields.pop("limits", {})
    return decode(with_limits(**{"chunk_tokens": 512, **limits}), **{"prefix_cache": True, "pool_pages": 16, **fields})


def order(bench: Bench[DecodeCore], number: int, prompt: Tokens, most: int = 3, **fields: Any) -> list[Effect]:
    """Request number `number` is accepted by prefill; the effects of that."""
    bench.submit(request(f"r{number}", number, prompt=prompt, sampling=sampling(max_new_tokens=most), **fields))
    bench.step(Resolved(rid=f"r{number}", infos=INFOS))
    return bench.say(accepted(number, bench.core.attempts), P)


def ordered(bench: Bench[DecodeCore], number: int, prompt: Tokens, most: int = 3) -> Expect:
    """What is ordered for it."""
    (expect,) = (one for one in order(bench, number, prompt, most) if isinstance(one, Expect))
    return expect


def arrive(bench: Bench[DecodeCore], number: int, token: int = 42) -> list[Effect]:
    """Its pages and its row are here."""
    attempt = bench.core.ledger.live[f"r{number}"].attempt
    return bench.step(polled(f"r{number}", KVPoll.Success, attempt, row=row(token, attempt, number), progress=99))


def answered(bench: Bench[DecodeCore], number: int, prompt: Tokens, most: int = 3) -> Tokens:
    """Served to the end: the prompt and its answer."""
    ordered(bench, number, prompt, most)
    arrive(bench, number, 40)
    for place in range(1, most):
        bench.compute(token=40 + place)
    assert bench.live == []
    return (*prompt, *range(40, 40 + most))


def books(bench: Bench[DecodeCore]) -> tuple[int, int]:
    """Pages in the cache, and how many of them somebody reads."""
    cache = bench.core.ledger.cache
    assert cache is not None
    return cache.pages, cache.locked


# -- what is held, and what is ordered


def test_the_next_turn_orders_only_what_decode_does_not_hold() -> None:
    bench = cached()
    told = answered(bench, 1, PROMPT, most=4)
    assert books(bench) == (4, 0), "of 9 tokens the last was drawn and never computed"
    expect = ordered(bench, 2, (*told, 7, 8, 9))
    assert (expect.held_pages, len(expect.pages)) == (4, 6)
    assert (*books(bench), bench.free) == (4, 4, 10)
    arrive(bench, 2)
    bench.compute()
    bench.compute()
    assert (*books(bench), bench.free) == (6 + 1, 0, 9)
    bench.step(FlushCache())
    assert (*books(bench), bench.free) == (0, 0, 16)


def test_a_prompt_that_is_held_whole_needs_the_row_alone_and_no_page_of_it_says_that_prefill_is_late() -> None:
    bench = cached()
    told = answered(bench, 1, PROMPT, most=4)
    expect = ordered(bench, 2, told[:8])
    assert (expect.held_pages, len(expect.pages)) == (4, 4)
    bench.step(polled("r2", KVPoll.WaitingForInput, expect.attempt, progress=4))
    bench.after(bench.core.limits.transfer_stall_ms + 1)
    assert bench.phase("r2") == "transferring"
    assert tokens(arrive(bench, 2)) == [42]


def test_two_that_begin_alike_share_their_pages_and_the_last_one_gives_them_back() -> None:
    bench = cached()
    told = answered(bench, 1, PROMPT)
    first, second = ordered(bench, 2, (*told, 1)), ordered(bench, 3, (*told, 2))
    assert first.pages[:3] == second.pages[:3]
    assert not set(first.pages[3:]) & set(second.pages[3:])
    bench.step(Abort(rid="r2", verdict=GONE))
    bench.step(polled("r2", KVPoll.Failed, first.attempt, writers_stopped=True))
    assert books(bench) == (3, 3), "the other reads them still"
    arrive(bench, 3)
    bench.step(Abort(rid="r3", verdict=GONE))
    assert books(bench) == (4, 0)


def test_without_a_cache_everything_is_ordered_and_nothing_kept() -> None:
    bench = cached(prefix_cache=False)
    told = answered(bench, 1, PROMPT)
    assert bench.free == 16
    assert ordered(bench, 2, told).held_pages == 0
    bench.step(FlushCache())


def test_hits_are_counted_and_cached_tokens_is_what_prefill_did_not_compute() -> None:
    bench = cached()
    told = answered(bench, 1, PROMPT)
    ordered(bench, 2, (*told, 1))
    attempt = bench.core.ledger.live["r2"].attempt
    effects = bench.step(polled("r2", KVPoll.Success, attempt, row=row(1, attempt, 2, cached_tokens=4), progress=9))
    assert [one.cached_tokens for one in effects if hasattr(one, "cached_tokens")] == [4]
    cache = bench.core.ledger.cache
    assert cache is not None
    assert (cache.hit_tokens, cache.asked_tokens) == (6, 5 + 9)


# -- prompts that decode computes itself


def test_a_local_prompt_computes_only_what_is_not_cached_and_says_so() -> None:
    paged = Paged(cached())
    paged.perform(local(paged.bench, "a", 6))
    paged.run()
    prompt = (*PROMPT, *answer(PROMPT, 6), 3)
    paged.perform(local(paged.bench, "b", 5, prompt=prompt))
    plan = paged.bench.plan()
    assert [(piece.start, len(piece.tokens)) for piece in plan.slices] == [(10, 2)]
    assert paged.bench.core.ledger.live["b"].cached_tokens == 10
    paged.bench.step(Abort(rid="b", verdict=GONE))
    paged.bench.commit(plan)
    paged.perform(local(paged.bench, "c", 5, prompt=prompt))
    paged.run()
    assert paged.heard["c"] == answer(prompt, 5)


def test_the_last_token_and_all_whose_logprobs_are_asked_for_are_computed_whatever_is_cached() -> None:
    paged = Paged(cached())
    paged.perform(local(paged.bench, "a", 2, prompt=(1, 2, 3, 4, 5, 6)))
    paged.run()
    starts = []
    for rid, start in (("b", None), ("c", 0), ("d", 1), ("e", 5)):
        asked = sampling(max_new_tokens=1, logprobs=None if start is None else 0, prompt_logprobs_from=start)
        paged.perform(paged.bench.submit(request(rid, bootstrap=None, prompt=(1, 2, 3, 4, 5, 6), sampling=asked)))
        plan = paged.bench.plan()
        starts += [piece.start for piece in plan.slices]
        paged.bench.commit(plan)
    assert starts == [4, 0, 0, 4]


def test_a_probe_uses_the_cache_like_any_other_local_prompt() -> None:
    bench = cached()
    bench.submit(probe("a", sampling=sampling(max_new_tokens=1)))
    bench.compute()
    bench.submit(probe("b", sampling=sampling(max_new_tokens=1)))
    assert [piece.start for piece in bench.plan().slices] == [4]


# -- what never enters it


def test_pages_of_a_transfer_that_failed_or_was_left_are_not_kept() -> None:
    bench = cached()
    for number, event in ((1, None), (2, Abort(rid="r2", verdict=GONE))):
        expect = ordered(bench, number, PROMPT)
        if event is not None:
            bench.step(event)
        bench.step(polled(f"r{number}", KVPoll.Failed, expect.attempt, writers_stopped=True))
        bench.step(polled(f"r{number}", KVPoll.Failed, expect.attempt, writers_stopped=True))
    assert (bench.live, *books(bench), bench.free) == ([], 0, 0, 16)


def test_a_step_that_failed_leaves_nothing_behind_but_what_was_shared() -> None:
    bench = cached()
    told = answered(bench, 1, PROMPT)
    ordered(bench, 2, (*told, 1, 2, 3))
    arrive(bench, 2)
    bench.compute(failed=Verdict(reason=Reason.DEVICE_FAULT, text="lost"))
    assert (bench.live, *books(bench), bench.free) == ([], 3, 0, 13)


def test_what_a_step_has_in_hand_is_not_kept_before_the_step_is_over() -> None:
    bench = cached()
    ordered(bench, 1, PROMPT, most=9)
    arrive(bench, 1)
    plan = bench.plan()
    bench.step(Abort(rid="r1", verdict=GONE))
    assert (*books(bench), bench.phase("r1")) == (0, 0, "revoking")
    bench.commit(plan)
    assert books(bench) == (2, 0), "the prompt's full pages, and not the one that was just written"


@pytest.mark.parametrize(
    "event", [FlushCache(), Pause(mode=PauseMode.IN_PLACE), Pause(mode=PauseMode.RETRACT)], ids=str
)
def test_what_was_computed_before_a_flush_never_enters_the_cache(event: Any) -> None:
    paged = Paged(cached())
    paged.perform(local(paged.bench, "a", 6))
    paged.compute()
    paged.compute()
    paged.perform(paged.bench.step(event))
    paged.bench.step(Continue())
    paged.run()
    assert paged.heard["a"] == answer(PROMPT, 6)
    # A retracted one is computed anew as a whole; in place nothing was said of the weights.
    assert books(paged.bench)[0] == (0 if isinstance(event, FlushCache) else 5)


@pytest.mark.parametrize("early", [True, False], ids=["while paused", "afterwards"])
def test_a_transfer_that_held_pages_of_old_weights_is_computed_anew_whenever_it_arrives(early: bool) -> None:
    bench = cached(limits={"rebootstraps_max": 0})
    told = answered(bench, 1, PROMPT)
    expect = ordered(bench, 2, (*told, 1), most=9)
    assert expect.held_pages == 3
    bench.step(Pause(mode=PauseMode.RETRACT))
    assert books(bench) == (3, 3), "prefill may still be writing beside them"
    if early:
        arrive(bench, 2)
    bench.step(Continue())
    if not early:
        arrive(bench, 2)
    assert (bench.phase("r2"), *books(bench)) == ("computing", 0, 0)
    assert [(piece.start, len(piece.tokens)) for piece in bench.plan().slices] == [(0, 10)]


# -- when memory is short


def test_cached_pages_make_room_for_whoever_needs_it() -> None:
    bench = cached(pool_pages=6)
    answered(bench, 1, PROMPT)
    assert books(bench) == (3, 0)
    expect = ordered(bench, 2, tuple(range(60, 69)), most=2)
    assert (len(expect.pages), *books(bench), bench.free) == (5, 1, 0, 0)


def test_pages_that_somebody_reads_already_are_not_counted_twice() -> None:
    bench = cached(pool_pages=10, limits={"answer_share_start_percent": 1, "answer_share_floor_percent": 1})
    told = answered(bench, 1, tuple(range(10, 20)), most=3)
    ordered(bench, 2, (*told, 1), most=2)
    assert (bench.core.ledger.spare, bench.phase("r2")) == (3, "transferring")
    ordered(bench, 3, (*told, 2), most=2)
    assert bench.phase("r3") == "transferring", "it needs eight pages, six of which are there"
    order(bench, 4, tuple(range(50, 60)), most=2)
    assert bench.phase("r4") == "prealloc"


def test_whoever_waits_is_looked_at_when_pages_are_kept_or_read_no_more() -> None:
    bench = cached(pool_pages=5)
    ordered(bench, 1, PROMPT)
    order(bench, 2, tuple(range(60, 67)))
    assert bench.phase("r2") == "prealloc"
    arrive(bench, 1)
    bench.compute()
    assert bench.phase("r2") == "prealloc"
    bench.compute()
    assert bench.phase("r2") == "transferring", "what the first left in the cache is evicted for it"


@pytest.mark.parametrize("backup_pages", [512, 0])
def test_answers_are_the_same_when_those_that_share_pages_give_way(backup_pages: int) -> None:
    paged = Paged(cached(pool_pages=12, limits={**BETS, "backup_pages": backup_pages}))
    prompts = {rid: (*PROMPT, 1, 2, 3, number) for number, rid in enumerate("abcd")}
    for rid, prompt in prompts.items():
        paged.perform(local(paged.bench, rid, 12, prompt=prompt))
    paged.run()
    assert paged.heard == {rid: answer(prompt, 12) for rid, prompt in prompts.items()}
    memory = paged.bench.core.memory
    assert memory.backups + memory.recomputations > 0
    assert paged.bench.free + books(paged.bench)[0] == 12
    paged.bench.step(FlushCache())
    assert paged.bench.free == 12


def test_pages_that_a_copy_did_not_fill_are_not_kept() -> None:
    paged = Paged(cached(pool_pages=12, limits=BETS))
    for rid in "abc":
        paged.perform(local(paged.bench, rid, 12, prompt=(*PROMPT, ord(rid))))
    rid = until(paged, "restoring")
    paged.perform(paged.bench.step(Abort(rid=rid, verdict=GONE)))
    before = books(paged.bench)[0]
    effect = paged.copies.pop(0)
    paged.bench.step(copied(effect, KVPoll.Failed))
    assert rid not in paged.bench.live
    assert books(paged.bench)[0] == before


def test_two_ranks_keep_the_same_cache_and_one_that_was_flushed_alone_shows() -> None:
    ranks = [cached() for _ in range(2)]
    for bench in ranks:
        ordered(bench, 2, (*answered(bench, 1, PROMPT), 9))
    assert len({bench.core.digest() for bench in ranks}) == 1
    ranks[0].step(FlushCache())
    assert len({bench.core.digest() for bench in ranks}) == 2
