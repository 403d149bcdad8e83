"""What an operator can set on a router."""

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from baton_core.limits import Limits
from baton_io.config import option


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
    prefill_policy: Literal["round_robin", "random"] = option("round_robin", "how a prefill worker is chosen")
    decode_policy: Literal["round_robin", "random"] = option("round_robin", "how a decode worker is chosen")
    retries: int = option(2, "further pairs tried after a worker refused, was lost or was busy; only before any output")
    connect_timeout_ms: int = option(1_000, "connecting to a worker, and any one probe of it")
    probe_interval_ms: int = option(1_000, "between two probes of a worker")
    log_format: Literal["console", "json"] = option("console", "how log lines look")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least severe log lines shown")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65_536:
            raise ValueError(f"port must be a port number, not {self.port}")
        for name in ("connect_timeout_ms", "probe_interval_ms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0 <= self.retries <= 10:
            raise ValueError(f"retries must be between 0 and 10, not {self.retries}")
        for name in ("prefill", "decode"):
            for url in getattr(self, name):
                _check_url(name, url)
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


def _check_url(name: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError(f"{name} must list URLs such as http://10.0.0.1:8100, not {url!r}")
