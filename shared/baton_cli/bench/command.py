"""`baton bench`: from parsed arguments to one of the six measurements."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from baton_cli.bench.client import check_url
from baton_cli.bench.compare import Compare, compare
from baton_cli.bench.handoff import HandoffBench, handoff
from baton_cli.bench.interference import InterferenceBench, interference
from baton_cli.bench.overload import OverloadBench, overload
from baton_cli.bench.prompts import LOWEST_ID
from baton_cli.bench.route import route, route_bench
from baton_cli.bench.sample import Load
from baton_cli.bench.serve import Serve, serve
from baton_cli.bench.stats import parse_bounds
from baton_cli.errors import Interrupted, UsageError
from baton_cli.interrupt import Interrupt
from baton_cli.layout import DEFAULT_DTYPE, RoleSetting, default_dtype, parse_setting
from baton_cli.processor import multiplies_bfloat16_here
from baton_cli.show import Screen

EXIT_INTERRUPTED = 130
TRANSPORTS = ("tcp", "shm", "auto")


def bench(arguments: argparse.Namespace, environ: Mapping[str, str], screen: Screen, interrupt: Interrupt) -> int:
    """The exit code. Raises CliError."""
    try:
        if arguments.bench == "serve":
            return serve(_serve(arguments), screen, interrupt)
        if arguments.bench == "handoff":
            return handoff(_handoff(arguments), environ, screen, interrupt)
        if arguments.bench == "interference":
            return interference(_interference(arguments), environ, screen, interrupt)
        if arguments.bench == "overload":
            return overload(_overload(arguments), environ, screen, interrupt)
        if arguments.bench == "route":
            return route(route_bench(arguments), screen, interrupt)
        return compare(_compare(arguments), environ, screen, interrupt)
    except Interrupted:
        screen.line("Interrupted: what was not done by then is not recorded, and what was started is stopped.")
        return EXIT_INTERRUPTED


def _serve(arguments: argparse.Namespace) -> Serve:
    if arguments.ids_below <= LOWEST_ID:
        raise UsageError(f"--ids-below must be above {LOWEST_ID}, not {arguments.ids_below}")
    concurrency = arguments.concurrency
    if concurrency is None and arguments.rate is None:
        concurrency = 1
    load = Load(
        requests=arguments.requests,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        seed=arguments.seed,
        concurrency=concurrency,
        rate_per_s=arguments.rate,
        warmup_requests=(concurrency or 1) if arguments.warmup is None else arguments.warmup,
        time_limit_seconds=arguments.time_limit_seconds,
    )
    return Serve(
        url=check_url(arguments.url),
        route=arguments.route,
        load=load,
        bounds=None if arguments.goodput is None else parse_bounds(arguments.goodput),
        model=arguments.model,
        ids_below=arguments.ids_below,
        request_timeout_seconds=arguments.request_timeout_seconds,
        json=arguments.json,
        plot=arguments.plot,
    )


def _dtype(arguments: argparse.Namespace) -> str:
    """As `baton up` would choose; peers that compute in bfloat16 alone are met in it."""
    if arguments.dtype is not None:
        return str(arguments.dtype)
    if getattr(arguments, "peer", "transformers") != "transformers":
        return DEFAULT_DTYPE
    return default_dtype(_settings(arguments), {}, multiplies_bfloat16=multiplies_bfloat16_here())


def _handoff(arguments: argparse.Namespace) -> HandoffBench:
    transports = tuple(filter(None, (name.strip() for name in arguments.transports.split(","))))
    if not transports or not set(transports) <= set(TRANSPORTS):
        raise UsageError(f"--transports {arguments.transports}: a list of {', '.join(TRANSPORTS)}")
    return HandoffBench(
        lengths=_numbers("--lengths", arguments.lengths),
        rounds=arguments.rounds,
        transports=transports,
        cores=_pair(arguments.cores),
        model=arguments.model,
        dtype=_dtype(arguments),
        settings=_settings(arguments),
        seed=arguments.seed,
        json=arguments.json,
    )


def _interference(arguments: argparse.Namespace) -> InterferenceBench:
    return InterferenceBench(
        streams=arguments.streams,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        intruder_tokens=arguments.intruder_tokens,
        every_seconds=arguments.every,
        seconds=arguments.seconds,
        cores=_pair(arguments.cores),
        model=arguments.model,
        dtype=_dtype(arguments),
        transfer=arguments.transfer,
        settings=_settings(arguments),
        seed=arguments.seed,
        json=arguments.json,
    )


def _overload(arguments: argparse.Namespace) -> OverloadBench:
    return OverloadBench(
        shares=_shares(arguments.shares),
        bounds=parse_bounds(arguments.goodput),
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        seconds=arguments.seconds,
        cores=_pair(arguments.cores),
        model=arguments.model,
        dtype=_dtype(arguments),
        settings=_settings(arguments),
        seed=arguments.seed,
        json=arguments.json,
    )


def _compare(arguments: argparse.Namespace) -> Compare:
    cores = arguments.cores or ("0/1" if arguments.peer == "vllm-pd" else "0")
    return Compare(
        peer=arguments.peer,
        venv=arguments.venv or Path(".baton") / "peers" / arguments.peer,
        lengths=_numbers("--lengths", arguments.lengths),
        output_tokens=arguments.output_tokens,
        concurrency=_numbers("--concurrency", arguments.concurrency),
        rounds=arguments.rounds,
        cores=tuple(_cores(part) for part in cores.split("/")),
        model=arguments.model,
        dtype=_dtype(arguments),
        settings=_settings(arguments),
        seed=arguments.seed,
        json=arguments.json,
    )


def _settings(arguments: argparse.Namespace) -> tuple[RoleSetting, ...]:
    return tuple(parse_setting(text) for text in arguments.settings)


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{flag} {text}: write it as numbers above 0 with commas between them, such as 128,1024")
    return tuple(int(part) for part in parts)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(f"--shares {text}: write them as numbers with commas between them, such as 0.5,1,3") from error


def _pair(text: str) -> tuple[str, str]:
    prefill, slash, decode = text.partition("/")
    if not slash:
        raise UsageError(f"--cores {text}: write the cores of prefill and of decode as 0/1 or 0,1/2,3")
    return _cores(prefill), _cores(decode)


def _cores(text: str) -> str:
    cores = text.strip()
    if not cores or not all(part.isdecimal() for part in cores.split(",")):
        raise UsageError(f"--cores: {text!r} is not a list of core numbers such as 0 or 0,1")
    return cores
