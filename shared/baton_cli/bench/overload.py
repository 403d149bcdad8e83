"""`baton bench overload`: goodput as the load grows past what a stack can do (it should stay near its peak).

Capacity is what many clients in a closed loop get, who come again when they are refused. Then requests arrive by chance
(Poisson), at shares of that rate, and those count that were answered in full within the bounds. The router is told to
refuse who would wait longer for a first token than three quarters of the bound, unless
`--set router.first-token-ms=…` says otherwise.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from baton_cli.bench.client import Endpoint, HttpEndpoint, http_session
from baton_cli.bench.machine import Machine, Watch
from baton_cli.bench.progress import Bar
from baton_cli.bench.prompts import Prompts
from baton_cli.bench.report import DASH, check_writable, ms, table, write_json
from baton_cli.bench.runner import run_load
from baton_cli.bench.sample import Load, Sample
from baton_cli.bench.stack import Wanted, running
from baton_cli.bench.stats import Bounds, Summary, summarise
from baton_cli.errors import CliError, UsageError
from baton_cli.interrupt import Interrupt
from baton_cli.layout import RoleSetting
from baton_cli.show import BOLD, Screen

ROUTE = "/generate"
SECONDS_MAX = 600.0
SHARE_MAX = 20.0
CLIENTS = 32
"""Of the closed loop that finds the capacity."""
PATIENCE_SHARE = 0.75
SEED_STRIDE = 1_000
REFUSED = "HTTP 503"
REFUSES = "first_token_ms"
AGAIN_SECONDS = 1.0
"""After so long a client of the closed loop comes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadBench:
    """What to measure. `shares` of the capacity arrive, one after the other, each for `seconds`."""

    shares: tuple[float, ...]
    bounds: Bounds
    input_tokens: int
    output_tokens: int
    seconds: float
    cores: tuple[str, str]
    model: str | None
    dtype: str | None
    settings: tuple[RoleSetting, ...]
    seed: int
    json: Path | None

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share <= SHARE_MAX for share in self.shares):
            raise UsageError(f"--shares must be numbers above 0 and at most {SHARE_MAX:g}, such as 0.5,1,3")
        if not 0 < self.seconds <= SECONDS_MAX:
            raise UsageError(f"--seconds must be above 0 and at most {SECONDS_MAX:g}, not {self.seconds:g}")
        if not math.isfinite(self.bounds.ttft_ms):
            raise UsageError("--goodput must bound ttft_ms: without it no load is too much")

    @property
    def wanted(self) -> Wanted:
        """The stack."""
        settings = self.settings
        if not any(one.role == "router" and one.key == REFUSES for one in settings):
            longest_ms = str(round(PATIENCE_SHARE * self.bounds.ttft_ms))
            settings += (RoleSetting(role="router", key=REFUSES, value=longest_ms),)
        return Wanted(name="pd", cores=self.cores, model=self.model, dtype=self.dtype, settings=settings)


@dataclass(frozen=True, slots=True)
class Patient:
    """An endpoint asked by clients who come again when they are refused: else a closed loop would be over at once."""

    endpoint: Endpoint

    async def complete(self, prompt: Sequence[int], output_tokens: int, origin_s: float) -> Sample:
        """See Endpoint."""
        while True:
            sample = await self.endpoint.complete(prompt, output_tokens, origin_s)
            if sample.failure != REFUSED:
                return sample
            await asyncio.sleep(AGAIN_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One share of the capacity. `good_per_s`: requests within the bounds, of those that arrived in a second."""

    share: float
    offered_per_s: float
    good_per_s: float
    refused: int
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadRecord:
    """Everything, for JSON."""

    kind: str
    machine: Machine
    settings: dict[str, Any]
    capacity_per_s: float
    points: list[Point]


def overload(what: OverloadBench, environ: Mapping[str, str], screen: Screen, interrupt: Interrupt) -> int:
    """The exit code. Raises CliError, Interrupted."""
    check_writable(what.json, "--json")
    with ExitStack() as context:
        stack = context.enter_context(running(what.wanted, environ, screen, interrupt))
        watch = Watch(stack.leaders)
        capacity, points = uvloop.run(_measure(what, stack.url, stack.model, screen, interrupt.requested))
        machine = watch.machine()
    _show(screen, what, capacity, points)
    screen.line(f"  {machine.text}")
    if what.json is not None:
        settings = {key: value for key, value in asdict(what).items() if key != "json"}
        settings["bounds"] = {name: value for name, value in asdict(what.bounds).items() if math.isfinite(value)}
        record = OverloadRecord(
            kind="overload", machine=machine, settings=settings, capacity_per_s=capacity, points=points
        )
        write_json(what.json, record)
        screen.line(f"  written: {what.json}")
    return 0


async def _measure(
    what: OverloadBench, url: str, model: str, screen: Screen, interrupted: Callable[[], bool]
) -> tuple[float, list[Point]]:
    """The capacity in requests a second, and a point for each share of it."""
    async with http_session(request_timeout_seconds=600) as session:
        endpoint = HttpEndpoint(session=session, url=url, route=ROUTE, model=model)

        seeds = itertools.count(what.seed * SEED_STRIDE)

        async def run(name: str, load: Load) -> Summary:
            prompts = Prompts(seed=next(seeds))  # another one each time: no prompt is found in a cache
            asked = endpoint if load.concurrency is None else Patient(endpoint)
            with Bar(screen, name, load.requests) as bar:
                outcome = await run_load(asked, load, prompts, bar, interrupted)
            return summarise(
                outcome.samples,
                client_cpu_share=outcome.client_cpu_share,
                unfinished=outcome.unfinished,
                bounds=what.bounds,
            )

        probe = await run("warm-up", _load(what, requests=CLIENTS, concurrency=CLIENTS))
        if not probe.completed:
            raise CliError(f"no request was answered: {probe.failures}")
        requests = max(2 * CLIENTS, round(probe.requests_per_s * what.seconds))
        capacity = (await run("capacity", _load(what, requests=requests, concurrency=CLIENTS))).requests_per_s
        points = []
        for share in what.shares:
            rate_per_s = share * capacity
            requests = max(1, round(rate_per_s * what.seconds))
            summary = await run(f"{share:g} of capacity", _load(what, requests=requests, rate_per_s=rate_per_s))
            points.append(_point(share, rate_per_s, summary))
        return capacity, points


def _load(
    what: OverloadBench, *, requests: int, concurrency: int | None = None, rate_per_s: float | None = None
) -> Load:
    return Load(
        requests=requests,
        input_tokens=what.input_tokens,
        output_tokens=what.output_tokens,
        seed=what.seed,
        concurrency=concurrency,
        rate_per_s=rate_per_s,
    )


def _point(share: float, rate_per_s: float, summary: Summary) -> Point:
    assert summary.goodput is not None
    return Point(
        share=share,
        offered_per_s=rate_per_s,
        good_per_s=summary.goodput.share * rate_per_s,
        refused=summary.failures.get(REFUSED, 0),
        summary=summary,
    )


def _show(screen: Screen, what: OverloadBench, capacity: float, points: list[Point]) -> None:
    bounds = ", ".join(f"{name} {bound:g}" for name, bound in asdict(what.bounds).items() if math.isfinite(bound))
    screen.line()
    screen.line(
        f"{what.input_tokens} tokens in, {what.output_tokens} out; capacity {capacity:.2f} requests/s "
        f"({CLIENTS} clients in a closed loop); good: within {bounds}",
        BOLD,
    )
    peak = max(point.good_per_s for point in points) or 1.0
    rows = [("share", "offered/s", "good/s", "of peak", "answered", "refused", "failed", "TTFT p50", "p99", "TPOT p99")]
    for point in points:
        summary = point.summary
        ttft, tpot = summary.ttft_ms, summary.tpot_ms
        failed = summary.requests - summary.completed - point.refused
        rows.append(
            (
                f"{point.share:g}",
                f"{point.offered_per_s:.2f}",
                f"{point.good_per_s:.2f}",
                f"{point.good_per_s / peak:.0%}",
                str(summary.completed),
                str(point.refused),
                str(failed),
                DASH if ttft is None else ms(ttft.p50),
                DASH if ttft is None else ms(ttft.p99),
                DASH if tpot is None else ms(tpot.p99),
            )
        )
    table(screen, rows)
