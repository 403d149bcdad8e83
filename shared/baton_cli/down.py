"""`baton down`: stop everything of a state, as often as one likes."""

from pathlib import Path

from baton_cli import state
from baton_cli.fleet import stop_in_order
from baton_cli.interrupt import Interrupt
from baton_cli.show import Screen


def down(directory: Path, *, grace_seconds: float, screen: Screen, interrupt: Interrupt) -> int:
    """The exit code. Ctrl-C ends the waiting, not the stopping. Raises CliError."""
    entries = state.read(directory)
    if entries is None:
        screen.line(f"Nothing runs from {directory}.")
        return 0
    # A foreground `up` sees its processes end: it must not call that an accident.
    state.update(directory, lambda found: [state.expecting_exit(entry) for entry in found])
    processes = [entry.running for entry in entries]
    alive = [process for process in processes if process.alive]
    killed = stop_in_order(processes, grace_seconds=grace_seconds, hurry=interrupt.requested)
    state.remove(directory)
    for process in alive:
        how = f"killed, it did not end within {grace_seconds:.0f} s" if process in killed else "stopped"
        screen.line(f"  {process.spec.name}: {how}")
    ended_before = len(processes) - len(alive)
    if ended_before:
        screen.line(f"  {ended_before} of {len(processes)} had ended before.")
    return 0
