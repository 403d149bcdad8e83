"""The real model, in float32, gives the answers that Transformers gave (`tests/gold`, made by `make gold`)."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from baton_core.plan import SequenceSlice, StepPlan
from baton_core.request import Sampling
from baton_engine.loading import Engine, load_engine

GOLD = json.loads((Path(__file__).parents[1] / "gold" / "smollm2.json").read_text())
PAGE_TOKENS = 16
CHUNK_TOKENS = 64


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    spec = importlib.util.find_spec(GOLD["model"]["package"])
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {GOLD['model']['package']} is not installed")
    loaded = load_engine(
        model_path=str(Path(spec.submodule_search_locations[0]) / GOLD["model"]["file"]),
        dtype="float32",
        device="cpu",
        kv_tokens=1_024,
        page_tokens=PAGE_TOKENS,
        metadata_rows=1,
        threads=0,
        progress=lambda what, done, total: None,
    )
    yield loaded
    loaded.close()


def answer(engine: Engine, input_ids: list[int], count: int) -> list[int]:
    """Greedy answer of `count` tokens, the prompt computed in chunks; pages in reverse, to prove the table is used."""
    pages = tuple(reversed(range((len(input_ids) + count) // PAGE_TOKENS + 1)))

    def step(tokens: list[int], start: int) -> int:
        item = SequenceSlice(
            rid="gold",
            tokens=tuple(tokens),
            start=start,
            pages=pages,
            sample=True,
            sampling=Sampling(temperature=0),
        )
        result = engine.runner.run(StepPlan(step=1, slices=(item,)))
        assert result.failed is None, result.failed
        return result.results[0].token

    drawn: list[int] = []
    for start in range(0, len(input_ids), CHUNK_TOKENS):
        drawn = [step(input_ids[start : start + CHUNK_TOKENS], start)]
    while len(drawn) < count:
        drawn.append(step(drawn[-1:], len(input_ids) + len(drawn) - 1))
    return drawn


@pytest.mark.parametrize("name", ["chat-capital", "prose-129"])
def test_the_engine_answers_as_transformers_does(engine: Engine, name: str) -> None:
    prompt: dict[str, Any] = next(item for item in GOLD["prompts"] if item["name"] == name)
    assert answer(engine, prompt["input_ids"], len(prompt["output_ids"])) == prompt["output_ids"]
