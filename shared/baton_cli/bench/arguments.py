"""The grammar of `baton bench`; light, because every `baton` command loads it."""

import argparse
from pathlib import Path

from baton_cli.bench.route_arguments import add_route

PEERS = ("transformers", "llama.cpp", "vllm", "vllm-pd")
ROUTES = ("/v1/completions", "/generate")


def add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench` with its six subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure: a server that runs, the price of a handoff, interference, overload, other engines, routing policies",
        description="Measure. Prompts are random token ids, the same for the same --seed, and no two alike.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _add_serve(kinds)
    _add_handoff(kinds)
    _add_interference(kinds)
    _add_overload(kinds)
    _add_compare(kinds)
    add_route(kinds)


def _add_serve(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "serve",
        help="load on a server that runs, as its clients see it",
        description="Stream answers from a server that runs (Baton, or any with OpenAI's completions) and report time to "
        "first token, time per token, gaps between tokens, throughput and goodput.",
        epilog="Example: baton bench serve --url http://127.0.0.1:8000 --requests 64 --concurrency 8 "
        "--goodput ttft_ms=500,itl_ms=100 --json run.json",
        allow_abbrev=False,
    )
    load = parser.add_argument_group("the load")
    load.add_argument("--url", required=True, help="base URL of the server, such as http://127.0.0.1:8000")
    load.add_argument("--route", choices=ROUTES, default=ROUTES[0], help="what to call [default %(default)s]")
    load.add_argument("--requests", type=int, default=32, metavar="N", help="measured requests [default %(default)s]")
    arrival = load.add_mutually_exclusive_group()
    arrival.add_argument("--concurrency", type=int, metavar="C", help="closed loop: C clients in turn [default 1]")
    arrival.add_argument("--rate", type=float, metavar="R", help="open loop: R requests a second, Poisson arrivals")
    load.add_argument("--input-tokens", type=int, default=128, metavar="L", help="prompt length [default %(default)s]")
    load.add_argument("--output-tokens", type=int, default=128, metavar="M", help="answer length [default %(default)s]")
    load.add_argument("--warmup", type=int, metavar="W", help="requests before, not counted [default: C, at least 1]")
    load.add_argument("--model", metavar="NAME", help="name to ask for [default: the first that the server lists]")
    load.add_argument(
        "--ids-below", type=int, default=16_384, metavar="V", help="token ids are drawn below V [default %(default)s]"
    )
    _seed(load)
    load.add_argument("--request-timeout-seconds", type=float, default=600.0, metavar="S", help="of one request")
    load.add_argument("--time-limit-seconds", type=float, default=600.0, metavar="S", help="of the whole run")
    out = parser.add_argument_group("results")
    out.add_argument("--goodput", metavar="BOUNDS", help="ttft_ms=…,tpot_ms=…,itl_ms=…,e2e_ms=…: count who kept them")
    _json(out)
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="draw distributions (needs matplotlib)")


def _add_handoff(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "handoff",
        help="what disaggregation costs the first token, stage by stage",
        description="Start a disaggregated and a colocated stack on this machine and ask them in turn: TTFT of both, "
        "the difference (target T5), and the stages that the workers measure themselves.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("what to measure")
    group.add_argument("--lengths", default="128,1024,4096", metavar="L,…", help="prompt tokens [default %(default)s]")
    group.add_argument("--rounds", type=int, default=10, metavar="N", help="requests to each [default %(default)s]")
    group.add_argument("--transports", default="tcp,shm", metavar="T,…", help="[default %(default)s]")
    group.add_argument("--cores", default="0/1", metavar="P/D", help="cores of prefill / decode [default %(default)s]")
    _stack(group)
    _json(group)


def _add_interference(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "interference",
        help="streams decode while long prompts arrive",
        description="Gaps between the tokens of N streams with and without long prompts that arrive every K seconds, on "
        "a disaggregated stack and on a colocated one with the same cores (target T4).",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("what to measure")
    group.add_argument("--streams", type=int, default=8, metavar="N", help="at once [default %(default)s]")
    group.add_argument("--input-tokens", type=int, default=64, metavar="L", help="of a stream [default %(default)s]")
    group.add_argument("--output-tokens", type=int, default=256, metavar="M", help="of a stream [default %(default)s]")
    group.add_argument("--intruder-tokens", type=int, default=2048, metavar="L", help="[default %(default)s]")
    group.add_argument(
        "--every", type=float, default=3.0, metavar="K", help="seconds between them [default %(default)g]"
    )
    group.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each phase [default %(default)g]")
    group.add_argument("--cores", default="0/1", metavar="P/D", help="cores of prefill / decode [default %(default)s]")
    group.add_argument("--transfer", choices=("auto", "shm", "tcp"), help="how the KV cache travels")
    _stack(group)
    _json(group)


def _add_overload(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "overload",
        help="goodput as the load grows past what a stack can do",
        description="Find what a disaggregated stack can do, then let requests arrive at shares of that rate, and count "
        "those that are answered within the bounds. What the router refuses at once costs no worker anything.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("what to measure")
    group.add_argument("--shares", default="0.5,0.8,1,1.5,2,3", metavar="S,…", help="[default %(default)s]")
    group.add_argument(
        "--goodput",
        default="ttft_ms=3000,tpot_ms=200",
        metavar="BOUNDS",
        help="what a good request keeps, as for serve [default %(default)s]",
    )
    group.add_argument("--input-tokens", type=int, default=128, metavar="L", help="[default %(default)s]")
    group.add_argument("--output-tokens", type=int, default=32, metavar="M", help="[default %(default)s]")
    group.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each share [default %(default)g]")
    group.add_argument("--cores", default="0/1", metavar="P/D", help="cores of prefill / decode [default %(default)s]")
    _stack(group)
    _json(group)


def _add_compare(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "compare",
        help="another engine, same weights and load, in turn with ours",
        description="Install another engine into a virtual environment of its own, give it the same weights, prompts and "
        "load as a stack of ours on the same cores, alternate, and report medians and ratios.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("what to compare")
    group.add_argument("--peer", choices=PEERS, required=True)
    group.add_argument(
        "--venv", type=Path, metavar="DIR", help="its environment [default .baton/peers/PEER; made if missing]"
    )
    group.add_argument("--lengths", default="128,1024", metavar="L,…", help="prompts for TTFT [default %(default)s]")
    group.add_argument("--output-tokens", type=int, default=32, metavar="M", help="for TPOT [default %(default)s]")
    group.add_argument(
        "--concurrency",
        default="8,32",
        metavar="C,…",
        help="for throughput, 128 in, 128 out; none: '' [default %(default)s]",
    )
    group.add_argument("--rounds", type=int, default=3, metavar="N", help="of each, in turn [default %(default)s]")
    group.add_argument("--cores", metavar="LIST", help="of both rivals, one thread each [default 0; vllm-pd: 0/1]")
    _stack(group)
    _json(group)


def _stack(group: "argparse._ActionsContainer") -> None:
    group.add_argument("--model", metavar="NAME|PATH", help="as for baton up")
    group.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="[default bfloat16; on a CPU that has none float32]"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="ROLE.KEY=VALUE",
        dest="settings",
        help="as for baton up; repeatable",
    )
    _seed(group)


def _seed(group: "argparse._ActionsContainer") -> None:
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrival times [default %(default)s]")


def _json(group: "argparse._ActionsContainer") -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write settings and figures")
