"""Control groups between real processes: the same minimum everywhere, and a missing rank is named in time."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

PEER = """
import json, sys
from pathlib import Path
from baton_core.errors import EngineError
from baton_core.ranks import Parallel
from baton_engine.control_group import ShmGroup
from baton_engine.groups import join

kind, directory, rank, ranks, turns, timeout_ms = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
if kind == "shm":
    group = ShmGroup(directory / "group", rank, [10 + one for one in range(ranks)], timeout_ms)
else:
    group = join(Parallel(tp=ranks), rank, f"file://{directory}/meet", "cpu", timeout_ms, start_ms=60_000).control_stage
seen = []
print("ready", flush=True)
for turn in range(turns):
    if turn == turns - 1:
        sys.stdin.readline()  # the last turn begins when the test says so
    values = [(turn * 7 + index * (rank + 3)) % 11 - 5 for index in range(turn % 5 + 1)] + [2**62 - rank, -(2**62) + rank]
    try:
        seen.append(list(group.all_reduce_min(values)))
    except EngineError as error:
        seen.append(str(error))
        break
print(json.dumps(seen), flush=True)
"""


class Ranks:
    """Processes that agree `turns` times; the last turn waits for `go`."""

    def __init__(self, kind: str, directory: Path, ranks: int, turns: int, timeout_ms: int = 10_000) -> None:
        command = [sys.executable, "-c", PEER, kind, str(directory)]
        self.all = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), str(turns), str(timeout_ms)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        for one in self.all:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"

    def go(self, rank: int) -> None:
        stdin = self.all[rank].stdin
        assert stdin is not None
        stdin.write("go\n")
        stdin.flush()

    def saw(self, rank: int) -> list[object]:
        stdout = self.all[rank].stdout
        assert stdout is not None
        seen: list[object] = json.loads(stdout.readline())
        return seen

    def end(self) -> None:
        for one in self.all:
            one.kill()
            one.wait()


def expected(turn: int, ranks: int) -> list[int]:
    values = [
        [(turn * 7 + index * (rank + 3)) % 11 - 5 for index in range(turn % 5 + 1)] + [2**62 - rank, -(2**62) + rank]
        for rank in range(ranks)
    ]
    return [min(column) for column in zip(*values, strict=True)]


@pytest.mark.parametrize("kind", ["shm", "gloo"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_the_least_of_all_in_every_turn(kind: str, ranks: int, tmp_path: Path) -> None:
    turns = 200
    group = Ranks(kind, tmp_path, ranks, turns)
    try:
        for rank in range(ranks):
            group.go(rank)
        wanted = [expected(turn, ranks) for turn in range(turns)]
        assert [group.saw(rank) for rank in range(ranks)] == [wanted] * ranks
    finally:
        group.end()


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_a_rank_that_does_not_take_part_is_named_within_the_timeout(kind: str, tmp_path: Path) -> None:
    group = Ranks(kind, tmp_path, 2, turns=3, timeout_ms=500)
    try:
        group.go(0)
        began = time.monotonic()
        error = str(group.saw(0)[-1])
        assert time.monotonic() - began < 6
        assert "500 ms" in error
        assert ("rank 11 did not take part" if kind == "shm" else "rank 1 did not answer") in error
    finally:
        group.end()


def test_a_rank_that_died_is_noticed_long_before_the_timeout(tmp_path: Path) -> None:
    group = Ranks("shm", tmp_path, 2, turns=3, timeout_ms=60_000)
    try:
        group.all[1].kill()
        group.all[1].wait()
        group.go(0)
        assert "is gone" in str(group.saw(0)[-1])
    finally:
        group.end()
