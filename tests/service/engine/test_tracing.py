from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tarry.errors import ConfigurationError, MissingExtra
from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.engine.tracing import AttemptTracer
from tests.service.engine.harness import BUSY, EPOCH_S, OK, EngineHarness, FakeTarget, run

TRACE_ID, CALLER_SPAN_ID = 0x1234, 0x5678
TRACE = f"00-{TRACE_ID:032x}-{CALLER_SPAN_ID:016x}-01"
ONE_RETRY = {"maxAttempts": 2, "initialDelayMs": 500, "jitterType": "NONE"}


def run_task(
    *responses: Any, stop_after_s: float = 10.0, **fields: Any
) -> tuple[Sequence[ReadableSpan], Sequence[DeliveryRequest]]:
    """Run one task with tracing; return the spans that were exported, and the sent requests."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    target = FakeTarget(*responses)

    async def main() -> None:
        harness = EngineHarness(target, tracer=AttemptTracer(provider, lambda: EPOCH_S))
        await harness.engine.start()
        await harness.add(harness.new_task(**fields))
        await asyncio.sleep(stop_after_s)
        await harness.engine.stop(1)

    run(main)
    return exporter.get_finished_spans(), target.requests


def attributes_of(span: ReadableSpan) -> Mapping[str, Any]:
    """Return the attributes of a span."""
    assert span.attributes is not None
    return span.attributes


def test_each_attempt_has_a_span_in_the_trace_of_the_caller() -> None:
    """Spans are children of the caller's span, and parents of the target's spans."""
    spans, requests = run_task(BUSY, OK, trace=TRACE, tracestate="vendor=a", overrides=ONE_RETRY)

    assert 2 == len(spans) == len(requests)
    assert 2 == len({span.context.span_id for span in spans})
    for span, request in zip(spans, requests, strict=True):
        assert span.parent is not None
        assert (TRACE_ID, CALLER_SPAN_ID) == (span.context.trace_id, span.parent.span_id)
        assert (
            f"00-{TRACE_ID:032x}-{span.context.span_id:016x}-01" == (request.headers["traceparent"])
        )
        assert "vendor=a" == request.headers["tracestate"]


def test_attributes_of_the_spans() -> None:
    """A span has the task, the target without path and query, the response and the outcome."""
    url = "http://a.example:8080/path?token=secret"
    (failed, succeeded), _ = run_task(BUSY, OK, url=url, overrides=ONE_RETRY)

    assert "POST http://a.example:8080" == failed.name == succeeded.name
    assert SpanKind.CLIENT is failed.kind
    attributes = dict(attributes_of(failed))
    assert 36 == len(attributes.pop("tarry.task_id"))
    assert {
        "tarry.tenant": "default",
        "tarry.downstream": "default/http:a.example:8080",
        "tarry.attempt": 1,
        "tarry.outcome": "transient",
        "http.request.method": "POST",
        "http.response.status_code": 503,
        "server.address": "a.example",
        "server.port": 8080,
        "error.type": "503",
    } == attributes
    assert StatusCode.ERROR is failed.status.status_code
    assert StatusCode.UNSET is succeeded.status.status_code
    expected = {
        "tarry.attempt": 2,
        "tarry.outcome": "success",
        "http.request.resend_count": 1,
        "http.response.status_code": 200,
    }
    assert expected.items() <= dict(attributes_of(succeeded)).items()


def test_grpc_attempts_have_their_own_attributes() -> None:
    """The span of a gRPC attempt has the status code of gRPC, and no attributes of HTTP."""
    response = DeliveryResult(status="UNAVAILABLE", remote="192.0.2.1")
    (span,), _ = run_task(
        response, url="grpc://a.example:50051/p.S/M", overrides={"maxAttempts": 1}
    )

    attributes = attributes_of(span)
    assert "grpc://a.example:50051" == span.name
    assert ("grpc", "UNAVAILABLE", "UNAVAILABLE", "192.0.2.1") == (
        attributes["rpc.system"],
        attributes["rpc.response.status_code"],
        attributes["error.type"],
        attributes["network.peer.address"],
    )
    assert not [name for name in attributes if name.startswith("http")]


async def _raise_error(_request: DeliveryRequest) -> DeliveryResult:
    msg = "bug"
    raise RuntimeError(msg)


async def _hang(_request: DeliveryRequest) -> DeliveryResult:
    await asyncio.sleep(1_000)
    return OK


@pytest.mark.parametrize(
    ("response", "error_type", "outcome"),
    [
        (DeliveryResult(fault=Fault.TIMEOUT), "timeout", "transient"),
        (DeliveryResult(fault=Fault.INTERNAL), "internal", None),
        (_raise_error, "RuntimeError", None),
        (_hang, "cancelled", None),
    ],
    ids=["timeout", "internal", "exception", "cancelled"],
)
def test_spans_of_attempts_without_a_response(
    response: Any, error_type: str, outcome: str | None
) -> None:
    """The span has the type of the error; without an outcome, the attempt is not counted."""
    spans, _ = run_task(response, OK, stop_after_s=0.1)

    attributes = attributes_of(spans[0])
    assert (error_type, outcome) == (attributes["error.type"], attributes.get("tarry.outcome"))
    assert StatusCode.ERROR is spans[0].status.status_code


def test_a_task_without_a_trace_starts_one() -> None:
    """The target receives the span of the attempt, which has no parent."""
    (span,), (request,) = run_task(OK)

    assert span.parent is None
    assert f"{span.context.trace_id:032x}" == request.headers["traceparent"].split("-")[1]


def test_an_unsampled_trace_is_not_recorded() -> None:
    """The target receives the trace id of the caller and its decision not to sample."""
    spans, (request,) = run_task(OK, trace=TRACE.replace("-01", "-00"))

    assert () == tuple(spans)
    _, trace_id, _, flags = request.headers["traceparent"].split("-")
    assert (f"{TRACE_ID:032x}", "00") == (trace_id, flags)


def test_a_disabled_sdk_leaves_the_trace_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """With OTEL_SDK_DISABLED, the target receives the headers of the caller, if any."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert TRACE == run_task(OK, trace=TRACE)[1][0].headers["traceparent"]
    assert "traceparent" not in run_task(OK)[1][0].headers


def test_the_exporter_needs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the exporter, the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[otlp\]'"):
        AttemptTracer.with_otlp_exporter(version="1", instance="a", unix_time=lambda: EPOCH_S)


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_BSP_MAX_QUEUE_SIZE", "10"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-1")],
)
def test_an_invalid_variable_is_an_error_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """The error says that the SDK rejects an environment variable, and why."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"OTEL_\* environment variable: .*(queue|ATTRIB)"):
        AttemptTracer.with_otlp_exporter(version="1", instance="a", unix_time=lambda: EPOCH_S)


async def test_a_failing_tracer_does_not_prevent_attempts(caplog: pytest.LogCaptureFixture) -> None:
    """If no span can be started, the attempt is made with the trace of the caller."""

    class FailingProcessor(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            msg = "out of order"
            raise RuntimeError(msg)

    provider, target = TracerProvider(), FakeTarget(OK)
    provider.add_span_processor(FailingProcessor())

    harness = EngineHarness(target, tracer=AttemptTracer(provider, lambda: EPOCH_S))
    await harness.engine.start()
    await harness.add(harness.new_task(trace=TRACE))
    await asyncio.sleep(0.1)
    await harness.engine.stop(1)
    assert [TRACE] == [request.headers["traceparent"] for request in target.requests]
    assert "span not started, task=" in caplog.text


def test_a_shutdown_does_not_wait_for_a_collector_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Spans that cannot be exported in time are given up, with a warning."""
    can_return = threading.Event()

    class HangingProcessor(SpanProcessor):
        def shutdown(self) -> None:
            can_return.wait()

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(HangingProcessor())
    run(AttemptTracer(provider, lambda: EPOCH_S).close)
    can_return.set()
    assert "last spans not exported within 2 s" in caplog.text


async def test_without_tracing_the_headers_are_sent_unchanged() -> None:
    """The target receives the caller's span as its parent."""
    target = FakeTarget()

    harness = EngineHarness(target)
    await harness.engine.start()
    await harness.add(harness.new_task(trace=TRACE, tracestate="vendor=a"))
    await harness.engine.stop(1)
    headers = target.requests[0].headers
    assert (TRACE, "vendor=a") == (headers["traceparent"], headers["tracestate"])
