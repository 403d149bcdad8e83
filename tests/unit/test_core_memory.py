"""Decode's memory: admission that bets on answers, pages that grow, and one line for all who wait for pages."""

import pytest

from baton_core.admission import AnswerShare
from baton_core.agreement import KVPoll
from baton_core.events import Abort
from unit.cores import (
    GONE,
    decode,
    polled,
    with_limits,
)
from unit.paged import BETS, ask, leave, local, storm

# -- what admission counts on


def test_the_share_of_answers_that_is_used_is_learned_and_never_falls_below_its_floor() -> None:
    share = AnswerShare(70, 10)
    assert share.expected(100) == 70
    for _ in range(2_000):
        share.ended(3, 100)
    assert share.expected(100) == 10
    for _ in range(2_000):
        share.ended(50, 100)
    assert 48 <= share.expected(100) <= 50
    share.fell_short()
    assert 60 <= share.expected(100) <= 63
    assert share.expected(0) == 0
    assert AnswerShare(300, 10).expected(7) == 7


def test_short_requests_move_the_share_less_than_long_ones() -> None:
    share = AnswerShare(20, 1)
    for _ in range(50):
        share.ended(1, 1)
    assert share.expected(1_000) <= 220


def test_pages_are_taken_as_the_answer_grows() -> None:
    paged = storm(count=1)
    held = []
    while paged.compute():
        held += [len(one.pages) for one in paged.bench.core.ledger.live.values()]
    assert held == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8]
    assert paged.bench.free == 12


def test_more_are_admitted_than_the_longest_answers_would_allow() -> None:
    phases = []
    for percent in (100, 1):
        bench = decode(with_limits(**{**BETS, "answer_share_start_percent": percent}))
        for rid in "ab":
            local(bench, rid, 9)
        phases.append([bench.phase(rid) for rid in "ab"])
    assert phases == [["computing", "local"], ["computing", "computing"]]


def test_what_runs_is_counted_with_what_it_is_expected_to_need() -> None:
    bench = decode(with_limits(answer_share_start_percent=100, chunk_tokens=512), pool_pages=9)
    local(bench, "a", 9)
    assert bench.free == 6
    local(bench, "b", 1)
    assert bench.phase("b") == "local", "four of the six are a's to come"
    bench.step(Abort(rid="a", verdict=GONE))
    assert bench.phase("b") == "computing"


# -- the line


def test_a_short_request_passes_a_giant_that_does_not_fit_but_only_so_many_do() -> None:
    bench = decode(with_limits(answer_share_start_percent=100, overtakings_max=2), pool_pages=10)
    ask(bench, "first", 1, 3)
    ask(bench, "giant", 2, 15)
    assert (bench.phase("first"), bench.phase("giant")) == ("transferring", "prealloc")
    ask(bench, "short", 3, 3)
    assert bench.phase("short") == "transferring"
    for number, rid in ((4, "next"), (5, "late"), (6, "later")):
        ask(bench, rid, number, 3)
    assert bench.phase("next") == "prealloc", "it does not fit"
    leave(bench, "first", 1)
    assert (bench.phase("next"), bench.phase("late")) == ("transferring", "prealloc")
    leave(bench, "short", 3)
    assert bench.phase("late") == "prealloc", "two have passed: nobody else does"
    leave(bench, "next", 4)
    assert (bench.phase("giant"), bench.phase("late")) == ("transferring", "prealloc")
    leave(bench, "giant", 2)
    assert (bench.phase("late"), bench.phase("later")) == ("transferring", "transferring")


def test_local_prompts_stand_in_the_same_line() -> None:
    bench = decode(with_limits(answer_share_start_percent=100, overtakings_max=1), pool_pages=8)
    ask(bench, "first", 1, 3)
    local(bench, "giant", 9)
    ask(bench, "short", 3, 3)
    assert (bench.phase("giant"), bench.phase("short")) == ("local", "transferring")
    ask(bench, "late", 4, 3)
    leave(bench, "short", 3)
    assert bench.phase("late") == "prealloc"
    leave(bench, "first", 1)
    assert bench.phase("giant") == "computing"


def test_who_waits_for_a_metadata_row_does_not_stand_in_the_way() -> None:
    bench = decode(with_limits(metadata_rows=1, chunk_tokens=512), pool_pages=16)
    ask(bench, "a", 1, 3)
    ask(bench, "b", 2, 3)
    local(bench, "c", 3)
    assert [bench.phase(rid) for rid in "abc"] == ["transferring", "prealloc", "computing"]
    assert bench.core.ledger.live["b"].overtaken == 0


def test_nobody_looks_again_while_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = decode(pool_pages=4)
    ask(bench, "a", 1, 3)
    ask(bench, "b", 2, 3)
    looked: list[int] = []
    monkeypatch.setattr(type(bench.core.line), "_pass", lambda line: looked.append(1))
    for _ in range(10):
        bench.step(polled("a", KVPoll.Transferring, 1, progress=1))
        bench.after(1)
    assert looked == []
    leave(bench, "a", 1)
    assert looked == [1]


def test_a_greater_priority_is_seen_however_many_stand_before_it() -> None:
    bench = decode(pool_pages=4)
    ask(bench, "first", 1, 3)
    for number in range(2, 100):
        ask(bench, f"r{number}", number, 3)
    local(bench, "high", 3, priority=1)
    leave(bench, "first", 1)
    assert [rid for rid in bench.live if bench.phase(rid) not in ("prealloc", "local")] == ["high"]
