"""The grammar of `baton doctor`; light, because every `baton` command loads it."""

import argparse
from pathlib import Path

TIMEOUT_SECONDS = 3.0
COMPLETION_SECONDS = 60.0


def add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="say what is wrong with this machine or with a stack, and what to type next",
        description="Look at this machine, and at a stack that runs (--url, --registry, --worker, or what `baton up` "
        "started here) or, where none does, at the one that `baton up` with the same options would start. One line for "
        "each check: ok, warn (it will work, but not well) or fail, what that means, and what to type next. Nothing is "
        "changed; one short completion is asked for.",
        epilog="Exit codes: 0 nothing failed, 1 something failed (with --strict also: something is warned of), 2 wrongly "
        "called. Examples: baton doctor; baton doctor --prefill 2 --model /models/qwen3-8b --set prefill.device=cuda; "
        "baton doctor --url http://router:8000 --registry http://registry:8990 --json",
        allow_abbrev=False,
    )
    running = parser.add_argument_group("a stack that runs")
    running.add_argument("--url", metavar="URL", help="its router [default: that of --state, if it runs]")
    running.add_argument("--registry", metavar="URL", help="its bootstrap registry [default: what the router says]")
    running.add_argument(
        "--worker", action="append", default=[], dest="workers", metavar="URL",
        help="one more worker, beside those that router and registry name; repeatable",
    )  # fmt: skip
    running.add_argument(
        "--state", type=Path, default=Path(".baton"), metavar="DIR", help="of baton up [default %(default)s]"
    )
    running.add_argument("--key-file", type=Path, metavar="FILE", help="holds the API key, where the router wants one")
    running.add_argument("--no-completion", action="store_true", help="ask for no completion")
    running.add_argument(
        "--timeout-seconds", type=float, default=TIMEOUT_SECONDS, metavar="S", help="of one probe [default %(default)g]"
    )
    _add_plan(parser.add_argument_group("a stack that is planned: the options of baton up"))
    out = parser.add_argument_group("results")
    out.add_argument("--json", action="store_true", help="findings as JSON on stdout")
    out.add_argument("--strict", action="store_true", help="a warning is a failure")


def _add_plan(group: "argparse._ActionsContainer") -> None:
    group.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill workers [default %(default)s]")
    group.add_argument("--decode", type=int, default=1, metavar="N", help="decode workers [default %(default)s]")
    group.add_argument(
        "--colocated", type=int, default=0, metavar="N", help="workers that do both [default %(default)s]"
    )
    group.add_argument("--model", metavar="NAME|PATH", help="what to serve")
    group.add_argument("--dtype", choices=("bfloat16", "float32"), help="type of weights and cache")
    group.add_argument("--transfer", choices=("auto", "shm", "tcp"), help="how the KV cache travels")
    group.add_argument("--port", type=int, default=8000, metavar="PORT", help="the router's [default %(default)s]")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="ROLE.KEY=VALUE",
        dest="settings",
        help="as for baton up; repeatable",
    )
