"""What people see: progress lines, the table of addresses, bad news. Plain ANSI on a terminal, plain lines elsewhere."""

import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from baton_cli.fleet import QUESTION, Answer, chat_body
from baton_cli.processes import ProcessFailed, Running, Stage, Status, describe_exit, log_tail
from baton_cli.state import Entry

RED, GREEN, YELLOW, BOLD, DIM, PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[1m", "\x1b[2m", "\x1b[0m"
COLOURS = {Stage.STARTING: DIM, Stage.LOADING: YELLOW, Stage.WAITING: YELLOW, Stage.READY: GREEN}
PERCENT_STEP = 25  # between two lines about the same load, where lines cannot be repainted


class Screen:
    """A stream for people. A terminal that has gone away is no error: the processes matter more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.tty = stream.isatty()

    def line(self, text: str = "", colour: str = PLAIN) -> None:
        self.write(self.paint(text, colour) + "\n")

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            return

    def paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{PLAIN}" if self.tty and colour != PLAIN else text

    @property
    def columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80


class Progress:
    """One line a process, repainted in place on a terminal, else written when something changed."""

    def __init__(self, screen: Screen, processes: Sequence[Running]) -> None:
        self._screen = screen
        self._names = [process.spec.name for process in processes]
        self._began = time.monotonic()
        self._ready_after: dict[str, float] = {}
        self._said: dict[str, tuple[Stage, int]] = {}
        self._painted = False

    def show(self, statuses: Sequence[Status]) -> None:
        """Paint how far every process is; on a terminal in place, else a line a change."""
        elapsed_seconds = time.monotonic() - self._began
        for name, status in zip(self._names, statuses, strict=True):
            if status.stage is Stage.READY:
                self._ready_after.setdefault(name, elapsed_seconds)
        if self._screen.tty:
            self._repaint(statuses, elapsed_seconds)
        else:
            self._write_changes(statuses)

    def _repaint(self, statuses: Sequence[Status], elapsed_seconds: float) -> None:
        lines = []
        for name, status in zip(self._names, statuses, strict=True):
            seconds = self._ready_after.get(name, elapsed_seconds)
            # Cut before colouring: a line that wraps would be repainted in the wrong place.
            text = f"  {name:<12} {seconds:6.1f} s  {status.text}"[: self._screen.columns - 1]
            lines.append("\x1b[2K" + self._screen.paint(text, COLOURS[status.stage]) + "\n")
        up = f"\x1b[{len(lines)}A" if self._painted else ""
        self._screen.write(up + "".join(lines))
        self._painted = True

    def _write_changes(self, statuses: Sequence[Status]) -> None:
        for name, status in zip(self._names, statuses, strict=True):
            key = (status.stage, status.percent // PERCENT_STEP)
            if self._said.get(name) != key:
                self._said[name] = key
                after = f" after {self._ready_after[name]:.1f} s" if status.stage is Stage.READY else ""
                self._screen.line(f"  {name}: {status.text}{after}")


def show_started(screen: Screen, entries: Sequence[Entry], model: str, answer: Answer, ready_seconds: float) -> None:
    """Everything is ready and has answered: the answer, the addresses, and commands to copy."""
    screen.line()
    screen.line(
        f"Ready in {ready_seconds:.1f} s. A completion went through the router in {answer.seconds:.2f} s:", BOLD
    )
    screen.line(f"  {QUESTION}")
    screen.line(f"  > {answer.text}", GREEN)
    screen.line()
    rows = [("PROCESS", "URL", "PID", "LOG")]
    rows += [(entry.spec.name, entry.spec.url, str(entry.pid), short_path(entry.spec.log)) for entry in entries]
    for row in aligned(rows):
        screen.line(f"  {row}")
    router = next(entry for entry in entries if entry.spec.role == "router")
    screen.line()
    screen.line("Try it:", BOLD)
    screen.line(f"  {curl(router.spec.url, model, stream=False)}")
    screen.line("Token by token:", BOLD)
    screen.line(f"  {curl(router.spec.url, model, stream=True)}")
    screen.line()


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with columns under each other."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def curl(router_url: str, model: str, *, stream: bool) -> str:
    """A command line to paste into a shell."""
    body = json.dumps(chat_body(model) | ({"stream": True} if stream else {}))
    options = "-sN" if stream else "-s"
    header = "-H 'content-type: application/json'"
    return f"curl {options} {router_url}/v1/chat/completions {header} -d {shlex.quote(body)}"


def short_path(path: str) -> str:
    """Relative to the working folder where it lies in it."""
    full = Path(path)
    return str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) else path


def restart_line(directory: Path, process: Running) -> str:
    """The command that starts this process again."""
    state = shlex.quote(short_path(str(directory)))
    return f"baton restart --state {state} {process.spec.role} {process.spec.index}"


def show_death(screen: Screen, process: Running, directory: Path) -> None:
    """A process died on its own while others go on: say it so that nobody overlooks it."""
    screen.line()
    screen.line(f"!! {process.spec.name} {describe_exit(process.exit_code)}; the other processes go on.", RED + BOLD)
    for line in quoted_tail(process):
        screen.line(line)
    screen.line("   It is not started again by itself. To do so:", BOLD)
    screen.line(f"     {restart_line(directory, process)}")
    screen.line()


def failure_text(failure: ProcessFailed) -> str:
    """Why nothing was started: what happened, the end of the log, what to do."""
    process = failure.process
    tail = log_tail(process.spec.log)
    lines = [f"{process.spec.name} {failure.what} while starting.", *quoted_tail(process)]
    return "\n".join([*lines, advice(process.spec.role, failure.exit_code, tail)])


def quoted_tail(process: Running) -> list[str]:
    """The end of the log, set apart."""
    tail = log_tail(process.spec.log)
    where = short_path(process.spec.log)
    return [f"   the end of {where}:", *(f"   | {line}" for line in tail)] if tail else [f"   {where} is empty"]


def advice(role: str, exit_code: int | None, tail: Sequence[str]) -> str:
    """What to do about a process that did not start."""
    text = "\n".join(tail).lower()
    if "address already in use" in text:
        return "Another program took one of its ports: try again, or choose another with --port."
    if "no module named" in text:
        return "Something is not installed: run `make install`."
    if exit_code == 2:
        return f"It refuses a setting (--set, BATON_* or the file): `baton-{role} --help` lists what it takes."
    if exit_code == -9:
        return "It was killed from outside, most likely for lack of memory: start fewer workers or a smaller model."
    if exit_code is None:
        return "If it only needs longer: --ready-timeout-seconds."
    return "The lines above say why; nothing was left running."
