"""OpenTelemetry: a span for each attempt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import tarry
from tarry.adapters.httpx import RetryTransport
from tarry.telemetry.opentelemetry import OpenTelemetryListener
from tarry.testing import VirtualClock, no_wait
from tests.adapters.grpc.fake_service import WATCH, open_channel, run_fake_service
from tests.integration.flaky import flaky_server
from tests.runtime.drivers import FAIL, OK, Dependency, Driver
from tests.telemetry.sample_calls import (
    CALL_COUNT,
    ConcurrentCaller,
    SampleCall,
    every_driver,
    every_sample_call,
    hedge_async,
    in_tasks_and_threads,
    listening,
)


class Traces:
    """A listener that creates spans, with an exporter to read them."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")
        self.listener = OpenTelemetryListener(self.provider, spans="spans")

    def spans(self, name: str = "op") -> list[Any]:
        """Return the finished spans of this name, in order."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def traces() -> Traces:
    """A listener with its own tracer provider."""
    return Traces()


def outcomes(spans: list[Any]) -> list[str]:
    """Return the outcomes of the attempts."""
    return [span.attributes["tarry.outcome"] for span in spans]


@every_driver
def test_attempts_are_spans(driver: Driver, clock: VirtualClock, traces: Traces) -> None:
    """Each attempt is a child of the current span, without network attributes."""
    with traces.tracer.start_as_current_span("parent"), listening(traces.listener):
        driver.run(clock, Dependency(clock, FAIL, OK))

    [parent] = traces.spans("parent")
    failed, succeeded = traces.spans()
    assert [parent.context.span_id] * 2 == [span.parent.span_id for span in (failed, succeeded)]
    assert {SpanKind.INTERNAL} == {failed.kind, succeeded.kind}
    assert {
        "tarry.operation": "op",
        "tarry.attempt": 1,
        "tarry.outcome": "transient",
        "error.type": "ConnectionError",
    } == dict(failed.attributes)
    assert {
        "tarry.operation": "op",
        "tarry.attempt": 2,
        "tarry.outcome": "success",
    } == dict(succeeded.attributes)
    codes = [span.status.status_code for span in (failed, succeeded, parent)]
    assert [StatusCode.ERROR, StatusCode.UNSET, StatusCode.UNSET] == codes
    assert () == parent.events


@every_driver
@every_sample_call
def test_every_attempt_has_a_span(
    driver: Driver, sample: SampleCall, clock: VirtualClock, traces: Traces
) -> None:
    """Every attempt of every sample call has one finished span."""
    with listening(traces.listener):
        sample.run(driver, clock)

    expected = [outcome for outcome, number in sample.attempts.items() for _ in range(number)]
    assert expected == outcomes(traces.spans())
    assert () == traces.listener._open_spans.get()


@every_driver
def test_wait_is_in_no_span(driver: Driver, clock: VirtualClock, traces: Traces) -> None:
    """A span ends before the wait, and the next one begins after it."""
    order: list[str] = []

    class Recorder(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            order.append("span begins")

        def on_end(self, span: Any) -> None:
            order.append("span ends")

    def record_wait(event: tarry.Event) -> None:
        if isinstance(event, tarry.WillWait | tarry.Waited):
            order.append(type(event).__name__)

    traces.provider.add_span_processor(Recorder())
    with listening(record_wait), listening(traces.listener):
        driver.run(clock, Dependency(clock, FAIL, OK))

    attempt = ["span begins", "span ends"]
    assert [*attempt, "WillWait", "Waited", *attempt] == order


@in_tasks_and_threads
def test_concurrent_calls(make_calls: ConcurrentCaller, traces: Traces) -> None:
    """Attempts of concurrent calls are children of the spans of their callers."""

    def context_of(number: int) -> Any:
        return traces.tracer.start_as_current_span(f"parent{number}")

    with listening(traces.listener):
        make_calls(context_of=context_of)

    for number in range(CALL_COUNT):
        [parent] = traces.spans(f"parent{number}")
        spans = traces.spans(f"op{number}")
        assert [*["transient"] * (number % 3), "success"] == outcomes(spans)
        assert {parent.context.span_id} == {span.parent.span_id for span in spans}
        attempts = [span.attributes["tarry.attempt"] for span in spans]
        assert list(range(1, number % 3 + 2)) == attempts


def test_requests_are_client_spans(traces: Traces) -> None:
    """Retries over HTTP have `http.request.resend_count`."""
    with (
        flaky_server() as server,
        no_wait(),
        httpx.Client(transport=RetryTransport(), trust_env=False) as client,
        listening(traces.listener),
    ):
        client.get(f"{server.url}/thing?run=otel&plan=503,200")
    failed, succeeded = traces.spans(f"GET {server.url}")

    assert {SpanKind.CLIENT} == {failed.kind, succeeded.kind}
    resent = [span.attributes.get("http.request.resend_count") for span in (failed, succeeded)]
    assert [None, 1] == resent
    assert "503" == failed.attributes["error.type"]


@pytest.mark.parametrize("in_other_thread", [False, True])
def test_streams_of_grpc_are_client_spans(traces: Traces, in_other_thread: bool) -> None:
    """Spans of gRPC streams end, also when another thread reads the stream."""
    with (
        run_fake_service() as service,
        no_wait(),
        open_channel(service.target) as opened,
        listening(traces.listener),
        ThreadPoolExecutor(1) as pool,
    ):
        service.steps = ["UNAVAILABLE"]
        stream = opened.unary_stream(WATCH)(b"")
        messages = pool.submit(list, stream).result() if in_other_thread else list(stream)
    failed, succeeded = traces.spans(f"shop.Payments/Watch {service.target}")

    assert [b"one", b"two"] == messages
    assert {SpanKind.CLIENT} == {failed.kind, succeeded.kind}
    assert ["UNAVAILABLE", None] == [
        span.attributes.get("error.type") for span in (failed, succeeded)
    ]
    assert not any("http.request.resend_count" in span.attributes for span in (failed, succeeded))


def test_nested_calls(clock: VirtualClock, traces: Traces) -> None:
    """Attempts of an inner call of the same name do not end the spans of the outer call."""
    inner = Dependency(clock, FAIL, OK)

    def outer() -> None:
        tarry.call(inner.call, on=ConnectionError, name="op")
        raise OSError

    with listening(traces.listener), pytest.raises(OSError):  # noqa: PT011 - it has no message
        tarry.call(outer, on=ValueError, name="op")

    assert ["transient", "success", "permanent"] == outcomes(traces.spans())


def test_cancelled_attempt(clock: VirtualClock, traces: Traces) -> None:
    """A cancelled attempt has no finished span, and the outer call has its span."""

    async def outer() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await tarry.acall(asyncio.sleep, 10, on=OSError, name="inner")

    with listening(traces.listener):
        clock.run(lambda: tarry.acall(outer, on=OSError, name="op"))

    assert [] == traces.spans("inner")
    assert ["success"] == outcomes(traces.spans())


def test_task_that_is_cancelled_many_times(clock: VirtualClock, traces: Traces) -> None:
    """The number of open spans of cancelled attempts is limited; later calls have spans."""

    async def worker() -> int:
        for _ in range(100):
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await tarry.acall(asyncio.sleep, 10, on=OSError, name="slow")
        await tarry.acall(asyncio.sleep, 0, on=OSError, name="op")
        return len(traces.listener._open_spans.get())

    with listening(traces.listener):
        assert clock.run(worker) < 20
    assert ["success"] == outcomes(traces.spans())


def test_listener_added_during_an_attempt(clock: VirtualClock, traces: Traces) -> None:
    """An attempt that began before the listener was added has no span; the next one has."""
    dependency = Dependency(clock, FAIL, OK)
    removers: list[Callable[[], None]] = []

    def work() -> object:
        if not removers:
            removers.append(tarry.listen(traces.listener))
        return dependency.call()

    tarry.call(work, on=ConnectionError, name="op")
    removers[0]()

    assert ["success"] == outcomes(traces.spans())


def test_hedges_have_no_spans(traces: Traces) -> None:
    """Copies of a hedged call have no spans."""
    with listening(traces.listener):
        hedge_async()

    assert [] == traces.spans("read")


@every_driver
def test_listener_that_raises(
    driver: Driver, clock: VirtualClock, traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    """A failing span processor does not fail the call, and is logged."""

    class Broken(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            raise RuntimeError("a bug in a processor")

    traces.provider.add_span_processor(Broken())
    with listening(traces.listener):
        assert "done" == driver.run(clock, Dependency(clock, FAIL, OK))

    assert 2 == sum(record.levelno == logging.ERROR for record in caplog.records)
    assert "a bug in a processor" in caplog.text
