"""docs/reliability.md speaks the truth: every report and hazard has a row, and every test that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
REPORTS = {
    "A": (1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16),
    "B": (1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17),
    "C": (1, 2, 4, 5, 7, 8, 10, 11),
    "F": (1, 2, 4, 5, 7, 8, 10, 11),
    "H": (1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19),
    "I": (1, 2, 4, 5, 7, 8, 10, 11),
    "J": (1, 2, 4, 5, 7, 8, 10, 11),
    "K": (1, 2, 4, 5, 7),
    "L": (1, 2, 4, 5, 7),
}
HAZARDS = range(1, 56)
NAMED = re.compile(r"`(test_\w+)::(test_\w+)`")


def rows() -> list[tuple[str, str]]:
    """Every row of a table, without its head, and the title of its section: theme H is not the hazards."""
    title, found = "", []
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            title = line
        elif line.startswith("| ") and "shown by" not in line:
            found.append((title, line))
    return found


@cache
def existing() -> set[tuple[str, str]]:
    """Every test there is: file and function."""
    return {
        (path.stem, node.name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_test_that_the_page_names_exists() -> None:
    named = set(NAMED.findall(PAGE.read_text()))
    assert len(named) > 50
    assert named - existing() == set()


def test_every_report_and_hazard_has_a_row_with_a_test_or_a_reason() -> None:
    wanted = {f"{theme}{number:02}" for theme, numbers in REPORTS.items() for number in numbers}
    wanted |= {f"hazard H{number}" for number in HAZARDS}
    found: set[str] = set()
    for title, row in rows():
        kind = "hazard " if title == "## Hazards" else ""
        found |= {kind + name for name in re.findall(r"\b(?:[ABCFIJKL]\d\d|H\d+)\b", row.split("|")[1])}
        assert NAMED.search(row) or "cannot occur" in row, row
    assert found == wanted
