"""Ctrl-C, SIGTERM and a closed terminal as a value that loops ask for, so that stopping is ordinary code."""

import signal
import threading
from types import FrameType


class Interrupt:
    """Counts the signals that asked this command to end: the first means stop, the second means at once."""

    def __init__(self) -> None:
        self._count = 0
        self._happened = threading.Event()

    def install(self) -> None:
        """Take the signals over for the rest of this process's life."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        self._happened.set()

    def requested(self) -> bool:
        """Whether somebody wants this command to end."""
        return self._count > 0

    def insisted(self) -> bool:
        """Whether somebody wants it to end without waiting for anything."""
        return self._count > 1

    def wait(self, seconds: float) -> bool:
        """Pause, or return True as soon as the end is asked for."""
        return self._happened.wait(seconds)
