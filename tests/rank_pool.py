"""Ranks of a worker as real processes, for engine tests: a pool of them that does one task after the other.

A task is a function of this module, called on every rank with the rank's number first. What a rank raises comes back as a
`Fault`, not as an exception, because the others' answers matter too.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

import baton_engine.logprobs
from baton_core.kv_layout import UnitLayout
from baton_core.plan import SequenceSlice, StepPlan, StepResult
from baton_core.ranks import Parallel
from baton_core.request import Sampling
from baton_engine.groups import TensorGroups, join
from baton_engine.loading import Engine, load_engine
from baton_engine.roll_call import GroupLost

PAGE_TOKENS = 4
KV_TOKENS = 1_024
JUDGED = Sampling(temperature=0, logprobs=4)
ANSWER_S = 60.0
# Torch from a cold disk, four times at once on two cores.
START_S = 300.0
LIMIT_MS = 20_000

Rounds = list[tuple[StepPlan | None, ...]]
"""What each unit computes in each step; None: it idles along."""


@dataclass(frozen=True)
class Fault:
    """What a rank raised."""

    kind: str
    text: str


class RankPool:
    """`size` processes, each with torch loaded and one thread."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._processes.append(process)
            self._ends.append(ours)
        for rank, end in enumerate(self._ends):
            if not end.poll(START_S):
                raise TimeoutError(f"rank {rank} did not start within {START_S} s")
            assert end.recv() == "ready"

    def run(self, task: Callable[..., Any], ranks: Sequence[int], *args: Any) -> list[Any]:
        """What each of `ranks` answers, in their order."""
        self.begin(task, ranks, *args)
        return [self.answer(rank) for rank in ranks]

    def begin(self, task: Callable[..., Any], ranks: Sequence[int], *args: Any) -> None:
        """Let `ranks` begin; their answers must be asked for."""
        for rank in ranks:
            self._ends[rank].send((task, (rank, *args)))

    @contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        """The process of `rank` does nothing meanwhile, and does not know it."""
        process = self._processes[rank]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(process.pid, signal.SIGCONT)

    def answer(self, rank: int) -> Any:
        """What `rank` answers to the task that it does."""
        if not self._ends[rank].poll(ANSWER_S):
            raise TimeoutError(f"rank {rank} does not answer")
        return self._ends[rank].recv()


@cache
def rank_pool() -> RankPool:
    """Four ranks, started once; they end with the process that asked for them."""
    return RankPool(4)


def _serve(end: Connection) -> None:
    torch.set_num_threads(1)
    end.send("ready")
    while True:
        try:
            task, args = end.recv()
        except EOFError:
            return
        try:
            end.send(task(*args))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            end.send(Fault(type(error).__name__, str(error)))


@contextmanager
def joined(
    rank: int, parallel: Parallel, rendezvous: str, device: str = "cpu", start_ms: int = 20_000
) -> Iterator[TensorGroups]:
    """The groups of a rank, while they are in use."""
    groups = join(parallel, rank, rendezvous, device, LIMIT_MS, start_ms=start_ms)
    try:
        yield groups
    finally:
        groups.close()


def load_rank(
    path: str, dtype: str, parallel: Parallel, rank: int, groups: TensorGroups | None, device: str = "cpu"
) -> Engine:
    """An engine of one rank."""
    return load_engine(
        model_path=path,
        dtype=dtype,
        device=device,
        kv_tokens=KV_TOKENS,
        page_tokens=PAGE_TOKENS,
        metadata_rows=1,
        threads=1,
        progress=lambda what, done, total: None,
        parallel=parallel,
        rank=rank,
        groups=groups,
    )


# -- tasks


def computed(
    rank: int, parallel: Parallel, rendezvous: str, path: str, dtype: str, rounds: Rounds, device: str = "cpu"
) -> tuple[list[StepResult], UnitLayout, torch.Tensor]:
    """The results of this rank's unit, its layout, and what the pool holds afterwards."""
    with joined(rank, parallel, rendezvous, device) as groups:
        engine = load_rank(path, dtype, parallel, rank, groups, device)
        results = []
        for plans in rounds:
            plan = plans[groups.place.dp_rank]
            if plan is None:
                engine.runner.run_idle()
            else:
                results.append(engine.runner.run(plan))
        groups.meet("the end")  # the first stage is done before the last one has heard of it
        pool = engine.pool.tensor.cpu().clone()
        engine.close()
        return results, engine.layout, pool


def poisoned(rank: int, parallel: Parallel, rendezvous: str, path: str, plans: list[StepPlan]) -> list[StepResult]:
    """Run `plans`, the first of them over a pool that holds no numbers, logits two rows at a time."""
    rows, baton_engine.logprobs.BLOCK_ROWS = baton_engine.logprobs.BLOCK_ROWS, 2
    try:
        with joined(rank, parallel, rendezvous) as groups:
            engine = load_rank(path, "float32", parallel, rank, groups)
            engine.pool.tensor.fill_(float("nan"))
            results = [engine.runner.run(plans[0])]
            engine.pool.tensor.zero_()
            results += [engine.runner.run(plan) for plan in plans[1:]]
            engine.close()
            return results
    finally:
        baton_engine.logprobs.BLOCK_ROWS = rows


def broken(rank: int, parallel: Parallel, rendezvous: str, path: str, plan: StepPlan, where: int) -> StepResult:
    """Run `plan` with a layer that fails on rank `where`."""
    with joined(rank, parallel, rendezvous) as groups:
        engine = load_rank(path, "float32", parallel, rank, groups)
        if rank == where:
            layers = engine.runner._model._layers
            layers[1] = replace(layers[1], down=_out_of_memory)
        try:
            return engine.runner.run(plan)
        finally:
            engine.close()


def _out_of_memory(values: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the device is out of memory")


def refused(rank: int, parallel: Parallel, rendezvous: str, path: str) -> None:
    """Load a model that cannot be shared like that."""
    with joined(rank, parallel, rendezvous) as groups:
        load_rank(path, "float32", parallel, rank, groups).close()


def summed(rank: int, parallel: Parallel, rendezvous: str, absent: int, limit_ms: int) -> list[float]:
    """Take part in a sum over the tp group, unless `absent`: then end without a word, but do not die."""
    groups = join(parallel, rank, rendezvous, "cpu", limit_ms)
    if rank == absent:
        _KEPT.append(groups)
        return []
    values = torch.full((3,), float(rank))
    try:
        groups.tp.sum(values)
    finally:
        groups.close()
    return values.tolist()


def left(rank: int, parallel: Parallel, rendezvous: str, leaver: int) -> int:
    """Take part in sums until the rank `leaver` has left after the first one; how many there were."""
    with joined(rank, parallel, rendezvous) as groups:
        groups.tp.sum(torch.ones(3))
        groups.meet("after one")  # a connection that closes may take with it what was not read yet
        if rank == leaver:
            return 1
        groups.tp.sum(torch.ones(3))
    return 2


_KEPT: list[TensorGroups] = []
"""Groups of ranks that play dead: their connections stay open."""


def everything_grouped(rank: int, parallel: Parallel, rendezvous: str) -> dict[str, Any]:
    """Use every group once."""
    with joined(rank, parallel, rendezvous) as groups:
        names = ("tp", "cp", "ffn", "stages", "control_tp", "control_cp", "control_stage", "control_unit")
        answer: dict[str, Any] = {name: getattr(groups, name).ranks for name in names}
        answer["least"] = groups.control_unit.all_reduce_min([rank, -rank])
        gathered = torch.empty(groups.tp.size, 2)
        groups.tp.gather(torch.full((2,), float(rank)), gathered)
        answer["gathered"] = gathered[:, 0].tolist()
        first = groups.tp.gather_to_first(torch.tensor([rank], dtype=torch.bfloat16))
        answer["first"] = None if first is None else first.flatten().tolist()
        total = torch.tensor([rank], dtype=torch.bfloat16)
        groups.ffn.sum(total)
        answer["sum"] = total.tolist()
        large = torch.randn(40_003, generator=torch.Generator().manual_seed(rank))
        groups.control_unit.sum(large)
        answer["large"] = large
        if groups.stages.size > 1:
            passed = torch.tensor([float(rank)])
            for _ in range(5):
                if groups.stages.rank > 0:
                    groups.stages.receive(passed, groups.stages.rank - 1)
                if groups.stages.rank < groups.stages.size - 1:
                    groups.stages.send(passed, groups.stages.rank + 1)
            answer["passed"] = passed.tolist()
        groups.meet("the end")
        return answer


def agreed(rank: int, parallel: Parallel, rendezvous: str, counts: tuple[int, ...]) -> list[Any]:
    """Agreements over so many values each; then one to which every rank brings another number of them."""
    with joined(rank, parallel, rendezvous) as groups:
        stage = groups.control_stage
        answers = [stage.all_reduce_min([rank * (-1) ** index for index in range(count)]) for count in counts]
        try:
            stage.all_reduce_min([0] * (2 + 600 * rank))
        except GroupLost as error:
            return [*answers, str(error)]
        return answers


def started(rank: int, parallel: Parallel, rendezvous: str, start_ms: int) -> None:
    """Join, and wait no longer than `start_ms` for the others."""
    with joined(rank, parallel, rendezvous, start_ms=start_ms):
        pass


# -- plans


def trace(
    engine: Engine, prompts: Sequence[Sequence[int]], count: int, chunk: int, tag: str
) -> tuple[list[StepPlan], list[StepResult]]:
    """What a small scheduler makes of `prompts`, and what the engine answers: prompts in chunks of `chunk` tokens beside
    the decode steps of others, every prompt token scored, `count` greedy tokens each."""
    pages_each = engine.pool.pages // len(prompts)
    sequences, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    plans: list[StepPlan] = []
    results: list[StepResult] = []
    while True:
        slices = []
        for index, prompt in enumerate(prompts):
            sequence = sequences[index]
            # Later ones begin later, so that chunks and decode steps meet.
            if len(sequence) == len(prompt) + count or len(plans) < index:
                continue
            end = min(len(sequence), done[index] + chunk)
            slices.append(
                SequenceSlice(
                    rid=f"{tag}{index}",
                    tokens=tuple(sequence[done[index] : end]),
                    start=done[index],
                    pages=tuple(range(index, engine.pool.pages, len(prompts)))[:pages_each],
                    sample=end == len(sequence),
                    sampling=JUDGED,
                    score=tuple(sequence[done[index] + 1 : min(end + 1, len(prompt))]),
                )
            )
            done[index] = end
        if not slices:
            return plans, results
        plans.append(StepPlan(step=len(plans) + 1, slices=tuple(slices)))
        results.append(engine.runner.run(plans[-1]))
        assert results[-1].failed is None, results[-1].failed
        for one in results[-1].results:
            if one.token is not None:
                sequences[int(one.rid.removeprefix(tag))].append(one.token)


def answering(prompt: Sequence[int], answer: Sequence[int], chunk: int = 16) -> list[StepPlan]:
    """The plans for one prompt, in chunks, to which `answer` is known to be the answer."""
    sequence = [*prompt, *answer[:-1]]
    ends = [*range(chunk, len(prompt), chunk), *range(len(prompt), len(sequence) + 1)]
    plans: list[StepPlan] = []
    for start, end in zip([0, *ends], ends, strict=False):
        item = SequenceSlice(
            rid="a",
            tokens=tuple(sequence[start:end]),
            start=start,
            pages=tuple(range(len(sequence) // PAGE_TOKENS + 1)),
            sample=end >= len(prompt),
            sampling=JUDGED,
        )
        plans.append(StepPlan(step=len(plans) + 1, slices=(item,)))
    return plans


def renumbered(plans: Sequence[StepPlan | None]) -> list[StepPlan | None]:
    """The same plans, counted on."""
    return [None if plan is None else replace(plan, step=step) for step, plan in enumerate(plans, 1)]
