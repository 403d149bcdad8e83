"""`baton bench compare`: another engine with the same weights, prompts and load, in turn with ours; medians and ratios.

Each of the two is measured while the other idles (or is paused). Ours is a stack of `baton up`, router included.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from baton_cli.bench.client import http_session
from baton_cli.bench.machine import Machine, Watch
from baton_cli.bench.peers import vllm
from baton_cli.bench.peers.rival import Cell, HttpRival, Rival
from baton_cli.bench.peers.shim_rival import Shim, shim_rival
from baton_cli.bench.peers.venv import Install, Shell, ensure_venv
from baton_cli.bench.progress import Bar
from baton_cli.bench.prompts import Prompts
from baton_cli.bench.report import DASH, check_writable, ms, table, write_json
from baton_cli.bench.sample import Sample
from baton_cli.bench.stack import Wanted, running
from baton_cli.bench.stats import summarise
from baton_cli.errors import CliError, Interrupted, UsageError
from baton_cli.interrupt import Interrupt
from baton_cli.layout import DEFAULT_MODEL, RoleSetting
from baton_cli.show import BOLD, Screen
from baton_core.errors import EngineError
from baton_worker.models import resolve_model

INSTALLS: dict[str, tuple[Install, ...]] = {
    "transformers": (
        Install(arguments=("install", "torch==2.13.0", "transformers==5.24.0", "gguf==0.19.0", "accelerate==1.15.0")),
    ),
    "llama.cpp": (Install(arguments=("install", "llama-cpp-python==0.3.36")),),
    "vllm": vllm.COLOCATED,
    "vllm-pd": vllm.PAIR,
}
PROMPT_TOKENS_OF_THROUGHPUT = OUTPUT_TOKENS_OF_THROUGHPUT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """What to compare. `cores`: one entry for colocated rivals, two (prefill, decode) for pairs."""

    peer: str
    venv: Path
    lengths: tuple[int, ...]
    output_tokens: int
    concurrency: tuple[int, ...]
    rounds: int
    cores: tuple[str, ...]
    model: str | None
    dtype: str
    settings: tuple[RoleSetting, ...]
    seed: int
    json: Path | None

    def __post_init__(self) -> None:
        if (len(self.cores) == 2) != (self.peer == "vllm-pd"):
            shape = "PREFILL/DECODE, such as 0/1" if self.peer == "vllm-pd" else "one list, such as 0 or 0,1"
            raise UsageError(f"--cores for {self.peer} is {shape}")
        if self.dtype != "bfloat16" and self.peer != "transformers":
            raise UsageError(f"{self.peer} is compared in bfloat16 only")
        if not 1 <= self.rounds <= 100 or self.output_tokens < 2 or not self.cells():
            raise UsageError(
                "--rounds must be 1 to 100, --output-tokens above 1, and there must be something to measure"
            )

    def cells(self) -> list[Cell]:
        """First tokens at each length, then throughput at each concurrency."""
        single = [
            Cell(input_tokens=n, output_tokens=self.output_tokens, concurrency=1, requests=1) for n in self.lengths
        ]
        return single + [
            Cell(
                input_tokens=PROMPT_TOKENS_OF_THROUGHPUT,
                output_tokens=OUTPUT_TOKENS_OF_THROUGHPUT,
                concurrency=many,
                requests=many,
            )
            for many in self.concurrency
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One rival in one cell: a median over each round's requests, for each round."""

    ttft_ms: list[float]
    tpot_ms: list[float]
    output_tokens_per_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One cell."""

    cell: Cell
    ours: Figures
    peer: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRecord:
    """Everything, for JSON."""

    kind: str
    machine: Machine
    settings: dict[str, Any]
    peer: dict[str, str]
    cells: list[Compared]


def compare(what: Compare, environ: Mapping[str, str], screen: Screen, interrupt: Interrupt) -> int:
    """The exit code. Raises CliError, Interrupted."""
    check_writable(what.json, "--json")
    python = ensure_venv(what.venv, INSTALLS[what.peer], Shell(screen, environ, interrupt.requested))
    wanted = Wanted(
        name=f"baton on {' / '.join(what.cores)}",
        cores=what.cores,
        model=what.model,
        dtype=what.dtype,
        settings=what.settings,
    )
    with running(wanted, environ, screen, interrupt) as stack:
        ours = HttpRival(name="baton", url=stack.url, model=stack.model, leaders=stack.leaders)
        with _peer(what, python, environ, screen, interrupt) as peer:
            watch = Watch([*ours.leaders, *peer.leaders])
            cells = uvloop.run(_measure(what, ours, peer, screen, interrupt.requested))
            machine, about = watch.machine(), peer.about
    _show(screen, what, cells, machine, about)
    if what.json is not None:
        settings = {key: value for key, value in asdict(what).items() if key not in ("json", "venv")}
        record = CompareRecord(kind="compare", machine=machine, settings=settings, peer=about, cells=cells)
        write_json(what.json, record)
        screen.line(f"  written: {what.json}")
    return 0


@contextmanager
def _peer(
    what: Compare, python: Path, environ: Mapping[str, str], screen: Screen, interrupt: Interrupt
) -> Iterator[Rival]:
    """The peer, loaded and ready. Raises CliError, Interrupted."""
    try:
        model = resolve_model(what.model or DEFAULT_MODEL).path
    except EngineError as error:
        raise CliError(str(error)) from error
    home = what.venv.absolute().with_name(f"{what.peer}-files")
    home.mkdir(parents=True, exist_ok=True)
    screen.line(f"Starting {what.peer}; its log is in {home}")
    if what.peer in ("transformers", "llama.cpp"):
        shim = Shim(
            engine=what.peer,
            python=python,
            model=model,
            dtype=what.dtype,
            cores=what.cores[0],
            log=home / "shim.log",
        )
        with shim_rival(shim, environ, interrupt.requested) as rival:
            yield rival
    else:
        server = vllm.Vllm(python=python, model=model, cores=what.cores, directory=home)
        vllm.prepare(server, Shell(screen, environ, interrupt.requested))
        with vllm.vllm_rival(server, environ, screen, interrupt.requested) as served:
            yield served


async def _measure(
    what: Compare, ours: Rival, peer: Rival, screen: Screen, interrupted: Callable[[], bool]
) -> list[Compared]:
    results: list[Compared] = []
    cells = what.cells()
    rivals = (ours, peer)
    async with http_session(request_timeout_seconds=600) as session:
        with Bar(screen, "rounds", len(cells) * (what.rounds + 1) * 2) as bar:
            for cell in cells:
                rounds: tuple[list[list[Sample]], list[list[Sample]]] = ([], [])
                for number in range(what.rounds + 1):  # the first is warm-up
                    for which in (0, 1) if number % 2 == 0 else (1, 0):
                        if interrupted():
                            raise Interrupted
                        rounds[which].append(await _round(session, what, rivals, which, cell, number))
                        bar.step()
                results.append(Compared(cell=cell, ours=_figures(rounds[0][1:]), peer=_figures(rounds[1][1:])))
    return results


async def _round(
    session: aiohttp.ClientSession, what: Compare, rivals: tuple[Rival, Rival], which: int, cell: Cell, number: int
) -> list[Sample]:
    """One round of one rival while the other is paused. Raises CliError when a request fails."""
    mine, other = rivals[which], rivals[1 - which]
    other.pause()
    mine.resume()
    samples = await mine.run(session, cell, Prompts(seed=what.seed), f"round {number}")
    other.resume()
    failed = next((sample.failure for sample in samples if sample.failure is not None), None)
    if failed is not None:
        raise CliError(f"{mine.name}: a request of {cell.input_tokens} tokens failed: {failed}")
    refuse_cached(mine.name, cell, samples)
    return samples


def refuse_cached(name: str, cell: Cell, samples: Sequence[Sample]) -> None:
    """Raises CliError where a prefix cache answered for some of the prompts: such a ratio would compare nothing."""
    cached = sum(sample.cached_tokens for sample in samples)
    if cached:
        asked = cell.input_tokens * len(samples)
        raise CliError(
            f"{name}: {cached} of {asked} prompt tokens came from its prefix cache, though no two prompts are alike; "
            "use another --seed, or a server that is not used by others"
        )


def _figures(rounds: Sequence[Sequence[Sample]]) -> Figures:
    return Figures(
        ttft_ms=[_median([sample.ttft_ms for sample in samples]) for samples in rounds],
        tpot_ms=[_median([sample.tpot_ms for sample in samples]) for samples in rounds],
        output_tokens_per_s=[summarise(samples, client_cpu_share=0).output_tokens_per_s for samples in rounds],
    )


def _median(values: Sequence[float | None]) -> float:
    return statistics.median([value for value in values if value is not None])


def _show(screen: Screen, what: Compare, cells: Sequence[Compared], machine: Machine, about: Mapping[str, str]) -> None:
    screen.line()
    versions = ", ".join(f"{name} {number}" for name, number in about.items())
    screen.line(f"baton against {what.peer} ({versions}) on cores {' / '.join(what.cores)}, {what.dtype}", BOLD)
    screen.line(f"  {machine.text}; medians of {what.rounds} rounds in turn; ratio: baton / {what.peer}")
    screen.line()
    rows: list[tuple[str, ...]] = [("in", "out", "at once", "", "baton", what.peer, "ratio")]
    for one in cells:
        pairs = [
            ("TTFT ms", one.ours.ttft_ms, one.peer.ttft_ms),
            ("time per token ms", one.ours.tpot_ms, one.peer.tpot_ms),
            ("output tokens/s", one.ours.output_tokens_per_s, one.peer.output_tokens_per_s),
        ]
        for name, mine, theirs in pairs:
            rows.append(_row(one.cell, name, statistics.median(mine), statistics.median(theirs)))
    table(screen, rows)


def _row(cell: Cell, name: str, mine: float, theirs: float) -> tuple[str, ...]:
    load = (str(cell.input_tokens), str(cell.output_tokens), str(cell.concurrency))
    return (*load, name, ms(mine), ms(theirs), f"{mine / theirs:.2f}" if theirs else DASH)
