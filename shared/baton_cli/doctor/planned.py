"""The stack that `baton up` would start: its settings, its model, its port, and what it asks of the machine."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton_cli.doctor.findings import Finding, fail, ok, warn
from baton_cli.doctor.machine import GIB, Demand, gib
from baton_cli.doctor.model import Located, judge_model, kv_bytes_a_token, locate
from baton_cli.doctor.ports import listener
from baton_cli.doctor.software import ModelFacts, TorchFacts
from baton_cli.layout import WORKERS, Host, ProcessSpec, UpOptions, plan
from baton_cli.ports import FIRST_PORT, is_free
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


def demand(stack: Planned, model: ModelFacts | None) -> Demand:
    """What the stack asks of the host; pools and weights of CUDA workers are on their devices."""
    uses_nccl = any(config.device == "cuda" and len(config.local_ranks) > 1 for config in stack.configs)
    if model is None:
        return Demand(ranks=stack.ranks, uses_nccl=uses_nccl)
    memory = sum(
        PROCESS_BYTES * len(config.local_ranks) + (0 if config.device == "cuda" else _weights_and_pool(config, model))
        for config in stack.configs
    )
    return Demand(ranks=stack.ranks, memory_bytes=memory, uses_nccl=uses_nccl)


def _weights_and_pool(config: WorkerConfig, model: ModelFacts) -> int:
    """Of all its ranks on this machine. Shards add up to one copy a unit; embeddings that ranks share out count once."""
    units = config.parallel.dp * len(config.local_ranks) / config.parallel.ranks
    each = model.weight_bytes[config.dtype] + config.kv_tokens * kv_bytes_a_token(model, config.dtype)
    return round(units * each)


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
        found += device_findings(stack, torch)
    found.append(port_finding(stack.port))
    return found


def device_findings(stack: Planned, torch: TorchFacts) -> list[Finding]:
    """Whether weights and pools of CUDA workers fit on the devices, taken together."""
    on_cuda = [config for config in stack.configs if config.device == "cuda"]
    if not on_cuda or not torch.devices or torch.model is None:
        return []
    model = torch.model
    need = sum(_weights_and_pool(config, model) for config in on_cuda)
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


def disk_finding(folder: Path) -> Finding:
    """Room for logs."""
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    free = found.f_frsize * found.f_bavail
    if free < GIB:
        return warn("disk", f"{gib(free)} left at {folder}: logs may fill it", "free some, or give another --state")
    return ok("disk", f"{gib(free)} left at {folder}")
