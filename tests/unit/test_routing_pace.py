"""How long a new request would wait for its first token, and who is told so at once."""

from baton_core.routing.pace import FREE_WAITERS_UNKNOWN, Pace, Waiter

TOKENS = 128


def served(pace: Pace, *, every_ms: float, since_ms: float, requests: int, behind: int) -> list[Waiter]:
    """One first token every so often, while `behind` others wait; those that wait at the end."""
    waiters = [pace.begin(TOKENS, since_ms) for _ in range(behind + 1)]
    for number in range(requests):
        now_ms = since_ms + (number + 1) * every_ms
        waiters.pop(0).came(now_ms)
        waiters.append(pace.begin(TOKENS, now_ms))
    return waiters


def test_the_wait_is_what_stands_before_it_over_the_rate() -> None:
    pace = Pace(longest_ms=10_000)
    served(pace, every_ms=100, since_ms=0, requests=200, behind=29)
    assert abs(pace.expected_ms(20_000) - 30 * 100) < 300


def test_a_few_long_prompts_among_short_ones_do_not_look_like_a_fleet_that_stands_still() -> None:
    pace = Pace(longest_ms=10_000)
    short = [pace.begin(1, 0) for _ in range(200)]
    for number, waiter in enumerate(short):
        waiter.came(100 * (number + 1))
    for _ in range(FREE_WAITERS_UNKNOWN + 1):
        pace.begin(3_000, 20_000)
    assert pace.expected_ms(20_000) < 1_200


def test_many_short_prompts_behind_long_ones_wait_for_their_tokens_only() -> None:
    pace = Pace(longest_ms=10_000)
    for number in range(20):
        pace.begin(3_000, 3_000 * number).came(3_000 * (number + 1))
    for _ in range(100):
        pace.begin(30, 60_000)
    assert pace.expected_ms(60_000) < 3_500


def test_whoever_would_wait_too_long_is_refused_and_told_by_how_much() -> None:
    pace = Pace(longest_ms=2_000)
    waiters = served(pace, every_ms=100, since_ms=0, requests=200, behind=29)
    assert 700 < pace.too_long_by_ms(20_000) < 1_300
    for waiter in waiters[:15]:
        waiter.gave_up(20_000)
    assert pace.too_long_by_ms(20_000) == 0


def test_nonsense_that_the_workers_refuse_at_once_does_not_look_like_a_fleet_that_stands_still() -> None:
    pace = Pace(longest_ms=2_000)
    served(pace, every_ms=10, since_ms=0, requests=200, behind=0)
    for at_ms in range(2_000, 60_000, 2):
        pace.begin(17_000, at_ms).refused(at_ms + 2)
    for _ in range(FREE_WAITERS_UNKNOWN + 1):
        pace.begin(TOKENS, 60_000)
    assert pace.too_long_by_ms(60_000) == 0


def test_a_few_may_always_wait_however_slow_it_is() -> None:
    pace = Pace(longest_ms=1)
    served(pace, every_ms=60_000, since_ms=0, requests=50, behind=FREE_WAITERS_UNKNOWN - 1)
    assert pace.too_long_by_ms(3_000_000) == 0
    pace.begin(TOKENS, 3_000_000)
    assert pace.too_long_by_ms(3_000_000) > 0


def test_a_slow_fleet_takes_only_as_many_as_it_can_answer_in_time() -> None:
    for behind, takes_more in ((2, True), (3, False)):  # 3 and 4 wait, and each takes half a second
        pace = Pace(longest_ms=2_250)
        served(pace, every_ms=500, since_ms=0, requests=200, behind=behind)
        assert (pace.too_long_by_ms(100_000) == 0) is takes_more


def test_nobody_is_refused_before_the_first_token_ever_nor_without_a_limit() -> None:
    fresh = Pace(longest_ms=1)
    for _ in range(1_000):
        fresh.begin(TOKENS, 0)
    assert fresh.too_long_by_ms(1_000) == 0
    unlimited = Pace(longest_ms=0)
    served(unlimited, every_ms=1_000, since_ms=0, requests=100, behind=100)
    assert unlimited.expected_ms(100_000) > 50_000
    assert unlimited.too_long_by_ms(100_000) == 0


def test_a_fleet_that_stands_still_takes_no_more_and_takes_them_again_when_it_goes_on() -> None:
    pace = Pace(longest_ms=5_000)
    waiters = served(pace, every_ms=10, since_ms=0, requests=500, behind=29)
    assert pace.too_long_by_ms(5_000) == 0
    assert pace.too_long_by_ms(125_000) > 0
    for number, waiter in enumerate(waiters):
        waiter.came(125_000 + 10 * number)
    assert pace.too_long_by_ms(125_300) == 0


def test_what_is_said_of_a_waiter_twice_counts_once() -> None:
    pace = Pace(longest_ms=1_000)
    waiter = pace.begin(TOKENS, 0)
    pace.begin(TOKENS, 0)
    for _ in range(3):
        waiter.came(10)
        waiter.gave_up(20)
    assert pace.waiting == 1


def test_idle_time_says_nothing_about_the_rate() -> None:
    pace = Pace(longest_ms=1_000)
    for waiter in served(pace, every_ms=100, since_ms=0, requests=200, behind=0):
        waiter.came(20_100)
    for _ in range(20):
        pace.begin(TOKENS, 3_600_000)
    assert abs(pace.expected_ms(3_600_000) - 20 * 100) < 200
