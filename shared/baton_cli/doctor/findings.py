"""What the doctor finds, and how it is shown."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from baton_cli.show import BOLD, GREEN, RED, YELLOW, Screen

NAME_WIDTH = 16
INDENT = " " * (2 + 6 + NAME_WIDTH + 1)


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"  # it will work, but not well, or not for everybody
    FAIL = "fail"  # it will not work


COLOURS = {Level.OK: GREEN, Level.WARN: YELLOW, Level.FAIL: RED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line. `text` says what was seen and what it means; `advice` what to type or do next, empty where it is well."""

    level: Level
    name: str
    text: str
    advice: str = ""


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(level=Level.OK, name=name, text=text)


def warn(name: str, text: str, advice: str) -> Finding:
    """It will do, but."""
    return Finding(level=Level.WARN, name=name, text=text, advice=advice)


def fail(name: str, text: str, advice: str) -> Finding:
    """It will not do."""
    return Finding(level=Level.FAIL, name=name, text=text, advice=advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Findings about one thing."""

    title: str
    findings: tuple[Finding, ...]


def show_section(screen: Screen, section: Section) -> None:
    """A heading, a line each, and under what is not well what to do."""
    if not section.findings:
        return
    screen.line(section.title, BOLD)
    for finding in section.findings:
        word = screen.paint(f"{finding.level.value:<4}", COLOURS[finding.level])
        screen.write(f"  {word}  {finding.name:<{NAME_WIDTH}} {finding.text}\n")
        for line in finding.advice.splitlines():
            screen.line(f"{INDENT}→ {line}")
    screen.line()


def count(findings: Iterable[Finding]) -> dict[Level, int]:
    """How many of each level."""
    counts = dict.fromkeys(Level, 0)
    for finding in findings:
        counts[finding.level] += 1
    return counts


def summary(counts: dict[Level, int]) -> str:
    """The last line."""
    return f"{counts[Level.OK]} ok, {_many(counts[Level.WARN], 'warning')}, {_many(counts[Level.FAIL], 'failure')}"


def as_json(sections: Sequence[Section]) -> dict[str, Any]:
    """The same for machines."""
    counts = count(finding for section in sections for finding in section.findings)
    return {
        "healthy": counts[Level.FAIL] == 0,
        "counts": {level.value: number for level, number in counts.items()},
        "sections": [
            {
                "title": section.title,
                "findings": [asdict(finding) | {"level": finding.level.value} for finding in section.findings],
            }
            for section in sections
        ],
    }


def _many(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
