"""Tracing over OpenTelemetry's SDK: batches, sent by a thread of its own, OTLP over HTTP. Needs the extra `otel`."""

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton_io.tracing import Attributes

TRACES_PATH = "/v1/traces"
PERIOD_MS = 1_000
"""Between two batches."""

W3C = TraceContextTextMapPropagator()


class OtelTracing:
    """See `Tracing`."""

    def __init__(self, service: str, instance: str, endpoint: str, ratio: float) -> None:
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        # Who calls with a trace decides whether it is kept; so all processes agree about one request.
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(ratio)))
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=PERIOD_MS))
        self._tracer = self._provider.get_tracer("baton")

    def begin(self, name: str, began_s: float, caller: Mapping[str, str]) -> "OtelSpan":
        """See `Tracing`."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        return OtelSpan(self._tracer, name, began_s, W3C.extract(caller), offset_ns, trace.SpanKind.SERVER, None)

    def close(self) -> None:
        """See `Tracing`."""
        self._provider.shutdown()


class OtelSpan:
    """See `Span`. `offset_ns` leads from the monotonic clock to the time of day."""

    def __init__(
        self,
        tracer: trace.Tracer,
        name: str,
        began_s: float,
        parent: Context,
        offset_ns: int,
        kind: trace.SpanKind,
        attributes: Attributes | None,
    ) -> None:
        self._tracer, self._offset_ns = tracer, offset_ns
        self._span = tracer.start_span(
            name, context=parent, kind=kind, start_time=self._day_ns(began_s), attributes=attributes
        )
        self._context = trace.set_span_in_context(self._span, Context())

    @property
    def is_recorded(self) -> bool:
        """See `Span`."""
        return self._span.get_span_context().trace_flags.sampled

    @property
    def headers(self) -> dict[str, str]:
        """See `Span`."""
        carrier: dict[str, str] = {}
        W3C.inject(carrier, self._context)
        return carrier

    def child(self, name: str, attributes: Attributes | None = None) -> "OtelSpan":
        """See `Span`."""
        return self._child(name, time.monotonic(), attributes)

    def note(self, name: str, began_s: float, ended_s: float, attributes: Attributes | None = None) -> None:
        """See `Span`."""
        self._child(name, began_s, attributes)._span.end(self._day_ns(ended_s))

    def end(self, attributes: Attributes | None = None, *, failure: str | None = None) -> None:
        """See `Span`."""
        if not self._span.is_recording():
            return
        for name, value in (attributes or {}).items():
            self._span.set_attribute(name, value)
        if failure is not None:
            self._span.set_status(trace.StatusCode.ERROR, failure)
        self._span.end(self._day_ns(time.monotonic()))

    def _child(self, name: str, began_s: float, attributes: Attributes | None) -> "OtelSpan":
        kind = trace.SpanKind.INTERNAL
        return OtelSpan(self._tracer, name, began_s, self._context, self._offset_ns, kind, attributes)

    def _day_ns(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._offset_ns
