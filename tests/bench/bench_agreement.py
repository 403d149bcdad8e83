"""T7: what agreement costs with 1,024 requests in flight on two ranks of one host: gloo, shared memory, and Python.

    python tests/bench/bench_agreement.py [--requests 1024] [--rounds 300]

The two groups take turns in the same two processes, so that what else runs on the machine meets both alike. Both ranks come
to each agreement together (a round begins with a small one that is not counted). `collective` is the reduction alone,
`tick` also polls, applies the gate and makes agreed polls. `mapping` is `poll_and_all_reduce_pp`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

from baton_core.agreement import (
    GateArgs,
    Group,
    KVPoll,
    Observation,
    SoloGroup,
    Watch,
    agreed_polls,
    poll_and_all_reduce,
    poll_and_all_reduce_pp,
)
from baton_core.events import AgreedPoll
from baton_core.messages import MetadataRow
from baton_core.ranks import Parallel
from baton_engine.control_group import ShmGroup
from baton_engine.groups import join


class Idle:
    """A transfer that is under way."""

    seen = Observation(poll=KVPoll.Transferring, progress=3)

    def poll(self) -> Observation:
        """Always the same."""
        return self.seen


class NoRows:
    """Metadata rows that nobody has written."""

    def room_word(self, row: int) -> int:
        """Empty."""
        return 0

    def read(self, row: int) -> MetadataRow | None:
        """Empty."""
        return None


def tick(group: Group, watches: list[Watch], previous: tuple[AgreedPoll, ...] = ()) -> tuple[AgreedPoll, ...]:
    """What a rank does in a tick with nothing new."""
    pollers = [Idle() for _ in watches]
    seen = poll_and_all_reduce(pollers, group, watches, NoRows(), GateArgs(backend="tcp"))
    return agreed_polls(watches, seen, NoRows(), previous)


def measure(rank: int, directory: Path, requests: int, rounds: int) -> dict[str, list[float]]:
    """Both ranks run this; seconds of each round."""
    joined = join(Parallel(tp=2), rank, f"file://{directory}/meet", "cpu", 30_000)
    groups: dict[str, Group] = {
        "gloo": joined.control_stage,
        "shm": ShmGroup(directory / "shm", rank, [0, 1], 30_000),
    }
    watches = [
        Watch(rid=f"r{one}", room=one + 1, attempt=1, host="10.0.0.1", row=0, serial=one) for one in range(requests)
    ]
    values = array("q", [3, 0, 1 << 30, 3] * requests)
    before = tick(SoloGroup(), watches)
    taken: dict[str, list[float]] = {}
    for number in range(rounds + 20):
        for name, group in groups.items():
            for what, act in (
                ("collective", lambda g=group: g.all_reduce_min(values)),
                ("tick", lambda g=group: tick(g, watches, before)),
            ):
                group.all_reduce_min([0])
                began = time.perf_counter()
                act()
                if number >= 20:
                    taken.setdefault(f"{name} {what}", []).append(time.perf_counter() - began)
        began = time.thread_time()  # Python alone, whatever else runs
        tick(SoloGroup(), watches, before)
        taken.setdefault("solo tick", []).append(time.thread_time() - began)
    rids = [watch.rid for watch in watches]
    for _ in range(rounds):
        began = time.perf_counter()
        poll_and_all_reduce_pp(rids, KVPoll.WaitingForInput, rids[: requests // 2], rids[-3:])
        taken.setdefault("mapping", []).append(time.perf_counter() - began)
    return taken


def main() -> None:
    """Start the other rank, measure, print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_024)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--other", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.other:
        measure(1, Path(arguments.other), arguments.requests, arguments.rounds)
        return
    with tempfile.TemporaryDirectory() as directory:
        sizes = ["--requests", str(arguments.requests), "--rounds", str(arguments.rounds)]
        other = subprocess.Popen([sys.executable, __file__, *sizes, "--other", directory])
        taken = measure(0, Path(directory), arguments.requests, arguments.rounds)
        other.wait()
    medians = {name: statistics.median(seconds) * 1e6 for name, seconds in taken.items()}
    for name, micros in medians.items():
        p99 = statistics.quantiles(taken[name], n=100)[98] * 1e6
        print(f"{name:18} median {micros:9.1f} µs   p99 {p99:9.1f} µs")
    print(f"shm / gloo, collective: {medians['shm collective'] / medians['gloo collective']:.3f} (T7: at most 0.1)")
    print(
        f"a tick with {arguments.requests} idle rooms: {medians['solo tick'] / 1000:.2f} ms of Python (T7: at most 1)"
    )
    print(f"mapping a consensus: {medians['mapping'] / arguments.requests:.3f} µs a request (T7: at most 0.3)")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
