"""A slice of the simulation in every test run; `make sim` plays as many seeds as one likes."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation import run
from simulation.tally import SEEDS_FOR_COVERAGE, Tally, legal_edges, report, shortfalls
from simulation.world import World

HERE = Path(__file__).parent
DIGEST_OF = "from simulation.test_simulation import digest; print(digest({seed}))"
SLICE = range(60)
DIGESTED = (24, 3, 33)


def digest(seed: int) -> str:
    """Everything that happened in a seed's world, as a digest."""
    world = World(seed, traced=True)
    world.run()
    return world.digest()


def once_failed() -> list[int]:
    """Seeds that once found a bug."""
    lines = (HERE / "seeds.txt").read_text().splitlines()
    return [int(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]


def test_sixty_worlds_come_to_rest_with_every_invariant_held() -> None:
    failures = [f"seed {played.seed}: {played.failure}" for played in run.play_many(SLICE) if played.failure]
    assert not failures


@pytest.mark.parametrize("seed", once_failed())
def test_a_seed_that_once_failed_passes(seed: int) -> None:
    assert run.play(seed).failure == ""


@pytest.mark.parametrize("seed", DIGESTED)
def test_the_same_seed_plays_the_same_way_twice(seed: int) -> None:
    assert digest(seed) == digest(seed)


def test_the_same_seed_plays_the_same_way_under_another_hash_seed() -> None:
    seed = DIGESTED[0]
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-c", DIGEST_OF.format(seed=seed)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == digest(seed)


def test_different_seeds_play_differently() -> None:
    assert len({digest(seed) for seed in DIGESTED}) == len(DIGESTED)


def test_a_failing_seed_says_what_broke_and_how_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: World) -> None:
        raise AssertionError("the moon is full")

    monkeypatch.setattr(World, "run", broken)
    run._show_failure(run.play(7))
    said = capsys.readouterr().out
    assert "seed 7" in said and "the moon is full" in said and "--first 7 --seeds 1 --trace" in said


def test_the_command_traces_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--first", "1", "--seeds", "1", "--trace"]) == 0
    assert "seed 1: passed" in capsys.readouterr().out


def test_short_coverage_fails_a_long_run_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    empty = Tally()
    assert len(shortfalls(empty)) > len(legal_edges())
    assert run._summary(empty, [1.0] * SEEDS_FOR_COVERAGE, failed=0) == 1
    said = capsys.readouterr().out
    assert "transition prefill intake -> bootstrapping: 0 times" in said
    assert "fault crash in phase decode.running: never" in said and "units of 5 ranks: 0" in said
    assert run._summary(empty, [1.0] * (SEEDS_FOR_COVERAGE - 1), failed=0) == 0
    assert "seeds passed" in capsys.readouterr().out


def test_a_long_run_that_went_on_after_a_failing_seed_fails_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert run._summary(Tally(), [1.0, 2.0], failed=1) == 1
    assert "2 seeds passed, 1 failed" in capsys.readouterr().out


def test_worlds_that_are_over_are_cleared_away_however_many_are_played() -> None:
    frozen = gc.get_freeze_count()
    run.play_many(range(3))
    assert gc.get_freeze_count() == frozen
    assert not [one for one in gc.get_objects() if isinstance(one, World)]


def test_the_report_lists_every_transition_and_fault() -> None:
    text = report(Tally())
    assert text.count("->") == len(legal_edges())
    assert "clock_jump" in text
