"""One request, one trace: a real stack of real processes sends its spans to a collector of the test's own."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from integration.stack import Stack, eventually, gold, greedy

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"


@dataclass(frozen=True)
class Seen:
    """One span as it arrived."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    failed: bool


@dataclass
class Collector:
    """What an OpenTelemetry collector would get."""

    url: str
    spans: list[Seen] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            told = {one.key: one.value.string_value for one in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.spans.append(
                    Seen(
                        service=told["service.name"],
                        name=span.name,
                        trace=span.trace_id.hex(),
                        span=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        began_ns=span.start_time_unix_nano,
                        ended_ns=span.end_time_unix_nano,
                        attributes={one.key: one.value.string_value or one.value.int_value for one in span.attributes},
                        failed=span.status.code == 2,
                    )
                )

    def of(self, trace: str) -> list[Seen]:
        return [span for span in self.spans if span.trace == trace]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") is None and self.path == "/v1/traces":
                found.take(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_OTLP_ENDPOINT", collector.url)
        up = Stack.up(directory)
    yield up
    up.down()


async def test_one_trace_holds_the_spans_of_router_prefill_and_decode(stack: Stack, collector: Collector) -> None:
    head = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{stack.url}/generate", json=greedy(gold()[0]) | {"stream": True}, headers=head)
        assert answer.status_code == 200

    async def complete() -> bool:
        names = {(span.service, span.name) for span in collector.of(TRACE)}
        return {("baton-prefill", "transfer"), ("baton-decode", "decode"), ("baton-router", "attempt")} <= names

    await eventually(complete, "the spans of all three")
    spans = collector.of(TRACE)
    root = next(span for span in spans if span.name == "router /generate")
    assert (root.service, root.parent) == ("baton-router", CALLER) and root.attributes[
        "http.response.status_code"
    ] == 200
    attempt = next(span for span in spans if span.name == "attempt")
    assert attempt.parent == root.span and int(attempt.attributes["baton.room"]) > 0
    for role, stages in (
        ("prefill", ["bootstrap", "queue", "forward", "transfer"]),
        ("decode", ["bootstrap", "queue", "transfer", "queue", "decode"]),
    ):
        worker = next(span for span in spans if (span.service, span.name) == (f"baton-{role}", "worker /generate"))
        assert worker.parent == attempt.span
        children = sorted((span for span in spans if span.parent == worker.span), key=lambda span: span.began_ns)
        assert [span.name for span in children] == stages
        for earlier, later in itertools.pairwise(children):
            assert earlier.began_ns <= earlier.ended_ns <= later.began_ns + 1_000_000
    # All on one time axis, though three processes measured: the whole contains its parts.
    assert all(root.began_ns - 1e6 <= span.began_ns and span.ended_ns <= root.ended_ns + 1e9 for span in spans)


async def test_a_failed_request_is_a_failed_span_and_a_callers_no_is_heeded(stack: Stack, collector: Collector) -> None:
    wrong, silent = "a" * 32, "b" * 32
    async with httpx.AsyncClient(timeout=60) as http:
        for trace, flag, status in ((silent, "00", 200), (wrong, "01", 400)):
            body = greedy(gold()[0]) if status == 200 else {"text": "x", "sampling_params": {"temperature": -1}}
            head = {"traceparent": f"00-{trace}-{CALLER}-{flag}"}
            assert (await http.post(f"{stack.url}/generate", json=body, headers=head)).status_code == status

    async def noted() -> bool:
        return any(span.name == "router /generate" for span in collector.of(wrong))

    await eventually(noted, "the failed span")
    assert next(span for span in collector.of(wrong) if span.name == "router /generate").failed
    assert collector.of(silent) == []
