"""`DIR/state.json`: which processes run, and everything needed to start each one again.

Written atomically and readable by its owner only, because BATON_* variables may hold keys. Changes are made under a
lock, so that two commands at once lose nothing.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from baton_cli.errors import CliError
from baton_cli.layout import WORKERS, ProcessSpec
from baton_cli.processes import Identity, Running

FILE_NAME = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A scheduler process of a worker; it writes into the worker's log."""

    rank: int
    pid: int
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A process: how it was started and what it is now."""

    spec: ProcessSpec
    pid: int
    started_ticks: int  # with the pid, identifies the process
    incarnation: str | int | None = None
    ranks: tuple[Rank, ...] = ()
    expected_exit: bool = False  # a command is stopping it: its end is no accident

    @property
    def running(self) -> Running:
        return Running(spec=self.spec, identity=Identity(self.pid, self.started_ticks))


def entry_of(process: Running) -> Entry:
    """The entry of a process that has just been started."""
    return Entry(spec=process.spec, pid=process.identity.pid, started_ticks=process.identity.started_ticks)


def expecting_exit(entry: Entry) -> Entry:
    """The same entry, marked as being stopped on purpose."""
    return replace(entry, expected_exit=True)


def read(directory: Path) -> list[Entry] | None:
    """The entries, or None where nothing runs. Raises CliError for a file that is not ours."""
    path = directory / FILE_NAME
    try:
        content = json.loads(path.read_bytes())
        return [_entry(raw) for raw in content["processes"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CliError(f"cannot read {path}: {error}") from error


def write(directory: Path, entries: Sequence[Entry]) -> None:
    """Replace whatever is there. Raises CliError."""
    with _locked(directory):
        _replace_file(directory / FILE_NAME, entries)


def update(directory: Path, change: Callable[[list[Entry]], list[Entry]]) -> None:
    """Replace the entries by `change(entries)`, unless somebody has removed the file meanwhile. Raises CliError."""
    with _locked(directory):
        entries = read(directory)
        if entries is not None:
            _replace_file(directory / FILE_NAME, change(entries))


def update_entry(directory: Path, spec: ProcessSpec, **changes: Any) -> None:
    """Change fields of one entry, if it is still there."""

    def change(entries: list[Entry]) -> list[Entry]:
        return [replace(entry, **changes) if entry.spec.name == spec.name else entry for entry in entries]

    update(directory, change)


def remove(directory: Path) -> None:
    """Forget everything; the logs stay."""
    (directory / FILE_NAME).unlink(missing_ok=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # The folder itself is what is locked: a lock file could be removed under somebody who waits for it.
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CliError(f"cannot write {directory / FILE_NAME}: {error.strerror or error}") from error


def _replace_file(path: Path, entries: Sequence[Entry]) -> None:
    content = json.dumps({"processes": [_plain(entry) for entry in entries]}, indent=2) + "\n"
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _plain(entry: Entry) -> dict[str, Any]:
    """One flat object, the format that tests and scripts read."""
    plain: dict[str, Any] = asdict(entry)
    plain = plain.pop("spec") | plain
    if entry.spec.bootstrap_port is None:
        del plain["bootstrap_port"]
    if entry.spec.role not in WORKERS:
        del plain["ranks"]
    return plain


def _entry(raw: dict[str, Any]) -> Entry:
    return msgspec.convert(raw | {"spec": raw}, Entry)
