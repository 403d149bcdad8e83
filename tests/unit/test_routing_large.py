"""Choice in fleets of thousands of ranks: what makes it cheap changes nothing that it promises."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_core.routing import policies as policies_module
from baton_core.routing.pair import ByRank, Draws, Fleet, NoPair, Policies
from baton_core.routing.policies import (
    LOOKED_AT_MAX,
    Ask,
    ConsistentHashPolicy,
    LeastLoadPolicy,
    PolicyName,
    RoundRobinPolicy,
    make_policy,
)
from baton_core.routing.workers import Load, Role, Target, Worker, WorkerState, has_room, load_of

ASK = Ask()
NAMES = tuple(f"w{number}" for number in range(8))


def target(name: str, rank: int | None = None) -> Target:
    worker = Worker(url=name, role=Role.DECODE, state=WorkerState.READY)
    return Target(key=name if rank is None else f"{name}@{rank}", worker=worker, dp_rank=rank)


TARGETS = {name: target(name) for name in NAMES}


subsets = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)


@given(st.lists(st.one_of(subsets, st.just(list(NAMES)), st.just(["w1", "w2"])), max_size=40), st.booleans())
def test_round_robin_always_takes_the_least_recent_candidate(asked: list[list[str]], lasting: bool) -> None:
    policy, turns = RoundRobinPolicy(), dict.fromkeys(NAMES, 0)
    handed: dict[tuple[str, ...], tuple[Target, ...]] = {}
    for turn, names in enumerate(asked, 1):
        candidates: Sequence[Target] = [TARGETS[name] for name in names]
        if lasting:  # a fleet hands out the very same tuple again and again
            candidates = handed.setdefault(tuple(names), tuple(candidates))
        chosen = policy.choose(candidates, ASK, {}, 0).key
        assert chosen in names
        assert turns[chosen] == min(turns[name] for name in names)
        turns[chosen] = turn


def test_round_robin_does_not_walk_over_the_dead_for_ever() -> None:
    policy = RoundRobinPolicy()
    for number in range(1_000):
        policy.choose([target(f"old{number}"), target(f"older{number}")], ASK, {}, 0)
    alive = tuple(TARGETS.values())
    turns = [policy.choose(alive, ASK, {}, 0).key for _ in range(32)]
    assert turns == list(NAMES) * 4
    assert len(policy._turns) < 100


def test_least_load_looks_at_a_window_of_very_many_and_still_levels_them() -> None:
    policy, loads = LeastLoadPolicy(), {f"w{number}": Load() for number in range(4 * LOOKED_AT_MAX)}
    many, draw = tuple(target(name) for name in loads), 1
    for _ in range(10 * len(many)):
        draw = (draw * 6364136223846793005 + 1442695040888963407) % 2**64
        loads[policy.choose(many, ASK, loads, draw >> 20).key].in_flight += 1
    held = [load.in_flight for load in loads.values()]
    assert max(held) - min(held) <= 2


@given(st.integers(0, 2**40), st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_the_least_loaded_of_few_is_found_exactly(draw: int, requests: list[int]) -> None:
    loads = {f"w{number}": Load(in_flight=count) for number, count in enumerate(requests)}
    chosen = LeastLoadPolicy().choose(tuple(target(name) for name in loads), ASK, loads, draw)
    assert load_of(chosen, loads) == min(requests)


def test_consistent_hash_moves_only_the_conversations_of_a_rank_that_is_left_out() -> None:
    policy = ConsistentHashPolicy()
    ranks = tuple(target(name, rank) for name in NAMES for rank in range(4))
    names = [Ask(session=f"s{number}") for number in range(2_000)]
    before = [policy.choose(ranks, ask, {}, 0).key for ask in names]
    after = [policy.choose([one for one in ranks if one.key != "w3@2"], ask, {}, 0).key for ask in names]
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {old for old, _ in moved} == {"w3@2"}
    assert {new.partition("@")[0] for _, new in moved} == {"w3"}
    spread = Counter(before)
    assert len(spread) == 32
    assert max(spread.values()) <= 3 * 2_000 / 32


def test_what_is_kept_ready_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies_module, "CATALOGUES_MAX", 2)
    catalogue = policies_module.Catalogue(lambda candidates: {one.key: one for one in candidates})
    handed = [(TARGETS["w1"], TARGETS[name]) for name in NAMES]
    assert [set(catalogue.of(one)) for one in handed] == [{"w1", name} for name in NAMES]
    assert len(catalogue._built) == 2
    catalogue.of([TARGETS["w2"]])
    assert len(catalogue._built) == 2


def fleet(prints: list[str | None]) -> Fleet:
    prefills = [
        Worker(url=f"p{n}", role=Role.PREFILL, state=WorkerState.READY, dp_size=2, fingerprint=one)
        for n, one in enumerate(prints)
    ]
    decodes = [replace(one, url=f"d{n}", role=Role.DECODE) for n, one in enumerate(reversed(prefills))]
    return Fleet(prefills, decodes, ByRank(prefill=True, decode=True))


@given(
    prints=st.lists(st.sampled_from(["f", "g", None]), min_size=1, max_size=4),
    avoid=st.sets(st.sampled_from(["p0", "p1@0", "p1@1", "d0", "d1@1", "d2@0"])),
    full=st.sets(st.sampled_from([f"d{n}@{rank}" for n in range(4) for rank in range(2)])),
    name=st.sampled_from(PolicyName),
    draw=st.integers(0, 2**40),
    alone=st.booleans(),
)
def test_a_pair_fits_and_has_room_and_is_not_avoided_whenever_there_is_one(
    prints: list[str | None], avoid: set[str], full: set[str], name: PolicyName, draw: int, alone: bool
) -> None:
    ours, loads = fleet(prints), {key: Load(kv_tokens_free=3) for key in full}
    both = Policies(prefill=make_policy(name), decode=make_policy(name))
    ask = Ask(session="s", prefix=(b"1", b"2"), prompt_tokens=10)
    prefills = [one for one in ours._prefill_targets if not {one.key, one.worker.url} & avoid]
    decodes = [one for one in ours._decode_targets if not {one.key, one.worker.url} & avoid]
    fits = [
        (one, other)
        for one in prefills
        for other in decodes
        if not one.worker.fingerprint
        or not other.worker.fingerprint
        or one.worker.fingerprint == other.worker.fingerprint
    ]
    for _ in range(3):
        pair = ours.choose(
            both, ask, loads, Draws(prefill=draw, decode=draw >> 3), avoid=avoid.__contains__, alone=alone
        )
        if isinstance(pair, NoPair):
            assert not decodes or (not alone and not fits)
            continue
        assert pair.decode in decodes
        roomy = [other for other in decodes if has_room(other, loads, 10)]
        if alone:
            assert pair.prefill is None
            assert not roomy or pair.decode in roomy
        else:
            assert (pair.prefill, pair.decode) in fits
            assert pair.decode in roomy or not [one for one, other in fits if other in roomy]
