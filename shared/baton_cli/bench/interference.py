"""`baton bench interference`: streams decode while long prompts arrive; who is disturbed, and how much (T4).

The same two cores twice: prefill on one and decode on the other, then one worker that does both on both.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from baton_cli.bench.client import Endpoint, HttpEndpoint, http_session, until_done
from baton_cli.bench.machine import Machine, Watch
from baton_cli.bench.progress import Bar
from baton_cli.bench.prompts import Prompts
from baton_cli.bench.report import DASH, check_writable, ms, table, write_json
from baton_cli.bench.sample import Sample
from baton_cli.bench.stack import Wanted, running
from baton_cli.bench.stats import Distribution, distribution
from baton_cli.errors import CliError, Interrupted, UsageError
from baton_cli.interrupt import Interrupt
from baton_cli.layout import RoleSetting
from baton_cli.show import BOLD, Screen

T = TypeVar("T")

SECONDS_MAX = 3600.0
IDLE_INTRUDERS = 3
INTRUDER_OUTPUT_TOKENS = 1
ROUTE = "/generate"
TICK_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceBench:
    """What to measure. `cores`: of prefill and decode; the colocated worker has both."""

    streams: int
    input_tokens: int
    output_tokens: int
    intruder_tokens: int
    every_seconds: float
    seconds: float
    cores: tuple[str, str]
    model: str | None
    dtype: str | None
    transfer: str | None
    settings: tuple[RoleSetting, ...]
    seed: int
    json: Path | None

    def __post_init__(self) -> None:
        if min(self.streams, self.input_tokens, self.intruder_tokens) < 1 or self.output_tokens < 2:
            raise UsageError("--streams and the numbers of tokens must be above 0 (output: above 1)")
        if not (0 < self.every_seconds <= self.seconds <= SECONDS_MAX):
            raise UsageError(f"--every must be above 0, at most --seconds, and that at most {SECONDS_MAX:.0f}")

    def wanted(self) -> list[Wanted]:
        """The two stacks."""
        both = ",".join(dict.fromkeys(self.cores))
        return [
            Wanted(
                name=name, cores=cores, model=self.model, dtype=self.dtype, transfer=transfer, settings=self.settings
            )
            for name, cores, transfer in (("pd", self.cores, self.transfer), ("colocated", (both,), None))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What the streams and the intruders saw in one stretch of time."""

    intruders: bool
    itl_ms: Distribution | None
    output_tokens_per_s: float
    intruder_ttft_ms: Distribution | None
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """One stack. `idle_ttft_ms`: the intruder's prompt alone on an idle stack."""

    stack: str
    machine: Machine
    idle_ttft_ms: Distribution | None
    quiet: Phase
    with_intruders: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceRecord:
    """Everything, for JSON."""

    kind: str
    settings: dict[str, Any]
    stacks: list[Disturbed]


def interference(what: InterferenceBench, environ: Mapping[str, str], screen: Screen, interrupt: Interrupt) -> int:
    """The exit code. Raises CliError, Interrupted."""
    check_writable(what.json, "--json")
    results: list[Disturbed] = []
    for wanted in what.wanted():
        with ExitStack() as context:
            stack = context.enter_context(running(wanted, environ, screen, interrupt))
            watch = Watch(stack.leaders)
            idle, phases = uvloop.run(_measure(what, stack.url, stack.model, wanted.name, screen, interrupt.requested))
            results.append(
                Disturbed(
                    stack=wanted.name,
                    machine=watch.machine(),
                    idle_ttft_ms=idle,
                    quiet=phases[0],
                    with_intruders=phases[1],
                )
            )
    _show(screen, what, results)
    if what.json is not None:
        settings = {key: value for key, value in asdict(what).items() if key != "json"}
        write_json(what.json, InterferenceRecord(kind="interference", settings=settings, stacks=results))
        screen.line(f"  written: {what.json}")
    return 0


async def _measure(
    what: InterferenceBench, url: str, model: str, name: str, screen: Screen, interrupted: Callable[[], bool]
) -> tuple[Distribution | None, list[Phase]]:
    async with http_session(request_timeout_seconds=600) as session:
        endpoint = HttpEndpoint(session=session, url=url, route=ROUTE, model=model)
        crowd = Crowd(what, endpoint, name)
        await _unless(interrupted, crowd.stream("warm-up"))
        idle: list[float] = []
        for number in range(IDLE_INTRUDERS):
            sample = await _unless(interrupted, crowd.intrude(f"idle {number}"))
            if sample.ttft_ms is None:
                raise CliError(f"a prompt of {what.intruder_tokens} tokens failed on the idle stack: {sample.failure}")
            idle.append(sample.ttft_ms)
        phases = []
        for intruders in (False, True):
            label = f"{name}, {'with' if intruders else 'without'} intruders"
            with Bar(screen, label, round(what.seconds / TICK_SECONDS)) as bar:
                phases.append(await _unless(interrupted, crowd.phase(intruders, bar)))
        return distribution(idle), phases


@dataclass(frozen=True, slots=True)
class Crowd:
    """The clients of one stack."""

    what: InterferenceBench
    endpoint: Endpoint
    name: str

    async def stream(self, name: str) -> Sample:
        """One stream."""
        prompt = Prompts(seed=self.what.seed).ids(f"{self.name} {name}", self.what.input_tokens)
        return await self.endpoint.complete(prompt, self.what.output_tokens, 0.0)

    async def intrude(self, name: str) -> Sample:
        """One long prompt."""
        prompt = Prompts(seed=self.what.seed).ids(f"{self.name} {name}", self.what.intruder_tokens)
        return await self.endpoint.complete(prompt, INTRUDER_OUTPUT_TOKENS, 0.0)

    async def phase(self, intruders: bool, bar: Bar) -> Phase:
        """`seconds` of streams, each followed by the next one, with or without long prompts among them.

        Streams and intruders that are under way when the time is over are waited for, but gaps after it do not count:
        then fewer streams share the machine.
        """
        began_s = time.perf_counter()
        end_s = began_s + self.what.seconds
        streams: list[Sample] = []
        long_ones: list[Sample] = []
        async with asyncio.TaskGroup() as group:
            for client in range(self.what.streams):
                group.create_task(self._follow(f"{intruders} {client}", end_s, streams))
            if intruders:
                group.create_task(self._arrive(began_s, end_s, long_ones))
            while time.perf_counter() < end_s:
                await asyncio.sleep(TICK_SECONDS)
                bar.step()
        return _phase(streams, long_ones, end_s, self.what.seconds, intruders)

    async def _follow(self, name: str, end_s: float, streams: list[Sample]) -> None:
        number = 0
        while time.perf_counter() < end_s:
            streams.append(await self.stream(f"stream {name} {number}"))
            number += 1
            if streams[-1].failure is not None:
                await asyncio.sleep(TICK_SECONDS)  # a server that refuses is not asked in a tight loop

    async def _arrive(self, began_s: float, end_s: float, long_ones: list[Sample]) -> None:
        async def one(number: int) -> None:
            long_ones.append(await self.intrude(f"intruder {number}"))

        async with asyncio.TaskGroup() as group:
            number = 0
            while (due_s := began_s + (number + 0.5) * self.what.every_seconds) < end_s:
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                group.create_task(one(number))
                number += 1


def _phase(streams: list[Sample], long_ones: list[Sample], end_s: float, seconds: float, intruders: bool) -> Phase:
    gaps: list[float] = []
    tokens = 0
    for sample in streams:
        times = sample.event_times_s
        tokens += sum(1 for at in times if at <= end_s)
        gaps += [(b - a) * 1000 for a, b in pairwise(times) if a <= end_s]
    ttft_ms = [sample.ttft_ms for sample in long_ones if sample.ttft_ms is not None]
    return Phase(
        intruders=intruders,
        itl_ms=distribution(gaps),
        output_tokens_per_s=tokens / seconds,
        intruder_ttft_ms=distribution(ttft_ms),
        failures=sum(1 for sample in (*streams, *long_ones) if sample.failure is not None),
    )


def _show(screen: Screen, what: InterferenceBench, results: list[Disturbed]) -> None:
    screen.line()
    screen.line(
        f"{what.streams} streams of {what.input_tokens} tokens in, {what.output_tokens} out; a prompt of "
        f"{what.intruder_tokens} tokens every {what.every_seconds:g} s; {what.seconds:g} s each", BOLD,
    )  # fmt: skip
    rows = [("stack", "intruder", "tokens/s", "ITL p50", "p99", "max (ms)", "intruder TTFT p50", "max", "failed")]
    for result in results:
        for phase in (result.quiet, result.with_intruders):
            itl, ttft = _three(phase.itl_ms), _three(phase.intruder_ttft_ms)
            name = "yes" if phase.intruders else "no"
            speed = f"{phase.output_tokens_per_s:.1f}"
            rows.append((result.stack, name, speed, *itl, ttft[0], ttft[2], str(phase.failures)))
    table(screen, rows)
    for result in results:
        screen.line(f"  {result.stack}: {_verdict(result)}; {result.machine.text}")


def _verdict(result: Disturbed) -> str:
    said = []
    before, after = result.quiet.itl_ms, result.with_intruders.itl_ms
    if before is not None and after is not None:
        said.append(f"ITL p99 × {after.p99 / before.p99:.2f} with the intruder")
    idle, busy = result.idle_ttft_ms, result.with_intruders.intruder_ttft_ms
    if idle is not None and busy is not None:
        said.append(f"intruder's TTFT × {busy.p50 / idle.p50:.2f} of the {idle.p50:.0f} ms on an idle stack")
    return ", ".join(said) or "nothing to compare"


def _three(part: Distribution | None) -> tuple[str, str, str]:
    return (DASH, DASH, DASH) if part is None else (ms(part.p50), ms(part.p99), ms(part.max))


async def _unless(interrupted: Callable[[], bool], work: Awaitable[T]) -> T:
    """The result of `work`. Raises Interrupted."""
    found: list[T] = []

    async def keep() -> None:
        found.append(await work)

    if not await until_done(asyncio.create_task(keep()), interrupted, TICK_SECONDS):
        raise Interrupted
    return found[0]
