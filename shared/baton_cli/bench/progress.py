"""How far a long piece of work is: a bar that is repainted on a terminal, now and then a line elsewhere."""

import time
from types import TracebackType
from typing import Self

from baton_cli.show import DIM, Screen

WIDTH = 24
REPAINT_SECONDS = 0.1
LINE_SECONDS = 10.0


class Bar:
    """Counts steps. Use it as a context manager or call `end`: both leave the cursor on a line of its own."""

    def __init__(self, screen: Screen, label: str, total: int) -> None:
        self._screen, self._label, self._total = screen, label, total
        self._done = self._failed = 0
        self._began_s = self._said_s = time.monotonic()
        self._painted = False
        self._paint(force=screen.tty)

    def step(self, *, failed: bool = False) -> None:
        """One more is done."""
        self._done += 1
        self._failed += failed
        self._paint(force=False)

    def end(self) -> None:
        """Wipe the bar: what was measured is about to be shown."""
        if self._painted and self._screen.tty:
            self._screen.write("\r\x1b[2K")
        self._painted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()

    def _paint(self, *, force: bool) -> None:
        now_s = time.monotonic()
        if not force and now_s - self._said_s < (REPAINT_SECONDS if self._screen.tty else LINE_SECONDS):
            return
        self._said_s = now_s
        text = self._text(now_s)
        if self._screen.tty:
            self._screen.write("\r\x1b[2K" + self._screen.paint(text[: self._screen.columns - 1], DIM))
            self._painted = True
        else:
            self._screen.line(text)

    def _text(self, now_s: float) -> str:
        share = self._done / self._total if self._total else 1.0
        filled = round(WIDTH * share)
        bar = "#" * filled + "-" * (WIDTH - filled)
        elapsed_s = now_s - self._began_s
        left = f", about {elapsed_s / share - elapsed_s:.0f} s left" if 0 < share < 1 else ""
        failed = f", {self._failed} failed" if self._failed else ""
        return f"  {self._label} [{bar}] {self._done}/{self._total}{failed}, {elapsed_s:.0f} s{left}"
