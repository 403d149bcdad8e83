"""The stack that `baton up` would start: its settings, its model, its port, and what it asks of the machine."""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton_cli.doctor.findings import Finding, fail, ok, warn
from baton_cli.doctor.machine import GIB, Demand, gib
from baton_cli.doctor.model import Located, judge_model, locate
from baton_cli.doctor.ports import listener
from baton_cli.doctor.software import Need, TorchFacts, Wanted
from baton_cli.layout import WORKERS, Host, ProcessSpec, UpOptions, plan
from baton_cli.ports import FIRST_PORT, is_free
from baton_cli.processor import multiplies_bfloat16_here
from baton_io.config import ConfigError, resolve
from baton_worker.config import DecodeConfig, PrefillConfig, WorkerConfig

CONFIGS: Mapping[str, type[WorkerConfig]] = {"prefill": PrefillConfig, "decode": DecodeConfig}
PROCESS_BYTES = 400 * 1024**2
"""What a rank takes beside weights and pool: Python, torch, activations of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A stack that does not run yet. `wrong`: settings that its processes would refuse."""

    port: int
    configs: tuple[WorkerConfig, ...]
    wrong: tuple[Finding, ...]

    @property
    def ranks(self) -> int:
        """Scheduler processes on this machine."""
        return sum(len(config.local_ranks) for config in self.configs)

    @property
    def wants_cuda(self) -> bool:
        """Whether some worker is to use it."""
        return any(config.device == "cuda" for config in self.configs)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those in use."""
        return tuple(dict.fromkeys(config.dtype for config in self.configs))

    @property
    def models(self) -> tuple[str, ...]:
        """What is to be served; one, where all is well."""
        return tuple(dict.fromkeys(config.model for config in self.configs))


def planned(options: UpOptions, environ: Mapping[str, str]) -> Planned:
    """From the options of `baton up` to the configuration that each worker would have. Raises UsageError."""
    host = Host(
        python=sys.executable,
        cwd=str(Path.cwd()),
        logs=Path(),
        env={name: value for name, value in environ.items() if name.startswith("BATON_")},
        cores=tuple(sorted(os.sched_getaffinity(0))),
        multiplies_bfloat16=multiplies_bfloat16_here(),
    )
    specs = plan(options, host, range(FIRST_PORT, FIRST_PORT + options.free_ports_needed))
    configs: list[WorkerConfig] = []
    wrong: list[Finding] = []
    for spec in specs:
        if spec.role not in WORKERS:
            continue
        try:
            configs.append(_config(spec))
        except ConfigError as error:
            wrong.append(fail("settings", f"{spec.name} would refuse: {error}", f"baton-{spec.role} --help"))
    return Planned(port=options.port, configs=tuple(configs), wrong=tuple(wrong))


def _config(spec: ProcessSpec) -> WorkerConfig:
    first_flag = 3  # python -m baton_prefill
    return resolve(CONFIGS[spec.role], spec.role, spec.argv[first_flag:], spec.env)


def locate_model(stack: Planned, environ: Mapping[str, str]) -> Located | None:
    """Where the model is; None where there is nothing to look for."""
    if not stack.models:
        return None
    if len(stack.models) > 1:
        text = f"the workers are to serve different ones: {', '.join(stack.models)}"
        return Located(finding=fail("model", text, "give one --model"))
    return locate(stack.models[0], environ)


def wanted_of(config: WorkerConfig) -> Wanted:
    """A worker as the probe of the engine is asked about it."""
    return Wanted(
        dtype=config.dtype,
        device=config.device,
        kv_tokens=config.kv_tokens,
        ranks=list(config.local_ranks),
        parallel=asdict(config.parallel),
    )


def demand(stack: Planned, needs: Sequence[Need]) -> Demand:
    """What the stack asks of the host; pools and weights of CUDA workers are on their devices."""
    uses_nccl = any(config.device == "cuda" and len(config.local_ranks) > 1 for config in stack.configs)
    if len(needs) != len(stack.configs):
        return Demand(ranks=stack.ranks, uses_nccl=uses_nccl)
    memory = PROCESS_BYTES * stack.ranks + sum(
        need.weight_bytes + need.pool_bytes
        for config, need in zip(stack.configs, needs, strict=True)
        if config.device != "cuda"
    )
    return Demand(ranks=stack.ranks, memory_bytes=memory, uses_nccl=uses_nccl)


def need_findings(stack: Planned, needs: Sequence[Need]) -> list[Finding]:
    """Whether the model can be shared out as each worker is to, and what its ranks here take."""
    found: dict[Finding, None] = {}  # workers of one role are alike: one line for all of them
    for config, need in zip(stack.configs, needs, strict=len(needs) == len(stack.configs)):
        role = next(role for role, kind in CONFIGS.items() if isinstance(config, kind))
        sizes = {name: size for name, size in asdict(config.parallel).items() if size not in (1, False)}
        layout = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "one rank"
        if need.refused:
            advice = f"--set {role}.tp=… (`architecture` above says which values the heads permit)"
            found[fail(f"{role} ranks", f"{layout}: {need.refused}", advice)] = None
        else:
            text = f"{layout}: weights {gib(need.weight_bytes)} and KV pools {gib(need.pool_bytes)} a worker"
            found[ok(f"{role} ranks", text)] = None
    return list(found)


def findings(stack: Planned, located: Located | None, torch: TorchFacts | str) -> list[Finding]:
    """Everything about the planned stack but the machine."""
    found = list(stack.wrong)
    if stack.configs and not stack.wrong:
        roles = [f"{sum(isinstance(one, kind) for one in stack.configs)} {role}" for role, kind in CONFIGS.items()]
        found.append(ok("settings", f"{', '.join(roles)} workers, {stack.ranks} ranks here: all settings are known"))
    if located is not None:
        found.append(located.finding)
    if isinstance(torch, TorchFacts):
        judged = judge_model(torch, stack.dtypes)
        found += [] if judged is None else [judged]
        found += need_findings(stack, torch.needs)
        found += device_findings(stack, torch)
    found.append(port_finding(stack.port))
    return found


def device_findings(stack: Planned, torch: TorchFacts) -> list[Finding]:
    """Whether weights and pools of CUDA workers fit on the devices, taken together."""
    pairs = zip(stack.configs, torch.needs, strict=False)
    need = sum(need.weight_bytes + need.pool_bytes for config, need in pairs if config.device == "cuda")
    if not need or not torch.devices:
        return []
    free = sum(device.free_bytes for device in torch.devices)
    text = f"{gib(free)} free on {len(torch.devices)} devices; weights and pools need about {gib(need)}"
    if need > free:
        return [fail("device memory", text, "lower kv_tokens, or spread a worker over more devices with tp")]
    return [ok("device memory", text)]


def port_finding(port: int) -> Finding:
    """The one port that must be this very one; the others are chosen among free ones."""
    if is_free(port):
        return ok("port", f"{port} is free for the router; other ports are chosen among free ones")
    owner = listener(port)
    by = "another program" if owner is None else owner
    return fail("port", f"{port} is taken by {by}", f"baton up --port {port + 1}, or stop {by}")


def folder_findings(stack: Planned, state: Path) -> list[Finding]:
    """Where processes write: logs, their private folder, and the sockets that workers in several containers share."""
    folders = [("state folder", state.absolute()), ("temporary folder", Path(tempfile.gettempdir()))]
    folders += [
        ("shm sockets", folder) for folder in sorted({Path(one.shm_dir) for one in stack.configs if one.shm_dir})
    ]
    return [_folder(name, folder) for name, folder in folders]


def _folder(name: str, folder: Path) -> Finding:
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        whose = existing.owner() if existing.stat().st_uid != os.getuid() else "this user"
        text = f"{folder} cannot be written by this user (uid {os.getuid()}): {existing} is {whose}'s"
        return fail(name, text, f"chown {os.getuid()} {existing}, or choose another")
    if name == "shm sockets" and existing != folder:
        advice = f"mount the volume that prefill and decode share at {folder}, or leave shm_dir out"
        return fail(name, f"{folder} is not there: pages would travel by tcp", advice)
    found = os.statvfs(existing)
    free = found.f_frsize * found.f_bavail
    if free < GIB:
        return warn(name, f"{gib(free)} left at {folder}: logs may fill it", "free some, or choose another")
    return ok(name, f"{folder}, {gib(free)} left")
