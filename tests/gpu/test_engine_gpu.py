"""The engine on CUDA: the same checks as on the CPU, with the same tiny models."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.testing import assert_close

from baton_core.plan import StepPlan
from baton_engine.runner import Runner
from tiny_models import TinyEngine, oracle, oracle_logits, part, prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logits_on_cuda_are_those_of_transformers(kind: str) -> None:
    model = oracle(kind)
    engine, tokens = TinyEngine(model, device="cuda"), prompt(23, seed=1)
    expected = oracle_logits(model, tokens)
    whole = engine.logits(part("whole", tokens, 0, first_page=0))
    one_by_one = [engine.logits(part("steps", [token], at, first_page=3))[0] for at, token in enumerate(tokens)]
    assert_close(whole[0], expected[-1], atol=1e-3, rtol=1e-3)
    assert_close(torch.stack(one_by_one), expected, atol=1e-3, rtol=1e-3)


def test_a_prompt_in_chunks_gives_what_the_whole_prompt_gives_on_cuda() -> None:
    engine, tokens = TinyEngine(oracle(), device="cuda"), prompt(50, seed=2)
    whole = engine.logits(part("whole", tokens, 0, first_page=0))
    chunked = torch.empty(0)
    for start in range(0, len(tokens), 16):
        chunked = engine.logits(part("chunked", tokens[start : start + 16], start, first_page=2))
    assert_close(chunked, whole, atol=1e-3, rtol=1e-3)


def test_bfloat16_on_cuda_stays_close_to_float32() -> None:
    model, tokens = oracle(), prompt(30, seed=3)
    coarse = TinyEngine(model, device="cuda", dtype=torch.bfloat16).logits(part("a", tokens, 0, first_page=0))
    assert torch.nn.functional.cosine_similarity(coarse, oracle_logits(model, tokens)[-1:]).item() > 0.99


def test_a_step_on_cuda_draws_what_the_cpu_draws() -> None:
    model = oracle()
    slices = tuple(part(f"r{index}", prompt(5 + index, seed=index), 0, first_page=index) for index in range(4))
    drawn = []
    for device in ("cpu", "cuda"):
        engine = TinyEngine(model, device=device)
        runner = Runner(engine.model, engine.pool)
        runner.warm_up()
        drawn.append(runner.run(StepPlan(step=1, slices=slices)).results)
    assert drawn[0] == drawn[1]


def test_pages_travel_to_and_from_cuda_through_host_memory() -> None:
    pool = TinyEngine(oracle(), device="cuda").pool
    pool.memory.target(2, 16, 4)[:] = b"abcd"
    assert bytes(pool.memory.source(2, 16, 4)) == bytes(4)
    pool.memory.landed(2)
    assert bytes(pool.memory.source(2, 16, 4)) == b"abcd"
    assert pool.file_descriptor is None
    pool.close()
