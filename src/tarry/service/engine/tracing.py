"""Spans of attempts, which are exported with OpenTelemetry if the setting `traces` is on.

The span of an attempt is a child of the caller's span, and its target receives the attempt's span
as `traceparent`. So the calls of `enqueue`, all attempts and the work of the target are one trace.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from tarry.core.extras import require_extra
from tarry.core.outcome import SUCCESS
from tarry.errors import ConfigurationError
from tarry.service.delivery import DeliveryResult
from tarry.service.engine import attempts

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from tarry.core.policy import Policy
    from tarry.service.delivery import DeliveryCallback
    from tarry.service.model import Task, TaskContent

_logger = logging.getLogger("tarry.service")
_MAX_FINAL_EXPORT_S = 2.0
"""How long a shutdown waits for the collector."""


class AttemptTracer:
    """Records a span for each attempt with `provider`.

    `unix_time` is the wall clock for dates in `Retry-After`, as in `attempts.classify`.
    """

    def __init__(self, provider: TracerProvider, unix_time: Callable[[], float]) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._unix_time = unix_time
        self._tracer = provider.get_tracer("tarry")
        self._propagator = TraceContextTextMapPropagator()
        self._set_span_in_context = trace.set_span_in_context
        self._client_kind, self._error = trace.SpanKind.CLIENT, trace.StatusCode.ERROR

    @classmethod
    def with_otlp_exporter(
        cls, *, version: str, instance: str, unix_time: Callable[[], float]
    ) -> AttemptTracer:
        """Return a tracer that exports spans with OTLP over HTTP, in a thread.

        `OTEL_*` environment variables set the endpoint, the sampler and the name of the service.
        Raises ConfigurationError if the SDK rejects one of them.
        """
        with require_extra("traces = otlp needs the exporter of OpenTelemetry", "otlp"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

        defaults = Resource({"service.version": version, "service.instance.id": instance})
        try:
            resource = defaults.merge(Resource.create())
            if str(resource.attributes["service.name"]).startswith("unknown_service"):
                resource = resource.merge(Resource({"service.name": "tarry"}))
            # The exporter must not delay the exit of the process: `close` has a timeout.
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        except ValueError as error:
            msg = f"traces = otlp: OpenTelemetry rejects an OTEL_* environment variable: {error}"
            raise ConfigurationError(msg) from error
        return cls(provider, unix_time)

    def start_span(self, task: Task, content: TaskContent) -> tuple[Span | None, TaskContent]:
        """Start the span of the next attempt; return it, and the content with it as the trace.

        If the SDK fails, for example in a sampler of the operator, the attempt is made without a
        span: no task waits for its traces.
        """
        try:
            return self._start_span(task, content)
        except Exception as error:  # noqa: BLE001 - samplers and processors can raise any error
            _logger.warning("span not started, task=%s: %r", task.id, error)
            return None, content

    def _start_span(self, task: Task, content: TaskContent) -> tuple[Span, TaskContent]:
        carrier: dict[str, str] = {}
        if content.trace is not None:
            carrier["traceparent"] = content.trace
            if content.tracestate is not None:
                carrier["tracestate"] = content.tracestate
        target = urlsplit(content.url)
        # Path and query are left out, because they may contain secrets.
        attributes: dict[str, str | int] = {
            "tarry.task_id": task.id,
            "tarry.tenant": task.tenant,
            "tarry.downstream": task.lane,
            "tarry.attempt": task.attempts + 1,
            "server.address": target.hostname or "",
        }
        if target.port is not None:
            attributes["server.port"] = target.port
        if target.scheme in {"grpc", "grpcs"}:
            name = f"{target.scheme}://{target.netloc}"
            attributes["rpc.system"] = "grpc"
        else:
            name = f"{content.method} {target.scheme}://{target.netloc}"
            attributes["http.request.method"] = content.method
            if task.attempts:  # omitted for the first attempt, as the semantic conventions require
                attributes["http.request.resend_count"] = task.attempts
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(name, parent, kind=self._client_kind, attributes=attributes)
        carrier.clear()
        self._propagator.inject(carrier, self._set_span_in_context(span))
        if carrier:  # empty if OTEL_SDK_DISABLED is set, and the task has no trace
            content = msgspec.structs.replace(
                content, trace=carrier["traceparent"], tracestate=carrier.get("tracestate")
            )
        return span, content

    def report_and_end_span(
        self,
        span: Span,
        policy: Policy,
        on_done: DeliveryCallback,
        result: DeliveryResult | BaseException,
    ) -> None:
        """Call `on_done` with the result of a delivery, then end the span of the attempt."""
        try:
            on_done(result)
        finally:
            self._end_span(span, policy, result)

    def _end_span(self, span: Span, policy: Policy, result: DeliveryResult | BaseException) -> None:
        if isinstance(result, DeliveryResult):
            error_type = self._record_result(span, policy, result)
        elif isinstance(result, asyncio.CancelledError):
            error_type = "cancelled"
        else:
            error_type = type(result).__qualname__
        if error_type is not None:
            span.set_attribute("error.type", error_type)
            span.set_status(self._error)
        span.end()

    def _record_result(self, span: Span, policy: Policy, result: DeliveryResult) -> str | None:
        """Set the attributes of a result; return the type of its error."""
        status = result.status
        if isinstance(status, int):
            span.set_attribute("http.response.status_code", status)
        elif status is not None:
            span.set_attribute("rpc.response.status_code", status)
        if result.remote is not None:
            span.set_attribute("network.peer.address", result.remote)
        outcome = attempts.classify(result, policy, self._unix_time)
        if outcome is not None:  # else the attempt is not counted
            span.set_attribute("tarry.outcome", outcome.kind.value)
            if outcome is SUCCESS:
                return None
        return str(status if result.fault is None else result.fault)

    async def close(self) -> None:
        """Export the spans that have ended; give up after two seconds."""
        loop = asyncio.get_running_loop()
        is_done = asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the event loop was closed after the timeout
                loop.call_soon_threadsafe(is_done.set)

        # A daemon thread: unlike a thread of the executor, it does not delay the exit.
        Thread(target=shut_down, name="trace-export", daemon=True).start()
        try:
            async with asyncio.timeout(_MAX_FINAL_EXPORT_S):
                await is_done.wait()
        except TimeoutError:
            _logger.warning("last spans not exported within %g s", _MAX_FINAL_EXPORT_S)
