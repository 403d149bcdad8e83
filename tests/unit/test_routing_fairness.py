"""Breakers, retry budgets, the fair queue and quotas: small machines with the time as an argument."""

import pytest

from baton_core.routing.breaker import Breaker, BreakerLimits, BreakerState, RetryBudget
from baton_core.routing.fairness import Entry, FairQueue, Meter, Quota, Ticket


def breaker() -> Breaker:
    return Breaker(BreakerLimits(failures_max=3, open_ms=1_000))


def opened() -> Breaker:
    one = breaker()
    for now in (1, 2, 3):
        one.failed(now)
    return one


def test_a_breaker_opens_only_after_failures_in_a_row() -> None:
    one = breaker()
    for now in range(10):
        one.failed(now)
        one.failed(now)
        one.succeeded()
    assert one.state(10) is BreakerState.CLOSED
    assert opened().state(3) is BreakerState.OPEN
    assert not opened().admits(1_002)


def test_a_half_open_breaker_lets_one_trial_through_and_closes_when_it_does_well() -> None:
    one = opened()
    assert one.admits(1_003)
    one.sent(1_003)
    assert not one.admits(1_004)
    one.succeeded()
    assert one.state(1_005) is BreakerState.CLOSED


def test_a_trial_that_fails_opens_the_breaker_again_for_the_whole_time() -> None:
    one = opened()
    one.sent(1_003)
    one.failed(1_100)
    assert not one.admits(2_099)
    assert one.admits(2_100)


def test_a_trial_that_never_comes_back_is_replaced_by_another() -> None:
    one = opened()
    one.sent(1_003)
    assert one.admits(2_003)


def test_limits_of_a_breaker_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="failures_max 0"):
        BreakerLimits(failures_max=0)


def test_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget(per_request=0.25, burst=2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.earn()
    assert [budget.spend() for _ in range(2)] == [True, False]
    for _ in range(1_000):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    with pytest.raises(ValueError, match="burst -1"):
        RetryBudget(per_request=1, burst=-1)


# -- the queue


def queue(waiting_max: int = 10) -> FairQueue:
    """One with its only place taken."""
    one = FairQueue(running_max=1, waiting_max=waiting_max)
    assert one.enter("", 0).entry is Entry.RUNS
    return one


def waits(one: FairQueue, key: str = "", priority: int = 0) -> Ticket:
    entered = one.enter(key, priority)
    assert entered.entry is Entry.WAITS
    assert entered.ticket is not None
    return entered.ticket


def test_who_waits_goes_in_order_of_arrival_and_of_priority_before_it() -> None:
    one = queue()
    first, second, urgent = waits(one), waits(one), waits(one, priority=5)
    assert [one.leave() for _ in range(4)] == [urgent, first, second, None]
    assert (one.running, one.waiting) == (0, 0)


def test_a_key_with_many_requests_lets_another_key_have_every_second_turn() -> None:
    one = queue()
    greedy = [waits(one, "greedy") for _ in range(5)]
    modest = [waits(one, "modest") for _ in range(2)]
    assert [one.leave() for _ in range(4)] == [greedy[0], modest[0], greedy[1], modest[1]]


def test_a_full_queue_refuses_its_equals_and_gives_its_last_place_to_a_better_one() -> None:
    one = queue(waiting_max=2)
    first, last = waits(one), waits(one)
    assert one.enter("", 0).entry is Entry.REFUSED
    entered = one.enter("", 1)
    assert entered.displaced is last
    assert [one.leave(), one.leave(), one.leave()] == [entered.ticket, first, None]


def test_one_that_gives_up_is_passed_over_and_leaves_nothing_behind() -> None:
    one = queue(waiting_max=1_000)
    tickets = [waits(one, str(number)) for number in range(500)]
    for ticket in tickets[:-1]:
        one.withdraw(ticket)
    assert one.waiting == 1
    assert len(one._heap) < 100
    assert one.leave() is tickets[-1]
    assert len(one._turns) <= 64


def test_a_queue_without_places_refuses_at_once() -> None:
    assert queue(waiting_max=0).enter("", 100).entry is Entry.REFUSED


# -- quotas


def test_a_rate_is_kept_and_a_second_of_it_may_come_at_once() -> None:
    meter = Meter(Quota(requests_per_s=2), 0.0)
    assert [meter.enter(0.0), meter.enter(0.0)] == [0.0, 0.0]
    assert meter.enter(0.0) == pytest.approx(0.5)
    assert meter.enter(0.5) == 0.0


def test_requests_at_once_are_counted_and_come_back() -> None:
    meter = Meter(Quota(concurrent_max=1), 0.0)
    assert meter.enter(0.0) == 0.0
    assert meter.enter(0.0) > 0
    meter.leave()
    assert meter.enter(0.0) == 0.0


def test_no_quota_is_no_limit_and_a_negative_one_is_refused() -> None:
    meter = Meter(Quota(), 0.0)
    assert all(meter.enter(0.0) == 0.0 for _ in range(1_000))
    with pytest.raises(ValueError, match="negative"):
        Quota(requests_per_s=-1)
