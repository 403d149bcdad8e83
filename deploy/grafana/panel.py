"""A panel is a title, a unit, and queries with their legends; `build.py` makes JSON of it.

`W` in a query stands for the selector that every panel shares: namespace and instance, both "all" at first.
"""

from dataclasses import dataclass

RATE = "$__rate_interval"
FULL, HALF, QUARTER = 24, 12, 6


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` are (PromQL, legend); `kind` is Grafana's type."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""
    kind: str = "timeseries"
    width: int = HALF
    stack: bool = False


def rate(metric: str, by: str = "", more: str = "") -> str:
    """Sum of a counter's rate, per second."""
    inner = f"rate({metric}{{W{more}}}[{RATE}])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(q: float, metric: str, by: str = "", more: str = "") -> str:
    """A quantile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{W{more}}}[{RATE}])))"


def mean(metric: str, by: str = "", more: str = "") -> str:
    """Mean of a histogram's observations."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric}_sum{{W{more}}}[{RATE}])) / sum{group} (rate({metric}_count{{W{more}}}[{RATE}]))"


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    """p50, p90 and p99."""
    return tuple((quantile(q, metric), f"p{round(q * 100)}") for q in (0.5, 0.9, 0.99))


def gauge(metric: str, by: str = "", more: str = "") -> str:
    """Sum of a gauge."""
    return f"sum by ({by}) ({metric}{{W{more}}})" if by else f"sum({metric}{{W{more}}})"
