"""Figures, schedules and records of `baton bench`: pure."""

import re
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from baton_cli.bench.machine import Machine, cpu_s_of_trees
from baton_cli.bench.prompts import LOWEST_ID, Prompts, poisson_arrivals_s
from baton_cli.bench.report import ServeRecord, ms, read_json, warnings, write_json
from baton_cli.bench.sample import Load, Sample
from baton_cli.bench.stages import FIRST_TOKEN, TTFT, UNATTRIBUTED, Total, app_ms, mean_ms, parse_stages
from baton_cli.bench.stats import OUT_OF_TIME, Bounds, parse_bounds, percentile, summarise
from baton_cli.errors import CliError, UsageError

METRICS = """
# TYPE baton_decode_handoff_stage_seconds histogram
baton_decode_handoff_stage_seconds_bucket{le="0.001",stage="resolving"} 1.0
baton_decode_handoff_stage_seconds_sum{stage="resolving"} 0.5
baton_decode_handoff_stage_seconds_count{stage="resolving"} 4.0
baton_prefill_handoff_stage_seconds_sum{stage="forwarding"} 2.0
baton_prefill_handoff_stage_seconds_count{stage="forwarding"} 4.0
baton_prefill_step_seconds_sum 9.0
"""


def sample(*event_times_s: float, sent_s: float = 0.0, tokens: int | None = None, failure: str | None = None) -> Sample:
    return Sample(
        prompt_tokens=10,
        sent_s=sent_s,
        ended_s=event_times_s[-1] if event_times_s else sent_s,
        event_times_s=event_times_s,
        output_tokens=len(event_times_s) if tokens is None else tokens,
        failure=failure,
    )


def test_percentiles_are_interpolated_between_neighbours() -> None:
    assert percentile([4, 1, 3, 2], 0.5) == 2.5
    assert percentile([10], 0.99) == 10
    assert percentile(list(range(101)), 0.99) == 99
    assert percentile([0, 10], 0.9) == pytest.approx(9)


def test_a_sample_tells_first_token_time_per_token_and_gaps() -> None:
    one = sample(1.5, 1.6, 1.8, sent_s=1.0)
    assert one.ttft_ms == pytest.approx(500)
    assert one.tpot_ms == pytest.approx(150)
    assert one.gaps_ms == pytest.approx([100, 200])
    assert one.e2e_ms == pytest.approx(800)


def test_time_per_token_counts_tokens_even_where_an_event_brings_several() -> None:
    assert sample(1.0, 1.3, tokens=4).tpot_ms == pytest.approx(100)
    assert sample(1.0, tokens=1).tpot_ms is None
    assert sample().ttft_ms is None


def test_throughput_is_over_the_time_from_the_first_request_to_the_last_answer() -> None:
    summary = summarise([sample(1.0, 2.0), sample(3.0, 4.0, sent_s=2.0)], client_cpu_share=0.1)
    assert summary.duration_s == 4.0
    assert (summary.requests_per_s, summary.output_tokens_per_s) == (0.5, 1.0)
    assert summary.itl_ms is not None
    assert summary.itl_ms.p50 == pytest.approx(1000)


def test_failed_requests_are_counted_by_reason_and_give_no_figures() -> None:
    samples = [sample(1.0, 1.1), sample(9.0, failure="HTTP 503"), sample(failure="HTTP 503")]
    summary = summarise(samples, client_cpu_share=0, unfinished=2)
    assert summary.failures == {"HTTP 503": 2, OUT_OF_TIME: 2}
    assert (summary.requests, summary.completed) == (5, 1)
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.max == pytest.approx(1000)


def test_nothing_complete_gives_no_distributions() -> None:
    summary = summarise([sample(failure="timeout")], client_cpu_share=0, bounds=Bounds(ttft_ms=1))
    assert summary.ttft_ms is None
    assert summary.itl_ms is None
    assert summary.goodput is not None
    assert summary.goodput.share == 0


def test_goodput_counts_whole_answers_within_every_bound_and_the_failed_against_it() -> None:
    quick, slow_start, slow_gap = sample(0.1, 0.15), sample(0.9, 0.95), sample(0.1, 0.15, 0.8)
    samples = [quick, slow_start, slow_gap, sample(0.1, failure="stream cut")]
    summary = summarise(samples, client_cpu_share=0, bounds=parse_bounds("ttft_ms=200, itl_ms=100"))
    assert summary.goodput is not None
    assert summary.goodput.share == 0.25
    assert summary.goodput.bounds_ms == {"ttft_ms": 200, "itl_ms": 100}
    assert summary.goodput.requests_per_s == pytest.approx(1 / 0.95)


@pytest.mark.parametrize("text", ["ttft_ms", "ttft=5", "ttft_ms=quick", "ttft_ms=0", "ttft_ms=-1", "ttft_ms=nan", ""])
def test_bounds_that_cannot_be_meant_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--goodput"):
        parse_bounds(text)


def test_open_loop_arrivals_are_the_same_for_the_same_seed_and_have_the_rate() -> None:
    arrivals_s = poisson_arrivals_s(seed=7, rate_per_s=20, requests=4000)
    assert arrivals_s == poisson_arrivals_s(seed=7, rate_per_s=20, requests=4000)
    assert arrivals_s != poisson_arrivals_s(seed=8, rate_per_s=20, requests=4000)
    gaps_s = [later - earlier for earlier, later in pairwise(arrivals_s)]
    assert statistics.fmean(gaps_s) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps_s) == pytest.approx(1 / 20, rel=0.1)  # exponential: as wide as its mean


def test_prompts_are_the_same_again_and_no_two_alike() -> None:
    prompts = Prompts(seed=1, ids_below=5000)
    names = [f"request {index}" for index in range(50)]
    assert prompts.ids("request 3", 64) == Prompts(seed=1, ids_below=5000).ids("request 3", 64)
    assert prompts.ids("request 3", 64) != Prompts(seed=2, ids_below=5000).ids("request 3", 64)
    assert len({tuple(prompts.ids(name, 64)[:16]) for name in names}) == 50
    assert all(LOWEST_ID <= token < 5000 for name in names for token in prompts.ids(name, 64))


def test_a_record_survives_json_whole(tmp_path: Path) -> None:
    samples = [sample(1.0, 1.25), sample(failure="HTTP 500")]
    machine = Machine(when="now", cpu="abacus", cores=2, python="3.11", foreign_cores=0.5)
    record = ServeRecord(
        kind="serve",
        machine=machine,
        settings={"seed": 3, "rate_per_s": None, "url": "http://x"},
        summary=summarise(samples, client_cpu_share=0.2, bounds=parse_bounds("e2e_ms=9")),
        samples=samples,
    )
    path = tmp_path / "run.json"
    write_json(path, record)
    assert read_json(path, ServeRecord) == record
    assert msgspec.json.decode(path.read_bytes())["summary"]["goodput"]["bounds_ms"] == {"e2e_ms": 9}  # no infinity


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"kind": 3}')
    with pytest.raises(CliError, match=r"broken\.json"):
        read_json(tmp_path / "broken.json", ServeRecord)


def test_doubtful_figures_come_with_a_warning() -> None:
    assert warnings(summarise([sample(0.1, 0.2)], client_cpu_share=0.05)) == []
    assert "the client used 90%" in warnings(summarise([sample(0.1, 0.2)], client_cpu_share=0.9))[0]
    assert "2.00 tokens an event" in warnings(summarise([sample(0.1, 0.2, tokens=4)], client_cpu_share=0))[0]


def test_a_loaded_machine_is_marked() -> None:
    loaded = Machine(when="now", cpu="abacus", cores=2, python="3.11", foreign_cores=1.5)
    assert "LOADED MACHINE" in loaded.text
    assert "LOADED" not in Machine(when="now", cpu="abacus", cores=2, python="3.11", foreign_cores=0.01).text


# A worker's rank is such a child: it leads a session of its own.
PARENT = """
import os, sys
child = os.fork()
if child == 0:
    os.setsid()
    sum(range(20_000_000))
    print("worked", flush=True)
    sys.stdin.read()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_the_work_of_a_child_in_another_session_is_not_somebody_elses() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"worked\n"
        used_s = cpu_s_of_trees(frozenset([parent.pid]))
        assert parent.stdin is not None
        parent.stdin.close()
    assert used_s > 0.1
    assert cpu_s_of_trees(frozenset()) == 0


def test_stage_times_come_from_the_workers_histograms() -> None:
    after = parse_stages(METRICS)
    assert after == {("decode", "resolving"): Total(0.5, 4), ("prefill", "forwarding"): Total(2.0, 4)}
    means = mean_ms({("decode", "resolving"): Total(0.1, 2)}, after, requests=2)
    assert means == pytest.approx({("decode", "resolving"): 200, ("prefill", "forwarding"): 1000})
    means |= {FIRST_TOKEN: 240}
    assert app_ms(means) == pytest.approx(40)  # prefill's time lies inside decode's waiting
    whole = (
        "baton_router_ttft_seconds_sum 3.5\nbaton_decode_first_token_seconds_sum 3.0\n"
        'baton_router_ttft_stage_seconds_sum{stage="unattributed"} 0.25\n'
    )
    told = {key: total.seconds for key, total in parse_stages(whole).items()}
    assert told == {TTFT: 3.5, FIRST_TOKEN: 3.0, UNATTRIBUTED: 0.25}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"concurrency": None}, "one of --concurrency"),
        ({"rate_per_s": 1.0}, "one of --concurrency"),
        ({"requests": 0}, "--requests"),
        ({"concurrency": 0}, "--concurrency"),
        ({"concurrency": None, "rate_per_s": 0.0}, "--rate"),
        ({"input_tokens": 0}, "--input-tokens"),
        ({"output_tokens": -1}, "--output-tokens"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(changes: dict[str, float | None], text: str) -> None:
    fine = {"requests": 1, "input_tokens": 1, "output_tokens": 1, "seed": 0, "concurrency": 1}
    with pytest.raises(UsageError, match=re.escape(text)):
        Load(**(fine | changes))  # type: ignore[arg-type]


def test_milliseconds_are_shown_with_three_figures_or_so() -> None:
    assert [ms(value) for value in (None, 1.234, 12.34, 1234.5)] == ["–", "1.23", "12.3", "1234"]
