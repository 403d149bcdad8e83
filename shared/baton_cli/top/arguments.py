"""The grammar of `baton top`; light, because every `baton` command loads it."""

import argparse
from pathlib import Path


def add_top(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `top`."""
    parser = commands.add_parser(
        "top",
        help="watch a stack: workers, queues, pages, speed, handoff stages",
        description="A live view of a stack from the /metrics of its router and workers: per worker and DP rank state, "
        "requests that run and wait, poll states, free pages, tokens a second, TTFT and time between tokens; then the "
        "stages of the handoff, and what was refused. Rates and percentiles are over the last --window-seconds. FREE and "
        "PAGES are of the KV pool (q: pages in quarantine). ITL is the time between tokens, TPOT its mean over an answer, "
        "STEP that of one forward, where a worker exports neither. TICK is how late the scheduler's loop was, B/W/T/S/F "
        "are the poll states Bootstrapping, WaitingForInput, Transferring, Success, Failed. A narrow terminal shows fewer "
        "columns. Keys: q ends, space freezes.",
        epilog="Examples: baton top; baton top --url http://router:8000 --interval 1; baton top --once | less",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url", metavar="URL", help="the router [default: that of --state, else http://127.0.0.1:8000]"
    )
    parser.add_argument(
        "--worker", action="append", default=[], dest="workers", metavar="URL",
        help="one more worker, beside those that the router names; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--state", type=Path, default=Path(".baton"), metavar="DIR", help="of baton up [default %(default)s]"
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between frames [default %(default)g]"
    )
    parser.add_argument(
        "--window-seconds", type=float, default=30.0, metavar="S", help="rates are over this long [default %(default)g]"
    )
    parser.add_argument(
        "--timeout-seconds", type=float, default=2.0, metavar="S", help="of one question [default %(default)g]"
    )
    parser.add_argument("--once", action="store_true", help="one frame, figures since each process started; then end")
    parser.add_argument("--columns", type=int, metavar="N", help="width [default: the terminal's, else 120]")
