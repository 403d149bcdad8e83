"""Where the time to first token goes: each part is measured by the process that owns it.

The router times the whole and what it takes itself, decode's app what lies between a leg's arrival there and its first
token, and the ranks their stages (`handoff_stage_seconds`). The rest is nobody's: the router publishes it as `unattributed`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import aiohttp

from baton_cli.bench.stack import Stack
from baton_cli.errors import CliError

_LINE = re.compile(r'baton_(prefill|decode)_handoff_stage_seconds_(sum|count)\{.*?stage="(\w+)".*?\} (\S+)')

_SHARE = re.compile(r'baton_router_ttft_stage_seconds_(sum|count)\{stage="(\w+)"\} (\S+)')

_WHOLE = re.compile(r"baton_(router|decode)_(ttft|first_token)_seconds_(sum|count)(?:\{\})? (\S+)")

Key = tuple[str, str]
"""Role and stage."""

TTFT: Key = ("router", "ttft")
ROUTER: Key = ("router", "router")
UNATTRIBUTED: Key = ("router", "unattributed")
FIRST_TOKEN: Key = ("decode", "first_token")

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
    return totals | parse_stages(await _text(session, f"{stack.url}/metrics"))


def parse_stages(text: str) -> dict[Key, Total]:
    """The totals in Prometheus' text format."""
    found: dict[tuple[str, str, str], float] = {}
    for role, what, stage, value in _LINE.findall(text):
        found[role, stage, what] = found.get((role, stage, what), 0.0) + float(value)  # of all DP ranks
    found |= {(role, stage, what): float(value) for role, stage, what, value in _WHOLE.findall(text)}
    found |= {("router", stage, what): float(value) for what, stage, value in _SHARE.findall(text)}
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


def app_ms(means: Mapping[Key, float]) -> float:
    """What decode's app took beside its rank's stages: to read, check and tokenize, and to turn the token into text."""
    return means.get(FIRST_TOKEN, 0.0) - path_ms(means, DECODE_PATH)


def path_ms(means: Mapping[Key, float], stages: Iterable[str]) -> float:
    """Mean time in some of decode's stages together."""
    return sum(means.get(("decode", stage), 0.0) for stage in stages)


async def _metrics(session: aiohttp.ClientSession, url: str) -> str:
    await _text(session, f"{url}/debug/snapshot")  # makes the scheduler report what it has
    return await _text(session, f"{url}/metrics")


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url) as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CliError(f"{url} does not answer: {error or type(error).__name__}") from error
