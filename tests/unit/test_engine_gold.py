"""The real model, in float32, gives the answers that Transformers gave (`tests/gold`, made by `make gold`)."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from baton_core.plan import SequenceSlice, StepPlan
from baton_core.request import Sampling, TokenLogprob
from baton_engine.loading import Engine, load_engine

FOLDER = Path(__file__).parents[1] / "gold"
GOLD = json.loads((FOLDER / "smollm2.json").read_text())
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


@pytest.mark.parametrize("chunk_tokens", [16, 512])
def test_logprobs_of_prompt_and_answer_are_those_of_transformers(engine: Engine, chunk_tokens: int) -> None:
    gold: dict[str, Any] = json.loads((FOLDER / "smollm2_logprobs.json").read_text())
    prompt, outputs = gold["input_ids"], gold["output_ids"]
    pages = tuple(range((len(prompt) + len(outputs)) // PAGE_TOKENS + 1))
    asking = Sampling(temperature=0, logprobs=5)
    got: list[TokenLogprob] = []
    ends = [*range(chunk_tokens, len(prompt), chunk_tokens), *range(len(prompt), len(prompt) + len(outputs))]
    start = 0
    for end in ends:
        tokens = (prompt + outputs)[start:end]
        score = tuple(prompt[start + 1 : end + 1])
        item = SequenceSlice(
            rid="gold",
            tokens=tuple(tokens),
            start=start,
            pages=pages,
            sample=end >= len(prompt),
            sampling=asking,
            score=score,
        )
        (result,) = engine.runner.run(StepPlan(step=1, slices=(item,))).results
        got += result.scored + (() if result.logprob is None else (result.logprob,))
        start = end
    assert [one.token for one in got] == [row["token"] for row in gold["logprobs"]]
    for one, row in zip(got, gold["logprobs"], strict=True):
        assert one.logprob == pytest.approx(row["logprob"], abs=1e-4)
        assert [logprob for _, logprob in one.top] == pytest.approx([logprob for _, logprob in row["top"]], abs=1e-4)
