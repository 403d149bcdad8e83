"""Play seeds: `python tests/simulation/run.py --seeds 1000 --first 0`. Exits 1 at a failing seed or short coverage.

A seed is some hundred thousand calls of small functions, and its profile is flat; what is quick here is Python that makes
few objects (`thaw`). Compiling was tried and left: Cython 3.3 (gcc -O1) over core and simulation made seeds no quicker,
mypyc over most of the core 10 %, for 90 s of compiling. Debian's Python 3.11.2 is 14 % quicker than a plain 3.11.7.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ in ("__main__", "__mp_main__"):
    here = Path(__file__).resolve().parent
    sys.path = [str(here.parent), *(path for path in sys.path if path != str(here))]
    # Before the first module that has values.
    from simulation.thaw import thaw_values

    thaw_values()

from simulation.tally import SEEDS_FOR_COVERAGE, Tally, report, shortfalls
from simulation.world import World, tell

COLLECT_EVERY = 100_000


@dataclass(slots=True)
class Played:
    """How one seed went."""

    seed: int
    cpu_ms: float
    tally: Tally
    failure: str = ""
    trace: str = ""


def play(seed: int, *, traced: bool = False) -> Played:
    """Play one seed; never raises for what the seed finds."""
    began = time.process_time()
    world = None
    failure = trace = ""
    try:
        world = World(seed, traced=traced)
        world.run()
    except Exception as error:  # noqa: BLE001 — whatever the core raises is what we look for
        failure = f"{type(error).__name__}: {error}"
    if world is not None and (failure or traced):
        trace = f"  shape: {world.shape}\n{tell(world)}"
    cpu_ms = (time.process_time() - began) * 1_000
    return Played(
        seed=seed, cpu_ms=cpu_ms, tally=Tally() if world is None else world.tally, failure=failure, trace=trace
    )


def play_many(seeds: range) -> list[Played]:
    """Play some seeds in this process, and clear away their worlds."""
    played = [play(seed) for seed in seeds]
    gc.collect()
    return played


def begin_process() -> None:
    """A collector that looks at what is new, and once a few worlds. Frozen later, worlds that are over would be kept."""
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Play seeds of the simulation.")
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--failures", type=int, default=1, help="stop at so many failing seeds [default 1]")
    parser.add_argument("--trace", action="store_true", help="print every event of the seeds")
    options = parser.parse_args(arguments)
    if options.trace:
        return _traced(range(options.first, options.first + options.seeds))
    batch = max(1, min(50, options.seeds // options.jobs))
    end = options.first + options.seeds
    batches = [range(first, min(end, first + batch)) for first in range(options.first, end, batch)]
    total, times, began, done, failed = Tally(), [], time.monotonic(), 0, 0
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(options.jobs, len(batches)), begin_process) as pool:
        for played in pool.imap_unordered(play_many, batches):
            for one in played:
                if one.failure:
                    _show_failure(one)
                    failed += 1
                    if failed >= options.failures:
                        return 1
                total.add(one.tally)
                times.append(one.cpu_ms)
            done += len(played)
            if sys.stderr.isatty() or done % 1_000 < batch:
                print(f"\r{done}/{options.seeds} seeds, {time.monotonic() - began:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr)
    return _summary(total, times, failed)


def _traced(seeds: range) -> int:
    failed = False
    for seed in seeds:
        one = play(seed, traced=True)
        print(one.trace)
        print(f"seed {seed}: {one.failure or 'passed'} ({one.cpu_ms:.0f} ms CPU, {one.tally.events} events)")
        failed = failed or bool(one.failure)
    return int(failed)


def _show_failure(one: Played) -> None:
    print(f"\nseed {one.seed} failed\n  {one.failure}\n{one.trace}")
    print(f"seed {one.seed}: {one.failure}")
    print(f"replay: python tests/simulation/run.py --first {one.seed} --seeds 1 --trace", flush=True)


def _summary(total: Tally, times: list[float], failed: int) -> int:
    print(report(total))
    times.sort()
    p95 = times[min(len(times) - 1, len(times) * 95 // 100)]
    mean = statistics.mean(times)
    print(
        f"CPU per seed: median {statistics.median(times):.1f} ms, mean {mean:.1f}, p95 {p95:.1f}; {total.events} events"
    )
    missing = shortfalls(total)
    if len(times) >= SEEDS_FOR_COVERAGE and missing:
        print("coverage is short:\n  " + "\n  ".join(missing))
        return 1
    print(f"{len(times)} seeds passed" + (f", {failed} failed" if failed else ""))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
