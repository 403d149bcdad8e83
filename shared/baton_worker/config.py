"""Configuration of a worker, and what its app hands to each of its rank processes.

`PrefillConfig` and `DecodeConfig` come from flags, environment and file (`baton_io.config`); `RankConfig` travels as one
line of JSON on a rank's stdin, so that a rank reads neither flags nor environment.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from baton_core.limits import Limits
from baton_io.config import option

DtypeName = Literal["bfloat16", "float32"]
DeviceName = Literal["cpu", "cuda"]
TransferName = Literal["auto", "tcp", "shm", "fake"]
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses one can listen on but nobody can connect to, and what is announced in their place."""


class Role(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What prefill and decode workers have in common. Raises ValueError at construction when a value is out of range."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8200, "port of the HTTP API; 0 takes a free one")
    model: str = option("smollm2-135m-instruct", "short name, .gguf file, Hugging Face directory, or hub id")
    served_model_name: str | None = option(None, "name shown in /v1/models; the model's own by default")
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "number format of weights, activations and KV cache")
    device: Literal["cpu", "cuda"] = option("cpu", "where the model runs")
    transfer: Literal["auto", "tcp", "shm", "fake"] = option(
        "auto", "how KV pages travel; auto: shm on one host, else tcp"
    )
    shm_dir: str = option("", "directory of decode's shm sockets, shared between containers; a private one by default")
    registry: tuple[str, ...] = option((), "base URLs of bootstrap registries, such as http://10.0.0.5:8998")
    advertise_host: str | None = option(None, "address that other workers reach this one at; --host by default")
    bootstrap_allow: tuple[str, ...] = option((), "more bootstrap hosts that requests may name")
    page_tokens: int = option(16, "tokens in one KV page")
    kv_tokens: int = option(32_768, "tokens the KV pool holds")
    threads: int = option(0, "compute threads of one rank; 0 takes one for each of its cores")
    cores: str = option("", "cores for the rank process, such as 0-3,6; all by default")
    log_format: Literal["console", "json"] = option("console", "log lines for people or for machines")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least severe log lines shown")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        _require(0 <= self.port < 65_536, "port", self.port, "between 0 and 65535")
        _require(self.page_tokens > 0, "page_tokens", self.page_tokens, "positive")
        _require(self.kv_tokens >= self.page_tokens, "kv_tokens", self.kv_tokens, "at least page_tokens")
        _require(self.threads >= 0, "threads", self.threads, "at least 0")
        for url in self.registry:
            _require(url.startswith(("http://", "https://")), "registry", url, "an http:// or https:// URL")
        parse_cores(self.cores)

    @property
    def reachable_host(self) -> str:
        """The address that other workers are told."""
        return self.advertise_host or self.local_host

    @property
    def local_host(self) -> str:
        """The address at which this worker reaches itself."""
        return WILDCARD_HOSTS.get(self.host, self.host)


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(WorkerConfig):
    """A prefill worker: it also serves a bootstrap registry."""

    port: int = option(8100, "port of the HTTP API; 0 takes a free one")
    bootstrap_port: int = option(8998, "port of this worker's own bootstrap registry; 0 takes a free one")

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)
        _require(0 <= self.bootstrap_port < 65_536, "bootstrap_port", self.bootstrap_port, "between 0 and 65535")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """A decode worker."""

    port: int = option(8200, "port of the HTTP API; 0 takes a free one")


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """Everything one rank process needs to know; `ipc_address` is where its app is bound and waits."""

    role: Role
    rank: int
    incarnation: str
    ipc_address: str
    model_path: str
    model_name: str
    dtype: DtypeName
    device: DeviceName
    transfer: TransferName
    shm_dir: str
    host: str  # listen here
    advertise_host: str  # and tell others this
    page_tokens: int
    kv_tokens: int
    threads: int
    cores: tuple[int, ...]  # empty: leave the affinity alone
    log_format: LogFormat
    log_level: LogLevel
    limits: Limits

    @staticmethod
    def of(
        config: WorkerConfig,
        *,
        role: Role,
        rank: int,
        incarnation: str,
        ipc_address: str,
        model_path: str,
        model_name: str,
    ) -> "RankConfig":
        """The configuration of one rank of a worker configured by `config`."""
        return RankConfig(
            role=role,
            rank=rank,
            incarnation=incarnation,
            ipc_address=ipc_address,
            model_path=model_path,
            model_name=model_name,
            dtype=config.dtype,
            device=config.device,
            transfer=config.transfer,
            shm_dir=config.shm_dir,
            host=config.host,
            advertise_host=config.reachable_host,
            page_tokens=config.page_tokens,
            kv_tokens=config.kv_tokens,
            threads=config.threads,
            cores=parse_cores(config.cores),
            log_format=config.log_format,
            log_level=config.log_level,
            limits=config.limits,
        )


def parse_cores(text: str) -> tuple[int, ...]:
    """The core numbers in a list such as "0-3,6", ascending; empty for "". Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise ValueError(f"cores must be a list such as 0-3,6, not {text!r}")
        span = range(int(first), int(last or first) + 1)
        if not span or span.stop > 4_096:
            raise ValueError(f"cores must be ascending ranges of core numbers below 4096, not {text!r}")
        cores.update(span)
    return tuple(sorted(cores))


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
