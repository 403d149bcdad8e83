"""`baton restart`: stop one process and start it exactly as it was started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_cli import state
from baton_cli.errors import CliError, Interrupted, UsageError
from baton_cli.fleet import live_entry
from baton_cli.interrupt import Interrupt
from baton_cli.processes import ProcessFailed, spawn, stop, wait_ready
from baton_cli.show import Progress, Screen, failure_text
from baton_cli.state import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Which process, and how long to wait for it."""

    directory: Path
    role: str
    index: int | None
    kill: bool
    environ: Mapping[str, str]
    grace_seconds: float
    ready_timeout_seconds: float


def restart(what: Restart, screen: Screen, interrupt: Interrupt) -> int:
    """The exit code: 0 once the new process is ready. Raises CliError."""
    entries = state.read(what.directory)
    if entries is None:
        raise CliError(f"nothing runs from {what.directory}: start it with `baton up`")
    entry = choose(entries, what.role, what.index)
    spec, old = entry.spec, entry.running
    state.update_entry(what.directory, spec, expected_exit=True)
    if old.alive:
        screen.line(
            f"Stopping {spec.name} (pid {entry.pid}): " + ("at once" if what.kill else "running requests finish")
        )
    if stop([old], grace_seconds=0 if what.kill else what.grace_seconds, hurry=interrupt.requested) and not what.kill:
        screen.line(f"{spec.name} did not end within {what.grace_seconds:.0f} s and was killed.")
    new = spawn(spec, what.environ, keep_log=True)
    state.update_entry(
        what.directory, spec, pid=new.identity.pid, started_ticks=new.identity.started_ticks, ranks=(),
        incarnation=None, expected_exit=False,
    )  # fmt: skip
    progress = Progress(screen, [new])
    try:
        wait_ready(
            [new],
            timeout_seconds=what.ready_timeout_seconds,
            show=progress.show,
            interrupted=interrupt.requested,
        )
    except ProcessFailed as failure:
        raise CliError(failure_text(failure)) from failure
    except Interrupted as error:
        raise CliError(f"interrupted; {spec.name} goes on starting (pid {new.identity.pid})") from error
    live = live_entry(new)
    state.update_entry(what.directory, spec, incarnation=live.incarnation, ranks=live.ranks)
    screen.line(f"{spec.name} is ready at {spec.url} (pid {new.identity.pid}).")
    return 0


def choose(entries: Sequence[Entry], role: str, index: int | None) -> Entry:
    """The entry that is meant. Raises UsageError, naming those there are."""
    of_role = [entry for entry in entries if entry.spec.role == role]
    found = of_role if index is None else [entry for entry in of_role if entry.spec.index == index]
    if len(found) == 1:
        return found[0]
    names = ", ".join(entry.spec.name for entry in entries)
    if not found:
        raise UsageError(f"there is no {role}{'' if index is None else f' {index}'}: {names}")
    raise UsageError(f"there are {len(found)} processes of role {role}: say which ({names})")
