"""Stacks of our own for a measurement: started by the machinery of `baton up`, in a state of their own, stopped after it.

BATON_* variables of the caller are left out on purpose: a figure must come from its command line alone.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton_cli import state
from baton_cli.errors import CliError
from baton_cli.fleet import first_completion, stop_in_order
from baton_cli.interrupt import Interrupt
from baton_cli.layout import DEFAULT_MODEL, Host, RoleSetting, UpOptions, plan
from baton_cli.ports import free_ports
from baton_cli.processes import ProcessFailed, Running, spawn, wait_ready
from baton_cli.show import Progress, Screen, failure_text

READY_TIMEOUT_SECONDS = 330.0
GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A stack to start. `cores` says where each worker computes: one entry (colocated) or two (prefill, decode)."""

    name: str
    cores: tuple[str, ...]
    model: str | None = None
    dtype: str | None = None
    transfer: str | None = None
    settings: tuple[RoleSetting, ...] = ()

    @property
    def options(self) -> UpOptions:
        """As `baton up` would be told."""
        pair = len(self.cores) == 2
        pins = [RoleSetting(role="prefill", key="cores", value=self.cores[0])] if pair else []
        pins.append(RoleSetting(role="decode", key="cores", value=self.cores[-1]))
        return UpOptions(
            prefill=int(pair),
            decode=int(pair),
            colocated=int(not pair),
            model=self.model,
            dtype=self.dtype,
            transfer=self.transfer,
            port=free_ports(1, taken=0)[0],
            settings=(*pins, *self.settings),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A stack that runs."""

    name: str
    url: str
    model: str
    processes: tuple[Running, ...]

    @property
    def leaders(self) -> list[int]:
        """The processes from which everything of this stack descends."""
        return [process.identity.pid for process in self.processes]

    def worker_urls(self, role: str) -> list[str]:
        """Of the workers of one role."""
        return [process.spec.url for process in self.processes if process.spec.role == role]


@contextmanager
def running(wanted: Wanted, environ: Mapping[str, str], screen: Screen, interrupt: Interrupt) -> Iterator[Stack]:
    """A stack that has answered, for as long as the context lasts. Raises CliError, Interrupted."""
    options = wanted.options
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        directory = Path(folder)
        host = Host(python=sys.executable, cwd=str(Path.cwd()), logs=directory / "logs", env={}, cores=())
        specs = plan(options, host, free_ports(options.free_ports_needed, taken=options.port))
        screen.line(f"Starting {wanted.name}; to stop it should this command be killed: baton down --state {directory}")
        processes: list[Running] = []
        try:
            for spec in specs:
                processes.append(spawn(spec, environ))
                state.write(directory, [state.entry_of(process) for process in processes])
            _wait(processes, screen, interrupt)
            model = wanted.model or DEFAULT_MODEL
            first_completion(processes[0].spec.url, model, interrupt.requested)
            url = processes[0].spec.url
            yield Stack(name=wanted.name, url=url, model=model, processes=tuple(processes))
        finally:
            stop_in_order(processes, grace_seconds=GRACE_SECONDS, hurry=lambda: False)


def _wait(processes: Sequence[Running], screen: Screen, interrupt: Interrupt) -> None:
    progress = Progress(screen, processes)
    try:
        wait_ready(
            processes,
            timeout_seconds=READY_TIMEOUT_SECONDS,
            show=progress.show,
            interrupted=interrupt.requested,
        )
    except ProcessFailed as failure:
        raise CliError(failure_text(failure)) from failure
