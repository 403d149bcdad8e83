"""Other shapes of the same system: two of each, and one worker alone."""

from pathlib import Path

import pytest

from integration.stack import Stack, ask_all, gold, greedy

SMALL = ("prefill.kv_tokens=8192", "decode.kv_tokens=8192")


async def test_two_prefill_and_two_decode_workers_share_the_work(tmp_path: Path) -> None:
    stack = Stack.up(
        tmp_path, "--prefill", "2", "--decode", "2", "--dtype", "float32", "--transfer", "tcp", settings=SMALL
    )
    try:
        prompts = [prompt for prompt in gold() if len(prompt["input_ids"]) <= 130]
        answers = await ask_all(stack.url, [greedy(prompt) for prompt in prompts], concurrency=16)
        assert [a["output_ids"] for a in answers] == [p["output_ids"] for p in prompts]
        for gauges in await stack.idle_snapshots():
            assert gauges["pages_free"] + gauges["pages_cached"] == gauges["pages"]
            assert gauges["links"] >= 1, "every worker took part"
    finally:
        stack.down()


async def test_a_colocated_worker_gives_the_same_answers_alone(tmp_path: Path) -> None:
    stack = Stack.up(
        tmp_path,
        *("--prefill", "0", "--decode", "0", "--colocated", "1", "--dtype", "float32"),
        settings=("decode.chunk_tokens=64", "decode.kv_tokens=16384"),
    )
    try:
        prompts = [prompt for prompt in gold() if len(prompt["input_ids"]) <= 600]
        answers = await ask_all(stack.url, [greedy(prompt) for prompt in prompts], concurrency=16)
        wrong = [p["name"] for p, a in zip(prompts, answers, strict=True) if a["output_ids"] != p["output_ids"]]
        assert wrong == []
        for gauges in await stack.idle_snapshots():
            assert gauges["pages_free"] + gauges["pages_cached"] == gauges["pages"]
    finally:
        stack.down()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [64, 2048])
@pytest.mark.parametrize("concurrency", [1, 16])
async def test_prompts_of_1_to_3000_tokens_equal_transformers(tmp_path: Path, chunk: int, concurrency: int) -> None:
    settings = (f"prefill.chunk_tokens={chunk}", "prefill.kv_tokens=16384", "decode.kv_tokens=16384")
    stack = Stack.up(tmp_path, "--dtype", "float32", "--transfer", "tcp", settings=settings)
    try:
        prompts = gold("smollm2_long")
        answers = await ask_all(stack.url, [greedy(prompt) for prompt in prompts], concurrency=concurrency)
        wrong = [p["name"] for p, a in zip(prompts, answers, strict=True) if a["output_ids"] != p["output_ids"]]
        assert wrong == []
    finally:
        stack.down()
