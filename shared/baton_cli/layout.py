"""Which processes `baton up` starts, with which arguments: pure, from options, free ports and cores to a list.

A process is started again from its `ProcessSpec` alone, so a spec holds everything that makes it: nothing is derived
a second time at restart.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_cli.errors import UsageError
from baton_io.config import ROLES

HOST = "127.0.0.1"
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_DTYPE = "bfloat16"
DEFAULT_TRANSFER = "auto"
WORKERS = ("prefill", "decode")

RANK_AXES = ("tp", "pp", "dp", "cp")

# What connects the processes to each other is chosen here, so nobody else may set it.
WIRING = ("port", "bootstrap_port", "registry", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process that serves HTTP: everything needed to start it, and to start it again."""

    role: str
    index: int
    argv: tuple[str, ...]
    env: dict[str, str]  # BATON_* only; the rest comes from whoever starts it
    cwd: str
    url: str
    log: str
    bootstrap_port: int | None = None  # prefill only: its own registry

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSetting:
    """One `--set role.key=value`."""

    role: str
    key: str
    value: str

    @property
    def variable(self) -> str:
        return f"BATON_{self.role.upper()}_{self.key.upper()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What to start. `model`, `dtype`, `transfer` are None where the user did not say. Raises UsageError."""

    prefill: int = 1
    decode: int = 1
    colocated: int = 0
    model: str | None = None
    dtype: str | None = None
    transfer: str | None = None
    port: int = 8000
    settings: tuple[RoleSetting, ...] = ()

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode, self.colocated) < 0:
            raise UsageError("the number of workers cannot be negative")
        if self.decode + self.colocated == 0:
            raise UsageError(
                "nothing would decode: give --decode 1 (with --prefill 1), or --colocated 1 for a worker that does both"
            )
        if not 0 < self.port < 65536:
            raise UsageError(f"--port must be 1 to 65535, not {self.port}")

    @property
    def decoders(self) -> int:
        """Decode processes; the colocated ones are the last of them."""
        return self.decode + self.colocated

    @property
    def free_ports_needed(self) -> int:
        return 1 + 2 * self.prefill + self.decoders


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where the processes will run."""

    python: str
    cwd: str
    logs: Path
    env: Mapping[str, str]  # BATON_* of the caller
    cores: tuple[int, ...]  # that this process may use
    multiplies_bfloat16: bool = True  # the processor itself, not by way of float32


def parse_setting(text: str) -> RoleSetting:
    """`role.key=value` as given to `--set`. Raises UsageError."""
    target, equals, value = text.partition("=")
    role, dot, key = target.strip().partition(".")
    key = key.strip().replace("-", "_").lower()
    if not (equals and dot and key.isidentifier()):
        raise UsageError(f"--set {text}: write it as role.key=value, for example prefill.chunk_tokens=256")
    if role not in ROLES:
        raise UsageError(f"--set {text}: the role must be one of {', '.join(ROLES)}")
    if key in WIRING:
        hint = "; use --port" if (role, key) == ("router", "port") else ""
        raise UsageError(f"--set {text}: `baton up` chooses {key} itself{hint}")
    return RoleSetting(role=role, key=key, value=value)


def plan(options: UpOptions, host: Host, free_ports: Sequence[int]) -> list[ProcessSpec]:
    """The processes, router first. `free_ports` has at least `options.free_ports_needed` entries."""
    assert len(free_ports) >= options.free_ports_needed
    ports = iter(free_ports)
    registry_port = next(ports)
    registry = f"http://{HOST}:{registry_port}"
    cores = worker_cores(options, host)
    prefills = [_prefill(options, host, ports, registry, index, cores) for index in range(options.prefill)]
    decodes = [_decode(options, host, ports, registry, index, cores) for index in range(options.decoders)]
    bootstrap = _spec(options, host, "bootstrap", 0, registry_port, {"host": HOST, "port": str(registry_port)})
    router_flags = {"port": str(options.port), "registry": registry}
    router_flags |= {"prefill": ",".join(spec.url for spec in prefills)} if prefills else {}
    router_flags |= {"decode": ",".join(spec.url for spec in decodes)}
    router = _spec(options, host, "router", 0, options.port, router_flags)
    return [router, bootstrap, *prefills, *decodes]


def worker_cores(options: UpOptions, host: Host) -> list[str | None]:
    """Cores of each worker, prefill workers first: disjoint while there are enough, shared in order when not.

    A worker gets them in proportion to its ranks, among which it shares them out. All None where there is one core, or
    where the user set cores for anybody: then all of it is theirs to decide.
    """
    cores = host.cores
    ranks = [ranks_of("prefill", options, host)] * options.prefill
    ranks += [ranks_of("decode", options, host)] * options.decoders
    variables = {"BATON_CORES", *(f"BATON_{role.upper()}_CORES" for role in WORKERS)}
    theirs = variables & ({setting.variable for setting in options.settings} | set(host.env))
    if len(cores) < 2 or theirs:
        return [None] * len(ranks)
    shares: list[str | None] = []
    for index, own in enumerate(ranks):
        before = sum(ranks[:index])
        first, end = (part * len(cores) // sum(ranks) for part in (before, before + own))
        shares.append(",".join(str(core) for core in cores[first : max(end, first + 1)]))
    return shares


def ranks_of(role: str, options: UpOptions, host: Host) -> int:
    """How many ranks a worker of this role will have, as far as settings and environment say; nonsense counts as 1."""
    ranks = 1
    settings = {setting.key: setting.value for setting in options.settings if setting.role == role}
    for key in RANK_AXES:
        shared, own = f"BATON_{key.upper()}", f"BATON_{role.upper()}_{key.upper()}"
        said = settings.get(key) or host.env.get(own) or host.env.get(shared) or "1"
        ranks *= max(1, int(said)) if said.isdecimal() else 1
    return ranks


def default_dtype(settings: Iterable[RoleSetting], env: Mapping[str, str], *, multiplies_bfloat16: bool) -> str:
    """What weights and cache are of where the user does not say: float32 on a CPU that would only imitate bfloat16."""
    said = {setting.value for setting in settings if setting.key == "device"}
    said |= {env.get(f"BATON_{name}DEVICE", "cpu") for name in ("", "PREFILL_", "DECODE_")}
    return DEFAULT_DTYPE if multiplies_bfloat16 or said - {"cpu"} else "float32"


def _prefill(
    options: UpOptions, host: Host, ports: Iterator[int], registry: str, index: int, cores: Sequence[str | None]
) -> ProcessSpec:
    port, bootstrap_port = next(ports), next(ports)
    flags = {"port": str(port), "bootstrap_port": str(bootstrap_port)}
    flags |= _worker_flags(options, host, "prefill", registry, cores[index])
    return _spec(options, host, "prefill", index, port, flags, bootstrap_port=bootstrap_port)


def _decode(
    options: UpOptions, host: Host, ports: Iterator[int], registry: str, index: int, cores: Sequence[str | None]
) -> ProcessSpec:
    port = next(ports)
    flags = {"port": str(port)} | _worker_flags(options, host, "decode", registry, cores[options.prefill + index])
    return _spec(options, host, "decode", index, port, flags)


def _worker_flags(options: UpOptions, host: Host, role: str, registry: str, cores: str | None) -> dict[str, str]:
    flags = {"registry": registry}
    dtype = default_dtype(options.settings, host.env, multiplies_bfloat16=host.multiplies_bfloat16)
    for key, said, default in (
        ("model", options.model, DEFAULT_MODEL),
        ("dtype", options.dtype, dtype),
        ("transfer", options.transfer, DEFAULT_TRANSFER),
    ):
        # A default of ours must not beat what the user's environment or file says.
        elsewhere = {
            f"BATON_{key.upper()}",
            f"BATON_{role.upper()}_{key.upper()}",
            "BATON_CONFIG",
            f"BATON_{role.upper()}_CONFIG",
        }
        if said is not None:
            flags[key] = said
        elif not elsewhere & set(host.env):
            flags[key] = default
    return flags if cores is None else flags | {"cores": cores}


def _spec(
    options: UpOptions,
    host: Host,
    role: str,
    index: int,
    port: int,
    flags: Mapping[str, str],
    *,
    bootstrap_port: int | None = None,
) -> ProcessSpec:
    own = {setting.key: setting for setting in options.settings if setting.role == role}
    argv = [host.python, "-m", f"baton_{role}"]
    for key, value in flags.items():
        if key not in own:  # `--set` travels as a variable, which a flag would beat
            argv += [f"--{key.replace('_', '-')}", value]
    return ProcessSpec(
        role=role,
        index=index,
        argv=tuple(argv),
        env=dict(host.env) | {setting.variable: setting.value for setting in own.values()},
        cwd=host.cwd,
        url=f"http://{HOST}:{port}",
        log=str(host.logs / f"{role}-{index}.log"),
        bootstrap_port=bootstrap_port,
    )
