"""Ranks on CUDA devices, over NCCL: the same checks as over gloo, with the same tiny models."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import torch.distributed as dist

from baton_core.ranks import Parallel
from rank_pool import Fault, Rounds, computed, load_rank, rank_pool, trace
from tiny_folders import save_folder
from tiny_models import oracle, prompt

RANKS = 2

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < RANKS or not dist.is_nccl_available(),
    reason=f"NCCL needs a device a rank, and torch sees {torch.cuda.device_count()} of {RANKS} CUDA devices here",
)


@pytest.mark.parametrize(
    "parallel",
    [Parallel(tp=RANKS), Parallel(pp=RANKS), Parallel(cp=RANKS), Parallel(dp=RANKS, dp_attention=True)],
    ids=["TP2", "PP2", "CP2", "DPA2"],
)
def test_ranks_on_cuda_answer_as_one_rank_on_the_cpu_does(tmp_path: Path, parallel: Parallel) -> None:
    path = str(save_folder(tmp_path / "model", oracle("llama", num_attention_heads=8, num_key_value_heads=4)))
    solo = load_rank(path, "float32", Parallel(), 0, None)
    plans, expected = trace(solo, [prompt(length, seed=length) for length in (23, 1, 9)], 6, 7, "a")
    solo.close()
    idle = [None] * (parallel.dp - 1)
    rounds: Rounds = [(plan, *idle) for plan in plans]
    answers = rank_pool().run(
        computed, range(RANKS), parallel, f"file://{tmp_path}/meet", path, "float32", rounds, "cuda"
    )
    assert not any(isinstance(answer, Fault) for answer in answers), answers
    assert [[one.token for one in result.results] for result in answers[parallel.speaker][0]] == [
        [one.token for one in result.results] for result in expected
    ]
