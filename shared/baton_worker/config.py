"""Configuration of a worker, and what its app hands to each of its rank processes.

`PrefillConfig` and `DecodeConfig` come from flags, environment and file (`baton_io.config`); `RankConfig` travels as one
line of JSON on a rank's stdin, so that a rank reads neither flags nor environment.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal
from urllib.parse import urlsplit

from baton_core.limits import Limits
from baton_core.ranks import Parallel, share
from baton_core.registration import FOLLOW
from baton_io.config import option

DtypeName = Literal["bfloat16", "float32"]
TransferName = Literal["auto", "tcp", "shm", "fake"]
ControlName = Literal["auto", "gloo", "shm"]
BalanceMethod = Literal["follow_bootstrap_room", "round_robin", "least_load"]
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
    transfer_staging: bool = option(
        False, "over tcp: gather many small runs of pages into one, and scatter them on decode; set on both sides"
    )
    kv_checksum: bool = option(
        False, "prefill sends a checksum over the KV pages of each request, decode checks it; set on both sides"
    )
    shm_dir: str = option("", "directory of decode's shm sockets, shared between containers; a private one by default")
    registry: tuple[str, ...] = option((), "base URLs of bootstrap registries, such as http://10.0.0.5:8998")
    advertise_host: str | None = option(None, "address that other workers reach this one at; --host by default")
    bootstrap_allow: tuple[str, ...] = option((), "more bootstrap hosts that requests may name")
    page_tokens: int = option(16, "tokens in one KV page")
    kv_tokens: int = option(32_768, "tokens the KV pool holds")
    prefix_cache: bool = option(
        True,
        "keep the KV pages of finished requests, so that what begins alike is neither computed nor transferred again",
    )
    tp: int = option(1, "tensor-parallel ranks of one stage of one unit")
    pp: int = option(1, "pipeline stages of one unit")
    dp: int = option(1, "units: attention-DP ranks, each with a KV pool and requests of its own")
    cp: int = option(1, "context-parallel ranks of one stage, which share the tokens of a prompt (prefill only)")
    dp_attention: bool = option(False, "shard the layers outside attention over dp * tp, all units in step")
    load_balance_method: Literal["follow_bootstrap_room", "round_robin", "least_load"] = option(
        "round_robin", "which unit takes a request that names none (routed_dp_rank)"
    )
    force_query_prefill_dp_rank: bool = option(
        False, "prefill registers the DP rank of every room, decode asks the registry for it"
    )
    nnodes: int = option(1, "machines that this worker's ranks are spread over, in equal shares")
    node_rank: int = option(0, "which of them this is; node 0 has the HTTP API")
    dist_init_addr: str | None = option(None, "host:port of node 0 where the ranks of several nodes meet")
    control: Literal["auto", "gloo", "shm"] = option(
        "auto", "how the ranks of a unit agree; auto: shared memory on one host, else gloo"
    )
    threads: int = option(0, "compute threads of one rank; 0 takes one for each of its cores")
    cores: str = option("", "cores for the ranks, such as 0-3,6, shared out among them; all by default")
    otlp_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector (OTLP over HTTP), such as http://otel:4318; none: no traces"
    )
    trace_ratio: float = option(1.0, "share of requests traced that come without a traceparent of their own")
    registry_token_file: str | None = option(
        None, "file with the token that registries demand for writes; this worker's own registry demands it too"
    )
    log_format: Literal["console", "json"] = option("console", "log lines for people or for machines")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least severe log lines shown")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        _require(0 <= self.port < 65_536, "port", self.port, "between 0 and 65535")
        _require(self.page_tokens > 0, "page_tokens", self.page_tokens, "positive")
        _require(self.kv_tokens >= self.page_tokens, "kv_tokens", self.kv_tokens, "at least page_tokens")
        _require(self.threads >= 0, "threads", self.threads, "at least 0")
        _require(0 <= self.trace_ratio <= 1, "trace_ratio", self.trace_ratio, "between 0 and 1")
        for url in self.registry:
            _require(url.startswith(("http://", "https://")), "registry", url, "an http:// or https:// URL")
        parse_cores(self.cores)
        _check_layout(self)

    @property
    def parallel(self) -> Parallel:
        """The sizes of this worker. DP attention with one unit is plain."""
        return Parallel(tp=self.tp, pp=self.pp, dp=self.dp, cp=self.cp, dp_attention=self.dp_attention and self.dp > 1)

    @property
    def local_ranks(self) -> range:
        """The ranks that run on this node."""
        return share(self.parallel.ranks, self.node_rank, self.nnodes)

    @property
    def init_address(self) -> tuple[str, int]:
        """Host and port of node 0; only with several nodes."""
        assert self.dist_init_addr is not None, "checked at construction"
        return parse_address(self.dist_init_addr)

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
    load_balance_method: Literal["follow_bootstrap_room", "round_robin", "least_load"] = option(
        "follow_bootstrap_room", "which unit takes a request that names none (routed_dp_rank)"
    )
    bootstrap_port: int = option(8998, "port of this worker's own bootstrap registry; 0 takes a free one")

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)
        _require(0 <= self.bootstrap_port < 65_536, "bootstrap_port", self.bootstrap_port, "between 0 and 65535")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(WorkerConfig):
    """A decode worker."""

    port: int = option(8200, "port of the HTTP API; 0 takes a free one")

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)
        if self.cp > 1:
            raise ValueError(f"cp = {self.cp}: a decode worker has no prompt to split; cp is prefill's, give it --tp")


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """Everything one rank process needs to know; `ipc_address` is where its app is bound and waits.

    `rendezvous` is where torch's groups of the whole worker meet, `log_address` where the leader of this rank's unit
    publishes the unit's log; `run_dir` is private to the app and its ranks on this node.
    """

    role: Role
    rank: int  # in the worker
    local_rank: int  # on this node: which of its devices
    parallel: Parallel
    incarnation: str
    ipc_address: str
    rendezvous: str
    log_address: str
    run_dir: str
    control: ControlName
    load_balance_method: BalanceMethod
    force_query_prefill_dp_rank: bool
    model_path: str
    model_name: str
    dtype: DtypeName
    device: str  # "cpu", "cuda", or "cuda:1" where several ranks share a node
    transfer: TransferName
    transfer_staging: bool
    kv_checksum: bool
    shm_dir: str
    host: str  # listen here
    advertise_host: str  # and tell others this
    page_tokens: int
    kv_tokens: int
    prefix_cache: bool
    threads: int
    cores: tuple[int, ...]  # empty: leave the affinity alone
    log_format: LogFormat
    log_level: LogLevel
    limits: Limits
    traces: bool = False  # report the stages of every request

    @property
    def dp_size(self) -> int:
        """Units of the worker."""
        return self.parallel.dp

    @property
    def follow_bootstrap_room(self) -> bool:
        """Whether room mod dp_size is the rank of every room, and no room is registered (prefill)."""
        return follows(self.load_balance_method, forced=self.force_query_prefill_dp_rank)


def follows(method: BalanceMethod, *, forced: bool) -> bool:
    """What a prefill worker publishes as `follow_bootstrap_room`. A forced one registers every room, so nobody guesses."""
    return method == FOLLOW and not forced


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


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of a text such as 10.0.0.5:29500 or [fe80::1]:29500. Raises ValueError."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.path or parts.username:
        raise ValueError(f"dist_init_addr must be host:port, not {text!r}")
    return host, port


def _check_layout(config: WorkerConfig) -> None:
    for name in ("tp", "pp", "dp", "cp", "nnodes"):
        _require(getattr(config, name) >= 1, name, getattr(config, name), "at least 1")
    ranks, nodes = config.parallel.ranks, config.nnodes
    if config.pp > 1 and config.parallel.dp_attention:
        raise ValueError(f"dp_attention with pp = {config.pp}: units that step together cannot be pipelines; use one")
    _require(0 <= config.node_rank < nodes, "node_rank", config.node_rank, f"below nnodes ({nodes})")
    if ranks % nodes:
        raise ValueError(f"nnodes = {nodes} does not divide the {ranks} ranks of pp * dp * cp * tp")
    if config.dist_init_addr is not None:
        parse_address(config.dist_init_addr)
    elif nodes > 1:
        raise ValueError(f"nnodes = {nodes} needs dist_init_addr: the host:port of node 0 where the ranks meet")
    if config.control == "shm" and (ranks // nodes) % config.parallel.members:
        raise ValueError(f"control = 'shm' with nnodes = {nodes}: a unit spans hosts, shared memory does not; use gloo")


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
