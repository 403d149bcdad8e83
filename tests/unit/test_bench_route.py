"""The policy simulator: its requests, its workers, and whole runs on small fleets; pure, in virtual time."""

import json
from collections import Counter
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path

import pytest

from baton_cli.bench.route import PolicyFigures, RouteBench, figures_of, parse_policies, route
from baton_cli.bench.route_trace import BLOCK_TOKENS, Arrival, Trace, TraceShape
from baton_cli.bench.route_workers import DecodeMachine, Job, PrefillMachine, WorkerShape
from baton_cli.bench.route_world import FleetShape, Outcome, Part, World
from baton_cli.errors import Interrupted, UsageError
from baton_cli.interrupt import Interrupt
from baton_cli.show import Screen
from baton_core.routing.policies import PolicyName
from baton_core.routing.workers import Role

SMALL = FleetShape(prefills=12, decodes=12, death_share=0.1, slow_share=0.1)
BLOCKS = tuple(bytes([number]) for number in range(8))


def run(policies: str, shape: FleetShape = SMALL, requests: int = 3_000) -> Outcome:
    return World(shape, parse_policies(policies), requests).run(lambda: None)


def figures(policies: str, shape: FleetShape = SMALL) -> PolicyFigures:
    return figures_of(policies, run(policies, shape), 0.0)


def job(blocks: int = 4, output_tokens: int = 10, beginning: tuple[bytes, ...] = BLOCKS) -> Job:
    return Job(Arrival(0.0, "c1", beginning[:blocks], output_tokens, 0), router=0, part=0)


# -- requests


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    one, same, other = (list(islice(Trace(TraceShape(), rate_per_s=50, seed=seed), 500)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_requests_come_in_order_at_the_rate_that_was_asked_for_from_the_beginning() -> None:
    arrivals = list(islice(Trace(TraceShape(), rate_per_s=100, seed=3), 4_000))
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(40, rel=0.15)
    assert times[1_000] == pytest.approx(10, rel=0.25)


def test_each_turn_of_a_conversation_begins_with_the_whole_turn_before() -> None:
    last: dict[str, tuple[bytes, ...]] = {}
    grown = 0
    for arrival in islice(Trace(TraceShape(think_s=1.0), rate_per_s=100, seed=4), 3_000):
        before = last.get(arrival.session)
        if before is not None:
            assert arrival.prefix[: len(before)] == before and len(arrival.prefix) > len(before)
            assert arrival.known_blocks == len(before)
            grown += 1
        last[arrival.session] = arrival.prefix
    assert grown > 500


def test_what_could_be_cached_is_what_some_earlier_prompt_began_with() -> None:
    met: set[bytes] = set()
    for arrival in islice(Trace(TraceShape(applications=20), rate_per_s=100, seed=5), 2_000):
        # The history of conversations that are older than the trace was asked by nobody in it.
        assert set(arrival.prefix[: arrival.known_blocks]) <= met
        met |= set(arrival.prefix)


def test_popular_applications_are_asked_more_often() -> None:
    first_blocks = Counter(arrival.prefix[0] for arrival in islice(Trace(TraceShape(), rate_per_s=100, seed=6), 5_000))
    most, *_, least = (count for _, count in first_blocks.most_common())
    assert most > 20 * least


def test_the_mean_length_of_prompts_is_what_the_rate_is_computed_from() -> None:
    shape = TraceShape()
    arrivals = list(islice(Trace(shape, rate_per_s=100, seed=7), 20_000))
    mean = sum(arrival.prompt_tokens for arrival in arrivals) / len(arrivals)
    assert mean == pytest.approx(shape.prompt_tokens_mean, rel=0.15)


# -- workers


def test_prefill_computes_in_turn_and_only_what_it_has_not_computed_before() -> None:
    shape = WorkerShape(prefill_tokens_per_s=64, prefill_overhead_s=1.0)
    prefill = PrefillMachine("p", shape)
    first, second = job(blocks=4), job(blocks=6)
    assert prefill.compute(first, 10.0) == 10 + 1 + 4
    assert prefill.compute(second, 11.0) == 15 + 1 + 2
    assert (first.hit_blocks, second.hit_blocks) == (0, 4)
    assert prefill.work == 6 * BLOCK_TOKENS


def test_prefill_always_computes_the_end_of_a_prompt() -> None:
    prefill = PrefillMachine("p", WorkerShape())
    again = job()
    for one in (job(), again):
        prefill.compute(one, 0.0)
    assert again.hit_blocks == 3


def test_prefill_forgets_what_was_unused_for_longest_the_end_of_a_prompt_first() -> None:
    prefill = PrefillMachine("p", WorkerShape(cache_tokens=4 * BLOCK_TOKENS))
    other = tuple(bytes([100 + number]) for number in range(2))
    old = job()
    for one in (job(), job(blocks=2, beginning=other), old):
        prefill.compute(one, 0.0)
    assert old.hit_blocks == 2


def test_a_dead_prefill_worker_comes_back_with_an_empty_cache() -> None:
    prefill = PrefillMachine("p", WorkerShape())
    lost, later = job(), job()
    prefill.jobs[lost] = None
    prefill.compute(lost, 0.0)
    assert prefill.die(1.0) == [lost] and not prefill.alive
    prefill.revive(2.0)
    prefill.compute(later, 2.0)
    assert later.hit_blocks == 0 and prefill.alive and prefill.life == 2


def start(decode: DecodeMachine, one: Job, now_s: float) -> None:
    decode.jobs[one] = None
    assert decode.reserve(one)
    decode.start(one, now_s)


def test_a_step_takes_longer_the_more_sequences_are_in_the_batch() -> None:
    decode = DecodeMachine("d", WorkerShape(step_s=1.0, step_each_s=0.5))
    start(decode, job(output_tokens=10), 0.0)
    assert decode.next_end_s(0.0) == 15.0
    start(decode, job(output_tokens=10), 7.5)
    assert decode.next_end_s(7.5) == 7.5 + 5 * 2
    assert len(decode.ended(17.5)) == 1
    assert decode.next_end_s(17.5) == 17.5 + 5 * 1.5


def test_a_slow_worker_keeps_what_it_has_done_and_goes_on_slowly() -> None:
    decode = DecodeMachine("d", WorkerShape(step_s=1.0, step_each_s=0.0))
    start(decode, job(output_tokens=10), 0.0)
    decode.slow_down(3.0, 4.0)
    assert decode.next_end_s(4.0) == 4 + 6 * 3


def test_what_does_not_fit_waits_in_order_and_takes_the_room_that_others_leave() -> None:
    decode = DecodeMachine("d", WorkerShape(kv_tokens=16_384, step_s=1.0))
    large, second, small = job(1, 16_000), job(1, 400), job(1, 10)
    start(decode, large, 0.0)
    assert not decode.reserve(second) and not decode.reserve(small), "a small one does not pass"
    assert decode.admitted() == []
    end_s = decode.next_end_s(0.0)
    assert end_s is not None and decode.ended(end_s) == [large]
    assert decode.admitted() == [second, small]
    decode.forget(second, end_s)
    decode.forget(small, end_s)
    assert decode.kv_tokens_free == 16_384


def test_one_that_is_given_up_while_it_waits_for_room_takes_none() -> None:
    decode = DecodeMachine("d", WorkerShape(kv_tokens=16_384))
    large, waiting = job(1, 16_000), job(1, 400)
    start(decode, large, 0.0)
    decode.reserve(waiting)
    decode.forget(waiting, 1.0)
    assert decode.kv_tokens_free == 16_384 - large.reserved_tokens and decode.admitted() == []


def test_a_full_batch_lets_the_next_wait_for_a_place() -> None:
    decode = DecodeMachine("d", WorkerShape(running_max=1, step_s=1.0, step_each_s=0.0))
    first, second = job(output_tokens=5), job(output_tokens=5)
    start(decode, first, 0.0)
    start(decode, second, 1.0)
    assert decode.ended(5.0) == [first]
    assert decode.next_end_s(5.0) == 10.0


# -- whole runs


@pytest.mark.parametrize("policy", [*(name.value for name in PolicyName), "cache_aware/least_load"])
def test_every_request_ends_and_no_leg_is_left_in_the_books(policy: str) -> None:
    outcome = run(policy)
    ended = sum(len(part.ttft_s) + part.failed + part.broken for part in outcome.parts.values())
    assert ended == 3_000
    assert outcome.in_flight_left == 0
    assert len(outcome.chosen_s) >= 3_000


def test_several_routers_end_every_request_too() -> None:
    outcome = run("least_load", replace(SMALL, routers=3))
    assert outcome.in_flight_left == 0 and sum(len(part.ttft_s) for part in outcome.parts.values()) > 2_950


def test_the_same_seed_gives_the_same_figures() -> None:
    one, two = run("cache_aware"), run("cache_aware")
    assert one.parts == two.parts and one.balance == two.balance and one.virtual_s == two.virtual_s


def test_conversations_that_stay_find_their_cache_and_scattered_ones_do_not() -> None:
    scattered, staying = figures("round_robin").parts["calm"], figures("session").parts["calm"]
    assert staying.cached_share > 2 * scattered.cached_share
    assert scattered.cachable_share == pytest.approx(staying.cachable_share, abs=0.02)
    assert staying.cached_share <= staying.cachable_share


def test_who_knows_the_load_is_more_even_than_who_does_not() -> None:
    blind, seeing = figures("random"), figures("least_load")
    for role in Role:
        assert seeing.balance[role.value].peak_over_mean < blind.balance[role.value].peak_over_mean
    assert (seeing.parts["calm"].ttft_ms_p99 or 0) < (blind.parts["calm"].ttft_ms_p99 or 0)
    assert (seeing.parts["slow"].ttft_ms_p99 or 0) < (blind.parts["slow"].ttft_ms_p99 or 0)


def test_a_death_breaks_streams_that_had_begun_and_retries_the_others() -> None:
    outcome = run("round_robin", SMALL)
    hit = [outcome.parts[part] for part in (Part.CALM, Part.DEATHS)]
    assert sum(part.retried for part in hit) > 0 and sum(part.broken for part in hit) > 0
    assert sum(part.failed for part in hit) == 0, "one worker of each role: whoever is refused has others"
    assert outcome.parts[Part.WARM_UP].retried == outcome.parts[Part.SLOW].retried == 0


def test_where_all_workers_are_dead_requests_fail_and_come_back_with_them() -> None:
    outcome = run("random", replace(SMALL, prefills=1, decodes=4, load=0.3, death_share=0.9))
    assert outcome.parts[Part.DEATHS].failed > 0
    assert outcome.parts[Part.SLOW].failed == 0 and outcome.in_flight_left == 0


# -- the command


def bench(**changes: object) -> RouteBench:
    settings: dict[str, object] = {"policies": ("random", "session"), "requests": 2_000, "fleet": SMALL}
    return RouteBench(**(settings | {"json": None, "plot": None} | changes))  # type: ignore[arg-type]


def test_the_command_shows_every_policy_and_writes_its_figures(tmp_path: Path) -> None:
    out = StringIO()
    assert route(bench(json=tmp_path / "run.json"), Screen(out), Interrupt()) == 0
    text = out.getvalue()
    assert "12 prefill and 12 decode workers; 2,000 requests to each policy" in text
    assert text.count("\n  random ") == text.count("\n  session ") == 2
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["kind"] == "route" and record["settings"]["requests"] == 2_000
    assert [one["policy"] for one in record["policies"]] == ["random", "session"]
    assert set(record["policies"][0]["parts"]) == {"warm_up", "calm", "deaths", "slow"}


class _Asked(Interrupt):
    def requested(self) -> bool:
        return True


def test_ctrl_c_ends_a_run() -> None:
    with pytest.raises(Interrupted):
        route(bench(), Screen(StringIO()), _Asked())


class _AskedLater(Interrupt):
    """Asked for while the second policy runs: progress is told each 1,000 of its 2,000 requests."""

    def requested(self) -> bool:
        self._count += 1
        return self._count > 3


def test_ctrl_c_loses_no_policy_that_was_done(tmp_path: Path) -> None:
    out = StringIO()
    with pytest.raises(Interrupted):
        route(bench(json=tmp_path / "run.json"), Screen(out), _AskedLater())
    assert "\n  random " in out.getvalue()
    record = json.loads((tmp_path / "run.json").read_text())
    assert [one["policy"] for one in record["policies"]] == ["random"]


@pytest.mark.parametrize("name", ["fastest", "random/fastest", "", "random/"])
def test_an_unknown_policy_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(UsageError, match="round_robin, random, power_of_two"):
        bench(policies=(name,))


def test_too_few_requests_to_say_anything_are_refused() -> None:
    with pytest.raises(UsageError, match="--requests must be 1,000 to"):
        bench(requests=900)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prefills": 0}, "at least one worker"),
        ({"load": 0}, "--load"),
        ({"death_share": 1.0}, "--death-share"),
        ({"slow_factor": 0.5}, "--slow-factor"),
        ({"routers": 0}, "--routers"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(change: dict[str, int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        replace(SMALL, **change)  # type: ignore[arg-type]
