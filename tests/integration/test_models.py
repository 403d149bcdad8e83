"""A Hugging Face directory through a real prefill and decode worker: the text is that of Transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoTokenizer, PreTrainedModel

from integration.stack import Stack, ask_all
from tiny_folders import VOCAB, save_folder, sure_prompts
from tiny_models import oracle

COUNT = 16
LENGTHS = (3, 40, 150)  # the longest in several chunks


SETTINGS = ("prefill.chunk_tokens=64", "prefill.kv_tokens=4096", "decode.kv_tokens=4096")
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return oracle("llama", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "tiny-llama", model, shard_bytes=60_000)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Stack]:
    options = ("--model", str(folder), "--dtype", "float32")
    running = Stack.up(tmp_path_factory.mktemp("1p1d"), *options, settings=SETTINGS)
    yield running
    running.down()


async def test_a_directory_is_served_under_its_name(stack: Stack) -> None:
    async with httpx.AsyncClient() as client:
        models = (await client.get(f"{stack.url}/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["tiny-llama"]


async def test_tokens_and_text_through_two_processes_are_those_of_transformers(
    stack: Stack, model: PreTrainedModel, folder: Path
) -> None:
    await compare(stack, model, folder)


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["tcp", "shm"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
async def test_every_architecture_over_every_transport(tmp_path: Path, kind: str, transfer: str) -> None:
    model = oracle(kind, vocab_size=VOCAB, **ARCHITECTURES[kind])
    folder = save_folder(tmp_path / "model", model)
    (tmp_path / "state").mkdir()
    options = ("--model", str(folder), "--dtype", "float32", "--transfer", transfer)
    stack = Stack.up(tmp_path / "state", *options, settings=SETTINGS)
    try:
        await compare(stack, model, folder)
    finally:
        stack.down()


async def compare(stack: Stack, model: PreTrainedModel, folder: Path) -> None:
    """Answers of several lengths, at once, against the oracle's."""
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = sure_prompts(model, LENGTHS, COUNT)
    sampling = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt, _ in expected]
    got = await ask_all(stack.url, bodies, concurrency=3)
    assert [answer["output_ids"] for answer in got] == [answer for _, answer in expected]
    assert [answer["text"] for answer in got] == [
        theirs.decode(answer, skip_special_tokens=True) for _, answer in expected
    ]
