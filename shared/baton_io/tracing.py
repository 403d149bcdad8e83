"""Traces of requests: what router and workers need of them, whoever carries them out.

Off by default, and then nothing of OpenTelemetry is loaded and a request pays for one `is None`. Times are seconds of the
host's monotonic clock, by which every process of a worker measures (`time.monotonic`, an event loop's `time`, and on Linux
`time.perf_counter` too); a tracer turns them into the time of day.
"""

from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

Attributes = Mapping[str, str | int | float]


class Span(Protocol):
    """Something that takes time, as part of a trace."""

    @property
    def is_recorded(self) -> bool:
        """Whether anybody will see it; if not, neither will its children be seen."""
        ...

    @property
    def headers(self) -> dict[str, str]:
        """What a callee is sent, so that its spans become children of this one."""
        ...

    def child(self, name: str, attributes: Attributes | None = None) -> "Span":
        """A part of it that begins now."""
        ...

    def note(self, name: str, began_s: float, ended_s: float, attributes: Attributes | None = None) -> None:
        """A part of it that is over."""
        ...

    def end(self, attributes: Attributes | None = None, *, failure: str | None = None) -> None:
        """It is over; `failure` says what went wrong. Only the first call counts."""
        ...


class Tracing(Protocol):
    """Makes the spans of one process."""

    def begin(self, name: str, began_s: float, caller: Mapping[str, str]) -> Span:
        """The first span here of a request: a child of the caller's span, where its head names one (W3C)."""
        ...

    def close(self) -> None:
        """Send what is left. May take seconds: not for an event loop's thread."""
        ...


def open_tracing(service: str, instance: str, endpoint: str | None, ratio: float) -> Tracing | None:
    """Tracing to the collector at `endpoint`; None where there is none. Raises ValueError where it cannot be had."""
    if endpoint is None:
        return None
    check_endpoint(endpoint)
    try:
        from baton_io.otel import OtelTracing
    except ImportError as error:
        raise ValueError(f"otlp_endpoint needs the extra otel (pip install 'baton[otel]'): {error}") from error
    return OtelTracing(service, instance, endpoint, ratio)


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError unless this is the base URL of a collector."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"otlp_endpoint must be a URL such as http://otel:4318, not {endpoint!r}")
