"""How chosen data-parallel ranks reach a pair."""

from collections import Counter
from dataclasses import replace

import pytest

from baton_core.routing.pair import ByRank, Draws, Fleet, NoPair, Pair, Policies
from baton_core.routing.policies import Ask, PolicyName, make_policy
from baton_core.routing.ranks import DpMode, Ranks, mode_for, ranks_told
from baton_core.routing.workers import Load, Role, Target, Worker, WorkerState

P = Worker(url="http://p", role=Role.PREFILL, dp_size=4, fingerprint="f", state=WorkerState.READY, reason="")
D = replace(P, url="http://d", role=Role.DECODE)
PAIR = Pair(prefill=Target(key="http://p@3", worker=P, dp_rank=3), decode=Target(key="http://d@1", worker=D, dp_rank=1))
ALONE = replace(PAIR, prefill=None)
WHOLE = Pair(prefill=Target(key="http://p", worker=P), decode=Target(key="http://d", worker=D))


@pytest.mark.parametrize(
    ("mode", "prefill", "decode"),
    [
        (DpMode.OFF, Ranks(), Ranks()),
        (DpMode.FOLLOW, Ranks(), Ranks(routed=1)),
        (DpMode.INJECT, Ranks(routed=3), Ranks(routed=1, prefill=3)),
        (DpMode.REGISTER, Ranks(routed=3), Ranks(routed=1)),
    ],
)
def test_each_mode_tells_each_leg_what_it_needs(mode: DpMode, prefill: Ranks, decode: Ranks) -> None:
    assert ranks_told(mode, PAIR) == (prefill, decode)
    assert ranks_told(mode, WHOLE) == (Ranks(), Ranks())


def test_decode_alone_is_told_its_own_rank() -> None:
    assert ranks_told(DpMode.AUTO, ALONE)[1] == Ranks(routed=1)


@pytest.mark.parametrize(
    ("announced", "fingerprint", "mode"),
    [
        (True, "f", DpMode.FOLLOW),
        (False, "f", DpMode.INJECT),
        (False, None, DpMode.INJECT),
        (None, "f", DpMode.INJECT),  # ours, of an age that says nothing
        (None, None, DpMode.FOLLOW),  # SGLang's default
    ],
)
def test_auto_goes_by_what_prefill_announces(announced: bool | None, fingerprint: str | None, mode: DpMode) -> None:
    worker = replace(P, follows_room=announced, fingerprint=fingerprint)
    assert mode_for(DpMode.AUTO, worker) is mode
    assert ranks_told(DpMode.AUTO, replace(PAIR, prefill=replace(PAIR.prefill, worker=worker))) == ranks_told(
        mode, PAIR
    )
    assert mode_for(DpMode.FOLLOW, worker) is DpMode.FOLLOW


def fleet() -> Fleet:
    prefills = [replace(P, url=f"http://p{n}") for n in range(2)]
    decodes = [replace(D, url=f"http://d{n}") for n in range(3)]
    return Fleet(prefills, decodes, ByRank(prefill=True, decode=True))


def test_a_rank_to_be_avoided_leaves_its_siblings_and_an_address_takes_them_along() -> None:
    both = Policies(prefill=make_policy(PolicyName.ROUND_ROBIN), decode=make_policy(PolicyName.ROUND_ROBIN))
    avoid = ("http://p0@1", "http://d1", "http://d2")
    chosen = [
        fleet().choose(both, Ask(), {}, Draws(prefill=0, decode=0), avoid=lambda name: name in avoid) for _ in range(28)
    ]
    pairs = [pair for pair in chosen if isinstance(pair, Pair)]
    assert len(pairs) == 28
    assert Counter(pair.decode.key for pair in pairs) == {f"http://d0@{rank}": 7 for rank in range(4)}
    prefills = Counter(pair.prefill.key for pair in pairs if pair.prefill)
    assert "http://p0@1" not in prefills
    assert set(prefills.values()) == {4}


def test_nobody_is_left_when_every_rank_is_to_be_avoided() -> None:
    both = Policies(prefill=make_policy(PolicyName.RANDOM), decode=make_policy(PolicyName.RANDOM))
    none = fleet().choose(both, Ask(), {}, Draws(prefill=0, decode=0), avoid=lambda name: "p0" in name or "p1@" in name)
    assert isinstance(none, NoPair)
    assert none.reason == ("no prefill worker is usable (http://p0: it just failed; http://p1: it just failed)")


@pytest.mark.parametrize("name", [PolicyName.ROUND_ROBIN, PolicyName.LEAST_LOAD, PolicyName.POWER_OF_TWO])
def test_load_stays_even_over_the_ranks_of_all_workers(name: PolicyName) -> None:
    both = Policies(prefill=make_policy(name), decode=make_policy(name))
    loads: dict[str, Load] = {}
    ours, draw = fleet(), 12345
    for _ in range(1_200):
        draw = (draw * 6364136223846793005 + 1442695040888963407) % 2**64
        pair = ours.choose(both, Ask(), loads, Draws(prefill=draw >> 8, decode=draw >> 24))
        assert isinstance(pair, Pair)
        assert pair.prefill is not None
        for target in (pair.prefill, pair.decode):
            loads.setdefault(target.key, Load()).in_flight += 1
    for side, mean in (("http://p", 150), ("http://d", 100)):
        held = [load.in_flight for key, load in loads.items() if key.startswith(side)]
        assert len(held) == 1_200 / mean
        assert max(held) - min(held) <= 6
