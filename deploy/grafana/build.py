"""Writes the dashboards: `python deploy/grafana/build.py [FOLDER]`, by default deploy/grafana/dashboards.

What they show is in `panels.py` and `worker_panels.py`. The data source is a variable: the files work in any Grafana.
"""

import json
import sys
from pathlib import Path
from typing import Any

from panel import FULL, Panel
from panels import DASHBOARDS

SELECTOR = 'namespace=~"$namespace", instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def main(arguments: list[str]) -> None:
    """Write every dashboard."""
    folder = Path(arguments[0]) if arguments else Path(__file__).parent / "dashboards"
    for name, (title, panels) in DASHBOARDS.items():
        text = json.dumps(dashboard(name, title, panels), indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def dashboard(name: str, title: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    """Grafana's JSON of one dashboard; panels flow from left to right."""
    placed, x, y, row_height = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > FULL:
            x, y, row_height = 0, y + row_height, 0
        height = 4 if panel.kind == "stat" else 8
        placed.append(_panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": height}))
        x, row_height = x + panel.width, max(row_height, height)
    return {
        "uid": f"baton-{name}",
        "title": f"Baton / {title}",
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "tags": ["baton"],
                "title": "Baton",
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {
            "list": [
                _datasource_variable(),
                _variable("namespace", '{__name__=~"baton_.+_(ready|workers)"}'),
                _variable("instance", '{__name__=~"baton_.+_(ready|workers)", namespace=~"$namespace"}'),
            ]
        },
        "annotations": {"list": []},
        "panels": placed,
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.replace("{W", "{" + SELECTOR),
            "legendFormat": legend,
        }
        for index, (query, legend) in enumerate(panel.queries)
    ]
    custom = {
        "fillOpacity": 20 if panel.stack else 0,
        "stacking": {"mode": "normal" if panel.stack else "none"},
        "showPoints": "never",
    }
    return {
        "id": number,
        "title": panel.title,
        "description": panel.help,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom if panel.kind == "timeseries" else {}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        if panel.kind == "timeseries"
        else {"reduceOptions": {"calcs": ["lastNotNull"]}},
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source", "current": {}}


def _variable(label: str, series: str) -> dict[str, Any]:
    # `.*` as "all" also matches where the label is missing, as `namespace` is under Compose.
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({series}, {label})", "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    main(sys.argv[1:])
