"""What a process of the stack holds of the operating system: descriptors, sockets, mappings, threads, memory of its own."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SLACK = 12
"""Connections that a pool may keep, and what allocators map on their own: no leak of one a fault stays below it for long."""
MEMORY_SLACK_KB = 64 * 1024
MEMORY_RATIO = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Counts of one process."""

    descriptors: int
    sockets: int
    shared_mappings: int  # of files: pools of peers are mapped as such
    threads: int
    memory_kb: int  # anonymous and resident


def held_by(pid: int) -> Held:
    """What this process holds now. Raises OSError when it is gone."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed since
            links.append(os.readlink(descriptor))
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return Held(
        descriptors=len(links),
        sockets=sum(link.startswith("socket:") for link in links),
        shared_mappings=sum("/memfd:" in line or "/dev/shm/" in line for line in maps),
        threads=int(status["Threads"]),
        memory_kb=int(status["RssAnon"].split()[0]),
    )


def of_stack(state: list[dict[str, Any]]) -> dict[str, Held]:
    """Of every process, by its place in the stack: a restarted one is compared with what was there before it."""
    found = {}
    for entry in state:
        name = f"{entry['role']} {entry['index']}"
        found[name] = held_by(entry["pid"])
        for number, rank in enumerate(entry.get("ranks", [])):
            found[f"{name} rank {number}"] = held_by(rank["pid"])
    return found


def grown(before: Mapping[str, Held], now: Mapping[str, Held]) -> list[str]:
    """What is held now and was not before, beyond what is no leak."""
    found = []
    for name, one in now.items():
        for field in fields(Held):
            was, has = getattr(before[name], field.name), getattr(one, field.name)
            most = was * MEMORY_RATIO + MEMORY_SLACK_KB if field.name == "memory_kb" else was + SLACK
            if has > most:
                found.append(f"{name}: {field.name} {was} -> {has}")
    return found
