"""`GET /events`: what happens, as it happens, as server-sent events (HTML, 9.2).

A stream begins now; what happened while nobody listened is in the attempt logs. A reader that is
too slow is told how many events it missed, and one whose key is revoked is sent no more.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service.api import problems
from tarry.service.api.auth import Authenticator
from tarry.service.api.problems import ApiError
from tarry.service.api.request import NoQuery
from tarry.service.api.routing import Operation
from tarry.service.api.views import attempt_view, public_lane_name
from tarry.wire.tasks import EventNews

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tarry.service.api.context import ApiContext
    from tarry.service.api.request import ApiRequest
    from tarry.service.engine.reporting import Event, Subscription
    from tarry.wire.asgi import Receive, Send

_encode = msgspec.json.Encoder().encode
_HEARTBEAT = 15.0
"""Seconds of silence after which a comment is sent: proxies close what is silent."""
_LOOK_EVERY = 1.0
"""Seconds after which a reader's key is looked at again: it is believed for a while as it is."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-accel-buffering", b"no"),
]


class EventResource:
    """The readers of this process, of which there are only so many."""

    def __init__(self, around: ApiContext, heartbeat: float = _HEARTBEAT) -> None:
        self._around = around
        self._heartbeat = heartbeat
        self._tenant_of = Authenticator(around).tenant_of
        self._streams: set[EventStream] = set()

    def operations(self) -> list[Operation]:
        """Return the row of the API about events."""
        return [
            Operation(
                method="GET", path="/events", name="streamEvents",
                does="Stream attempts and transitions as they happen (server-sent events).",
                handler=self.stream, query=NoQuery,
                answers={200: "text/event-stream"}, refuses=(400, 422, 503),
            )
        ]  # fmt: skip

    async def stream(self, asked: ApiRequest) -> EventStream:
        """Begin a stream."""
        asked.query(NoQuery)
        if len(self._streams) >= self._around.limits.max_event_streams:
            detail = f"There are {len(self._streams)} readers of events already."
            raise problems.unavailable(detail, 10.0)
        subscription = self._around.engine.events.subscribe(asked.tenant)
        stream = EventStream(
            subscription,
            self._heartbeat,
            partial(self._unwelcome, asked),
            self._streams.discard,
            bodiless=asked.scope["method"] == "HEAD",
        )
        self._streams.add(stream)
        return stream

    async def _unwelcome(self, asked: ApiRequest) -> None:
        """Return when a reader may read no more, or nobody can say whether it may."""
        tenant_of = self._tenant_of
        if isinstance(tenant_of, str):
            await asyncio.Event().wait()
            return
        try:
            while True:
                await asyncio.sleep(_LOOK_EVERY)
                whose = tenant_of(asked)
                if not isinstance(whose, str):
                    await whose
        except (ApiError, StoreUnavailable):
            return

    def close(self) -> None:
        """End all streams, so that the server can."""
        for stream in tuple(self._streams):
            stream.end()


class EventStream:
    """One reader."""

    def __init__(
        self,
        subscription: Subscription,
        heartbeat: float,
        unwelcome: Callable[[], Coroutine[Any, Any, None]],
        ended: Callable[[EventStream], None],
        *,
        bodiless: bool,
    ) -> None:
        self._subscription = subscription
        self._heartbeat = heartbeat
        self._unwelcome = unwelcome
        self._ended = ended
        self._bodiless = bodiless
        self._end = asyncio.Event()
        self._number = 0

    def end(self) -> None:
        """Send no more."""
        self._end.set()

    async def run(self, receive: Receive, send: Send) -> None:
        """Send events until the reader leaves, or may not stay, or the service ends."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            if not self._bodiless:
                await self._run(receive, send)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._subscription.close()
            self._ended(self)

    async def _run(self, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        running: set[asyncio.Task[Any]] = {
            loop.create_task(self._pump(send)),
            loop.create_task(self._unwelcome()),
            loop.create_task(_left(receive)),
            loop.create_task(self._end.wait()),
        }
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in running:
                one.cancel()
            await asyncio.wait(running)
        for one in running:
            if not one.cancelled():
                one.result()  # it may have failed

    async def _pump(self, send: Send) -> None:
        await _write(send, b": hello\n\n")
        while True:
            try:
                async with asyncio.timeout(self._heartbeat):
                    event = await self._subscription.next()
            except TimeoutError:
                await _write(send, b": still here\n\n")
                continue
            if self._subscription.missed:
                missed, self._subscription.missed = self._subscription.missed, 0
                await self._tell(send, event.at, EventNews(kind="missed", missed=missed))
            await self._tell(send, event.at, _news(event))

    async def _tell(self, send: Send, at: int, news: EventNews) -> None:
        self._number += 1
        head = f"id: {at}-{self._number}\nevent: {news.kind}\ndata: "
        await _write(send, head.encode() + _encode(news) + b"\n\n")


def _news(event: Event) -> EventNews:
    """Return an event as it is told: without the target's words, which may echo secrets."""
    attempt = None
    if event.attempt is not None:
        attempt = attempt_view(event.task_id or "", event.attempt, [])
        attempt.response_excerpt, attempt.response_truncated = None, False
        if isinstance(event.attempt.status, str):  # of gRPC, whose errors have words of the target
            attempt.error_message = None
    return EventNews(
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


async def _write(send: Send, text: bytes) -> None:
    await send({"type": "http.response.body", "body": text, "more_body": True})


async def _left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
