"""Monitoring: `/events`, `/healthz`, `/readyz` and `/metrics`.

`GET /events` streams new attempts and state changes as server-sent events (HTML Standard, section
9.2). A client that reads too slowly misses events, and then receives their number. A stream ends
when its API key is revoked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service.api import problems
from tarry.service.api.auth import Authenticator
from tarry.service.api.messages import ApiResponse, NoQuery, json_response
from tarry.service.api.problems import ApiError
from tarry.service.api.routing import Operation
from tarry.service.api.views import attempt_view, public_lane_name
from tarry.service.engine.context import HealthCheck
from tarry.service.engine.metrics import OPENMETRICS_MEDIA_TYPE
from tarry.service.engine.reporting import Subscription
from tarry.wire.tasks import ServiceEvent

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest
    from tarry.service.engine.reporting import Event
    from tarry.wire.http import Receive, Send

_encode = msgspec.json.Encoder().encode
_HEARTBEAT_S = 15.0
"""Interval at which a comment is sent on an idle stream: proxies close idle connections."""
_API_KEY_CHECK_INTERVAL_S = 1.0
"""Interval at which the API key of a stream is checked; most checks only read the key cache."""
_TOO_MANY_STREAMS_RETRY_AFTER_S = 10.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-accel-buffering", b"no"),
]
_STORE_CHECK_INTERVAL_S = 1.0
_NOT_READY_RETRY_AFTER_S = 5.0


class EventResource:
    """The operation that streams events, and the open streams of this process."""

    def __init__(self, context: ApiContext) -> None:
        self.context: ApiContext = context
        self.authenticate: Final = Authenticator(context).authenticate
        self.streams: set[EventStream] = set()

    @Operation("GET", "/events", "streamEvents", ("text/event-stream",))
    async def stream(self, request: ApiRequest) -> EventStream:
        """Stream attempts and state changes as server-sent events."""
        request.parse_query(NoQuery)
        if len(self.streams) >= self.context.limits.max_event_streams:
            detail = f"{len(self.streams)} event streams are open already."
            raise problems.unavailable(detail, _TOO_MANY_STREAMS_RETRY_AFTER_S)
        stream = EventStream(self, request)
        self.streams.add(stream)
        return stream

    def close(self) -> None:
        """End all streams, so that the server can shut down."""
        for stream in self.streams:
            stream.end_requested.set()


class EventStream:
    """One open event stream, which sends events until it ends."""

    def __init__(self, resource: EventResource, request: ApiRequest) -> None:
        self._resource = resource
        self._request = request
        self._subscription = Subscription(resource.context.engine.events, request.tenant)
        self.end_requested: asyncio.Event = asyncio.Event()
        self._sent_event_count = 0

    async def run(self, receive: Receive, send: Send) -> None:
        """Send events until the client disconnects, its key is revoked or the service stops."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            if self._request.scope["method"] != "HEAD":
                await self._run(receive, send)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._subscription.close()
            self._resource.streams.discard(self)

    async def _run(self, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        asyncio_tasks: set[asyncio.Task[Any]] = {
            loop.create_task(self._send_events(send)),
            loop.create_task(self._wait_until_unauthorized()),
            loop.create_task(_wait_until_disconnected(receive)),
            loop.create_task(self.end_requested.wait()),
        }
        try:
            await asyncio.wait(asyncio_tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asyncio_tasks:
                task.cancel()
            await asyncio.wait(asyncio_tasks)
        for task in asyncio_tasks:
            if not task.cancelled():
                task.result()  # raises if the task failed

    async def _wait_until_unauthorized(self) -> None:
        """Return when the API key is no longer valid, or the store is unavailable."""
        authenticate = self._resource.authenticate
        if authenticate is None:
            await asyncio.Event().wait()  # no key is required: wait forever
            return
        try:
            while True:
                await asyncio.sleep(_API_KEY_CHECK_INTERVAL_S)
                tenant = authenticate(self._request)
                if not isinstance(tenant, str):  # an awaitable: the API key is not cached
                    await tenant
        except (ApiError, StoreUnavailable):
            return

    async def _send_events(self, send: Send) -> None:
        await _write(send, b": hello\n\n")
        while True:
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    event = await self._subscription.next()
            except TimeoutError:
                await _write(send, b": still here\n\n")
                continue
            if self._subscription.missed_count:
                missed, self._subscription.missed_count = self._subscription.missed_count, 0
                await self._send_event(send, event.at, ServiceEvent(kind="missed", missed=missed))
            await self._send_event(send, event.at, _event_view(event))

    async def _send_event(self, send: Send, at: int, data: ServiceEvent) -> None:
        self._sent_event_count += 1
        head = f"id: {at}-{self._sent_event_count}\nevent: {data.kind}\ndata: "
        await _write(send, head.encode() + _encode(data) + b"\n\n")


def _event_view(event: Event) -> ServiceEvent:
    """Return the view of an event, without texts of the target, which may contain secrets."""
    attempt = None
    if event.attempt is not None:
        attempt = attempt_view(event.task_id or "", event.attempt, secrets=[])
        attempt.response_excerpt, attempt.response_truncated = None, False
        if isinstance(event.attempt.status, str):  # gRPC: the target wrote the error message
            attempt.error_message = None
    return ServiceEvent(
        kind=event.kind,
        at=event.at,
        lane=public_lane_name(event.lane),
        task_id=event.task_id,
        policy_id=event.policy_id,
        attempt=attempt,
        reason=event.reason,
        next_attempt_at=event.next_attempt_at,
        attempt_number=event.attempts,
    )


async def _write(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _wait_until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class HealthStatus(msgspec.Struct):
    """The service is healthy."""

    status: Literal["ok"] = "ok"


class HealthResource:
    """The operations for liveness, readiness and metrics."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._store_check = HealthCheck(
            context.engine.health,
            "store",
            context.store.ping,
            context.monotonic,
            interval_s=_STORE_CHECK_INTERVAL_S,
            failing_interval_s=_STORE_CHECK_INTERVAL_S,
        )

    @Operation("GET", "/healthz", "isAlive", HealthStatus, query=None, is_public=True)
    async def get_liveness(self, _: ApiRequest) -> ApiResponse:
        """Liveness: the process responds."""
        return json_response(200, HealthStatus())

    @Operation("GET", "/readyz", "isReady", HealthStatus, errors=(503,), query=None, is_public=True)
    async def get_readiness(self, _: ApiRequest) -> ApiResponse:
        """Readiness: the service can accept and process tasks."""
        engine = self._context.engine
        await asyncio.gather(self._store_check.run_if_due(), engine.body_store_check.run_if_due())
        failing = engine.health.failing
        if not failing:
            return json_response(200, HealthStatus())
        # A cause may name hosts and files. If keys are required, causes are only logged, because
        # callers without a key can read this endpoint.
        if self._context.require_api_keys:
            failing = dict.fromkeys(failing, "see the log")
        detail = f"Failing: {', '.join(sorted(failing))}."
        raise problems.unavailable(detail, _NOT_READY_RETRY_AFTER_S, failing=failing)

    @Operation("GET", "/metrics", "getMetrics", ("text/plain", OPENMETRICS_MEDIA_TYPE), query=None)
    async def get_metrics(self, request: ApiRequest) -> ApiResponse:
        """Get Prometheus metrics of the tenant; of all tenants for the operator or without keys."""
        context = self._context
        reads_all = not context.require_api_keys or request.tenant == context.operator_tenant
        tenant = None if reads_all else request.tenant
        accept = b",".join(request.header_values(b"accept")).decode("latin-1")
        body, content_type = await context.render_metrics(tenant, accept)
        return ApiResponse(200, body, [(b"content-type", content_type.encode())])
