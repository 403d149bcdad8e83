"""Starting, watching and stopping processes of the operating system.

A process is known by its pid *and* its start time from `/proc`, so that a pid which the kernel has given to somebody
else is never signalled. Each process leads a session of its own: a Ctrl-C in the terminal reaches only `baton up`,
and SIGKILL reaches the whole group, ranks included.
"""

import http.client
import json
import os
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from baton_cli.errors import CliError, Interrupted
from baton_cli.layout import ProcessSpec

POLL_SECONDS = 0.1
PROBE_TIMEOUT_SECONDS = 2.0
KILL_TIMEOUT_SECONDS = 5.0
TAIL_LINES = 20
TAIL_BYTES = 64 * 1024


class ProcessFailed(CliError):
    """A process ended, or stayed unready for too long, while it was being started."""

    def __init__(self, process: "Running", what: str, exit_code: int | None) -> None:
        super().__init__(f"{process.spec.name} {what}")
        self.process = process
        self.what = what
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Identity:
    """A process that ran at some time, told from a later one with the same pid."""

    pid: int
    started_ticks: int  # since boot, as /proc says

    @property
    def alive(self) -> bool:
        """A zombie is dead: it only waits for its parent."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.started_ticks and found[0] not in "ZX"


@dataclass(slots=True, kw_only=True)
class Running:
    """A started process. `child` is None where another command started it."""

    spec: ProcessSpec
    identity: Identity
    child: "subprocess.Popen[bytes] | None" = None

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        if self.child is not None:
            return self.child.poll() is None  # also reaps it
        return self.identity.alive

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs, or where only its real parent knows."""
        return None if self.child is None else self.child.poll()


class Stage(Enum):
    """How far a process is, as people want to know it."""

    STARTING = "starting"
    LOADING = "loading"
    WAITING = "waiting"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Status:
    """What `/ready` said. `detail` is for people."""

    stage: Stage
    detail: str = ""
    percent: int = 0

    @property
    def text(self) -> str:
        return self.detail or self.stage.value


def spawn(spec: ProcessSpec, environ: Mapping[str, str], *, keep_log: bool = False) -> Running:
    """Start `spec` in a session of its own, its output in its log. Raises CliError when it cannot be executed.

    BATON_* variables come from the spec alone, everything else from `environ`.
    """
    env = {name: value for name, value in environ.items() if not name.startswith("BATON_")} | spec.env
    Path(spec.log).parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(spec.log, "ab" if keep_log else "wb") as log:
            child = subprocess.Popen(
                spec.argv,
                env=env,
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise CliError(f"cannot start {spec.name} ({spec.argv[0]}): {error}") from error
    found = _stat(child.pid)
    assert found is not None, "a child that was not waited for has an entry in /proc"
    return Running(spec=spec, identity=Identity(child.pid, found[1]), child=child)


def wait_ready(
    processes: Sequence[Running],
    *,
    timeout_seconds: float,
    show: Callable[[Sequence[Status]], None],
    interrupted: Callable[[], bool],
) -> None:
    """Return once `/ready` of each has answered 200; `show` sees every round.

    Raises ProcessFailed when one ends or the time is over, Interrupted when `interrupted()`.
    """
    deadline = time.monotonic() + timeout_seconds
    statuses = [Status(Stage.STARTING)] * len(processes)
    while True:
        for index, process in enumerate(processes):
            if not process.alive:
                raise ProcessFailed(process, describe_exit(process.exit_code), process.exit_code)
            if statuses[index].stage is not Stage.READY:
                statuses[index] = probe(process.spec.url)
        show(statuses)
        late = [process for process, status in zip(processes, statuses, strict=True) if status.stage is not Stage.READY]
        if not late:
            return
        if interrupted():
            raise Interrupted
        if time.monotonic() > deadline:
            status = statuses[processes.index(late[0])]
            raise ProcessFailed(late[0], f"was not ready after {timeout_seconds:.0f} s ({status.text})", None)
        time.sleep(POLL_SECONDS)


def probe(url: str) -> Status:
    """What `GET url/ready` says now; a process that does not answer yet is STARTING."""
    try:
        code, body = get_json(f"{url}/ready", timeout_seconds=PROBE_TIMEOUT_SECONDS)
    except (OSError, http.client.HTTPException):
        return Status(Stage.STARTING)
    if code == 200:
        return Status(Stage.READY)
    report = body if isinstance(body, dict) else {}
    progress, reasons = report.get("progress"), report.get("reasons")
    if isinstance(progress, dict) and isinstance(progress.get("total"), int) and isinstance(progress.get("done"), int):
        if 0 <= progress["done"] < progress["total"]:
            percent = 100 * progress["done"] // progress["total"]
            return Status(Stage.LOADING, f"{progress.get('what') or 'loading'} {percent} %", percent)
    why = "; ".join(str(reason) for reason in reasons) if isinstance(reasons, list) else ""
    return Status(Stage.WAITING, f"waiting: {why}" if why else f"waiting (/ready answers {code})")


def get_json(url: str, *, timeout_seconds: float) -> tuple[int, Any]:
    """Status and decoded body (None where it is not JSON). Raises OSError or HTTPException."""
    return _exchange("GET", url, None, timeout_seconds)


def post_json(url: str, body: object, *, timeout_seconds: float) -> tuple[int, Any]:
    """As `get_json`, with a JSON body."""
    return _exchange("POST", url, json.dumps(body), timeout_seconds)


def _exchange(method: str, url: str, body: str | None, timeout_seconds: float) -> tuple[int, Any]:
    # http.client, because the usual clients would send loopback requests through a proxy from the environment.
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_seconds)
    try:
        connection.request(method, parts.path, body=body, headers={"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    try:
        return response.status, json.loads(content)
    except ValueError:
        return response.status, None


def stop(processes: Sequence[Running], *, grace_seconds: float, hurry: Callable[[], bool]) -> list[Running]:
    """SIGTERM to each process; SIGKILL to the groups that are left when the grace is over or `hurry()`.

    Returns those that had to be killed. Without a grace there is no SIGTERM either: whoever wants a process dead at once
    does not want it to begin to drain. Ranks never get the SIGTERM: their app drains and tells them.
    """
    for process in processes:
        if process.alive and grace_seconds > 0:
            _signal(process.identity, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while any(process.alive for process in processes) and time.monotonic() < deadline and not hurry():
        time.sleep(POLL_SECONDS)
    survivors = [process for process in processes if process.alive]
    kill(processes)
    return survivors


def kill(processes: Sequence[Running]) -> None:
    """SIGKILL to each process's group; a worker's ranks end with their app. Raises CliError if one survives that."""
    for process in processes:
        _kill_group(process.identity)
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while any(process.alive for process in processes):
        if time.monotonic() > deadline:
            names = ", ".join(f"{p.spec.name} (pid {p.identity.pid})" for p in processes if p.alive)
            raise CliError(f"still running after SIGKILL: {names}")
        time.sleep(POLL_SECONDS)


def _signal(identity: Identity, number: signal.Signals) -> None:
    if identity.alive:
        with suppress(ProcessLookupError), _named_refusal(identity):  # it may have ended just now
            os.kill(identity.pid, number)


def _kill_group(identity: Identity) -> None:
    found = _stat(identity.pid)
    if found is not None and found[1] != identity.started_ticks:
        return  # the pid is somebody else's now, so the group is as well
    with suppress(ProcessLookupError), _named_refusal(identity):
        os.killpg(identity.pid, signal.SIGKILL)


@contextmanager
def _named_refusal(identity: Identity) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise CliError(f"pid {identity.pid} belongs to another user: stop it as that user") from error


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a pid, or None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return fields[0], int(fields[19])


def describe_exit(exit_code: int | None) -> str:
    """How a process ended, for people."""
    if exit_code is None:
        return "is gone"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"exited with code {exit_code}"


def log_tail(path: str, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log; empty where there is none."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
            content = log.read()
    except OSError:
        return []
    return content.decode(errors="replace").splitlines()[-lines:]
