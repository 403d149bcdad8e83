"""Prometheus' text format, read; and what two scrapes of one process say about the time between them. Pure."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one process exported at one moment, by sample name."""

    at_s: float
    samples: Mapping[str, tuple[tuple[Labels, float], ...]]

    def series(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """Those of a name whose labels are these, among others."""
        for own, value in self.samples.get(name, ()):
            if all(own.get(label) == wanted for label, wanted in labels.items()):
                yield own, value

    def total(self, name: str, **labels: str) -> float | None:
        """Their sum, or None where there is none."""
        values = [value for _, value in self.series(name, **labels)]
        return sum(values) if values else None

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Their sums by the value of one label."""
        sums: dict[str, float] = {}
        for own, value in self.series(name, **labels):
            key = own.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def values_of(self, name: str, label: str) -> list[str]:
        """The values that a label has, in order of appearance."""
        return list(dict.fromkeys(own[label] for own, _ in self.series(name) if label in own))


def parse(text: str, at_s: float) -> Scrape:
    """What does not look like a sample is passed over: a view is no judge of a format."""
    samples: dict[str, list[tuple[Labels, float]]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        labels = {name: _ESCAPE.sub(_unescaped, value) for name, value in _LABEL.findall(match["labels"] or "")}
        samples.setdefault(match["name"], []).append((labels, value))
    return Scrape(at_s, {name: tuple(several) for name, several in samples.items()})


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts up to each bound, as exported; infinity last."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    @property
    def count(self) -> float:
        """Observations."""
        return self.counts[-1] if self.counts else 0.0

    def quantile(self, share: float) -> float | None:
        """As Prometheus computes it: linear inside a bucket; what lies beyond the last bound counts as that bound."""
        if not self.count:
            return None
        wanted = share * self.count
        below_bound, below_count = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= wanted and count > below_count:
                if bound == math.inf:
                    return below_bound
                return below_bound + (bound - below_bound) * (wanted - below_count) / (count - below_count)
            below_bound, below_count = bound, count
        return below_bound

    def since(self, before: "Histogram") -> "Histogram":
        """What came after `before`; everything, where that was another life of the process."""
        if before.bounds != self.bounds or any(a < b for a, b in zip(self.counts, before.counts, strict=True)):
            return self
        return Histogram(self.bounds, tuple(a - b for a, b in zip(self.counts, before.counts, strict=True)))

    def plus(self, other: "Histogram") -> "Histogram":
        """Both together; of other bounds than ours nothing is taken."""
        if not self.bounds:
            return other
        if other.bounds != self.bounds:
            return self
        return Histogram(self.bounds, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))


def histogram(scrape: Scrape, name: str, **labels: str) -> Histogram:
    """The histogram of that name, summed over the series that match."""
    sums: dict[float, float] = {}
    for own, value in scrape.series(f"{name}_bucket", **labels):
        bound = float(own.get("le", "nan"))
        sums[bound] = sums.get(bound, 0.0) + value
    ordered = sorted(sums.items())
    # A series that lacks a bound would make the sums fall: then no quantile can be trusted.
    if any(later < earlier for (_, earlier), (_, later) in pairwise(ordered)):
        return Histogram()
    return Histogram(tuple(bound for bound, _ in ordered), tuple(count for _, count in ordered))


@dataclass(frozen=True, slots=True)
class Window:
    """Two scrapes of one process; without `before`, everything since the process started."""

    now: Scrape
    before: Scrape | None = None

    @property
    def seconds(self) -> float:
        """Between the two; 0 where there is one."""
        return 0.0 if self.before is None else self.now.at_s - self.before.at_s

    def increase(self, name: str, **labels: str) -> float | None:
        """By how much a counter grew; None where there is no such counter."""
        after = self.now.total(name, **labels)
        if after is None or self.before is None:
            return after
        before = self.before.total(name, **labels) or 0.0
        return after - before if after >= before else after

    def rate(self, name: str, **labels: str) -> float | None:
        """Its growth a second; None where there is one scrape only."""
        grown = self.increase(name, **labels)
        return None if grown is None or self.seconds <= 0 else grown / self.seconds

    def increases(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Growth by the value of one label; what did not grow is left out."""
        found = {value: self.increase(name, **{**labels, label: value}) for value in self.now.values_of(name, label)}
        return {value: grown for value, grown in found.items() if grown}

    def histogram(self, name: str, **labels: str) -> Histogram:
        """What was observed in the window."""
        after = histogram(self.now, name, **labels)
        return after if self.before is None else after.since(histogram(self.before, name, **labels))
