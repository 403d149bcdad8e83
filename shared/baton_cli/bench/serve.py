"""`baton bench serve`: load on a server that runs, and what its clients see."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from baton_cli.bench.client import HttpEndpoint, http_session, served_model
from baton_cli.bench.machine import Watch
from baton_cli.bench.plot import check_plot, write_plot
from baton_cli.bench.progress import Bar
from baton_cli.bench.prompts import Prompts
from baton_cli.bench.report import ServeRecord, check_writable, show_summary, write_json
from baton_cli.bench.runner import Outcome, run_load
from baton_cli.bench.sample import Load
from baton_cli.bench.stats import Bounds, summarise
from baton_cli.errors import CliError
from baton_cli.interrupt import Interrupt
from baton_cli.show import BOLD, Screen

QUIET_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """What to measure, and where the results go. `model` None: the first that the server lists."""

    url: str
    route: str
    load: Load
    bounds: Bounds | None
    model: str | None
    ids_below: int
    request_timeout_seconds: float
    json: Path | None
    plot: Path | None


def serve(what: Serve, screen: Screen, interrupt: Interrupt) -> int:
    """The exit code: 0 when every request was answered in full. Raises CliError, Interrupted."""
    check_writable(what.json, "--json")
    check_writable(what.plot, "--plot")
    check_plot(what.plot)
    before = Watch()
    time.sleep(QUIET_LOOK_SECONDS)  # before the load: the server may be on this machine, and counts as foreign
    machine = before.machine()
    outcome, model = uvloop.run(_measure(what, screen, interrupt.requested))
    summary = summarise(
        outcome.samples,
        client_cpu_share=outcome.client_cpu_share,
        unfinished=outcome.unfinished,
        bounds=what.bounds,
    )
    screen.line(f"{model} at {what.url}{what.route}: {describe(what.load)}", BOLD)
    screen.line(f"  {machine.text} in the second before; this client used {outcome.client_cpu_share:.0%} of one")
    screen.line()
    show_summary(screen, summary)
    if what.json is not None:
        settings = {"url": what.url, "route": what.route, "model": model, "ids_below": what.ids_below}
        settings |= asdict(what.load) | {"request_timeout_seconds": what.request_timeout_seconds}
        record = ServeRecord(kind="serve", machine=machine, settings=settings, summary=summary, samples=outcome.samples)
        write_json(what.json, record)
        screen.line(f"  written: {what.json}")
    if what.plot is not None:
        write_plot(what.plot, outcome.samples, f"{model}, {describe(what.load)}")
        screen.line(f"  written: {what.plot}")
    return 0 if summary.completed == summary.requests else 1


def describe(load: Load) -> str:
    """The load in words."""
    arrive = (
        f"rate {load.rate_per_s:g}/s (Poisson)" if load.rate_per_s is not None else f"concurrency {load.concurrency}"
    )
    return (
        f"{load.requests} requests, {arrive}, {load.input_tokens} tokens in, {load.output_tokens} out, seed {load.seed}"
    )


async def _measure(what: Serve, screen: Screen, interrupted: Callable[[], bool]) -> tuple[Outcome, str]:
    async with http_session(what.request_timeout_seconds) as session:
        listed = await served_model(session, what.url) if what.model is None else what.model
        endpoint = HttpEndpoint(session=session, url=what.url, route=what.route, model=listed)
        prompts = Prompts(seed=what.load.seed, ids_below=what.ids_below)
        await _try_once(endpoint, prompts, what)
        with Bar(screen, "requests", what.load.requests) as bar:
            return await run_load(endpoint, what.load, prompts, bar, interrupted), listed


async def _try_once(endpoint: HttpEndpoint, prompts: Prompts, what: Serve) -> None:
    """One request before all others: what is wrong with every request is said once. Raises CliError."""
    sample = await endpoint.complete(
        prompts.ids("first", what.load.input_tokens), what.load.output_tokens, time.perf_counter()
    )
    if sample.failure is not None and not sample.output_tokens:
        raise CliError(
            f"the first request to {what.url}{what.route} failed ({sample.failure}); the server's log may say more. "
            "Does it take prompts of token ids, and as long a context?"
        )
