"""What a run leaves behind: a table for people, JSON with all settings for machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from baton_cli.bench.machine import Machine
from baton_cli.bench.sample import Sample
from baton_cli.bench.stats import Distribution, Summary
from baton_cli.errors import CliError
from baton_cli.show import BOLD, RED, YELLOW, Screen, aligned

Record = TypeVar("Record")

SATURATED_SHARE = 0.7
"""Above this share of one core the client is likely to be what was measured."""

DASH = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRecord:
    """One run of `baton bench serve`, in full."""

    kind: str
    machine: Machine
    settings: dict[str, Any]
    summary: Summary
    samples: list[Sample]


def write_json(path: Path, record: object) -> None:
    """Write any record of dataclasses. Raises CliError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror or error}") from error


def read_json(path: Path, kind: type[Record]) -> Record:
    """What `write_json` wrote. Raises CliError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise CliError(f"cannot read {path}: {error}") from error


def check_writable(path: Path | None, flag: str) -> None:
    """Raises CliError now rather than after a long run."""
    if path is not None and not path.absolute().parent.is_dir():
        raise CliError(f"{flag} {path}: there is no folder {path.absolute().parent}")


def ms(value: float | None) -> str:
    """Milliseconds with three figures or so."""
    if value is None:
        return DASH
    size = abs(value)
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:.0f}"


def table(screen: Screen, rows: Sequence[Sequence[str]]) -> None:
    """Rows under a heading: the first row."""
    head, *body = aligned(rows)
    screen.line("  " + head, BOLD)
    for line in body:
        screen.line("  " + line)


def show_summary(screen: Screen, summary: Summary) -> None:
    """The table of one run."""
    parts = (
        ("time to first token", summary.ttft_ms),
        ("time per token after it", summary.tpot_ms),
        ("between tokens (ITL)", summary.itl_ms),
        ("whole request", summary.e2e_ms),
    )
    table(screen, [("ms", "p50", "p90", "p99", "max", "mean"), *(_row(name, part) for name, part in parts)])
    screen.line()
    screen.line(
        f"  {summary.completed} of {summary.requests} requests complete in {summary.duration_s:.1f} s: "
        f"{summary.output_tokens_per_s:.1f} output tokens/s, {summary.requests_per_s:.2f} requests/s"
    )
    if summary.goodput is not None:
        bounds = ", ".join(f"{name} {bound:g}" for name, bound in summary.goodput.bounds_ms.items())
        screen.line(
            f"  goodput within {bounds}: {summary.goodput.requests_per_s:.2f} requests/s "
            f"({summary.goodput.share:.0%} of the requests)"
        )
    for reason, count in summary.failures.items():
        screen.line(f"  failed: {count} × {reason}", RED)
    for warning in warnings(summary):
        screen.line(f"  ! {warning}", YELLOW)


def warnings(summary: Summary) -> list[str]:
    """What makes the figures doubtful."""
    said = []
    if summary.client_cpu_share > SATURATED_SHARE:
        said.append(f"the client used {summary.client_cpu_share:.0%} of a core: it may be what was measured")
    if summary.cached_tokens:
        share = summary.cached_tokens / max(1, summary.prompt_tokens)
        said.append(f"{share:.0%} of the prompt tokens came from a prefix cache: give another --seed")
    if summary.tokens_per_event is not None and summary.tokens_per_event > 1.05:
        said.append(f"{summary.tokens_per_event:.2f} tokens an event: gaps are between events, not tokens")
    if summary.late_ms_max > 10:
        said.append(f"a request was sent {summary.late_ms_max:.0f} ms after its time: the client could not keep up")
    return said


def _row(name: str, part: Distribution | None) -> tuple[str, ...]:
    if part is None:
        return (name, *[DASH] * 5)
    return (name, ms(part.p50), ms(part.p90), ms(part.p99), ms(part.max), ms(part.mean))
