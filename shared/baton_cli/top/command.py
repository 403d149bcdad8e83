"""`baton top`: the loop and the terminal."""

import argparse
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from baton_cli import state
from baton_cli.errors import CliError, UsageError
from baton_cli.fetch import base_url
from baton_cli.interrupt import Interrupt
from baton_cli.show import Screen
from baton_cli.top.collect import Collector
from baton_cli.top.frame import render
from baton_cli.top.view import View

DEFAULT_URL = "http://127.0.0.1:8000"
PIPE_COLUMNS = 120
INTERVAL_LEAST_S = 0.1
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def top(arguments: argparse.Namespace, screen: Screen, interrupt: Interrupt) -> int:
    """The exit code: 0, or 1 where with --once the router does not answer. Raises CliError."""
    if not arguments.interval >= INTERVAL_LEAST_S:
        raise UsageError(f"--interval must be at least {INTERVAL_LEAST_S:g}, not {arguments.interval:g}")
    if not arguments.window_seconds > 0 or not arguments.timeout_seconds > 0:
        raise UsageError("--window-seconds and --timeout-seconds must be above 0")
    if arguments.columns is not None and arguments.columns < 20:
        raise UsageError(f"--columns must be at least 20, not {arguments.columns}")
    url = base_url("--url", arguments.url) if arguments.url is not None else _url_of_state(arguments)
    workers = [base_url("--worker", worker) for worker in arguments.workers]
    collector = Collector(url, workers, window_s=arguments.window_seconds, timeout_s=arguments.timeout_seconds)
    if arguments.once:
        view = collector.look()
        write(screen, view, width=_width(arguments, screen), height=None, every_s=None)
        return 1 if view.router.fault else 0
    first = collector.look()
    if first.router.fault and not first.rows:
        raise CliError(
            f"{url}: {first.router.fault}. Give the router's address with --url, or start one with `baton up`"
        )
    if screen.tty and sys.stdin.isatty():
        _live(first, collector, arguments, screen, interrupt)
    else:
        _scroll(first, collector, arguments, screen, interrupt)
    return 0


def _url_of_state(arguments: argparse.Namespace) -> str:
    """The router that `baton up` started from here, else the usual address."""
    for entry in state.read(arguments.state) or []:
        if entry.spec.role == "router":
            return entry.spec.url
    return DEFAULT_URL


def _width(arguments: argparse.Namespace, screen: Screen) -> int:
    if arguments.columns is not None:
        return int(arguments.columns)
    return screen.columns if screen.tty else PIPE_COLUMNS


def write(screen: Screen, view: View, *, width: int, height: int | None, every_s: float | None) -> None:
    """The frame as lines, one below the other."""
    for one in render(view, width=width, height=height, every_s=every_s):
        screen.write(one.painted(screen.paint).rstrip() + "\n")


def _scroll(
    view: View, collector: Collector, arguments: argparse.Namespace, screen: Screen, interrupt: Interrupt
) -> None:
    """Frames one after the other, for a file or a pipe."""
    while True:
        write(screen, view, width=_width(arguments, screen), height=None, every_s=None)
        screen.line()
        if interrupt.wait(arguments.interval):
            return
        view = collector.look()


def _live(
    view: View, collector: Collector, arguments: argparse.Namespace, screen: Screen, interrupt: Interrupt
) -> None:
    """Repaint in place until q or Ctrl-C; a change of the terminal's size repaints at once."""
    is_frozen = False
    with _own_screen(screen) as woken:
        due_s = time.monotonic() + arguments.interval
        while not interrupt.requested():
            _paint(screen, view, arguments)
            key = _wait(woken, max(0.0, due_s - time.monotonic()))
            if key in ("q", "Q"):
                return
            if key == " ":
                is_frozen = not is_frozen
            if time.monotonic() >= due_s:
                if not is_frozen:
                    view = collector.look()
                due_s = time.monotonic() + arguments.interval


def _paint(screen: Screen, view: View, arguments: argparse.Namespace) -> None:
    with suppress(OSError):
        lines = os.get_terminal_size(sys.stdout.fileno()).lines
        shown = render(view, width=_width(arguments, screen), height=lines, every_s=arguments.interval)
        painted = (REST_OF_LINE + "\n").join(one.painted(screen.paint) for one in shown)
        screen.write(f"{HOME}{painted}{REST_OF_LINE}{REST_OF_SCREEN}")


@contextmanager
def _own_screen(screen: Screen) -> Iterator[int]:
    """The terminal's second screen, keys as they are typed; yields a descriptor that signals write to."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    old_handler = signal.signal(signal.SIGWINCH, lambda *_: None)
    old_wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        tty.setcbreak(descriptor)
        screen.write(ENTER)
        yield reading
    finally:
        screen.write(LEAVE)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(old_wakeup)
        signal.signal(signal.SIGWINCH, old_handler)
        os.close(reading)
        os.close(writing)


def _wait(woken: int, wait_s: float) -> str:
    """A key, or nothing when the time is over or a signal came."""
    ready, _, _ = select.select([sys.stdin, woken], [], [], wait_s)
    if woken in ready:
        with suppress(BlockingIOError):
            os.read(woken, 1024)
    return os.read(sys.stdin.fileno(), 1).decode("latin-1") if sys.stdin in ready else ""
