"""The checksum over a handoff (`--kv-checksum`): what is not what prefill computed never becomes an answer."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton_core.agreement import KVPoll
from baton_core.errors import Reason
from baton_core.kv_layout import UnitLayout
from baton_engine.transfer import checksum as sums
from baton_engine.transfer.ways import Job
from contract.transfer_pairs import Units

ONE = UnitLayout(layers=3, kv_heads=2, head_dim=4, element_bytes=4, page_tokens=4)
LAYOUTS = {
    "TP1 to TP1": (ONE, ONE),
    "TP2 to TP1": (replace(ONE, tp=2), ONE),
    "PP2 to TP2": (replace(ONE, pp=2), replace(ONE, tp=2)),
    "CP2 to PP2": (replace(ONE, cp=2), replace(ONE, pp=2)),
    "pages of 4 to 6": (ONE, replace(ONE, page_tokens=6)),
}
TOKENS = 18
Make = Callable[..., Units]


@pytest.fixture(params=["tcp", "shm", "auto", "staged", "staged alone"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[Units] = []

    def make(name: str, checksum: str = "prefill, decode") -> Units:
        made.append(Units(str(request.param), tmp_path, *LAYOUTS[name], checksum=checksum))
        made[-1].begin(TOKENS)
        made[-1].ready()
        return made[-1]

    yield make
    for units in made:
        units.close()


def flip_a_byte(monkeypatch: pytest.MonkeyPatch, units: Units, member: int) -> None:
    """Once one of prefill's ranks has counted its last page in for decode's first rank, a byte of it changes."""
    take_in = sums.Checksums.take_in
    mine = units.sources[member].memory

    def flipping(self: sums.Checksums, job: Job) -> int | None:
        found = take_in(self, job)
        if self._memory is mine and job.flow.peer == "d1/0.0" and found is not None:
            units.sources[member].page_view(units.source_pages[-1], 5, 1)[0] ^= 1
        return found

    monkeypatch.setattr(sums.Checksums, "take_in", flipping)


@pytest.mark.parametrize("name", LAYOUTS)
def test_whole_handoffs_pass_chunk_by_chunk(make: Make, name: str) -> None:
    units = make(name)
    for first in range(len(units.source_pages)):
        units.push(first, first + 1)
    units.arrive()


@pytest.mark.parametrize("checksum", ["prefill", "neither"])
def test_decode_checks_what_comes_with_a_checksum_and_takes_what_comes_without(make: Make, checksum: str) -> None:
    units = make("TP2 to TP1", checksum)
    units.push(0, len(units.source_pages))
    units.arrive()


def failure(units: Units) -> tuple[Reason | None, str]:
    """Why the first of decode's ranks that fails does."""

    def failed() -> list[int]:
        return [member for member in range(units.target.members) if units.received(member).poll is KVPoll.Failed]

    units.bell.until(lambda: bool(failed()), "a rank of decode fails")
    seen = units.received(failed()[0])
    return seen.reason, seen.text


@pytest.mark.parametrize("name", ["TP1 to TP1", "TP2 to TP1", "PP2 to TP2"])
@pytest.mark.parametrize("which", [0, -1], ids=["the first rank", "the last rank"])
def test_one_flipped_byte_fails_the_attempt_and_names_who_wrote_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, which: int
) -> None:
    units = make(name)
    member = range(units.source.members)[which]
    flip_a_byte(monkeypatch, units, member)
    units.push(0, len(units.source_pages))
    reason, text = failure(units)
    assert reason is Reason.METADATA_CORRUPT
    assert "KV checksum differs in room 7" in text
    assert f"p1/0.{member} sent" in text
    monkeypatch.undo()
    units.begin(TOKENS, room=8)
    units.ready(room=8)
    units.push(0, len(units.source_pages), room=8)
    units.arrive(room=8)


def test_a_worker_that_was_told_to_check_takes_nothing_without_a_checksum(make: Make) -> None:
    units = make("TP1 to TP1", "decode")
    units.push(0, len(units.source_pages))
    reason, text = failure(units)
    assert reason is Reason.METADATA_CORRUPT
    assert "sent none" in text
