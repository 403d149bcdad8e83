"""What is installed: packages, torch and its devices, Docker."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from baton_cli.doctor.findings import Finding, fail, ok, warn

PROBE_TIMEOUT_SECONDS = 120.0
DOCKER_TIMEOUT_SECONDS = 10.0
ENGINE = "engine"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

# Its own process, because nothing of the command line may load torch. It says what a worker would compute with, by the
# engine's own code; a word it cannot say is left out.
PROBE = """
import json, sys
import torch
said = {"version": torch.__version__, "cuda_build": torch.version.cuda, "cpu": torch.backends.cpu.get_cpu_capability()}
said["devices"] = []
for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    free, total = torch.cuda.mem_get_info(index)
    said["devices"].append({"name": torch.cuda.get_device_name(index), "free_bytes": free, "total_bytes": total})

def need(model, wanted):
    parallel = Parallel(**wanted["parallel"])
    dtype = DTYPES[wanted["dtype"]]
    weights = pool = 0
    for rank in wanted["ranks"]:
        shard = Shard.of(model, parallel, parallel.place(rank))
        weights += weight_bytes(shard, dtype, torch.device(wanted["device"]))
        pool += wanted["kv_tokens"] * 2 * len(shard.layers) * len(shard.kv_heads) * model.head_dim * dtype.itemsize
    return {"weight_bytes": weights, "pool_bytes": pool}

if len(sys.argv) > 1:
    from pathlib import Path
    from baton_core.errors import BatonError
    from baton_core.ranks import Parallel
    from baton_engine.loading import DTYPES, open_model, weight_bytes
    from baton_engine.shard import Shard
    try:
        model = open_model(Path(sys.argv[1])).config
        said["model"] = {
            "architecture": model.architecture, "parameters": model.parameters, "layers": model.layers,
            "query_heads": model.query_heads, "kv_heads": model.kv_heads, "context_tokens": model.context_tokens,
            "numbers_a_token": 2 * model.layers * model.kv_heads * model.head_dim,
        }
        said["needs"] = []
        for wanted in json.loads(sys.argv[2]):
            try:
                said["needs"].append(need(model, wanted))
            except BatonError as error:
                said["needs"].append({"refused": str(error)})
    except BatonError as error:
        said["refused"] = str(error)
    except Exception as error:
        said["unknown"] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


class Wanted(msgspec.Struct, frozen=True):
    """One worker, as the probe is asked about it."""

    dtype: str
    device: str
    kv_tokens: int
    ranks: list[int]  # on this machine
    parallel: dict[str, int | bool]


class Device(msgspec.Struct, frozen=True):
    """One CUDA device."""

    name: str
    free_bytes: int
    total_bytes: int


class ModelFacts(msgspec.Struct, frozen=True):
    """A model as the engine understands it."""

    architecture: str
    parameters: int
    layers: int
    query_heads: int
    kv_heads: int
    context_tokens: int
    numbers_a_token: int  # of its KV cache


class Need(msgspec.Struct, frozen=True):
    """What the ranks of one worker take on this machine. `refused`: the model cannot be shared out among them like that."""

    weight_bytes: int = 0  # at the peak of loading
    pool_bytes: int = 0
    refused: str = ""


class TorchFacts(msgspec.Struct, frozen=True):
    """What the probe said. `refused`: the engine cannot serve the model; `unknown`: it could not be asked."""

    version: str
    cuda_build: str | None
    cpu: str
    devices: list[Device] = []
    model: ModelFacts | None = None
    needs: list[Need] = []  # of each worker that was asked about
    refused: str = ""
    unknown: str = ""


def probe_torch(model: Path | None, workers: Sequence[Wanted]) -> TorchFacts | str:
    """Ask torch, and with a model the engine; a text where that cannot be done."""
    asked = [] if model is None else [str(model), msgspec.json.encode(workers).decode()]
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, *asked], capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"torch did not load within {PROBE_TIMEOUT_SECONDS:.0f} s"
    lines = done.stderr.strip().splitlines()
    if done.returncode:
        return lines[-1] if lines else f"its process ended with {done.returncode}"
    return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=TorchFacts)


def judge_torch(
    found: TorchFacts | str, *, is_needed: bool, wants_cuda: bool, has_driver: bool = NVIDIA_DRIVER.exists()
) -> Finding:
    """Torch and the devices it sees."""
    if isinstance(found, str):
        is_absent = "No module named 'torch'" in found
        if is_absent and not is_needed:
            return ok("torch", "not installed: this machine can run router and registry, no worker")
        advice = "make install, or pip install 'baton[engine]'" if is_absent else "pip install --force-reinstall torch"
        what = "not installed: no worker can run here" if is_absent else f"cannot be loaded ({found})"
        return (fail if is_needed else warn)("torch", what, advice)
    text = f"{found.version}, CPU {found.cpu}"
    if found.devices:
        names = ", ".join(f"{one.name} {one.total_bytes / 1024**3:.0f} GiB" for one in found.devices)
        return ok("torch", f"{text}; CUDA {found.cuda_build}: {names}")
    if wants_cuda:
        cause = (
            "it is built without CUDA" if found.cuda_build is None else "it sees no device (driver? container runtime?)"
        )
        advice = "pip install torch (a CUDA build)" if found.cuda_build is None else "nvidia-smi; docker run --gpus all"
        return fail("torch", f"{text}; a worker is to use CUDA, and {cause}", advice)
    if has_driver:
        return warn(
            "torch",
            f"{text}; there is an NVIDIA driver, and torch sees no CUDA device",
            "install a CUDA build of torch, then give workers --set prefill.device=cuda --set decode.device=cuda",
        )
    return ok("torch", f"{text}, no CUDA device")


# -- packages


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """`name >= least`, for one extra or (empty) for everybody."""

    name: str
    least: str
    extra: str


_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(\[.*?\])?\s*(?P<bounds>[^;]*)(;\s*(?P<marker>.*))?")


def requirements(distribution: str = "baton") -> list[Requirement]:
    """What our own metadata asks for. Raises metadata.PackageNotFoundError."""
    found = []
    for text in metadata.requires(distribution) or []:
        match = _REQUIREMENT.match(text)
        assert match is not None, text
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", match["marker"] or "")
        least = re.search(r">=\s*([\w.]+)", match["bounds"])
        found.append(Requirement(name=match["name"], least=least[1] if least else "", extra=extra[1] if extra else ""))
    return found


def installed(name: str) -> str | None:
    """The version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def judge_packages(
    wanted: Iterable[Requirement], version_of: Callable[[str], str | None], *, engine_needed: bool
) -> list[Finding]:
    """Packages that everybody needs, and those of the engine."""
    kinds: Mapping[str, list[Requirement]] = {"": [], ENGINE: []}
    for one in wanted:
        if one.extra in kinds and one.name != "torch":  # torch has a line of its own
            kinds[one.extra].append(one)
    findings = []
    for extra, several in kinds.items():
        name = "packages" if not extra else f"{extra} packages"
        wrong = [text for one in several if (text := _fault(one, version_of(one.name)))]
        if not wrong:
            findings.append(ok(name, f"all {len(several)} are there"))
        elif extra and not engine_needed and all("missing" in text for text in wrong):
            findings.append(ok(name, "not installed: this machine can run router and registry, no worker"))
        else:
            advice = "make install, or pip install " + ("baton" if not extra else f"'baton[{extra}]'")
            findings.append(fail(name, "; ".join(wrong), advice))
    return findings


def _fault(wanted: Requirement, version: str | None) -> str:
    if version is None:
        return f"{wanted.name} is missing"
    if wanted.least and _numbers(version) < _numbers(wanted.least):
        return f"{wanted.name} is {version}, needed is {wanted.least} or later"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version; what follows them (rc1, +cpu) decides nothing here."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


# -- Docker


def docker_finding() -> Finding:
    """Whether `docker compose up` would work; nobody needs it for `baton up`."""
    program = shutil.which("docker")
    if program is None:
        return ok("docker", "not installed; only `docker compose up` needs it")
    client = _said(program, "version", "--format", "{{.Client.Version}}")
    server = _said(program, "version", "--format", "{{.Server.Version}}")
    compose = _said(program, "compose", "version", "--short")
    if server is None or not server[0]:
        cause = "" if server is None else f" ({server[1]})"
        return warn(
            "docker",
            f"{client[1] if client and client[0] else program}, but its daemon does not answer{cause}; "
            "only `docker compose up` needs it",
            "start it (systemctl start docker, dockerd), or add yourself to the group docker",
        )
    if compose is None or not compose[0]:
        return warn("docker", f"{server[1]}, without the compose plugin", "install docker-compose-plugin")
    runtimes = _said(program, "info", "--format", "{{json .Runtimes}}")
    nvidia = ", NVIDIA runtime" if runtimes is not None and runtimes[0] and "nvidia" in _names(runtimes[1]) else ""
    sdk = installed("docker")
    return ok("docker", f"{server[1]}, compose {compose[1]}{nvidia}{'' if sdk is None else f', SDK {sdk}'}")


def _said(*command: str) -> tuple[bool, str] | None:
    """Whether it did well and the last line it said; None where it says nothing in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOCKER_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return (done.returncode == 0, lines[-1]) if lines else None


def _names(text: str) -> list[str]:
    try:
        return list(json.loads(text))
    except ValueError:
        return []
