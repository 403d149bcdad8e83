"""Where the time of handoffs goes, from the workers' own `handoff_stage_seconds`."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import aiohttp

from baton_cli.bench.stack import Stack
from baton_cli.errors import CliError

_LINE = re.compile(r'baton_(prefill|decode)_handoff_stage_seconds_(sum|count)\{.*?stage="(\w+)".*?\} (\S+)')

Key = tuple[str, str]
"""Role and stage."""

DECODE_PATH = ("intake", "resolving", "greeting", "prealloc", "transferring", "local", "computing")
"""Stages of decode between a request's arrival at the rank and its first token; they follow one another, and the token
leaves at the end of `transferring` or `computing`."""


@dataclass(frozen=True, slots=True)
class Total:
    """Time spent in a stage so far, and by how many requests."""

    seconds: float
    count: float


async def stage_totals(session: aiohttp.ClientSession, stack: Stack) -> dict[Key, Total]:
    """Fresh totals of every worker. Raises CliError."""
    totals: dict[Key, Total] = {}
    for role in ("prefill", "decode"):
        for url in stack.worker_urls(role):
            for key, total in parse_stages(await _metrics(session, url)).items():
                before = totals.get(key, Total(0.0, 0.0))
                totals[key] = Total(before.seconds + total.seconds, before.count + total.count)
    return totals


def parse_stages(text: str) -> dict[Key, Total]:
    """The totals in Prometheus' text format."""
    found: dict[tuple[str, str, str], float] = {}
    for role, what, stage, value in _LINE.findall(text):
        found[role, stage, what] = found.get((role, stage, what), 0.0) + float(value)  # of all DP ranks
    stages = {(role, stage) for role, stage, _ in found}
    return {
        (role, stage): Total(found.get((role, stage, "sum"), 0.0), found.get((role, stage, "count"), 0.0))
        for role, stage in stages
    }


def mean_ms(before: Mapping[Key, Total], after: Mapping[Key, Total], requests: int) -> dict[Key, float]:
    """Mean time that each of `requests` requests spent in each stage between two looks."""
    means: dict[Key, float] = {}
    for key, total in after.items():
        earlier = before.get(key, Total(0.0, 0.0))
        if total.count > earlier.count:
            means[key] = (total.seconds - earlier.seconds) * 1000 / requests
    return means


def unattributed_ms(ttft_ms: float, means: Mapping[Key, float]) -> float:
    """What of a mean TTFT no stage of decode owns: router, both HTTP hops, tokens on their way."""
    return ttft_ms - path_ms(means, DECODE_PATH)


def path_ms(means: Mapping[Key, float], stages: Iterable[str]) -> float:
    """Mean time in some of decode's stages together."""
    return sum(means.get(("decode", stage), 0.0) for stage in stages)


async def _metrics(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/debug/snapshot") as response:  # makes the scheduler report what it has
            await response.read()
        async with session.get(f"{url}/metrics") as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CliError(f"{url}/metrics does not answer: {error or type(error).__name__}") from error
