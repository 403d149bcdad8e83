"""Units of several ranks where layouts meet: routes that conflict, page sizes that differ, pairs that do not fit."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from integration.workers import Worker, answer_of, flags_of, stop_all
from ports import free_port
from tiny_folders import VOCAB, save_folder, sure_prompts
from tiny_models import oracle

LENGTHS, COUNT = (5, 40, 70), 10


@dataclass(frozen=True)
class Exam:
    """A model, and prompts with the answers that count."""

    folder: Path
    prompts: list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def exam(tmp_path_factory: pytest.TempPathFactory) -> Exam:
    model = oracle("llama", vocab_size=VOCAB, hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    folder = save_folder(tmp_path_factory.mktemp("models") / "tiny", model)
    return Exam(folder, sure_prompts(model, LENGTHS, COUNT))


def ready(*workers: Worker) -> None:
    for worker in workers:
        worker.wait()


async def check(exam: Exam, prefill: Worker, decode: Worker) -> None:
    answers = await asyncio.gather(*(answer_of(prefill, decode, prompt, COUNT) for prompt, _ in exam.prompts))
    for (_, wanted), (first, second) in zip(exam.prompts, answers, strict=True):
        assert (first.status_code, second.status_code) == (200, 200), f"{first.text} {second.text} {decode.text()}"
        assert second.json()["output_ids"] == wanted


class Routes:
    """A prefill worker of two units and a decode worker, with or without the force switch."""

    def __init__(self, directory: Path, exam: Exam, *, prefill_forced: bool, decode_forced: bool) -> None:
        self.exam = exam
        force: dict[str, object] = {"force_query_prefill_dp_rank": True}
        self.prefill = Worker(
            "prefill", directory, "prefill", **flags_of({"dp": 2}, exam.folder, **(force if prefill_forced else {}))
        )
        self.decode = Worker(
            "decode", directory, "decode", **flags_of({}, exam.folder, **(force if decode_forced else {}))
        )
        ready(self.prefill, self.decode)

    async def ask(self, room: int, **more: Any) -> tuple[httpx.Response, httpx.Response]:
        """Both legs of this room; `prefill_` fields go to prefill alone."""
        prompt, _ = self.exam.prompts[0]
        common = {key: value for key, value in more.items() if not key.startswith("prefill_")}
        own = {key.removeprefix("prefill_"): value for key, value in more.items() if key.startswith("prefill_")}
        return await answer_of(
            self.prefill, self.decode, prompt, COUNT, prefill_more=own, bootstrap_room=room, **common
        )


@pytest.fixture(scope="module", params=["neither", "both", "prefill", "decode"])
def routes(
    request: pytest.FixtureRequest, exam: Exam, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Routes]]:
    forced = request.param
    running = Routes(
        tmp_path_factory.mktemp(forced),
        exam,
        prefill_forced=forced in ("both", "prefill"),
        decode_forced=forced in ("both", "decode"),
    )
    yield forced, running
    stop_all([running.prefill, running.decode])


async def test_a_room_that_follows_is_served_whoever_forces(routes: tuple[str, Routes]) -> None:
    _, fleet = routes
    async with asyncio.timeout(5):
        first, second = await fleet.ask(1_001)
    assert (first.status_code, second.status_code) == (200, 200), second.text
    assert second.json()["output_ids"] == fleet.exam.prompts[0][1]
    assert first.json()["meta_info"]["dp_rank"] == 1


async def test_a_route_that_conflicts_fails_both_legs_at_once_or_is_registered(routes: tuple[str, Routes]) -> None:
    """Room 1,002 implies unit 0, the router sends prefill's leg to unit 1."""
    forced, fleet = routes
    async with asyncio.timeout(3):  # nobody waits for a dead leg
        first, second = await fleet.ask(1_002, prefill_routed_dp_rank=1)
    if forced in ("both", "prefill"):
        assert (first.status_code, second.status_code) == (200, 200), f"{first.text} {second.text}"
        assert first.json()["meta_info"]["dp_rank"] == 1
        assert second.json()["output_ids"] == fleet.exam.prompts[0][1]
    else:
        assert first.status_code == 400
        assert "1002" in first.text
        assert "BATON_FORCE_QUERY_PREFILL_DP_RANK" in first.text
        assert second.status_code >= 400


async def test_a_rank_that_the_request_names_needs_no_room_to_match(routes: tuple[str, Routes]) -> None:
    _, fleet = routes
    first, second = await fleet.ask(1_004, prefill_routed_dp_rank=1, disagg_prefill_dp_rank=1)
    assert (first.status_code, second.status_code) == (200, 200), f"{first.text} {second.text}"
    assert first.json()["meta_info"]["dp_rank"] == 1


async def test_ranks_that_do_not_exist_are_refused_naming_both_numbers(routes: tuple[str, Routes]) -> None:
    _, fleet = routes
    async with asyncio.timeout(3):
        first, second = await fleet.ask(1_006, prefill_routed_dp_rank=5)
    assert first.status_code == 400
    assert "5" in first.text
    assert "2" in first.text
    assert second.status_code >= 400


@pytest.mark.parametrize("way", [{}, {"transfer": "tcp", "transfer_staging": True}], ids=["auto", "staged"])
async def test_pages_of_different_sizes_are_translated(exam: Exam, tmp_path: Path, way: dict[str, object]) -> None:
    prefill = Worker(
        "prefill", tmp_path, "prefill", **flags_of({"tp": 2}, exam.folder, page_tokens=16, chunk_tokens=32, **way)
    )
    decode = Worker("decode", tmp_path, "decode", **flags_of({}, exam.folder, page_tokens=24, **way))
    try:
        ready(prefill, decode)
        await check(exam, prefill, decode)
    finally:
        stop_all([prefill, decode])


async def test_a_pair_that_cannot_share_kv_fails_the_request_naming_both_values_and_lives(
    exam: Exam, tmp_path: Path
) -> None:
    prefill = Worker("prefill", tmp_path, "prefill", **flags_of({"tp": 2}, exam.folder))
    decode = Worker("decode", tmp_path, "decode", **(flags_of({}, exam.folder) | {"dtype": "bfloat16"}))
    fitting = Worker("decode", tmp_path, "fitting", **flags_of({}, exam.folder))
    try:
        ready(prefill, decode, fitting)
        first, second = await answer_of(prefill, decode, exam.prompts[0][0], COUNT)
        for leg in (first, second):
            assert leg.status_code == 500
            assert "float32" in leg.text
            assert "bfloat16" in leg.text
        await check(exam, prefill, fitting)
        assert decode.process.poll() is None
    finally:
        stop_all([prefill, decode, fitting])


async def test_a_worker_may_be_spread_over_two_nodes(exam: Exam, tmp_path: Path) -> None:
    meeting: dict[str, object] = {"nnodes": 2, "dist_init_addr": f"127.0.0.1:{free_port(4)}"}
    flags = flags_of({"tp": 2}, exam.folder, chunk_tokens=32, **meeting)
    nodes = [Worker("prefill", tmp_path, f"node-{node}", **flags, node_rank=node) for node in (0, 1)]
    decode = Worker("decode", tmp_path, "decode", **flags_of({}, exam.folder))
    try:
        ready(nodes[0], decode)
        await check(exam, nodes[0], decode)
        nodes[1].process.kill()
        await asyncio.to_thread(nodes[0].process.wait, 60)
        assert nodes[0].process.returncode != 0
    finally:
        stop_all([*nodes, decode])
