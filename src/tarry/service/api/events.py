"""`GET /events`: new attempts and state changes as server-sent events (HTML Standard, 9.2).

An event is encoded once, and added to the buffer of its tenant. Each stream of the tenant reads the
buffer from its own position, and sends all new events together about ten times a second. So the
cost of a stream hardly depends on the number of events. A stream whose client reads too slowly
misses events, and then sends their number. A stream ends when its API key is revoked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service.api import problems
from tarry.service.api.auth import Authenticator
from tarry.service.api.messages import NoQuery
from tarry.service.api.problems import ApiError
from tarry.service.api.roles import Role
from tarry.service.api.routing import Operation
from tarry.service.api.views import attempt_view
from tarry.service.delivery.targets import public_lane_name
from tarry.service.tenant_shares import TenantShares
from tarry.wire.tasks import ServiceEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest
    from tarry.service.engine.reporting import EngineEvent
    from tarry.wire.http import Receive, Send

_encode = msgspec.json.Encoder().encode
_HEARTBEAT_S = 15.0
"""Interval at which a comment is sent on an idle stream: proxies close idle connections."""
_SEND_INTERVAL_S = 0.1
"""Average time between two parts of a busy stream. An event on an idle stream is sent at once."""
_MAX_PART_BYTES = 65_536
"""Approximate limit for the events that a stream sends at once."""
_MAX_SENT_BYTES_PER_S = 128 << 20
"""Approximate limit for all streams that are behind, so that they cannot take up the processor."""
_MAX_TENANT_BUFFER_BYTES = 1 << 20
"""How far a stream may fall behind; about 3,000 events."""
_MAX_BUFFER_BYTES = 32 << 20
"""Limit for the buffers of all tenants. Each has the same share, if that is less than the above."""
_API_KEY_CHECK_INTERVAL_S = 1.0
"""Interval at which the API key of a stream is checked; most checks only read the key cache."""
_TOO_MANY_STREAMS_RETRY_AFTER_S = 10.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-accel-buffering", b"no"),
]


class EventBuffer:
    """The latest encoded events of a tenant, for all its streams.

    A position is the number of events before it, since the buffer was created.
    """

    def __init__(self) -> None:
        self.end: int = 0  # the position after the last event
        self._events: list[bytes] = []
        self._buffered_bytes = 0
        self._has_new_events = asyncio.Event()

    def append(self, event: bytes, max_bytes: int) -> None:
        """Add an event; drop the oldest events if the buffer has more than `max_bytes`."""
        self._events.append(event)
        self.end += 1
        self._buffered_bytes += len(event)
        dropped = 0
        while self._buffered_bytes > max_bytes:
            self._buffered_bytes -= len(self._events[dropped])
            dropped += 1
        if dropped:
            del self._events[:dropped]
        self._has_new_events.set()

    def read(self, position: int) -> tuple[bytes, int, int]:
        """Return events from a position on, the next position, and how many events were missed."""
        first = self.end - len(self._events)
        begin = max(position, first)
        # The average size is exact enough, and is faster than adding up the sizes for each stream.
        max_events = max(1, _MAX_PART_BYTES * len(self._events) // max(1, self._buffered_bytes))
        events = self._events[begin - first : begin - first + max_events]
        return b"".join(events), begin + len(events), begin - position

    async def wait_for_event(self, position: int) -> None:
        """Wait until there is an event at this position."""
        while position == self.end:
            self._has_new_events.clear()
            await self._has_new_events.wait()


class EventResource:
    """The operation that streams events, and the open streams of this process."""

    def __init__(self, context: ApiContext) -> None:
        self.context: ApiContext = context
        self.authenticate: Final = Authenticator(context).authenticate
        self.streams: set[EventStream] = set()
        self._slots = TenantShares(context.limits.max_event_streams)
        self._opened_count = 0
        self._buffers: dict[str, EventBuffer] = {}
        """By tenant, for tenants with open streams."""
        self._stop_listening: Callable[[], None] | None = None

    @Operation("GET", "/events", "streamEvents", ("text/event-stream",), errors=(429,))
    async def stream(self, request: ApiRequest) -> EventStream:
        """Stream attempts and state changes as server-sent events."""
        request.parse_query(NoQuery)
        tenant = request.tenant
        if not self._slots.is_available(tenant):
            if count := self._slots.used_by(tenant):
                detail = f"The tenant has {count} open event streams. Close some of them."
                retry_after = problems.retry_after(_TOO_MANY_STREAMS_RETRY_AFTER_S)
                raise problems.TENANT_LIMIT.error(detail, headers=[retry_after])
            detail = "Too many event streams are open."
            raise problems.unavailable(detail, _TOO_MANY_STREAMS_RETRY_AFTER_S)
        self._slots.acquire(tenant)
        if self._stop_listening is None:
            self._stop_listening = self.context.engine.events.listen(self._on_event)
        buffer = self._buffers.setdefault(tenant, EventBuffer())
        self._opened_count += 1
        stream = EventStream(self, request, buffer, self._opened_count)
        self.streams.add(stream)
        return stream

    def remove(self, stream: EventStream, tenant: str) -> None:
        """Remove a stream that has ended."""
        self.streams.remove(stream)
        self._slots.release(tenant)
        if not self._slots.used_by(tenant):
            del self._buffers[tenant]
        if self._stop_listening is not None and not self._buffers:
            self._stop_listening()
            self._stop_listening = None

    def close(self) -> None:
        """End all streams, so that the server can shut down."""
        for stream in self.streams:
            stream.end_requested.set()

    def _on_event(self, event: EngineEvent) -> None:
        buffer = self._buffers.get(event.tenant)
        if buffer is not None:
            head = f"id: {event.at}-{buffer.end + 1}\n"
            max_bytes = min(_MAX_TENANT_BUFFER_BYTES, _MAX_BUFFER_BYTES // len(self._buffers))
            buffer.append(head.encode() + _encode_event(_event_view(event)), max_bytes)


class EventStream:
    """One open event stream, which sends events until it ends."""

    def __init__(
        self, resource: EventResource, request: ApiRequest, buffer: EventBuffer, number: int
    ) -> None:
        self._resource = resource
        self._request = request
        self._buffer = buffer
        self._position = buffer.end
        self.end_requested: asyncio.Event = asyncio.Event()
        # Streams send at different intervals: 75 % to 125 % of the average, distributed evenly by
        # the golden ratio. Otherwise an event would wake all idle streams of a tenant, and these
        # would then send in the same iterations of the event loop, and delay other requests.
        self._interval_factor = 0.75 + 0.5 * (number * 0.618034 % 1)

    async def run(self, receive: Receive, send: Send) -> None:
        """Send events until the client disconnects, its key is revoked or the service stops."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            if self._request.scope["method"] != "HEAD":
                await self._run(receive, send)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._resource.remove(self, self._request.tenant)

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
                tenant = authenticate(self._request, Role.READ)
                if not isinstance(tenant, str):  # an awaitable: the API key is not cached
                    await tenant
        except (ApiError, StoreUnavailable):
            return

    async def _send_events(self, send: Send) -> None:
        await _write(send, b": hello\n\n")
        buffer = self._buffer
        while True:
            if self._position == buffer.end:
                try:
                    async with asyncio.timeout(_HEARTBEAT_S):
                        await buffer.wait_for_event(self._position)
                except TimeoutError:
                    await _write(send, b": still here\n\n")
                    continue
            data, self._position, missed = buffer.read(self._position)
            if missed:
                data = _encode_event(ServiceEvent(kind="missed", missed=missed)) + data
            await _write(send, data)
            await asyncio.sleep(self._interval_factor * self._interval_s())

    def _interval_s(self) -> float:
        """Return the average time until the next part."""
        if self._position == self._buffer.end:
            return _SEND_INTERVAL_S
        return len(self._resource.streams) * _MAX_PART_BYTES / _MAX_SENT_BYTES_PER_S


def _event_view(event: EngineEvent) -> ServiceEvent:
    """Return the view of an event, without texts of the target, which may contain secrets."""
    attempt = None
    if event.attempt is not None:
        attempt = attempt_view(event.task_id or "", event.attempt, secrets=[])
        attempt.response_excerpt, attempt.response_truncated = None, False
        if isinstance(
            event.attempt.response_status, str
        ):  # gRPC: the target wrote the error message
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


def _encode_event(event: ServiceEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.kind.encode(), _encode(event))


async def _write(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _wait_until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
