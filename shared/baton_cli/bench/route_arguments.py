"""The grammar of `baton bench route`; light, because every `baton` command loads it."""

import argparse
from pathlib import Path

REQUESTS = 1_000_000
POLICIES = "round_robin,random,power_of_two,least_load,consistent_hash,session,cache_aware"


def add_route(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench route`."""
    parser = kinds.add_parser(
        "route",
        help="the router's policies on a simulated fleet of a thousand workers",
        description="Send the same requests through each of the router's policies on a simulated fleet, in virtual time: "
        "how even the load is, how much of the prompts is found in prefill's caches, time to first token, what happens "
        "when workers die or slow down, and how long the real policy code takes for a choice. Nothing is started, and "
        "the same seed gives the same figures (but for the times of choices, which are real).",
        epilog="Example: baton bench route --workers 200 --requests 100000 "
        "--policies round_robin,cache_aware/least_load --json route.json --plot route.png",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to simulate")
    what.add_argument(
        "--policies", default=POLICIES, metavar="P,…",
        help="names of --prefill-policy and --decode-policy of the router; two that differ as prefill/decode "
        "[default all]",
    )  # fmt: skip
    what.add_argument(
        "--requests", type=int, default=REQUESTS, metavar="N",
        help="sent to each policy, the same to all [default %(default)s]",
    )  # fmt: skip
    what.add_argument("--workers", type=int, default=1_000, metavar="N", help="in all [default %(default)s]")
    what.add_argument(
        "--prefill-share", type=float, default=0.5, metavar="S", help="of the workers [default %(default)s]"
    )
    what.add_argument(
        "--routers", type=int, default=1, metavar="N",
        help="routers that share the requests and learn of each other's load by probes only [default %(default)s]",
    )  # fmt: skip
    _number(what, "--load", 0.8, "L", "requests arrive at this share of what prefill computes without any cache")
    what.add_argument("--seed", type=int, default=0, help="of requests, draws and faults [default %(default)s]")
    _add_requests(parser.add_argument_group("the requests"))
    _add_workers(parser.add_argument_group("the workers, by default those of an 8B model on 48 GB GPUs"))
    faults = parser.add_argument_group("faults")
    _number(faults, "--death-share", 0.02, "S", "of the workers that die at half time and come back empty")
    _number(faults, "--slow-share", 0.05, "S", "of the workers that are slow in the last quarter")
    _number(faults, "--slow-factor", 4.0, "F", "how many times slower")
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="write settings and figures")
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them (needs matplotlib)")


def _add_requests(group: "argparse._ActionsContainer") -> None:
    group.add_argument(
        "--applications", type=int, default=2_000, metavar="N", help="system prompts, Zipf [default %(default)s]"
    )
    _number(group, "--turns", 3.0, "T", "of a conversation, on average")
    _number(group, "--think-seconds", 10.0, "S", "between two turns, on average")
    group.add_argument("--output-tokens", type=int, default=200, metavar="M", help="on average [default %(default)s]")


def _add_workers(group: "argparse._ActionsContainer") -> None:
    _number(group, "--prefill-tokens-per-second", 8_000.0, "R", "of one prefill worker")
    group.add_argument(
        "--cache-tokens", type=int, default=131_072, metavar="N", help="of a prefill worker [default %(default)s]"
    )
    _number(group, "--step-ms", 22.0, "MS", "of a decode worker, before what each sequence adds (0.25 ms)")
    group.add_argument(
        "--kv-tokens", type=int, default=196_608, metavar="N", help="of a decode worker [default %(default)s]"
    )


def _number(group: "argparse._ActionsContainer", flag: str, default: float, metavar: str, text: str) -> None:
    group.add_argument(flag, type=float, default=default, metavar=metavar, help=f"{text} [default {default:g}]")
