"""Choice of workers: policies, pairs and rooms, as pure functions of views and drawn integers."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from baton_core.request import ROOM_MAX
from baton_core.routing.pair import ByRank, Draws, Fleet, NoPair, Pair, Policies
from baton_core.routing.policies import TURNS_MAX, Ask, Policy, RandomPolicy, RoundRobinPolicy
from baton_core.routing.rooms import draw_room
from baton_core.routing.workers import Load, Role, Target, Worker, WorkerState, compatible

DRAWS = Draws(prefill=0, decode=0)
ASK = Ask()


def worker(name: str, role: Role = Role.PREFILL, *, fingerprint: str | None = "f") -> Worker:
    return Worker(url=name, role=role, fingerprint=fingerprint, state=WorkerState.READY, reason="")


def decode(name: str, *, fingerprint: str | None = "f") -> Worker:
    return worker(name, Role.DECODE, fingerprint=fingerprint)


def policies(policy: type[Policy] = RoundRobinPolicy) -> Policies:
    return Policies(prefill=policy(), decode=policy())


def target(name: str) -> Target:
    return Target(key=name, worker=worker(name))


def choose_pair(
    prefills: list[Worker],
    decodes: list[Worker],
    both: Policies,
    draws: Draws,
    *,
    avoid: tuple[str, ...] = (),
    alone: bool = False,
) -> Pair | NoPair:
    avoided = (lambda url: url in avoid) if avoid else None
    return Fleet(prefills, decodes).choose(both, ASK, {}, draws, avoid=avoided, alone=alone)


def missing_pair(prefills: list[Worker], decodes: list[Worker]) -> str | None:
    return Fleet(prefills, decodes).missing_pair()


def chosen(result: Pair | NoPair) -> tuple[str | None, str]:
    assert isinstance(result, Pair), result
    return (result.prefill.key if result.prefill else None, result.decode.key)


def refused(result: Pair | NoPair) -> str:
    assert isinstance(result, NoPair), result
    return result.reason


# -- policies


def test_round_robin_gives_every_worker_its_turn() -> None:
    policy, workers = RoundRobinPolicy(), [target("a"), target("b"), target("c")]
    assert [policy.choose(workers, ASK, {}, 0).key for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_round_robin_never_repeats_itself_however_the_candidates_differ_from_request_to_request() -> None:
    policy, a, b, c = RoundRobinPolicy(), target("a"), target("b"), target("c")
    turns = [policy.choose(candidates, ASK, {}, 0).key for candidates in ([a, b, c], [b, c], [a, b, c], [a, c]) * 30]
    assert all(before != after for before, after in pairwise(turns))
    assert min(Counter(turns).values()) >= 30


def test_round_robin_serves_a_newcomer_next_and_then_no_more_than_its_share() -> None:
    policy, old = RoundRobinPolicy(), [target("a"), target("b")]
    for _ in range(10):
        policy.choose(old, ASK, {}, 0)
    assert [policy.choose([*old, target("new")], ASK, {}, 0).key for _ in range(4)] == ["new", "a", "b", "new"]


def test_round_robin_remembers_a_bounded_number_of_workers() -> None:
    policy = RoundRobinPolicy()
    for number in range(TURNS_MAX + 10):
        policy.choose([target(str(number))], ASK, {}, 0)
    assert len(policy._turns) == TURNS_MAX


def test_random_follows_the_draw() -> None:
    workers = [target("a"), target("b"), target("c")]
    assert [RandomPolicy().choose(workers, ASK, {}, draw).key for draw in (0, 1, 2, 3, 2**32 - 1)] == [
        "a",
        "b",
        "c",
        "a",
        "a",
    ]


# -- pairs


def test_a_pair_is_chosen_by_the_policy_of_each_role() -> None:
    both = Policies(prefill=RandomPolicy(), decode=RoundRobinPolicy())
    result = choose_pair([worker("p1"), worker("p2")], [decode("d1"), decode("d2")], both, Draws(prefill=1, decode=1))
    assert chosen(result) == ("p2", "d1")


def test_only_workers_with_matching_fingerprints_are_paired() -> None:
    prefills = [worker("p-old", fingerprint="old"), worker("p-new", fingerprint="new")]
    decodes = [decode("d-new", fingerprint="new"), decode("d-old", fingerprint="old")]
    both = policies()
    pairs = [chosen(choose_pair(prefills, decodes, both, DRAWS)) for _ in range(4)]
    assert pairs == [("p-old", "d-old"), ("p-new", "d-new")] * 2


def test_a_prefill_worker_without_a_partner_is_not_chosen() -> None:
    prefills = [worker("p-alone", fingerprint="other"), worker("p")]
    assert chosen(choose_pair(prefills, [decode("d")], policies(), DRAWS)) == ("p", "d")


@pytest.mark.parametrize("unknown", [None, ""])
def test_an_unknown_fingerprint_matches_everything(unknown: str | None) -> None:
    assert compatible(worker("p", fingerprint=unknown), decode("d"))
    assert compatible(worker("p"), decode("d", fingerprint=unknown))
    assert not compatible(worker("p", fingerprint="x"), decode("d", fingerprint="y"))


def test_incompatible_workers_are_refused_naming_both_fingerprints() -> None:
    prefills, decodes = [worker("p", fingerprint="kv=1")], [decode("d", fingerprint="kv=2")]
    reason = refused(choose_pair(prefills, decodes, policies(), DRAWS))
    assert "kv=1" in reason
    assert "kv=2" in reason
    assert missing_pair(prefills, decodes) == reason


def test_no_prefill_worker_known_at_all_means_colocated() -> None:
    assert chosen(choose_pair([], [decode("d")], policies(), DRAWS)) == (None, "d")
    assert missing_pair([], [decode("d")]) is None


def test_a_known_but_unusable_prefill_worker_does_not_mean_colocated() -> None:
    down = replace(worker("p"), state=WorkerState.UNREADY, reason="loading the model")
    assert refused(choose_pair([down], [decode("d")], policies(), DRAWS)) == (
        "no prefill worker is usable (p: unready, loading the model)"
    )


def test_a_draining_worker_takes_nothing_new() -> None:
    draining = replace(decode("d1"), state=WorkerState.DRAINING, reason="")
    assert chosen(choose_pair([worker("p")], [draining, decode("d2")], policies(), DRAWS)) == ("p", "d2")


def test_a_missing_decode_worker_is_named_whether_none_is_known_or_none_is_usable() -> None:
    assert missing_pair([worker("p")], []) == "no decode worker is known"
    down = [replace(decode(f"d{n}"), state=WorkerState.UNREADY, reason="gone") for n in range(6)]
    assert missing_pair([worker("p")], down) == (
        "no decode worker is usable (d0: unready, gone; d1: unready, gone; d2: unready, gone; d3: unready, gone; "
        "and 2 more)"
    )


def test_a_retry_avoids_the_workers_that_failed() -> None:
    prefills, decodes = [worker("p1"), worker("p2")], [decode("d1"), decode("d2")]
    assert chosen(choose_pair(prefills, decodes, policies(), DRAWS, avoid=("p1", "d1"))) == ("p2", "d2")


def test_a_retry_without_another_pair_is_refused_and_says_so() -> None:
    reason = refused(choose_pair([worker("p1")], [decode("d1")], policies(), DRAWS, avoid=("p1",)))
    assert reason == "no prefill worker is usable (p1: it just failed)"


def test_a_refused_choice_costs_nobody_a_turn() -> None:
    both, prefills = policies(), [worker("p1"), worker("p2")]
    refused(choose_pair(prefills, [decode("d", fingerprint="x")], both, DRAWS))
    assert chosen(choose_pair(prefills, [decode("d")], both, DRAWS)) == ("p1", "d")


# -- rooms


def test_a_room_is_never_the_fake_room_and_always_fits_63_bits() -> None:
    assert [draw_room(bits) for bits in (0, 1, 2**63 - 2, 2**63 - 1)] == [1, 2, ROOM_MAX, 1]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 7, 8])
def test_a_room_drawn_for_a_rank_leads_there_and_stays_in_range(dp_size: int) -> None:
    for bits in (0, 1, dp_size, 2**62, 2**63 - 3, 2**63 - 2, 2**63 - 1):
        for rank in range(dp_size):
            room = draw_room(bits, dp_size=dp_size, dp_rank=rank)
            assert room % dp_size == rank
            assert 1 <= room <= ROOM_MAX


def test_a_view_of_a_worker_that_cannot_be_is_not_made() -> None:
    with pytest.raises(ValueError, match="dp_size 0"):
        replace(worker("p"), dp_size=0)


# -- targets and room


def test_every_rank_is_a_target_where_ranks_are_chosen_and_a_worker_is_one_where_they_are_not() -> None:
    prefills, decodes = [replace(worker("p"), dp_size=3)], [replace(decode("d"), dp_size=2)]
    fleet = Fleet(prefills, decodes, ByRank(prefill=True))
    both = policies()
    pairs = [fleet.choose(both, ASK, {}, DRAWS) for _ in range(3)]
    assert [chosen(pair) for pair in pairs] == [("p@0", "d"), ("p@1", "d"), ("p@2", "d")]
    assert [pair.prefill.dp_rank for pair in pairs if isinstance(pair, Pair) and pair.prefill] == [0, 1, 2]


def test_decode_workers_without_room_for_the_prompt_are_passed_over_while_one_has_it() -> None:
    fleet, full = Fleet([worker("p")], [decode("d1"), decode("d2")]), Load(kv_tokens_free=10)
    ask, both = Ask(prompt_tokens=100), policies(RandomPolicy)
    assert chosen(fleet.choose(both, ask, {"d1": full}, DRAWS)) == ("p", "d2")
    assert chosen(fleet.choose(both, ask, {"d1": full, "d2": full}, DRAWS)) == ("p", "d1")


def test_a_prefill_worker_all_of_whose_partners_are_full_is_passed_over() -> None:
    fleet = Fleet(
        [worker("p-a", fingerprint="a"), worker("p-b", fingerprint="b")],
        [decode("d-a", fingerprint="a"), decode("d-b", fingerprint="b")],
    )
    loads = {"d-a": Load(kv_tokens_free=1)}
    assert chosen(fleet.choose(policies(), Ask(prompt_tokens=9), loads, DRAWS)) == ("p-b", "d-b")


def test_a_decode_worker_serves_alone_where_that_is_asked_for() -> None:
    assert chosen(choose_pair([worker("p")], [decode("d")], policies(), DRAWS, alone=True)) == (None, "d")


def test_a_report_counts_until_requests_of_our_own_come_and_go() -> None:
    load = Load(in_flight=3)
    load.report(requests=7, kv_tokens_free=None)
    load.in_flight += 2
    assert load.requests == 9
    load.in_flight = 0
    assert load.requests == 4
