"""Every query of ours: those of the dashboards' panels, and those of the recording and alert rules.

`python tests/deploy/queries.py http://127.0.0.1:9090` asks a living Prometheus each panel's query and each recording rule,
and fails where one returns nothing.
"""

import json
import math
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
RULES = ROOT / "deploy/prometheus/rules.yml"
SCRAPES = sorted((ROOT / "tests/deploy/scrape").glob("*.prom"))
VARIABLES = {"$namespace": ".*", "$instance": ".*", "$__rate_interval": "2m"}


def panels() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every panel's query, with the dashboards' variables filled in."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                query = target["expr"]
                for name, value in VARIABLES.items():
                    query = query.replace(name, value)
                yield f"{path.stem}: {panel['title']}", query


def rules(kind: str) -> Iterator[tuple[str, str]]:
    """(name, PromQL) of every rule; `kind` is `record` or `alert`."""
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            if kind in rule:
                yield rule[kind], rule["expr"]


def names(query: str) -> set[str]:
    """Metric names in a query."""
    return set(re.findall(r"\bbaton[:_][a-z0-9_:]+", re.sub(r'"(?!baton_\()[^"]*"', '""', query)))


def scraped() -> set[str]:
    """Every sample name in the scrapes of a real stack that are checked in."""
    lines = (line for path in SCRAPES for line in path.read_text(encoding="utf-8").splitlines())
    return {re.split(r"[{ ]", line, maxsplit=1)[0] for line in lines if line and not line.startswith("#")}


def ask(prometheus: str, query: str) -> int:
    """How many series Prometheus returns that have a value; NaN, what comes of nothing by nothing, is none."""
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    found = json.load(urllib.request.urlopen(url, timeout=10))["data"]["result"]
    return sum(not math.isnan(float(series["value"][1])) for series in found)


def without_data(prometheus: str) -> list[tuple[str, str]]:
    """(where, PromQL) of each panel's query, recording rule and recorded series that has no value now."""
    recorded = [(f"recorded: {name}", name) for name, _ in rules("record")]
    asked = [*panels(), *rules("record"), *recorded]
    return [(where, query) for where, query in asked if not ask(prometheus, query)]


def main(prometheus: str) -> int:
    """Ask everything; the number of queries without data."""
    empty = without_data(prometheus)
    for where, query in empty:
        print(f"no data: {where}\n    {query}")
    print(f"{len(empty)} queries without data")
    return len(empty)


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1].rstrip("/")) else 0)
