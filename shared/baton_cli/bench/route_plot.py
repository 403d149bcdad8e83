"""A picture of `baton bench route`, as PNG. Needs matplotlib."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_cli.errors import CliError

if TYPE_CHECKING:
    from baton_cli.bench.route import PolicyFigures

INCHES = (13.0, 8.0)
PARTS = ("calm", "deaths", "slow")


def write_route_plot(path: Path, figures: Sequence["PolicyFigures"], title: str) -> None:
    """Four panels: TTFT curves, TTFT under faults, caches and balance, time of a choice. Raises CliError."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=INCHES, layout="constrained")
    (curves, faults), (caches, choices) = figure.subplots(2, 2)
    for one in figures:
        curves.plot(one.ttft_ms_curve, range(len(one.ttft_ms_curve)), label=one.policy)
    curves.set(xlabel="time to first token, calm (ms)", ylabel="% of requests", xscale="log", ylim=(0, 100))
    curves.legend(fontsize="small")
    _bars(
        faults,
        figures,
        {part: [one.parts[part].ttft_ms_p99 or 0.0 for one in figures] for part in PARTS},
        "TTFT p99 (ms)",
    )
    faults.set(yscale="log")
    cached = [100 * one.parts["calm"].cached_share for one in figures]
    _bars(caches, figures, {"cached": cached}, "% of prompt tokens cached, calm")
    caches.axhline(100 * figures[0].parts["calm"].cachable_share, linestyle="--", linewidth=1, label="could be")
    caches.legend(fontsize="small")
    _bars(
        choices,
        figures,
        {"p50": [one.choice_us_p50 for one in figures], "p99": [one.choice_us_p99 for one in figures]},
        "time of a choice (µs)",
    )
    choices.set(yscale="log")
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror or error}") from error


def _bars(axes: Any, figures: Sequence["PolicyFigures"], series: dict[str, list[float]], label: str) -> None:
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        axes.bar([place + number * width for place in range(len(values))], values, width, label=name)
    places = [place + 0.4 - width / 2 for place in range(len(figures))]
    axes.set_xticks(places, [one.policy for one in figures], rotation=20, ha="right", fontsize="small")
    axes.set(ylabel=label)
    if len(series) > 1:
        axes.legend(fontsize="small")
