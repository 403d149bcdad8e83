"""`baton bench handoff`: what disaggregation costs the first token (T5), stage by stage, for each transport.

Two stacks run at once and are asked in turn: prefill on one core and decode on another, and one worker that does both on
prefill's core. An idle stack uses no CPU. Router and client are not pinned in either.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from baton_cli.bench.client import HttpEndpoint, http_session
from baton_cli.bench.machine import Machine, Watch
from baton_cli.bench.progress import Bar
from baton_cli.bench.prompts import Prompts
from baton_cli.bench.report import DASH, check_writable, ms, table, write_json
from baton_cli.bench.sample import Sample
from baton_cli.bench.stack import Stack, Wanted, running
from baton_cli.bench.stages import ROUTER, TTFT, UNATTRIBUTED, Key, Total, app_ms, mean_ms, path_ms, stage_totals
from baton_cli.bench.stats import percentile
from baton_cli.errors import CliError, Interrupted, UsageError
from baton_cli.interrupt import Interrupt
from baton_cli.layout import RoleSetting
from baton_cli.show import BOLD, YELLOW, Screen

OUTPUT_TOKENS = 2
WARMUP_REQUESTS = 2
ROUTE = "/generate"  # each token is an event of its own there, visible or not
TARGET_SHORT_MS = 5.0
TARGET_LONG_SHARE = 0.03
UNATTRIBUTED_SHORT_MS, UNATTRIBUTED_SHARE = 3.0, 0.03  # O2: the greater of the two, at p95
SHORT_TOKENS, LONG_TOKENS = 128, 4096  # T5 says nothing about lengths between them


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffBench:
    """What to measure. `cores`: of prefill (and of the colocated worker), and of decode."""

    lengths: tuple[int, ...]
    rounds: int
    transports: tuple[str, ...]
    cores: tuple[str, str]
    model: str | None
    dtype: str | None
    settings: tuple[RoleSetting, ...]
    seed: int
    json: Path | None

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise UsageError("--lengths must be prompt lengths such as 128,1024,4096")
        if not 1 <= self.rounds <= 1000:
            raise UsageError(f"--rounds must be 1 to 1000, not {self.rounds}")

    def wanted(self, name: str, transport: str | None = None) -> Wanted:
        """The stack of one transport, or the colocated one."""
        cores = self.cores if transport is not None else self.cores[:1]
        return Wanted(
            name=name,
            cores=cores,
            model=self.model,
            dtype=self.dtype,
            transfer=transport,
            settings=self.settings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One stack at one length. Stage times are means, keyed `role.stage`; `unattributed_ms` is of each request."""

    ttft_ms: list[float]
    ttft_median_ms: float
    ttft_mean_ms: float
    stages_ms: dict[str, float]
    app_ms: float
    unattributed_ms: list[float]
    unattributed_p95_ms: float

    @property
    def unattributed_bound_ms(self) -> float:
        """What O2 allows at p95."""
        return max(UNATTRIBUTED_SHORT_MS, UNATTRIBUTED_SHARE * self.stages_ms.get(".".join(TTFT), self.ttft_mean_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Disaggregated against colocated."""

    transport: str
    input_tokens: int
    pd: Measured
    colocated: Measured

    @property
    def cost_ms(self) -> float:
        return self.pd.ttft_median_ms - self.colocated.ttft_median_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRecord:
    """Everything, for JSON."""

    kind: str
    machine: Machine
    settings: dict[str, Any]
    rows: list[Row]


def handoff(what: HandoffBench, environ: Mapping[str, str], screen: Screen, interrupt: Interrupt) -> int:
    """The exit code. Raises CliError, Interrupted."""
    check_writable(what.json, "--json")
    with ExitStack() as stacks:
        colocated = stacks.enter_context(running(what.wanted("colocated"), environ, screen, interrupt))
        pairs: dict[str, Stack] = {}
        for transport in what.transports:
            wanted = what.wanted(f"pd over {transport}", transport)
            try:
                pairs[transport] = stacks.enter_context(running(wanted, environ, screen, interrupt))
            except CliError as error:
                screen.line(f"  ! {transport} is left out, its stack did not start: {error}", YELLOW)
        if not pairs:
            raise CliError("no disaggregated stack started: nothing was measured")
        watch = Watch([pid for stack in (colocated, *pairs.values()) for pid in stack.leaders])
        rows = uvloop.run(_measure(what, pairs, colocated, screen, interrupt.requested))
        machine = watch.machine()
    _show(screen, rows, machine)
    if what.json is not None:
        settings = {key: value for key, value in asdict(what).items() if key != "json"}
        write_json(what.json, HandoffRecord(kind="handoff", machine=machine, settings=settings, rows=rows))
        screen.line(f"  written: {what.json}")
    return 0


async def _measure(
    what: HandoffBench,
    pairs: Mapping[str, Stack],
    colocated: Stack,
    screen: Screen,
    interrupted: Callable[[], bool],
) -> list[Row]:
    rows: list[Row] = []
    total = len(pairs) * len(what.lengths) * what.rounds * 2
    async with http_session(request_timeout_seconds=600) as session:
        with Bar(screen, "requests", total) as bar:
            for transport, pd in pairs.items():
                for tokens in what.lengths:
                    alternation = Alternation(session, what, transport, tokens, bar, interrupted)
                    rows.append(await alternation.row(pd, colocated))
    return rows


@dataclass(frozen=True, slots=True)
class Alternation:
    """Asks two stacks in turn for one prompt length."""

    session: aiohttp.ClientSession
    what: HandoffBench
    transport: str
    tokens: int
    bar: Bar
    interrupted: Callable[[], bool]

    async def row(self, pd: Stack, colocated: Stack) -> Row:
        """Warm both up, then alternate; who goes first changes each round. Raises CliError when a request fails."""
        stacks = (pd, colocated)
        for stack in stacks:
            await self._ask(stack, "warm-up", WARMUP_REQUESTS)
        totals = [[await stage_totals(self.session, stack)] for stack in stacks]
        samples: tuple[list[Sample], list[Sample]] = ([], [])
        for number in range(self.what.rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                samples[which].extend(await self._ask(stacks[which], f"round {number}", 1))
                totals[which].append(await stage_totals(self.session, stacks[which]))
                self.bar.step()
        return Row(
            transport=self.transport,
            input_tokens=self.tokens,
            pd=_measured(samples[0], totals[0]),
            colocated=_measured(samples[1], totals[1]),
        )

    async def _ask(self, stack: Stack, name: str, requests: int) -> list[Sample]:
        endpoint = HttpEndpoint(session=self.session, url=stack.url, route=ROUTE, model=stack.model)
        prompts = Prompts(seed=self.what.seed)
        found: list[Sample] = []
        for number in range(requests):
            if self.interrupted():
                raise Interrupted
            prompt = prompts.ids(f"{self.transport} {name} {number}", self.tokens)
            sample = await endpoint.complete(prompt, OUTPUT_TOKENS, time.perf_counter())
            if sample.failure is not None:
                raise CliError(f"a request of {self.tokens} tokens to {stack.name} failed: {sample.failure}")
            found.append(sample)
        return found


def _measured(samples: Sequence[Sample], totals: Sequence[Mapping[Key, Total]]) -> Measured:
    """`totals`: before the first request, and after each."""
    means = mean_ms(totals[0], totals[-1], len(samples))
    nobodys = [mean_ms(before, after, 1).get(UNATTRIBUTED, math.nan) for before, after in pairwise(totals)]
    ttft_ms = [sample.ttft_ms for sample in samples if sample.ttft_ms is not None]
    return Measured(
        ttft_ms=ttft_ms,
        ttft_median_ms=statistics.median(ttft_ms),
        ttft_mean_ms=statistics.fmean(ttft_ms),
        stages_ms={f"{role}.{stage}": value for (role, stage), value in means.items()},
        app_ms=app_ms(means),
        unattributed_ms=nobodys,
        unattributed_p95_ms=percentile(nobodys, 0.95),
    )


def _show(screen: Screen, rows: Sequence[Row], machine: Machine) -> None:
    screen.line()
    screen.line("Time to first token, disaggregated against colocated (medians, ms)", BOLD)
    screen.line(f"  {machine.text}")
    cost: list[tuple[str, ...]] = [("transport", "tokens", "PD", "colocated", "cost", "of colocated", "T5")]
    cost += [_cost_row(row, loaded=machine.loaded) for row in rows]
    table(screen, cost)
    screen.line()
    screen.line(
        "Where it goes (means a request, ms; the workers' own handoff_stage_seconds, which count whole ms)", BOLD
    )
    table(screen, [STAGE_HEADING, *(line for row in rows for line in _stage_rows(row, loaded=machine.loaded))])
    screen.line(
        "  set up: intake, look-up, hello, page orders · compute: the prompt's chunks · handoff: what decode waits"
    )
    screen.line(
        "  beyond compute · app: decode's, from a leg's arrival to the first token's text, less its rank's stages"
    )
    screen.line(
        "  router: until its legs were sent · unattributed: the rest of its TTFT; O2: p95 at most 3 ms, or 3 % of TTFT"
    )


def _cost_row(row: Row, *, loaded: bool) -> tuple[str, ...]:
    share = row.cost_ms / row.colocated.ttft_median_ms
    verdict = DASH
    if row.input_tokens <= SHORT_TOKENS:
        verdict = f"{'kept' if row.cost_ms <= TARGET_SHORT_MS else 'missed'} ({TARGET_SHORT_MS:g} ms)"
    elif row.input_tokens >= LONG_TOKENS:
        verdict = f"{'kept' if share <= TARGET_LONG_SHARE else 'missed'} ({TARGET_LONG_SHARE:.0%})"
    if loaded and verdict != DASH:
        verdict = "not judged: loaded"
    times = (row.pd.ttft_median_ms, row.colocated.ttft_median_ms, row.cost_ms)
    return (row.transport, str(row.input_tokens), *(ms(value) for value in times), f"{share:+.1%}", verdict)


STAGE_HEADING = (
    *("transport", "tokens", "stack", "TTFT", "set up", "compute", "handoff"),
    *("router", "app", "unattributed", "its p95", "O2"),
)


def _stage_rows(row: Row, *, loaded: bool) -> list[tuple[str, ...]]:
    name = (row.transport, str(row.input_tokens))
    pd, alone = row.pd, row.colocated
    computing = pd.stages_ms.get("prefill.forwarding", 0.0)
    beyond = pd.stages_ms.get("decode.transferring", 0.0) - computing
    waits = path_ms(_keys(pd), ("intake", "resolving", "greeting", "prealloc"))
    mine = path_ms(_keys(alone), ("intake", "local"))
    local = path_ms(_keys(alone), ("computing",))
    first, second = (waits, computing, beyond), (mine, local, 0.0)
    return [
        (*name, stack, *(ms(value) for value in (measured.ttft_mean_ms, *stages)), *_rest(measured, loaded=loaded))
        for stack, measured, stages in (("PD", pd, first), ("colocated", alone, second))
    ]


def _rest(measured: Measured, *, loaded: bool) -> tuple[str, ...]:
    """What ranks do not own, and whether O2 is kept."""
    bound_ms = measured.unattributed_bound_ms
    verdict = f"{'kept' if measured.unattributed_p95_ms <= bound_ms else 'missed'} ({bound_ms:.1f} ms)"
    mean_and_p95 = (statistics.fmean(measured.unattributed_ms), measured.unattributed_p95_ms)
    own_ms = measured.stages_ms.get(".".join(ROUTER))
    return (
        ms(own_ms),
        ms(measured.app_ms),
        *(ms(value) for value in mean_and_p95),
        "not judged: loaded" if loaded else verdict,
    )


def _keys(measured: Measured) -> dict[Key, float]:
    split = {tuple(name.split(".", 1)): value for name, value in measured.stages_ms.items()}
    return {(role, stage): value for (role, stage), value in split.items()}
