"""A trace through the client, a running service and a target, as an OTLP collector receives it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import tarry
from tests.integration.service import service, target


class Collector:
    """An OTLP collector: an HTTP server that keeps the spans of each service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        """The spans in the order of arrival, with the name of their service."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    attributes = {each.key: each.value for each in resource.resource.attributes}
                    name = attributes["service.name"].string_value
                    for scope in resource.scope_spans:
                        collector.spans += [(name, span) for span in scope.spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def spans_of(self, service_name: str) -> list[Span]:
        """Return the spans of one service, in the order of their start."""
        spans = [span for name, span in self.spans if name == service_name]
        return sorted(spans, key=lambda span: span.start_time_unix_nano)


@contextmanager
def _collector() -> Iterator[Collector]:
    started = Collector()
    try:
        yield started
    finally:
        started.close()


def _provider(service_name: str, collector: Collector) -> TracerProvider:
    provider = TracerProvider(resource=Resource({"service.name": service_name}))
    exporter = OTLPSpanExporter(f"{collector.url}/v1/traces")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def test_enqueue_attempts_and_target_are_one_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempts are children of the client's span, and parents of the target's spans."""
    with (
        _collector() as collector,
        target(lambda _path, number: 503 if number == 1 else 200) as receiver,
    ):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # the shutdown exports the spans
        with service(tmp_path, "--set", "traces=otlp") as started:
            state = TraceState([("vendor", "a")])
            remote = SpanContext(0xABC, 0xDEF, True, TraceFlags(1), state)
            client_provider = _provider("client", collector)
            tracer = client_provider.get_tracer("test")
            parent = set_span_in_context(NonRecordingSpan(remote))
            with (
                tracer.start_as_current_span("enqueue", parent),
                tarry.Client(f"http://127.0.0.1:{started.port}") as client,
            ):
                task = client.enqueue(
                    f"{receiver.url}/hook", overrides={"maxAttempts": 2, "initialDelayMs": 1}
                )
            assert "SUCCEEDED" == started.wait_until_finished(task.task_id)["status"]
            target_provider = _provider("target", collector)
            for headers in receiver.received_requests["/hook"]:
                context = TraceContextTextMapPropagator().extract(
                    {name.lower(): value for name, value in headers.items()}
                )
                target_provider.get_tracer("test").start_span("hook", context).end()
            assert 0 == started.stop()
        client_provider.shutdown()
        target_provider.shutdown()

    (enqueued,) = collector.spans_of("client")
    attempts, handled = collector.spans_of("tarry"), collector.spans_of("target")
    assert (2, 2) == (len(attempts), len(handled))
    for attempt, target_span in zip(attempts, handled, strict=True):
        assert 0xABC.to_bytes(16) == enqueued.trace_id == attempt.trace_id == target_span.trace_id
        assert enqueued.span_id == attempt.parent_span_id
        assert attempt.span_id == target_span.parent_span_id
        assert "vendor=a" == enqueued.trace_state == attempt.trace_state == target_span.trace_state
