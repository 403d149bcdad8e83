"""A worker's spans: one for each request from its head to its last byte, and within it what the scheduler did with it.

The scheduler reports the phases of a request once it has ended, with its next snapshot; they are told apart here by what
people ask for: bootstrap, queue, forward, transfer, decode.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from baton_core.errors import EngineError
from baton_core.request import Incarnation, RequestId
from baton_io.ipc import Stage, Timeline
from baton_io.tracing import TRACEPARENT, TRACESTATE, Span, Tracing, open_tracing
from baton_worker.config import Role, WorkerConfig

LIVE_MAX = 16_384
"""Requests whose phases are waited for; the oldest are given up first."""

SPAN_OF_STAGE = {
    "bootstrapping": "bootstrap",
    "accepted": "bootstrap",
    "resolving": "bootstrap",
    "greeting": "bootstrap",
    "queued": "queue",
    "prealloc": "queue",
    "arrived": "queue",
    "local": "queue",
    "retracted": "queue",
    "forwarding": "forward",
    "computing": "forward",
    "inflight": "transfer",
    "transferring": "transfer",
    "running": "decode",
    "backing_up": "backup",
    "restoring": "backup",
    "revoking": "revoke",
}
"""Phases not named here (`intake`) take no time of their own."""


class RequestTrace:
    """The span of one request at this worker."""

    def __init__(self, span: Span) -> None:
        self.span = span

    def end(self, status: int, reason: str = "") -> None:
        """The request was answered."""
        attributes = {"http.response.status_code": status}
        self.span.end(attributes, failure=(reason or f"status {status}") if status >= 400 else None)


class Traces:
    """All spans of a worker; without tracing it does nothing."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self._live: OrderedDict[RequestId, Span] = OrderedDict()

    def begin(self, route: str, rid: RequestId, headers: Mapping[str, str], began_s: float) -> RequestTrace | None:
        """A request came in."""
        if self._tracing is None:
            return None
        caller = {name: headers[name] for name in (TRACEPARENT, TRACESTATE) if name in headers}
        span = self._tracing.begin(f"worker /{route}", began_s, caller)
        return RequestTrace(span)

    def follow(self, trace: RequestTrace | None, scheduler_rid: RequestId) -> None:
        """The scheduler has the request under this id."""
        if trace is None or not trace.span.is_recorded:
            return
        self._live[scheduler_rid] = trace.span
        if len(self._live) > LIVE_MAX:
            self._live.popitem(last=False)

    def ended(self, timelines: Iterable[Timeline]) -> None:
        """The scheduler says what it did with requests that have ended."""
        for timeline in timelines:
            span = self._live.pop(timeline.rid, None)
            if span is not None:
                for name, stages in _by_span(timeline.stages):
                    phases = ", ".join(dict.fromkeys(stage.name for stage in stages))
                    span.note(name, stages[0].began_s, stages[-1].ended_s, {"baton.phase": phases})

    async def close(self) -> None:
        """Send what is left."""
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def open_traces(config: WorkerConfig, role: Role, incarnation: Incarnation) -> Traces:
    """The spans of this worker, as configured. Raises EngineError where that cannot be had."""
    try:
        return Traces(open_tracing(f"baton-{role.value}", incarnation, config.otlp_endpoint, config.trace_ratio))
    except ValueError as error:
        raise EngineError(str(error)) from error


def _by_span(stages: Iterable[Stage]) -> list[tuple[str, list[Stage]]]:
    """Stages that follow each other and belong to the same span, together."""
    found: list[tuple[str, list[Stage]]] = []
    for stage in stages:
        name = SPAN_OF_STAGE.get(stage.name)
        if name is None:
            continue
        if found and found[-1][0] == name:
            found[-1][1].append(stage)
        else:
            found.append((name, [stage]))
    return found
