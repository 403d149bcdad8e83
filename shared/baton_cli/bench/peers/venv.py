"""A peer's own virtual environment: made once, from pinned packages, and never ours."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_cli.errors import CliError, Interrupted, UsageError
from baton_cli.processes import log_tail
from baton_cli.show import DIM, Screen

INSTALL_TIMEOUT_SECONDS = 3600.0
POLL_SECONDS = 0.2
LINE_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """One call of pip, with its arguments."""

    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs long commands: output into a log, a sign of life on the screen, Ctrl-C ends them."""

    screen: Screen
    environ: Mapping[str, str]
    interrupted: Callable[[], bool]

    def run(self, argv: Sequence[str], log: Path, what: str) -> None:
        """Raises CliError with the end of the log, Interrupted."""
        began_s = said_s = time.monotonic()
        self.screen.line(f"{what}; log in {log}")
        with open(log, "ab") as stream:
            process = subprocess.Popen(argv, env=self.environ, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
        while process.poll() is None:
            elapsed_s = time.monotonic() - began_s
            if self.interrupted() or elapsed_s > INSTALL_TIMEOUT_SECONDS:
                process.kill()
                process.wait()
                if self.interrupted():
                    raise Interrupted
                raise CliError(f"{what}: not done after {elapsed_s:.0f} s; see {log}")
            if self.screen.tty:
                self.screen.write(f"\r\x1b[2K  {elapsed_s:.0f} s")
            elif time.monotonic() - said_s > LINE_SECONDS:
                said_s = time.monotonic()
                self.screen.line(f"  {elapsed_s:.0f} s", DIM)
            time.sleep(POLL_SECONDS)
        if self.screen.tty:
            self.screen.write("\r\x1b[2K")
        if process.returncode != 0:
            tail = "\n".join(f"   | {line}" for line in log_tail(str(log)))
            raise CliError(f"{what} failed:\n{tail}\nPackages come from wherever pip is set up to find them.")


def ensure_venv(directory: Path, installs: Sequence[Install], shell: Shell) -> Path:
    """The Python of the environment at `directory`, made when it is missing. Raises CliError, UsageError, Interrupted.

    One that is complete is used as it is, also where somebody else made it: delete it to have it made again.
    """
    if directory.resolve() == Path(sys.prefix).resolve():
        raise UsageError(f"--venv {directory} is the environment that Baton runs in: a peer gets one of its own")
    python = directory.absolute() / "bin" / "python"
    unfinished = directory.with_name(directory.name + ".unfinished")
    if python.exists() and not unfinished.exists():
        return python
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished.touch()
    log = directory.with_name(directory.name + ".log")
    clear = [sys.executable, "-m", "venv", "--clear", str(directory)]
    shell.run(clear, log, f"Making a virtual environment in {directory}")
    for install in installs:
        shell.run([str(python), "-m", "pip", *install.arguments], log, f"pip {' '.join(install.arguments)}")
    unfinished.unlink()
    return python
