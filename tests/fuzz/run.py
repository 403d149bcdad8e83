"""Throw cases at every port: `make fuzz` (CASES, SEED, PORT). A failing case is printed with the way to throw it alone.

python tests/fuzz/run.py --cases 1000000                 shared out evenly over all ports
python tests/fuzz/run.py --port links --seed 1 --first 4711 --cases 1
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz.alone import leave_the_network
from fuzz.http_lanes import HttpLane
from fuzz.inside_lanes import INSIDE
from fuzz.lanes import Failed, Lane, Progress, drive
from fuzz.rank_lanes import LinkLane, LiveKvLane, LiveShmLane
from fuzz.stand import Stand, standing

HTTP = ("router", "admin", "registry", "own registry", "prefill", "decode")
LIVE: dict[str, Callable[[Stand], Lane]] = {
    **{name: lambda stand, name=name: HttpLane(name, stand) for name in HTTP},  # type: ignore[misc]
    "links": LinkLane,
    "kv": LiveKvLane,
    "shm": LiveShmLane,
}
PORTS = (*LIVE, *INSIDE)
CHECK_EVERY = 10_000


async def fire(lane: Lane, seed: int, first: int, cases: int) -> str | None:
    """All cases of one port; what went wrong, if anything did."""
    progress = Progress(lane.name, cases)
    try:
        await drive(lane, seed, first, cases, checks=max(2, cases // CHECK_EVERY), progress=progress)
    except Failed as failed:
        print(failed, flush=True)
        return str(failed)
    return None


async def _live(stand: Stand, ports: list[str], args: argparse.Namespace, cases: int) -> list[str | None]:
    await stand.begin()
    return [await fire(LIVE[port](stand), args.seed, args.first, cases) for port in ports]


async def _inside(port: str, args: argparse.Namespace, cases: int) -> str | None:
    lane = INSIDE[port]()
    try:
        return await fire(lane, args.seed, args.first, cases)
    finally:
        await lane.close()


def main() -> int:
    """Fire; the exit status."""
    parser = argparse.ArgumentParser(description="throw damaged frames, bodies and requests at every port")
    parser.add_argument("--cases", type=int, default=1_000_000, help="in all, shared out evenly [default 1,000,000]")
    parser.add_argument("--seed", type=int, default=1, help="all chance comes from it, port and number [default 1]")
    parser.add_argument("--first", type=int, default=0, help="number of the first case [default 0]")
    parser.add_argument("--port", choices=PORTS, action="append", help="only this one; repeatable [default all]")
    args = parser.parse_args()
    ports = args.port or list(PORTS)
    cases = max(1, args.cases // len(ports))
    refused = leave_the_network()
    if refused:
        parser.exit(1, f"{refused}; run as root\n")
    began_s = time.monotonic()
    wrong = [asyncio.run(_inside(port, args, cases)) for port in ports if port in INSIDE]
    live = [port for port in ports if port in LIVE]
    if live:
        with tempfile.TemporaryDirectory() as directory, standing(Path(directory)) as stand:
            wrong += asyncio.run(_live(stand, live, args, cases))
    print(f"{cases * len(ports):,} cases, seed {args.seed}, {time.monotonic() - began_s:.0f} s")
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started goes with whoever started it
    sys.exit(main())
