"""`baton up`, `restart` and `down` on real processes: small HTTP servers stand in for the four services."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from baton_cli import state
from baton_cli.errors import CliError, Interrupted
from baton_cli.layout import ProcessSpec
from baton_cli.ports import free_ports, is_free
from baton_cli.processes import (
    Identity,
    ProcessFailed,
    Running,
    Stage,
    Status,
    get_json,
    kill,
    probe,
    spawn,
    stop,
    wait_ready,
)
from baton_cli.show import Progress, Screen, advice, failure_text

DEADLINE_SECONDS = 10.0

# A service reduced to what the command line needs of it; BATON_<ROLE>_FAKE says how it misbehaves.
FAKE_SERVICE = """
import argparse, http.server, json, os, signal, sys
role = os.path.basename(sys.argv[0]).removeprefix("baton_").removesuffix(".py")
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
port = parser.parse_known_args()[0].port
fake = os.environ.get(f"BATON_{role.upper()}_FAKE", "")
print("hello from", role, flush=True)
if fake == "crash":
    sys.exit("cannot read the model")
probes = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global probes
        probes += 1
        if self.path == "/server_info" and role in ("prefill", "decode"):
            ranks = [{"rank": 0, "pid": os.getpid(), "more": 1}]
            self.reply(200, {"incarnation": f"{role}-{os.getpid()}", "ranks": ranks})
        elif self.path != "/ready":
            self.reply(404, {})
        elif fake == "never":
            self.reply(503, {"ready": False, "reasons": ["no usable pair"]})
        elif probes == 1:
            progress = {"what": "loading model", "done": 9, "total": 20}
            self.reply(503, {"ready": False, "reasons": ["loading"], "progress": progress})
        else:
            self.reply(200, {"ready": True})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if fake == "broken":
            return self.reply(500, {"error": {"message": "no luck"}})
        self.reply(200, {"choices": [{"message": {"content": f"Paris ({body['model']})"}}]})

    def reply(self, code, body):
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass

def drain(*_):
    print("drained", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if fake == "stubborn" else drain)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

Baton = Callable[..., "subprocess.CompletedProcess[str]"]


def until(condition: Callable[[], bool]) -> None:
    """Return once `condition()` holds; fails after the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def never() -> bool:
    return False


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A working folder with the stand-ins in it; nothing that was started from it survives the test."""
    for role in ("router", "bootstrap", "prefill", "decode"):
        (tmp_path / f"baton_{role}.py").write_text(FAKE_SERVICE, encoding="utf-8")
    yield tmp_path
    kill(running(tmp_path))


@pytest.fixture
def baton(folder: Path) -> Baton:
    """Runs the command in `folder` and returns what it said."""

    def run(*argv: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "baton_cli", *argv]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=False)

    return run


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Running]]:
    """Starts one stand-in, misbehaving as told."""
    started: list[Running] = []

    def spawn_one(role: str = "decode", fake: str = "") -> Running:
        started.append(spawn(spec_of(folder, role, fake), os.environ))
        return started[-1]

    yield spawn_one
    kill(started)


@pytest.fixture
def foreground(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A `baton up` that stays, ready."""
    command = [sys.executable, "-m", "baton_cli", "up", "--port", str(free_ports(1, taken=0)[0])]
    with open(folder / "up.log", "w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, text=True)
    until(lambda: process.poll() is not None or "Ctrl-C stops" in (folder / "up.log").read_text())
    yield process
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()


def spec_of(folder: Path, role: str, fake: str) -> ProcessSpec:
    port = free_ports(1, taken=0)[0]
    return ProcessSpec(
        role=role,
        index=0,
        argv=(sys.executable, "-m", f"baton_{role}", "--port", str(port)),
        env={f"BATON_{role.upper()}_FAKE": fake},
        cwd=str(folder),
        url=f"http://127.0.0.1:{port}",
        log=str(folder / f"{role}.log"),
    )


def ready(*processes: Running, timeout_seconds: float = DEADLINE_SECONDS) -> list[list[Status]]:
    seen: list[list[Status]] = []
    wait_ready(
        processes,
        timeout_seconds=timeout_seconds,
        show=lambda statuses: seen.append(list(statuses)),
        interrupted=never,
    )
    return seen


def saved(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / ".baton" / "state.json").read_text())["processes"]
    return found


def running(folder: Path) -> list[Running]:
    return [entry.running for entry in state.read(folder / ".baton") or []]


def port() -> str:
    return str(free_ports(1, taken=0)[0])


# -- one process


def test_waiting_ends_when_each_says_ready_and_shows_how_far_the_load_is(start: Callable[..., Running]) -> None:
    seen = ready(start("prefill"), start("decode"))
    assert Status(Stage.LOADING, "loading model 45 %", 45) in [status for statuses in seen for status in statuses]
    assert [status.stage for status in seen[-1]] == [Stage.READY, Stage.READY]


def test_a_process_that_ends_while_starting_is_reported_with_its_last_lines(start: Callable[..., Running]) -> None:
    process = start(fake="crash")
    with pytest.raises(ProcessFailed) as caught:
        ready(process)
    text = failure_text(caught.value)
    assert "decode 0 exited with code 1 while starting." in text
    assert "| cannot read the model" in text


def test_a_process_that_never_gets_ready_is_reported_with_its_reason(start: Callable[..., Running]) -> None:
    process = start(fake="never")
    until(lambda: probe(process.spec.url).stage is Stage.WAITING)
    with pytest.raises(ProcessFailed, match=r"was not ready after 0 s \(waiting: no usable pair\)"):
        ready(process, timeout_seconds=0)


def test_waiting_can_be_interrupted(start: Callable[..., Running]) -> None:
    with pytest.raises(Interrupted):
        wait_ready([start(fake="never")], timeout_seconds=9, show=lambda _: None, interrupted=lambda: True)


def test_stopping_lets_a_process_finish(start: Callable[..., Running]) -> None:
    process = start()
    ready(process)
    assert stop([process], grace_seconds=DEADLINE_SECONDS, hurry=never) == []
    assert Path(process.spec.log).read_text() == "hello from decode\ndrained\n"
    assert process.exit_code == 0


@pytest.mark.parametrize(("grace_seconds", "hurry"), [(0.2, False), (60.0, True)])
def test_a_process_that_does_not_stop_is_killed(
    start: Callable[..., Running], grace_seconds: float, hurry: bool
) -> None:
    process = start(fake="stubborn")
    ready(process)
    assert stop([process], grace_seconds=grace_seconds, hurry=lambda: hurry) == [process]
    assert process.exit_code == -signal.SIGKILL


def test_a_pid_that_belongs_to_somebody_else_is_left_alone(start: Callable[..., Running]) -> None:
    process = start()
    ready(process)
    stranger = Running(spec=process.spec, identity=Identity(process.identity.pid, process.identity.started_ticks - 1))
    assert not stranger.alive
    assert stop([stranger], grace_seconds=0, hurry=never) == []
    assert process.alive


def test_a_program_that_does_not_exist_is_an_error_for_people(folder: Path) -> None:
    spec = spec_of(folder, "decode", "")
    missing = ProcessSpec(
        role="decode", index=0, argv=("/no/such/python",), env={}, cwd=spec.cwd, url=spec.url, log=spec.log
    )
    with pytest.raises(CliError, match="cannot start decode 0"):
        spawn(missing, os.environ)


def test_only_the_specs_own_baton_variables_reach_a_process(start: Callable[..., Running], folder: Path) -> None:
    spec = spec_of(folder, "decode", "")
    process = spawn(spec, dict(os.environ) | {"BATON_DECODE_FAKE": "crash"})
    try:
        ready(process)
    finally:
        kill([process])


def test_free_ports_are_different_and_can_be_listened_on() -> None:
    found = free_ports(5, taken=0)
    assert len(set(found)) == 5
    assert all(is_free(number) for number in found)


@pytest.mark.parametrize(
    ("exit_code", "tail", "told"),
    [
        (1, ["OSError: Address already in use"], "--port"),
        (1, ["No module named 'torch'"], "make install"),
        (2, [], "baton-decode --help"),
        (-9, [], "memory"),
        (None, [], "--ready-timeout-seconds"),
    ],
)
def test_each_failure_comes_with_what_to_do(exit_code: int | None, tail: list[str], told: str) -> None:
    assert told in advice("decode", exit_code, tail)


def test_progress_writes_a_line_only_when_something_changed() -> None:
    stream = io.StringIO()
    spec = ProcessSpec(role="decode", index=0, argv=(), env={}, cwd="", url="", log="")
    progress = Progress(Screen(stream), [Running(spec=spec, identity=Identity(1, 1))])
    for percent in (1, 2, 30):
        progress.show([Status(Stage.LOADING, f"loading model {percent} %", percent)])
    assert stream.getvalue() == "  decode 0: loading model 1 %\n  decode 0: loading model 30 %\n"


# -- the commands


def test_up_detached_answers_a_question_and_leaves_a_state_from_which_down_stops_all(
    baton: Baton, folder: Path
) -> None:
    said = baton("up", "--detach", "--port", port(), "--model", "tiny", "--set", "decode.more=1")
    assert (said.returncode, said.stderr) == (0, "")
    assert "Paris (tiny)" in said.stdout
    assert len(re.findall(r"curl -sN? http://127\.0\.0\.1:\d+/v1/chat/completions", said.stdout)) == 2
    entries = {entry["role"]: entry for entry in saved(folder)}
    assert list(entries) == ["router", "bootstrap", "prefill", "decode"]
    decode = entries["decode"]
    assert decode["incarnation"] == f"decode-{decode['pid']}"
    assert decode["ranks"] == [{"rank": 0, "pid": decode["pid"], "log": decode["log"]}]
    assert decode["env"] == {"BATON_DECODE_MORE": "1"}
    assert entries["prefill"]["bootstrap_port"]
    assert "ranks" not in entries["router"]
    assert all(get_json(f"{entry['url']}/ready", timeout_seconds=5)[0] == 200 for entry in entries.values())
    processes = running(folder)
    again = baton("up", "--detach", "--port", port())
    assert again.returncode == 1
    assert "already running" in again.stderr
    assert baton("down").returncode == 0
    assert not (folder / ".baton" / "state.json").exists()
    assert not any(process.alive for process in processes)
    assert "Nothing runs" in baton("down").stdout


@pytest.mark.parametrize("how", [[], ["--kill"]])
def test_restart_starts_one_process_as_it_was(baton: Baton, folder: Path, how: list[str]) -> None:
    assert baton("up", "--detach", "--port", port(), "--decode", "2", "--set", "decode.more=1").returncode == 0
    before = saved(folder)
    assert "say which" in baton("restart", "decode").stderr
    said = baton("restart", *how, "decode", "1")
    assert said.returncode == 0, said.stderr
    after = saved(folder)
    assert after[:-1] == before[:-1]
    assert after[-1]["pid"] != before[-1]["pid"]
    assert after[-1]["incarnation"] == f"decode-{after[-1]['pid']}"
    changed = {key for key in after[-1] if after[-1][key] != before[-1][key]}
    assert changed == {"pid", "started_ticks", "incarnation", "ranks"}
    log = Path(after[-1]["log"]).read_text()
    assert log.count("hello") == 2
    assert ("drained" in log) == (not how)


def test_up_that_fails_stops_what_it_started_and_says_why(baton: Baton, folder: Path) -> None:
    said = baton("up", "--detach", "--port", port(), "--set", "decode.fake=crash")
    assert said.returncode == 1
    assert "| cannot read the model" in said.stderr
    assert not (folder / ".baton" / "state.json").exists()
    broken = baton("up", "--detach", "--port", port(), "--set", "router.fake=broken")
    assert broken.returncode == 1
    assert "no completion came through" in broken.stderr
    assert "no luck" in broken.stderr


def test_up_on_a_port_that_is_taken_says_so(baton: Baton, start: Callable[..., Running]) -> None:
    process = start()
    ready(process)
    said = baton("up", "--port", process.spec.url.rpartition(":")[2])
    assert said.returncode == 1
    assert "is taken by another program" in said.stderr


def test_a_death_in_the_foreground_is_loud_and_restart_is_followed_and_ctrl_c_stops_all(
    foreground: "subprocess.Popen[str]", baton: Baton, folder: Path
) -> None:
    output = folder / "up.log"
    prefill, decode = running(folder)[2:]
    os.killpg(decode.identity.pid, signal.SIGKILL)
    until(lambda: "baton restart --state .baton decode 0" in output.read_text())
    assert "!! decode 0 was killed by SIGKILL" in output.read_text()
    assert prefill.alive
    assert baton("restart", "decode").returncode == 0
    until(lambda: "decode 0 was started again" in output.read_text())
    processes = running(folder)
    assert len(processes) == 4
    assert all(process.alive for process in processes)
    foreground.send_signal(signal.SIGINT)
    assert foreground.wait(timeout=DEADLINE_SECONDS) == 0
    assert not any(process.alive for process in processes)
    assert not (folder / ".baton" / "state.json").exists()


def test_down_from_another_terminal_is_no_accident(
    foreground: "subprocess.Popen[str]", baton: Baton, folder: Path
) -> None:
    assert baton("down").returncode == 0
    assert foreground.wait(timeout=DEADLINE_SECONDS) == 0
    said = (folder / "up.log").read_text()
    assert "decode 0 was stopped by another command." in said
    assert "!!" not in said
