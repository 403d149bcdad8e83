"""A picture of one run, as PNG. Needs matplotlib, which is an extra: `pip install 'baton[bench]'`."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton_cli.bench.sample import Sample
from baton_cli.errors import CliError

INCHES = (10.0, 4.0)
MISSING = (
    "--plot needs matplotlib, which is not installed: run `pip install matplotlib` (or `pip install 'baton[bench]'`)"
)


def check_plot(path: Path | None) -> None:
    """Raises CliError where a picture is wanted and cannot be drawn: before the run, not after it."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise CliError(f"--plot {path}: the picture is a PNG, so the name must end in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise CliError(MISSING)


def write_plot(path: Path, samples: Sequence[Sample], title: str) -> None:
    """Three panels: TTFT by when a request was sent, and how TTFT and gaps are distributed. Raises CliError."""
    complete = [sample for sample in samples if sample.failure is None and sample.ttft_ms is not None]
    # Loaded by name, because the command must work without it, and Figure alone needs no display.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=INCHES, layout="constrained")
    over_time, ttft, gaps = figure.subplots(1, 3)
    over_time.plot([sample.sent_s for sample in complete], [sample.ttft_ms for sample in complete], ".")
    over_time.set(xlabel="sent after (s)", ylabel="time to first token (ms)", ylim=(0, None))
    _cumulative(ttft, [sample.ttft_ms for sample in complete if sample.ttft_ms is not None], "time to first token (ms)")
    _cumulative(gaps, [gap for sample in complete for gap in sample.gaps_ms], "between tokens (ms)")
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror or error}") from error


def _cumulative(axes: Any, values: Sequence[float], label: str) -> None:
    ordered = sorted(values)
    axes.plot(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], drawstyle="steps-post")
    axes.set(xlabel=label, ylabel="share of all", ylim=(0, 1))
