"""docs/metrics.md says what router, registry and workers really export: each name, type and label, and nothing else."""

import ast
import re
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton_bootstrap.app import RegistryCollector
from baton_core.registry import NeedsProbe, RegistryTable
from baton_engine.transfer.tally import Tally
from baton_io.registry_routes import RegistryRoutes
from baton_router.failures import RETRYABLE
from baton_router.metrics import RouterMetrics, TargetFigures

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy/prometheus"))

import metrics_reference as reference  # noqa: E402

COUNTING = ("count", "set_count", "gauge", "observe", "_sample")
"""Methods of a worker's metrics whose first argument is a metric's name."""
SNAPSHOTS = ("gauges", "tally", "metrics")
"""Modules that make what a rank tells its app, and what the app shows."""
NAME = re.compile(r"[a-z][a-z_]+(\{.*)?")


def test_the_page_is_what_its_table_says() -> None:
    assert reference.PAGE.read_text() == reference.page(), "run deploy/prometheus/metrics_reference.py"


def test_every_metric_is_listed_once_with_a_meaning_and_a_unit() -> None:
    names = [f"{role} {entry.name}" for entry in reference.ENTRIES for role in entry.roles]
    assert len(names) == len(set(names)) > 60
    for entry in reference.ENTRIES:
        assert entry.shown_unit != "–" and len(entry.text) > 10, entry.name
        assert entry.name.endswith("_total") is (entry.kind == "counter"), entry.name


def test_the_router_exports_exactly_that() -> None:
    metrics = RouterMetrics()
    metrics.finished("/generate", 200, 0.1)
    metrics.first_byte(0.1, 0.01, 0.08)
    metrics.retried(next(iter(RETRYABLE)))
    figures = TargetFigures(
        role="prefill", worker="http://p", dp_rank="0", in_flight=0, load=0, is_open=False, served=1, failed=0
    )
    metrics.targets_from(lambda: [figures])
    text = metrics.export().decode()
    assert reference.differences(text) == []
    assert set(reference.families(text)) == set(reference.known("router"))


async def nobody(_question: NeedsProbe) -> bool:
    """No worker answers."""
    return False


def test_the_registry_exports_exactly_that() -> None:
    registry = CollectorRegistry()
    routes = RegistryRoutes.alone(RegistryTable("life"), clock=lambda: 0, probe=nobody, token=None)
    routes.count("GET /route", 200)
    registry.register(RegistryCollector(routes, lambda: 0))
    text = generate_latest(registry).decode()
    assert reference.differences(text) == []
    assert set(reference.families(text)) == set(reference.known("bootstrap"))


def counted(tree: ast.Module, *, is_snapshot: bool) -> set[str]:
    """Every metric name that a source file counts, sets or observes; where snapshots are made, every key of a table."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COUNTING:
            found += node.args[:1]
        if is_snapshot and isinstance(node, ast.Dict):
            found += [key for key in node.keys if key is not None]
        if is_snapshot and isinstance(node, ast.DictComp):
            found.append(node.key)
        if is_snapshot and isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.append(node.slice)
        if is_snapshot and isinstance(node, ast.Return) and isinstance(node.value, ast.JoinedStr):
            found.append(node.value)  # a helper that makes a key with labels
    texts = [leading_text(node) for node in found]
    return {text.partition("{")[0] for text in texts if NAME.fullmatch(text)}


def leading_text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return leading_text(node.values[0])
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_workers_count_exactly_what_the_page_lists() -> None:
    names: set[str] = set()
    for package in ("baton_worker", "baton_engine"):
        for path in sorted((ROOT / "shared" / package).rglob("*.py")):
            is_snapshot = path.stem in SNAPSHOTS
            if is_snapshot or "metrics" in path.read_text():
                names |= counted(ast.parse(path.read_text()), is_snapshot=is_snapshot)
    names.discard("le")  # a label, of the module that renders
    names |= {key.partition("{")[0] for key in (*Tally().counters(), *Tally().samples())}
    listed = {entry.name for entry in reference.ENTRIES if entry.roles[0] in reference.WORKERS}
    assert names - {"le"} == listed, "le is the label of buckets"


@pytest.mark.parametrize("role", ["router", "bootstrap", "prefill", "decode"])
def test_what_a_real_stack_exported_is_listed_with_its_type_and_labels(role: str) -> None:
    assert reference.differences((ROOT / f"tests/deploy/scrape/{role}.prom").read_text()) == []


def test_a_difference_is_noticed() -> None:
    text = (
        "# TYPE baton_decode_pages counter\nbaton_decode_pages 1\n# TYPE baton_decode_new gauge\nbaton_decode_new 1\n"
    )
    text += '# TYPE baton_decode_links gauge\nbaton_decode_links{peer="x"} 1\n'
    assert reference.differences(text) == [
        "baton_decode_pages is a counter, not a gauge",
        "baton_decode_new (gauge) is not in the table",
        "baton_decode_links also has labels ['peer']",
    ]
