"""The policies that know something, and a fleet simulated through them: even load, conversations that stay."""

import random
from collections import Counter, deque
from dataclasses import replace

import pytest

from baton_core.routing.pair import ByRank, Draws, Fleet, Pair, Policies
from baton_core.routing.policies import (
    Ask,
    CacheAwarePolicy,
    ConsistentHashPolicy,
    LeastLoadPolicy,
    PolicyName,
    PowerOfTwoPolicy,
    SessionPolicy,
    make_policy,
)
from baton_core.routing.prefixes import BLOCK_BYTES, MEMORY_BLOCKS_MIN, PrefixMemory, blocks_for, prefix_blocks
from baton_core.routing.ring import STALE_RATIO, HashRing
from baton_core.routing.workers import Load, Role, Target, Worker, WorkerState


def target(name: str) -> Target:
    return Target(key=name, worker=Worker(url=name, role=Role.DECODE, state=WorkerState.READY))


A, B, C = (target(name) for name in "abc")
ASK = Ask()


def loads(**requests: int) -> dict[str, Load]:
    return {name: Load(in_flight=count) for name, count in requests.items()}


def prompt(text: str) -> Ask:
    return Ask(prefix=prefix_blocks(text.encode()))


# -- load


def test_least_load_takes_the_fewest_requests_and_breaks_ties_by_the_draw() -> None:
    policy = LeastLoadPolicy()
    assert policy.choose([A, B, C], ASK, loads(a=2, b=1, c=3), 0) is B
    assert [policy.choose([A, B, C], ASK, loads(a=1), draw) for draw in (0, 1, 2)] == [B, C, B]


def test_power_of_two_takes_the_less_loaded_of_two_different_ones() -> None:
    policy = PowerOfTwoPolicy()
    chosen = Counter(policy.choose([A, B, C], ASK, loads(a=9, b=1, c=2), draw).key for draw in range(600))
    assert chosen["a"] == 0
    assert chosen["b"] == 2 * chosen["c"]
    assert policy.choose([A], ASK, {}, 7) is A


# -- conversations


@pytest.mark.parametrize("policy", [ConsistentHashPolicy(), SessionPolicy()])
def test_a_conversation_stays_where_it_is_whatever_the_load(policy: ConsistentHashPolicy | SessionPolicy) -> None:
    ask = Ask(session="conversation")
    home = policy.choose([A, B, C], ask, {}, 0)
    assert {policy.choose([A, B, C], ask, {home.key: Load(in_flight=99)}, draw).key for draw in range(50)} == {home.key}


def test_only_the_share_of_a_target_that_leaves_is_moved_by_consistent_hash() -> None:
    policy, targets = ConsistentHashPolicy(), [target(f"t{number}") for number in range(10)]
    asks = [Ask(session=str(number)) for number in range(2_000)]
    before = [policy.choose(targets, ask, {}, 0).key for ask in asks]
    after = [policy.choose(targets[1:], ask, {}, 0).key for ask in asks]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "t0")
    assert max(Counter(before).values()) < 1.6 * 200


def test_a_ring_forgets_targets_that_are_gone_and_keeps_names_where_they_were() -> None:
    ring = HashRing()
    for number in range(200):
        ring.owner("name", {f"old{number}": None})
    assert len(ring._known) <= 2 * STALE_RATIO + 1
    fresh = HashRing()
    names, now = [str(number) for number in range(50)], {"a": None, "b": None}
    assert [ring.owner(name, now) for name in names] == [fresh.owner(name, now) for name in names]


def test_two_routers_send_a_conversation_to_the_same_target_in_whatever_order_they_met_them() -> None:
    one, other = ConsistentHashPolicy(), ConsistentHashPolicy()
    other.choose([C], Ask(session="x"), {}, 0)
    for number in range(100):
        ask = Ask(session=str(number))
        assert one.choose([A, B, C], ask, {}, 0) is other.choose([C, B, A], ask, {}, 1)


def test_a_session_whose_home_is_gone_finds_a_new_one_and_stays_there() -> None:
    policy, ask = SessionPolicy(), Ask(session="s")
    assert policy.choose([A], ask, {}, 0) is A
    assert policy.choose([B], ask, {}, 0) is B
    assert policy.choose([A, B], ask, {}, 0) is B


# -- prefixes


def test_blocks_of_equal_beginnings_are_equal_and_the_same_bytes_after_another_beginning_are_not() -> None:
    first, second = "x" * BLOCK_BYTES, "y" * BLOCK_BYTES
    assert prefix_blocks((first + second).encode())[0] == prefix_blocks((first + "z").encode())[0]
    assert prefix_blocks((first + second).encode())[1] not in prefix_blocks((second + second).encode())
    assert prefix_blocks(b"") == ()
    assert len(prefix_blocks(b"short")) == 1


def test_cache_aware_follows_the_longest_known_prefix() -> None:
    policy, shared = CacheAwarePolicy(), "system " * 200
    home = policy.choose([A, B, C], prompt(shared + "one" * 100), {}, 1)
    assert policy.choose([A, B, C], prompt(shared + "two" * 100), {home.key: Load(in_flight=1)}, 0) is home


def test_a_prompt_that_is_known_nowhere_goes_to_the_least_loaded() -> None:
    policy, shared = CacheAwarePolicy(), "heavy " * 400
    for _ in range(10):
        policy.choose([A], prompt(shared), {}, 0)
    assert policy.choose([A, B], prompt("unseen " * 400), loads(a=0, b=1), 0) is A
    assert policy.choose([A, B], prompt("unknown " * 400), loads(a=5, b=1), 0) is B


def test_a_known_prefix_is_worth_a_queue_no_longer_than_what_it_saves() -> None:
    policy, ask = CacheAwarePolicy(), prompt("shared " * 400)
    policy.choose([A], ask, {}, 0)  # which took all of its blocks: so long is one request in front of another
    assert policy.choose([A, B], ask, loads(a=1, b=0), 0) is A
    assert policy.choose([A, B], ask, loads(a=40, b=39), 0) is A
    assert policy.choose([A, B], ask, loads(a=40, b=2), 0) is B
    assert policy.choose([A], ask, loads(a=40), 0) is A


def test_a_prefix_that_everybody_shares_ends_on_as_many_targets_as_it_takes() -> None:
    policy, targets = CacheAwarePolicy(), tuple(target(f"t{number}") for number in range(50))
    waiting, queues = deque[str](), Counter[str]()
    for number in range(5_000):
        ask = prompt("shared " * 200 + f"{number} of its own " * 100)
        chosen = policy.choose(targets, ask, loads(**queues), number).key
        waiting.append(chosen)
        queues[chosen] += 1
        assert queues[chosen] <= 4, "40 are there at once, and 50 could take them"
        if len(waiting) == 40:
            queues[waiting.popleft()] -= 1


def test_the_memory_of_prefixes_is_bounded_and_forgets_what_was_not_met_for_longest() -> None:
    memory = PrefixMemory(blocks_max=10)
    for number in range(100):
        memory.remember(prefix_blocks(str(number).encode()), "a")
    assert len(memory) == 10
    assert memory.depths(prefix_blocks(b"99")) == {"a": 1}
    assert memory.depths(prefix_blocks(b"5")) == {}


def test_a_large_fleet_is_remembered_for_as_much_as_its_own_caches_hold() -> None:
    assert [blocks_for(targets) for targets in (1, 64, 200, 512, 10_000)] == [
        131_072,
        131_072,
        409_600,
        1_048_576,
        1_048_576,
    ]
    policy, targets = CacheAwarePolicy(), tuple(target(f"t{number}") for number in range(100))
    first = prompt("first " * 400)
    home = policy.choose(targets, first, {}, 0)
    for number in range(MEMORY_BLOCKS_MIN):
        policy.choose(targets, Ask(prefix=(number.to_bytes(8, "big"),)), {}, 0)
    assert policy.choose(targets, first, {home.key: Load(in_flight=1)}, 0) is home


def test_every_policy_an_operator_can_name_chooses_among_its_candidates() -> None:
    for name in PolicyName:
        policy = make_policy(name)
        assert policy.choose([A, B], Ask(session="s", prefix=(b"p",)), {}, 3) in (A, B), name


# -- a simulated fleet

STEPS = 4_000
HELD_STEPS = 200
"""A request stays for so many arrivals: on the average that many are there at once."""


def fleet(workers: int, dp_size: int) -> Fleet:
    ready = Worker(url="w", role=Role.PREFILL, state=WorkerState.READY, dp_size=dp_size)
    prefills = [replace(ready, url=f"p{number}") for number in range(workers)]
    decodes = [replace(ready, url=f"d{number}", role=Role.DECODE) for number in range(workers)]
    return Fleet(prefills, decodes, ByRank(prefill=True, decode=True))


def simulate(name: PolicyName, conversations: int, dp_size: int = 4) -> tuple[float, dict[str, set[str]]]:
    """The worst load of a decode target over the mean, at any time once warm; and where each conversation was."""
    draw, some = random.Random(7), fleet(4, dp_size)
    both = Policies(prefill=make_policy(name), decode=make_policy(name))
    known = {f"{role}{n}@{rank}": Load() for role in "pd" for n in range(4) for rank in range(dp_size)}
    running: deque[Pair] = deque()
    homes: dict[str, set[str]] = {}
    worst = 0.0
    for step in range(STEPS):
        session = f"c{draw.randrange(conversations)}"
        ask = Ask(session=session, prefix=prefix_blocks(session.encode()))
        pair = some.choose(both, ask, known, Draws(prefill=draw.getrandbits(32), decode=draw.getrandbits(32)))
        assert isinstance(pair, Pair)
        assert pair.prefill is not None
        homes.setdefault(session, set()).add(pair.decode.key)
        running.append(pair)
        for chosen in (pair.prefill, pair.decode):
            known[chosen.key].in_flight += 1
        if len(running) > HELD_STEPS:
            done = running.popleft()
            assert done.prefill is not None
            known[done.prefill.key].in_flight -= 1
            known[done.decode.key].in_flight -= 1
        if step > 2 * HELD_STEPS:
            mean = HELD_STEPS / (4 * dp_size)
            worst = max(worst, *(known[f"d{n}@{rank}"].in_flight / mean for n in range(4) for rank in range(dp_size)))
    return worst, homes


def test_round_robin_and_least_load_keep_every_rank_within_a_tenth_of_the_mean() -> None:
    assert simulate(PolicyName.ROUND_ROBIN, 100)[0] <= 1.1
    assert simulate(PolicyName.LEAST_LOAD, 100)[0] <= 1.1


def test_power_of_two_keeps_every_rank_within_a_half_of_the_mean_where_chance_alone_does_not() -> None:
    assert simulate(PolicyName.POWER_OF_TWO, 100)[0] <= 1.5
    assert simulate(PolicyName.RANDOM, 100)[0] > 1.5


@pytest.mark.parametrize("name", [PolicyName.SESSION, PolicyName.CONSISTENT_HASH])
def test_conversations_stay_on_their_rank_and_none_is_worse_than_twice_the_mean(name: PolicyName) -> None:
    worst, homes = simulate(name, 2_000)
    assert all(len(places) == 1 for places in homes.values())
    assert worst <= 2.5


def test_cache_aware_keeps_prompts_at_home_as_long_as_no_queue_grows_there() -> None:
    worst, homes = simulate(PolicyName.CACHE_AWARE, 500)
    assert sum(len(places) for places in homes.values()) < 1.5 * len(homes)
    assert worst <= 2.0
