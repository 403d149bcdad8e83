"""Scrape configuration, rules and dashboards: valid, tested, and made of metrics that a real stack shows."""

import json
import re
import sys
from pathlib import Path

import yaml

from baton_core.errors import Reason
from deploy import queries
from deploy.tools import ROOT, promtool, run

PROMETHEUS = ROOT / "deploy/prometheus"
GRAFANA = ROOT / "deploy/grafana"


def test_promtool_accepts_configuration_and_rules() -> None:
    for kind, name in (("config", "prometheus.yml"), ("rules", "rules.yml")):
        done = run(promtool(), "check", kind, str(PROMETHEUS / name))
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_where_it_must_and_only_there() -> None:
    done = run(promtool(), "test", "rules", str(PROMETHEUS / "rules.test.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    tests = yaml.safe_load((PROMETHEUS / "rules.test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    alerts = {name for name, _ in queries.rules("alert")}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == alerts
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == alerts


def test_metrics_of_a_real_stack_are_clean() -> None:
    for path in queries.SCRAPES:
        done = run(promtool(), "check", "metrics", stdin=path.read_text())
        assert done.returncode == 0, f"{path.name}: {done.stdout + done.stderr}"


def test_every_metric_of_a_panel_or_rule_exists() -> None:
    known = queries.scraped() | {name for name, _ in queries.rules("record")}
    asked = [*queries.panels(), *queries.rules("record"), *queries.rules("alert")]
    missing = {(where, name) for where, query in asked for name in queries.names(query) - known}
    assert not missing
    assert all(queries.names(query) or "up{" in query or "__name__" in query for _, query in asked)


def test_labels_that_queries_select_by_exist_too() -> None:
    seen: dict[str, set[str]] = {}
    for path in queries.SCRAPES:
        for label, value in re.findall(r'(\w+)="([^"]*)"', path.read_text()):
            seen.setdefault(label, set()).add(value)
    # Failures that the captured load did not provoke; the words are those of `baton_core.errors.Reason`.
    seen["reason"] |= {reason.name.lower() for reason in Reason}
    wrong = []
    for where, query in [*queries.panels(), *queries.rules("record"), *queries.rules("alert")]:
        for label, value in re.findall(r'\b(stage|queue|state|role|reason|outcome)=~?"([^"]*)"', query):
            wrong += [(where, label, word) for word in value.split("|") if word not in seen[label]]
    assert not wrong


def test_every_alert_has_a_severity_and_a_runbook_that_exists() -> None:
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in (ROOT / "docs/operations.md").read_text().splitlines()
        if line.startswith("#")
    }
    for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
                assert page == "docs/operations.md" and anchor in anchors, rule["alert"]
                assert rule["labels"]["severity"] in ("critical", "warning")
                assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_the_dashboards_are_what_their_source_says(tmp_path: Path) -> None:
    done = run(sys.executable, str(GRAFANA / "build.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text() for path in tmp_path.glob("*.json")}
    kept = {path.name: path.read_text() for path in queries.DASHBOARDS}
    assert made == kept, "run deploy/grafana/build.py"
    assert set(kept) == {
        f"{name}.json" for name in ("overview", "request-flow", "prefill", "decode", "kv-plane", "router")
    }


def test_dashboards_fit_any_grafana_and_overlap_nowhere() -> None:
    uids = set()
    for path in queries.DASHBOARDS:
        board = json.loads(path.read_text())
        uids.add(board["uid"])
        assert [one["name"] for one in board["templating"]["list"]] == ["datasource", "namespace", "instance"]
        cells: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            assert (
                panel["datasource"]["uid"] == "${datasource}"
                and panel["targets"]
                and panel["fieldConfig"]["defaults"]["unit"]
            )
            place = panel["gridPos"]
            covered = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not covered & cells and place["x"] + place["w"] <= 24, panel["title"]
            cells |= covered
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert len(uids) == len(queries.DASHBOARDS)


def test_a_panel_of_one_role_shows_only_that_role() -> None:
    for where, query in queries.panels():
        board = where.partition(":")[0]
        if board in ("prefill", "decode"):
            assert all(name.startswith(f"baton_{board}_") for name in queries.names(query)), where


def test_grafana_finds_datasource_and_dashboards_where_compose_mounts_them() -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in service["volumes"] if volume.startswith("./"))
    assert mounts == {
        "./deploy/grafana/provisioning": "/etc/grafana/provisioning",
        "./deploy/grafana/dashboards": "/var/lib/grafana-dashboards",
    }
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/baton.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana-dashboards" and provider["type"] == "file"
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090" and source["isDefault"] is True
