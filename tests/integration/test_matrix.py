"""Every prefill layout with every decode layout, over shm and tcp: the tokens are those of one rank alone.

    prefill  TP1 TP2 TP4 PP2 PP2xTP2 CP2 DP2 DP2xTP2 DPA2 DPA2xTP2        (DP: units of their own; DPA: DP attention)
    decode   TP1 TP2 TP3 DP2 DPA2 PP2

The model is SmolLM2 (9 query, 3 KV heads) where both sides permit it, a tiny one with 12 of each where decode has three
ranks, else two tiny ones: 8 query heads with 4 KV heads, and with one, which every rank then holds. Answers are compared
with Transformers' in float32, on prompts where it is sure of every token. Decode workers are started once a model and
take both ways; prefill workers once a model and way.

The whole is slow (`make test-matrix`); `REDUCED` runs in CI.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from integration.stack import gold
from integration.workers import Worker, answer_of, flags_of, stop_all
from tiny_folders import VOCAB, save_folder, sure_prompts
from tiny_models import oracle

PREFILL: dict[str, dict[str, object]] = {
    "TP1": {},
    "TP2": {"tp": 2},
    "TP4": {"tp": 4},
    "PP2": {"pp": 2},
    "PP2xTP2": {"pp": 2, "tp": 2},
    "CP2": {"cp": 2},
    "DP2": {"dp": 2},
    "DP2xTP2": {"dp": 2, "tp": 2},
    "DPA2": {"dp": 2, "dp_attention": True},
    "DPA2xTP2": {"dp": 2, "tp": 2, "dp_attention": True},
}
DECODE: dict[str, dict[str, object]] = {
    "TP1": {},
    "TP2": {"tp": 2},
    "TP3": {"tp": 3},
    "DP2": {"dp": 2},
    "DPA2": {"dp": 2, "dp_attention": True},
    "PP2": {"pp": 2},
}
HEADS = {"gqa": (8, 4), "mqa": (8, 1), "mha": (12, 12)}
WAYS = ("shm", "tcp")
SMOL_MODEL = "smollm2-135m-instruct"
LENGTHS, COUNT = (1, 17, 40, 70), 12
SMOL_PROMPTS, SMOL_COUNT = 4, 16
CHUNK_TOKENS = 32


@dataclass(frozen=True, order=True)
class Cell:
    """One field of the matrix; sorted so that workers that serve several cells stay up."""

    model: str
    way: str
    prefill: str
    decode: str

    def __str__(self) -> str:
        return f"{self.model}-{self.way}-{self.prefill}-{self.decode}"


def models_of(prefill: str, decode: str) -> tuple[str, ...]:
    """Which models show this pair."""
    if int(PREFILL[prefill].get("tp", 1)) == 1 and int(DECODE[decode].get("tp", 1)) in (1, 3):  # type: ignore[call-overload]
        return ("smol",)
    return ("mha",) if decode == "TP3" else ("gqa", "mqa")


CELLS = sorted(
    Cell(model, way, prefill, decode)
    for prefill in PREFILL
    for decode in DECODE
    for way in WAYS
    for model in models_of(prefill, decode)
)
REDUCED = {
    "gqa-shm-TP2-TP1",
    "gqa-shm-TP2-TP2",
    "gqa-tcp-PP2xTP2-PP2",
    "gqa-tcp-PP2xTP2-TP2",
    "gqa-shm-DPA2xTP2-DPA2",
    "mqa-tcp-TP4-TP2",
    "mqa-tcp-CP2-TP2",
}


@dataclass(frozen=True)
class Exam:
    """A model, and prompts with the answers that count."""

    path: Path | str
    prompts: list[tuple[list[int], list[int]]]
    count: int


@pytest.fixture(scope="module")
def exams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exam]:
    made: dict[str, Exam] = {}
    for name, (heads, kv_heads) in HEADS.items():
        model = oracle(
            "llama",
            vocab_size=VOCAB,
            hidden_size=8 * heads,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            num_hidden_layers=4,
        )
        folder = save_folder(tmp_path_factory.mktemp("models") / f"tiny-{name}", model)
        made[name] = Exam(folder, sure_prompts(model, LENGTHS, COUNT), COUNT)
    long_enough = [one for one in gold() if len(one["output_ids"]) >= SMOL_COUNT and not one["stopped_by_eos"]]
    chosen = [one for one in long_enough if len(one["input_ids"]) <= 200][:SMOL_PROMPTS]
    prompts = [(one["input_ids"], one["output_ids"][:SMOL_COUNT]) for one in chosen]
    made["smol"] = Exam(SMOL_MODEL, prompts, SMOL_COUNT)
    return made


class Fleet:
    """The workers that are up; one prefill worker and one model's decode workers at a time."""

    def __init__(self, exams: dict[str, Exam], directory: Path) -> None:
        self._exams, self._directory = exams, directory
        self._prefill: tuple[tuple[str, str, str], Worker] | None = None
        self._decodes: dict[str, Worker] = {}
        self._model = ""

    def pair(self, cell: Cell) -> tuple[Worker, Worker]:
        """The two workers of a cell, ready."""
        if cell.model != self._model:
            self.close()
            self._model = cell.model
        key = (cell.model, cell.way, cell.prefill)
        if self._prefill is None or self._prefill[0] != key:
            if self._prefill is not None:
                self._prefill[1].stop()
            flags = self._flags(cell, PREFILL[cell.prefill], cell.way)
            name = f"{cell.model}-{cell.way}-prefill-{cell.prefill}"
            self._prefill = (key, Worker("prefill", self._directory, name, **flags, chunk_tokens=CHUNK_TOKENS))
        if cell.decode not in self._decodes:
            flags = self._flags(cell, DECODE[cell.decode], "auto")
            name = f"{cell.model}-decode-{cell.decode}"
            self._decodes[cell.decode] = Worker("decode", self._directory, name, **flags)
        prefill, decode = self._prefill[1], self._decodes[cell.decode]
        prefill.wait()
        decode.wait()
        return prefill, decode

    def close(self) -> None:
        """Stop everything."""
        stop_all([*([] if self._prefill is None else [self._prefill[1]]), *self._decodes.values()])
        self._prefill = None
        self._decodes.clear()

    def _flags(self, cell: Cell, layout: dict[str, object], way: str) -> dict[str, object]:
        return flags_of(layout, self._exams[cell.model].path, transfer=way)


@pytest.fixture(scope="module")
def fleet(exams: dict[str, Exam], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(exams, tmp_path_factory.mktemp("matrix"))
    yield running
    running.close()


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=() if str(cell) in REDUCED else pytest.mark.slow, id=str(cell)) for cell in CELLS]
)
async def test_tokens_are_those_of_one_rank_alone(cell: Cell, fleet: Fleet, exams: dict[str, Exam]) -> None:
    exam = exams[cell.model]
    prefill, decode = fleet.pair(cell)
    answers = await asyncio.gather(
        *(answer_of(prefill, decode, prompt, exam.count) for prompt, _ in exam.prompts for _ in range(2))
    )
    for (prompt, wanted), (first, second) in zip(
        [pair for pair in exam.prompts for _ in range(2)], answers, strict=True
    ):
        assert first.status_code == 200, f"{first.text}\n{prefill.text()}\n{decode.text()}"
        assert second.status_code == 200, f"{second.text}\n{prefill.text()}\n{decode.text()}"
        assert second.json()["output_ids"] == wanted, f"{len(prompt)} tokens"
