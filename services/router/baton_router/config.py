"""What an operator can set on a router."""

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from baton_core.limits import BODY_STALL_MS, Limits
from baton_core.routing.breaker import (
    BREAKER_FAILURES_MAX,
    BREAKER_OPEN_MS,
    RETRIES,
    RETRIES_BURST,
    RETRIES_PER_REQUEST,
)
from baton_io.config import option

POSITIVE = (
    "connect_timeout_ms",
    "probe_interval_ms",
    "worker_silence_ms",
    "discovery_interval_ms",
    "kubernetes_resync_ms",
    "breaker_failures_max",
    "breaker_open_ms",
    "concurrent_max",
    "queue_ms",
    "client_silence_ms",
)
HIGHEST = {
    "retries": 10,
    "migrations": 10,
    "retries_per_request": 10,
    "retries_burst": 1_000_000,
    "queue_max": 1_000_000,
    "local_prompt_tokens": 1_000_000,
    "first_token_ms": 86_400_000,
    "client_silence_ms": BODY_STALL_MS,  # then the connection itself gives up
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of one router. Raises ValueError at construction, naming the key."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on")
    prefill: tuple[str, ...] = option(
        (), "URLs of prefill workers; none at all: decode workers serve alone (colocated)"
    )
    decode: tuple[str, ...] = option((), "URLs of decode workers")
    registry: str | None = option(None, "host:port of the bootstrap registry where both legs meet; none: the prefill's")
    workers_file: str | None = option(None, "TOML file with lists prefill and decode of URLs; read again on change")
    registry_discovery: bool = option(False, "take the prefill workers that are registered at --registry")
    kubernetes_api: str | None = option(
        None, "URL of the Kubernetes API, whose EndpointSlices name workers; in a pod: https://kubernetes.default.svc"
    )
    kubernetes_namespace: str = option("default", "namespace of the EndpointSlices")
    kubernetes_selector: str = option("app.kubernetes.io/name=baton", "label selector of the EndpointSlices")
    kubernetes_role_label: str = option("app.kubernetes.io/component", "label whose value is prefill or decode")
    kubernetes_credentials: str | None = option(
        "/var/run/secrets/kubernetes.io/serviceaccount", "folder with token and ca.crt; none: neither is used"
    )
    docker_socket: str | None = option(None, "socket of a Docker engine whose labelled containers are workers")
    discovery_interval_ms: int = option(2_000, "between two looks at a source of workers that cannot be watched")
    kubernetes_resync_ms: int = option(30_000, "between two full lists of the EndpointSlices")
    prefill_policy: Literal[
        "round_robin", "random", "power_of_two", "least_load", "cache_aware", "consistent_hash", "session"
    ] = option("round_robin", "how a prefill worker is chosen")
    decode_policy: Literal[
        "round_robin", "random", "power_of_two", "least_load", "cache_aware", "consistent_hash", "session"
    ] = option("round_robin", "how a decode worker is chosen")
    poll_loads: bool = option(True, "ask workers for /v1/loads with every probe; used by policies that weigh load")
    dp_mode: Literal["auto", "off", "follow", "inject", "register"] = option(
        "auto",
        "how a chosen data-parallel rank reaches the workers; auto: as prefill announces; off: they choose themselves",
    )
    degrade: bool = option(False, "without a usable prefill worker decode workers serve alone")
    local_prompt_tokens: int = option(0, "prompts estimated to be shorter stay on decode; 0: none")
    retries: int = option(
        RETRIES, "further pairs tried after a worker refused, was lost or was busy; only before any output"
    )
    retries_per_request: float = option(
        RETRIES_PER_REQUEST, "retries and migrations that every request adds to the budget of all"
    )
    retries_burst: int = option(RETRIES_BURST, "retries and migrations that the budget holds at most, and at first")
    migrations: int = option(
        3, "further pairs tried for a stream that had begun when its decode worker was lost; 0: it ends with an error"
    )
    breaker_failures_max: int = option(
        BREAKER_FAILURES_MAX, "failures in a row by a worker's own fault that open its breaker"
    )
    breaker_open_ms: int = option(BREAKER_OPEN_MS, "how long an open breaker keeps requests away before one is tried")
    concurrent_max: int = option(4_096, "requests under way; further ones wait in the queue")
    queue_max: int = option(1_024, "requests that wait; further ones get 503 with Retry-After")
    queue_ms: int = option(30_000, "longest wait in the queue")
    first_token_ms: int = option(
        30_000,
        "longest wait for a first token: who is expected to wait longer, behind those that do, gets 503 with "
        "Retry-After at once; 0: nobody",
    )
    client_silence_ms: int = option(30_000, "a client that sends nothing of its request for so long gets 408")
    keys_file: str | None = option(None, "TOML file of API keys with quotas and priorities; none: open to everyone")
    redis: str | None = option(
        None, "URL of the Redis through which routers share the quotas of keys; none: each counts for itself"
    )
    redis_password_file: str | None = option(None, "file with the password of that Redis")
    worker_key: str | None = option(None, "API key sent to workers; the client's own never is")
    admin_host: str = option("127.0.0.1", "address of the admin routes")
    admin_port: int | None = option(None, "port of the admin routes; none: there are none")
    connect_timeout_ms: int = option(1_000, "connecting to a worker, and any one probe of it")
    probe_interval_ms: int = option(1_000, "between two probes of a worker")
    worker_silence_ms: int = option(
        10_000, "a worker that answers no probe and sends nothing for so long is lost to the requests it has"
    )
    otlp_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector (OTLP over HTTP), such as http://otel:4318; none: no traces"
    )
    trace_ratio: float = option(1.0, "share of requests traced that come without a traceparent of their own")
    registry_token_file: str | None = option(
        None, "file with the token that registries demand for writes; used with --dp-mode register"
    )
    log_format: Literal["console", "json"] = option("console", "how log lines look")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least severe log lines shown")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65_536:
            raise ValueError(f"port must be a port number, not {self.port}")
        for name in POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name, highest in HIGHEST.items():
            if not 0 <= getattr(self, name) <= highest:
                raise ValueError(f"{name} must be between 0 and {highest}, not {getattr(self, name)}")
        if self.admin_port is not None and not 0 < self.admin_port < 65_536:
            raise ValueError(f"admin_port must be a port number, not {self.admin_port}")
        if not 0 <= self.trace_ratio <= 1:
            raise ValueError(f"trace_ratio must be between 0 and 1, not {self.trace_ratio}")
        if self.redis is not None and not self.redis.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(f"redis must be a URL such as redis://redis:6379/0, not {self.redis!r}")
        if self.registry_discovery and self.registry is None:
            raise ValueError("registry_discovery needs a registry")
        for name in ("prefill", "decode"):
            for url in getattr(self, name):
                check_url(name, url)
        if self.registry is not None:
            parse_address(self.registry)


def parse_address(text: str) -> tuple[str, int]:
    """Host (IPv6 in brackets) and port of `host:port` or `http://host:port`. Raises ValueError."""
    parts = urlsplit(text if "//" in text else f"//{text}")
    if not parts.hostname or not parts.port:
        raise ValueError(f"registry must be host:port, not {text!r}")
    return bracketed(parts.hostname), parts.port


def bracketed(host: str) -> str:
    """`host` as it stands in front of a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def check_url(name: str, url: str) -> None:
    """Raises ValueError, naming the key, where `url` is not that of a worker."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"{name} must list URLs such as http://10.0.0.1:8100, not {url!r}")
