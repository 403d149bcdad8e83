"""`baton up`: start everything, prove that it answers, then watch it (or leave, with `--detach`)."""

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from baton_cli import state
from baton_cli.errors import CliError, Interrupted
from baton_cli.fleet import first_completion, live_entry, stop_in_order
from baton_cli.interrupt import Interrupt
from baton_cli.layout import DEFAULT_DTYPE, DEFAULT_MODEL, Host, ProcessSpec, UpOptions, plan
from baton_cli.ports import free_ports, is_free
from baton_cli.processes import ProcessFailed, Running, spawn, wait_ready
from baton_cli.processor import multiplies_bfloat16_here
from baton_cli.show import Progress, Screen, failure_text, show_death, show_started

WATCH_SECONDS = 0.3
FAILED_START_GRACE_SECONDS = 5.0
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start: where the state goes, what the processes inherit, how long to wait."""

    directory: Path
    environ: Mapping[str, str]
    detach: bool
    ready_timeout_seconds: float
    grace_seconds: float


def up(options: UpOptions, launch: Launch, screen: Screen, interrupt: Interrupt) -> int:
    """The exit code. Raises CliError when something cannot be started; then nothing is left running."""
    refuse_if_running(launch.directory)
    if not is_free(options.port):
        raise CliError(f"port {options.port} is taken by another program: choose another with --port")
    directory = writable_directory(launch)
    host = _host(launch, directory)
    specs = plan(options, host, free_ports(options.free_ports_needed, taken=options.port))
    if options.dtype is None and any("float32" in spec.argv for spec in specs):  # nobody said so, environment included
        screen.line(f"This processor has no {DEFAULT_DTYPE}: serving in float32, unless told otherwise (--dtype)")
    processes: list[Running] = []
    with ExitStack() as cleanup:
        cleanup.callback(state.remove, directory)
        cleanup.callback(_stop_failed_start, processes)
        try:
            _start(specs, processes, options, directory, launch, screen, interrupt)
        except ProcessFailed as failure:
            raise CliError(failure_text(failure)) from failure
        except Interrupted:
            screen.line("Interrupted while starting: stopping what was started.")
            return EXIT_INTERRUPTED
        cleanup.pop_all()
    if launch.detach:
        screen.line(f"Running in the background. To stop: baton down --state {directory}")
        return 0
    return _serve_until_interrupted(processes, directory, launch, screen, interrupt)


def refuse_if_running(directory: Path) -> None:
    """Raises CliError when processes of this state are alive: they would be forgotten."""
    alive = [entry.spec.name for entry in state.read(directory) or [] if entry.running.alive]
    if alive:
        raise CliError(
            f"already running from {directory}: {', '.join(alive)}. Stop them with `baton down --state {directory}`, "
            "or give this start a --state and a --port of its own"
        )


def writable_directory(launch: Launch) -> Path:
    """The state's folder; in the foreground a temporary one where that cannot be written. Raises CliError."""
    try:
        launch.directory.mkdir(parents=True, exist_ok=True)
        if os.access(launch.directory, os.W_OK):
            return launch.directory.resolve()
        reason = "not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    if launch.detach:
        raise CliError(f"cannot keep the state in {launch.directory} ({reason}): give another --state")
    return Path(tempfile.mkdtemp(prefix="baton-", dir=launch.environ.get("XDG_RUNTIME_DIR")))


def _host(launch: Launch, directory: Path) -> Host:
    return Host(
        python=sys.executable,
        cwd=str(Path.cwd()),
        logs=directory / "logs",
        env={name: value for name, value in launch.environ.items() if name.startswith("BATON_")},
        cores=tuple(sorted(os.sched_getaffinity(0))),
        multiplies_bfloat16=multiplies_bfloat16_here(),
    )


def _start(
    specs: Sequence[ProcessSpec],
    processes: list[Running],
    options: UpOptions,
    directory: Path,
    launch: Launch,
    screen: Screen,
    interrupt: Interrupt,
) -> None:
    """Start all at once and wait. Appends to `processes` what it started, also when it raises."""
    began = time.monotonic()
    for spec in specs:
        processes.append(spawn(spec, launch.environ))
    # Already now: should this command be killed while it waits, `baton down` still finds them.
    state.write(directory, [state.entry_of(process) for process in processes])
    screen.line(f"Starting {len(processes)} processes; logs in {directory / 'logs'}")
    wait_ready(
        processes,
        timeout_seconds=launch.ready_timeout_seconds,
        show=Progress(screen, processes).show,
        interrupted=interrupt.requested,
    )
    ready_seconds = time.monotonic() - began
    entries = [live_entry(process) for process in processes]
    model = options.model or launch.environ.get("BATON_MODEL") or DEFAULT_MODEL
    try:
        answer = first_completion(processes[0].spec.url, model, interrupt.requested)
    except CliError as error:
        text = f"every process is ready, but no completion came through; the logs are in {directory / 'logs'}\n{error}"
        raise CliError(text) from error
    state.write(directory, entries)
    show_started(screen, entries, model, answer, ready_seconds)


def _stop_failed_start(processes: Sequence[Running]) -> None:
    stop_in_order(processes, grace_seconds=FAILED_START_GRACE_SECONDS, hurry=lambda: False)


def _serve_until_interrupted(
    processes: Sequence[Running], directory: Path, launch: Launch, screen: Screen, interrupt: Interrupt
) -> int:
    screen.line("Ctrl-C stops everything.")
    watch = Watch(processes, directory, screen)
    while not interrupt.wait(WATCH_SECONDS):
        if watch.look() == 0:
            screen.line("No process is left.")
            break
    # What `baton restart` started from another terminal is stopped too.
    state.update(directory, lambda entries: [state.expecting_exit(entry) for entry in entries])
    screen.line("Stopping: router, then workers (running requests finish), then registry. Ctrl-C again: at once.")
    killed = stop_in_order(watch.processes, grace_seconds=launch.grace_seconds, hurry=interrupt.insisted)
    for process in killed:
        screen.line(f"{process.spec.name} did not end within {launch.grace_seconds:.0f} s and was killed.")
    state.remove(directory)
    return 0 if interrupt.requested() or not watch.accidents else 1


class Watch:
    """Looks after the processes of a foreground `up`: reports deaths, follows restarts by other commands."""

    def __init__(self, processes: Sequence[Running], directory: Path, screen: Screen) -> None:
        self._directory = directory
        self._screen = screen
        self._known = {process.spec.name: process for process in processes}
        self._dead: set[str] = set()
        self.accidents = 0

    @property
    def processes(self) -> list[Running]:
        return list(self._known.values())

    def look(self) -> int:
        """Report what changed since the last look; returns how many processes are alive or about to be."""
        entries = {entry.spec.name: entry for entry in state.read(self._directory) or []}
        for name, process in list(self._known.items()):
            entry = entries.get(name)
            if entry is not None and entry.running.identity != process.identity:
                self._known[name] = entry.running
                self._dead.discard(name)
                self._screen.line(f"{name} was started again (pid {entry.pid}).")
            elif name not in self._dead and not process.alive:
                self._dead.add(name)
                self._report(process, expected=entry is None or entry.expected_exit)
        coming_back = [entry for entry in entries.values() if entry.expected_exit]
        return len(self._known) - len(self._dead) + len(coming_back)

    def _report(self, process: Running, *, expected: bool) -> None:
        if expected:
            self._screen.line(f"{process.spec.name} was stopped by another command.")
        else:
            self.accidents += 1
            show_death(self._screen, process, self._directory)
