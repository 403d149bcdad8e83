"""`baton bench route`: every policy of the router on the same simulated fleet, figures side by side (target T11)."""

import argparse
import gc
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton_cli.bench.machine import Machine, describe
from baton_cli.bench.plot import check_plot
from baton_cli.bench.progress import Bar
from baton_cli.bench.report import check_writable, ms, table, write_json
from baton_cli.bench.route_plot import write_route_plot
from baton_cli.bench.route_trace import TraceShape
from baton_cli.bench.route_workers import WorkerShape
from baton_cli.bench.route_world import TELL_EVERY, Balance, Counts, FleetShape, Outcome, Part, World
from baton_cli.bench.stats import percentile
from baton_cli.errors import Interrupted, UsageError
from baton_cli.interrupt import Interrupt
from baton_cli.show import BOLD, DIM, RED, Screen
from baton_core.routing.policies import PolicyName
from baton_core.routing.workers import Role

SHOWN_PARTS = (Part.CALM, Part.DEATHS, Part.SLOW)
REQUESTS_MIN, REQUESTS_MAX = 1_000, 100_000_000
CURVE_POINTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteBench:
    """What to simulate. Raises UsageError."""

    policies: tuple[str, ...]
    requests: int  # to each policy
    fleet: FleetShape
    json: Path | None
    plot: Path | None

    def __post_init__(self) -> None:
        if not REQUESTS_MIN <= self.requests <= REQUESTS_MAX:
            raise UsageError(f"--requests must be {REQUESTS_MIN:,} to {REQUESTS_MAX:,}, not {self.requests:,}")
        if not self.policies:
            raise UsageError("--policies must name one at least")
        for text in self.policies:
            parse_policies(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFigures:
    """One part of a run. Times are None where no request was answered."""

    requests: int
    retried: int
    failed: int
    broken: int
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p99: float | None
    cached_share: float
    cachable_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceFigures:
    """How even the calm part was. `work`: of the worker that did most over the mean; `peak`: mean, over the probes, of
    the requests on the fullest worker over the mean."""

    work_most_over_mean: float
    work_deviation: float  # standard deviation over the mean
    peak_over_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    """One policy."""

    policy: str
    choices: int
    choice_us_mean: float
    choice_us_p50: float
    choice_us_p99: float
    parts: dict[str, PartFigures]
    balance: dict[str, BalanceFigures]
    ttft_ms_curve: list[float]  # 0 %, 1 %, … 100 % of the calm part
    virtual_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRecord:
    """Everything, for JSON."""

    kind: str
    machine: Machine
    settings: dict[str, Any]
    policies: list[PolicyFigures]


def route_bench(arguments: argparse.Namespace) -> RouteBench:
    """From the command line. Raises UsageError."""
    prefills = round(arguments.workers * arguments.prefill_share)
    return RouteBench(
        policies=tuple(filter(None, (name.strip() for name in arguments.policies.split(",")))),
        requests=arguments.requests,
        fleet=FleetShape(
            prefills=prefills,
            decodes=arguments.workers - prefills,
            routers=arguments.routers,
            load=arguments.load,
            death_share=arguments.death_share,
            slow_share=arguments.slow_share,
            slow_factor=arguments.slow_factor,
            seed=arguments.seed,
            worker=WorkerShape(
                prefill_tokens_per_s=arguments.prefill_tokens_per_second,
                cache_tokens=arguments.cache_tokens,
                step_s=arguments.step_ms / 1000,
                kv_tokens=arguments.kv_tokens,
            ),
            trace=TraceShape(
                applications=arguments.applications,
                turns_mean=arguments.turns,
                think_s=arguments.think_seconds,
                output_tokens_mean=arguments.output_tokens,
            ),
        ),
        json=arguments.json,
        plot=arguments.plot,
    )


def parse_policies(text: str) -> tuple[PolicyName, PolicyName]:
    """`name`, or `prefill/decode` where the two differ. Raises UsageError naming those there are."""
    prefill, slash, decode = text.partition("/")
    try:
        return PolicyName(prefill), PolicyName(decode if slash else prefill)
    except ValueError as error:
        names = ", ".join(name.value for name in PolicyName)
        raise UsageError(f"--policies: {text!r} is not one of {names}, or two of them as prefill/decode") from error


def route(what: RouteBench, screen: Screen, interrupt: Interrupt) -> int:
    """The exit code. Raises CliError; Interrupted, after telling about the policies that were done by then."""
    check_writable(what.json, "--json")
    check_writable(what.plot, "--plot")
    check_plot(what.plot)
    began_s = time.process_time()
    screen.line(describe_run(what), BOLD)
    figures: list[PolicyFigures] = []
    try:
        for text in what.policies:
            figures.append(_measure(what, text, screen, interrupt.requested))
    except Interrupted:
        if figures:
            _tell(what, figures, screen, began_s)
        raise
    _tell(what, figures, screen, began_s)
    return 0


def _tell(what: RouteBench, figures: Sequence[PolicyFigures], screen: Screen, began_s: float) -> None:
    """Show figures, and write them where that was asked for."""
    show(screen, figures)
    screen.line()
    screen.line(f"  {time.process_time() - began_s:.0f} s of CPU on one core", DIM)
    if what.json is not None:
        settings = asdict(what.fleet) | {"requests": what.requests, "rate_per_s": what.fleet.rate_per_s}
        record = RouteRecord(kind="route", machine=describe(), settings=settings, policies=list(figures))
        write_json(what.json, record)
        screen.line(f"  written: {what.json}")
    if what.plot is not None:
        write_route_plot(what.plot, figures, describe_run(what))
        screen.line(f"  written: {what.plot}")


def describe_run(what: RouteBench) -> str:
    """The run in words."""
    fleet = what.fleet
    routers = f", {fleet.routers} routers" if fleet.routers > 1 else ""
    return (
        f"{fleet.prefills} prefill and {fleet.decodes} decode workers{routers}; {what.requests:,} requests to each "
        f"policy at {fleet.rate_per_s:,.0f}/s, seed {fleet.seed}"
    )


def _measure(what: RouteBench, text: str, screen: Screen, interrupted: Callable[[], bool]) -> PolicyFigures:
    world = World(what.fleet, parse_policies(text), what.requests)
    began_s = time.process_time()
    with Bar(screen, f"{text}, thousands of requests", what.requests // TELL_EVERY) as bar, _no_collector():

        def tell() -> None:
            bar.step()
            if interrupted():
                raise Interrupted

        outcome = world.run(tell)
    assert outcome.in_flight_left == 0, "every leg that began has ended"
    return figures_of(text, outcome, time.process_time() - began_s)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Its pauses would be counted as time of whichever choice they fall into, and grow with the simulator's own data."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def figures_of(text: str, outcome: Outcome, cpu_s: float) -> PolicyFigures:
    """What is kept of a run."""
    chosen_us = sorted(1e6 * seconds for seconds in outcome.chosen_s)
    calm_s = sorted(outcome.parts[Part.CALM].ttft_s)
    curve = [1000 * percentile(calm_s, point / CURVE_POINTS) for point in range(CURVE_POINTS + 1)] if calm_s else []
    return PolicyFigures(
        policy=text,
        choices=len(chosen_us),
        choice_us_mean=sum(chosen_us) / len(chosen_us),
        choice_us_p50=percentile(chosen_us, 0.5),
        choice_us_p99=percentile(chosen_us, 0.99),
        parts={part.name.lower(): _part_figures(outcome.parts[part]) for part in Part},
        balance={role.value: _balance_figures(outcome.balance[role]) for role in Role},
        ttft_ms_curve=curve,
        virtual_s=outcome.virtual_s,
        cpu_s=cpu_s,
    )


def _part_figures(counts: Counts) -> PartFigures:
    ttft_s, tpot_s = sorted(counts.ttft_s), sorted(counts.tpot_s)
    return PartFigures(
        requests=len(ttft_s) + counts.failed + counts.broken,
        retried=counts.retried,
        failed=counts.failed,
        broken=counts.broken,
        ttft_ms_p50=_ms(ttft_s, 0.5),
        ttft_ms_p90=_ms(ttft_s, 0.9),
        ttft_ms_p99=_ms(ttft_s, 0.99),
        tpot_ms_p50=_ms(tpot_s, 0.5),
        tpot_ms_p99=_ms(tpot_s, 0.99),
        cached_share=counts.hit_tokens / max(1, counts.prompt_tokens),
        cachable_share=counts.known_tokens / max(1, counts.prompt_tokens),
    )


def _ms(ordered_s: "Sequence[float] | array[float]", share: float) -> float | None:
    return 1000 * percentile(ordered_s, share) if ordered_s else None


def _balance_figures(balance: Balance) -> BalanceFigures:
    work = balance.work
    mean = sum(work) / len(work) or 1.0
    variance = sum((one - mean) ** 2 for one in work) / len(work)
    return BalanceFigures(
        work_most_over_mean=max(work) / mean,
        work_deviation=variance**0.5 / mean,
        peak_over_mean=sum(balance.peaks) / max(1, len(balance.peaks)),
    )


def show(screen: Screen, figures: Sequence[PolicyFigures]) -> None:
    """Two tables: the calm part, and what faults do."""
    cachable = figures[0].parts["calm"].cachable_share
    screen.line()
    screen.line(
        f"Calm: of the prompts' tokens {cachable:.0%} were in an earlier prompt, so a cache could give them", BOLD
    )
    head = (
        "policy",
        "choice p50",
        "p99",
        "cached",
        "work: most/mean",
        "fullest/mean",
        "TTFT p50",
        "p90",
        "p99",
        "TPOT p50",
    )
    table(screen, [head, *(_calm_row(one) for one in figures)])
    screen.line("  choices in µs, times in ms; most/mean and fullest/mean: prefill, decode", DIM)
    screen.line()
    screen.line("Faults: TTFT p99 in ms, and requests that were retried, that failed, whose stream broke", BOLD)
    fault_head = ("policy", "calm", "deaths", "retried", "failed", "broken", "slow")
    table(screen, [fault_head, *(_fault_row(one) for one in figures)])
    lost = [one.policy for one in figures if any(one.parts[part].failed for part in ("warm_up", "slow"))]
    if lost:
        screen.line(f"  ! requests failed although no worker was dead: {', '.join(lost)}", RED)


def _calm_row(one: PolicyFigures) -> tuple[str, ...]:
    calm, prefill, decode = one.parts["calm"], one.balance["prefill"], one.balance["decode"]
    return (
        one.policy,
        f"{one.choice_us_p50:.0f}",
        f"{one.choice_us_p99:.0f}",
        f"{calm.cached_share:.0%}",
        f"{prefill.work_most_over_mean:.2f}, {decode.work_most_over_mean:.2f}",
        f"{prefill.peak_over_mean:.1f}, {decode.peak_over_mean:.1f}",
        ms(calm.ttft_ms_p50),
        ms(calm.ttft_ms_p90),
        ms(calm.ttft_ms_p99),
        ms(calm.tpot_ms_p50),
    )


def _fault_row(one: PolicyFigures) -> tuple[str, ...]:
    deaths = one.parts["deaths"]
    # Whoever was on its way when the workers died came in the calm part.
    several = [one.parts[part] for part in ("calm", "deaths")]
    return (
        one.policy,
        ms(one.parts["calm"].ttft_ms_p99),
        ms(deaths.ttft_ms_p99),
        f"{sum(part.retried for part in several):,}",
        f"{sum(part.failed for part in several):,}",
        f"{sum(part.broken for part in several):,}",
        ms(one.parts["slow"].ttft_ms_p99),
    )
