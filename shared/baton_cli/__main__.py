"""The command `baton`: serve a model on this machine, restart one process of it, stop it, watch it, examine it, measure."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton_cli.bench.arguments import add_bench
from baton_cli.doctor.arguments import add_doctor
from baton_cli.down import down
from baton_cli.errors import CliError, UsageError
from baton_cli.interrupt import Interrupt
from baton_cli.layout import DEFAULT_DTYPE, DEFAULT_MODEL, DEFAULT_TRANSFER, UpOptions, parse_setting
from baton_cli.restart import Restart, restart
from baton_cli.show import Screen
from baton_cli.top.arguments import add_top
from baton_cli.up import Launch, up
from baton_io.config import ROLES

DESCRIPTION = "Serve a model on this machine, with prefill and decode in processes of their own."
DEFAULT_STATE = ".baton"
DEFAULT_GRACE_SECONDS = 30.0
RESTART_GRACE_SECONDS = 130.0  # a worker drains for up to `drain_ms`, 120 s
READY_TIMEOUT_SECONDS = 330.0  # a worker gives up by itself after `start_ms`, 300 s


def main() -> None:
    """Entry point of `baton` and `python -m baton_cli`."""
    sys.exit(run(sys.argv[1:], os.environ))


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of one command: 0 done, 1 it failed, 2 wrongly called, 130 interrupted while starting."""
    arguments = build_parser().parse_args(argv)
    screen, interrupt = Screen(sys.stdout), Interrupt()
    interrupt.install()
    try:
        if arguments.command == "up":
            return up(_up_options(arguments), _launch(arguments, environ), screen, interrupt)
        if arguments.command == "down":
            return down(arguments.state, grace_seconds=arguments.grace_seconds, screen=screen, interrupt=interrupt)
        if arguments.command == "bench":
            from baton_cli.bench.command import bench  # only here: its HTTP client is half of a second that others save

            return bench(arguments, environ, screen, interrupt)
        if arguments.command == "doctor":
            from baton_cli.doctor.command import doctor  # only here, likewise: it knows every setting of a worker

            return doctor(arguments, environ, screen)
        if arguments.command == "top":
            from baton_cli.top.command import top

            return top(arguments, screen, interrupt)
        return restart(_restart(arguments, environ), screen, interrupt)
    except CliError as error:
        print(f"baton {arguments.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def build_parser() -> argparse.ArgumentParser:
    """The grammar of the command line."""
    parser = argparse.ArgumentParser(prog="baton", description=DESCRIPTION, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(commands)
    _add_restart(commands)
    _add_down(commands)
    add_doctor(commands)
    add_top(commands)
    add_bench(commands)
    return parser


def _add_up(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "up",
        help="start registry, router and workers, and wait until they answer",
        description="Start registry, router and workers on this machine, wait until a completion has passed through.",
        epilog="Example: baton up --prefill 2 --decode 2 --port 9000 --set prefill.chunk_tokens=256. Options of a "
        "single role: baton-prefill --help, and likewise baton-decode, baton-router, baton-bootstrap.",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to start")
    what.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill workers [default %(default)s]")
    what.add_argument("--decode", type=int, default=1, metavar="N", help="decode workers [default %(default)s]")
    what.add_argument(
        "--colocated", type=int, default=0, metavar="N",
        help="workers that do both; with --prefill 0 --decode 0 nothing is handed over [default %(default)s]",
    )  # fmt: skip
    what.add_argument("--model", metavar="NAME|PATH", help=f"what to serve [default {DEFAULT_MODEL}]")
    what.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help=f"type of weights and cache [default {DEFAULT_DTYPE}; float32 on a CPU that has none]",
    )
    what.add_argument(
        "--transfer", choices=("auto", "shm", "tcp"), help=f"how the KV cache travels [default {DEFAULT_TRANSFER}]"
    )
    what.add_argument("--port", type=int, default=8000, metavar="PORT", help="the router's port [default %(default)s]")
    what.add_argument(
        "--set", action="append", default=[], metavar="ROLE.KEY=VALUE", dest="settings",
        help="any other option of a role; prefill.tp=2 is its flag --tp 2 and the variable BATON_PREFILL_TP=2; repeatable",
    )  # fmt: skip
    how = parser.add_argument_group("how to run")
    how.add_argument("--detach", action="store_true", help="return once ready and leave everything running")
    _add_state(how)
    _add_seconds(how, "--ready-timeout-seconds", READY_TIMEOUT_SECONDS, "how long starting may take")
    _add_seconds(how, "--grace-seconds", DEFAULT_GRACE_SECONDS, "how long running requests may go on after Ctrl-C")


def _add_restart(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "restart",
        help="stop one process and start it as it was",
        description="Stop one process (running requests finish), start it with the same arguments, wait until ready.",
        allow_abbrev=False,
    )
    parser.add_argument("role", choices=ROLES, metavar="ROLE", help="one of " + ", ".join(ROLES))
    parser.add_argument("index", type=int, nargs="?", metavar="INDEX", help="which one; needed where there are several")
    parser.add_argument("--kill", action="store_true", help="do not let running requests finish: SIGKILL")
    _add_state(parser)
    _add_seconds(parser, "--ready-timeout-seconds", READY_TIMEOUT_SECONDS, "how long starting may take")
    _add_seconds(parser, "--grace-seconds", RESTART_GRACE_SECONDS, "how long running requests may go on")


def _add_down(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "down",
        help="stop everything",
        description="Stop everything that was started with this state.",
        allow_abbrev=False,
    )
    _add_state(parser)
    _add_seconds(parser, "--grace-seconds", DEFAULT_GRACE_SECONDS, "how long running requests may go on")


def _add_state(group: "argparse._ActionsContainer") -> None:
    text = "folder of state.json and logs/ [default %(default)s]"
    group.add_argument("--state", type=Path, default=Path(DEFAULT_STATE), metavar="DIR", help=text)


def _add_seconds(group: "argparse._ActionsContainer", flag: str, default: float, text: str) -> None:
    group.add_argument(flag, type=float, default=default, metavar="SECONDS", help=f"{text} [default {default:.0f}]")


def _up_options(arguments: argparse.Namespace) -> UpOptions:
    return UpOptions(
        prefill=arguments.prefill,
        decode=arguments.decode,
        colocated=arguments.colocated,
        model=arguments.model,
        dtype=arguments.dtype,
        transfer=arguments.transfer,
        port=arguments.port,
        settings=tuple(parse_setting(text) for text in arguments.settings),
    )


def _launch(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Launch:
    return Launch(
        directory=arguments.state,
        environ=environ,
        detach=arguments.detach,
        ready_timeout_seconds=arguments.ready_timeout_seconds,
        grace_seconds=arguments.grace_seconds,
    )


def _restart(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Restart:
    return Restart(
        directory=arguments.state,
        role=arguments.role,
        index=arguments.index,
        kill=arguments.kill,
        environ=environ,
        grace_seconds=arguments.grace_seconds,
        ready_timeout_seconds=arguments.ready_timeout_seconds,
    )


if __name__ == "__main__":
    main()
