"""`GET /events`: server-sent events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.api.application import Api
from tarry.service.api.context import ApiLimits
from tarry.service.api.monitoring import EventResource
from tarry.service.engine.reporting import Event
from tarry.service.model import AttemptRecord
from tarry.testing import VirtualClock
from tests.service.api.harness import NOW, ApiHarness, FakeTime, run_with_api
from tests.service.api.test_auth import create_key


class EventReader:
    """A client of `/events` that disconnects when `disconnect` is set."""

    def __init__(self, api: Api, method: str = "GET", key: str = "") -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.disconnect = asyncio.Event()
        scope = {
            "type": "http",
            "method": method,
            "path": "/events",
            "query_string": b"",
            "headers": [(b"x-api-key", key.encode())] if key else [],
        }
        self.task = asyncio.ensure_future(api(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.disconnect.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.sent.put(message)

    async def wait_for_start(self) -> dict[str, Any]:
        """Return the response headers after the first comment has arrived."""
        start = await self.sent.get()
        assert b": hello\n\n" == (await self.sent.get())["body"]
        return start

    async def next_event(self) -> tuple[str, str, Any]:
        """Return the id, the name and the data of the next event."""
        lines = (await self.sent.get())["body"].decode().split("\n")
        assert ["", ""] == lines[3:]
        number, kind, data = (line.partition(": ")[2] for line in lines[:3])
        return number, kind, json.loads(data)


def build_event(kind: str, tenant: str = "default", **fields: Any) -> Event:
    """Return an event of a lane of the tenant."""
    lane = f"{tenant}/https:a:443"
    return Event(kind=kind, at=NOW, tenant=tenant, lane=lane, **fields)


def test_events_are_sent_to_their_tenant() -> None:
    """A stream has only the events of its tenant, each with an id."""

    async def test(api: ApiHarness) -> None:
        reader = EventReader(api.api)
        start = await reader.wait_for_start()
        assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
        api.engine.events.publish(build_event("added", "other"))
        api.engine.events.publish(build_event("added", task_id="i", attempts=0))
        api.engine.events.publish(build_event("parked"))
        expected = {
            "kind": "added",
            "at": NOW,
            "lane": "https:a:443",
            "taskId": "i",
            "attemptNumber": 0,
        }
        assert (f"{NOW}-1", "added", expected) == await reader.next_event()
        assert (f"{NOW}-2", "parked") == (await reader.next_event())[:2]
        reader.disconnect.set()
        await reader.task
        assert not api.engine.events.listeners

    run_with_api(test)


def test_events_contain_no_text_of_the_target() -> None:
    """Excerpt and error message, which may contain secrets, are null in events."""

    async def test(api: ApiHarness) -> None:
        reader = EventReader(api.api)
        await reader.wait_for_start()
        attempt = AttemptRecord(
            number=1, scheduled_at=NOW, started_at=NOW, status=401, outcome="permanent", excerpt="s"
        )
        api.engine.events.publish(build_event("attempt", task_id="i", attempt=attempt))
        returned = (await reader.next_event())[2]["attempt"]
        assert (401, None, "i") == (
            returned["responseStatus"],
            returned["responseExcerpt"],
            returned["taskId"],
        )
        attempt.status, attempt.error = "UNAUTHENTICATED", "token s is not valid"
        api.engine.events.publish(build_event("attempt", task_id="i", attempt=attempt))
        assert (await reader.next_event())[2]["attempt"]["errorMessage"] is None
        reader.disconnect.set()
        await reader.task

    run_with_api(test)


def test_a_slow_reader_receives_the_number_of_missed_events() -> None:
    """A `missed` event precedes the next event."""

    async def test(api: ApiHarness) -> None:
        reader = EventReader(api.api)
        await reader.wait_for_start()
        for i in range(1_005):
            api.engine.events.publish(build_event("added", task_id=str(i)))
        first = await reader.next_event()
        assert ("missed", {"kind": "missed", "missed": 5}) == first[1:]
        assert "5" == (await reader.next_event())[2]["taskId"]
        reader.disconnect.set()
        await reader.task

    run_with_api(test)


def test_an_idle_stream_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments are sent regularly, so that proxies keep the connection open."""
    monkeypatch.setattr("tarry.service.api.monitoring._HEARTBEAT_S", 0.0)

    async def test(api: ApiHarness) -> None:
        reader = EventReader(api.api)
        await reader.wait_for_start()
        assert b": still here\n\n" == (await reader.sent.get())["body"]
        reader.disconnect.set()
        await reader.task

    run_with_api(test)


def test_streams_end_with_the_service() -> None:
    """Closing the API ends open streams."""

    async def test(api: ApiHarness) -> None:
        reader = EventReader(api.api)
        await reader.wait_for_start()
        api.api.close()
        await reader.task
        assert {"type": "http.response.body", "body": b""} == await reader.sent.get()
        assert not api.engine.events.listeners

    run_with_api(test)


def test_the_number_of_streams_is_limited() -> None:
    """A stream above the limit gets a 503 with Retry-After; a closed stream frees its slot."""

    async def test(api: ApiHarness) -> None:
        reader = EventReader(api.api)
        await reader.wait_for_start()
        rejected = await api.request("GET", "/events")
        assert (503, "10") == (rejected.status, rejected.header("retry-after"))
        reader.disconnect.set()
        await reader.task
        head = EventReader(api.api, "HEAD")
        await head.task
        assert 200 == (await head.sent.get())["status"]
        assert b"" == (await head.sent.get())["body"]
        assert isinstance(api.api._events, EventResource)
        assert not api.engine.events.listeners

    run_with_api(test, limits=ApiLimits(max_event_streams=1))


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_stream_ends_when_its_key_is_revoked(
    is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream ends when the cached key lookup expires, with or without events."""
    clock = VirtualClock()
    monkeypatch.setattr(FakeTime, "seconds", lambda _: clock.now())

    async def publish(api: ApiHarness) -> None:
        while True:
            await asyncio.sleep(0.1)
            api.engine.events.publish(build_event("added", "acme"))

    async def test() -> None:
        api = ApiHarness(keys=True)
        secret, key = await create_key(api, "acme")
        reader = EventReader(api.api, key=secret)
        await reader.wait_for_start()
        publisher = asyncio.ensure_future(publish(api)) if is_busy else None
        await asyncio.sleep(59.9)
        assert not reader.task.done()
        assert await api.store.revoke_api_key(key.id)
        async with asyncio.timeout(6.1):
            await reader.task
        sent = [await reader.sent.get() for _ in range(reader.sent.qsize())]
        assert {"type": "http.response.body", "body": b""} == sent[-1]
        assert not api.engine.events.listeners
        if publisher is not None:
            publisher.cancel()

    clock.run(test)


@pytest.mark.parametrize("error", [StoreUnavailable("disk full"), ZeroDivisionError()])
def test_a_stream_ends_when_its_key_cannot_be_checked(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unavailable store ends the stream, and any other error is raised."""
    clock = VirtualClock()
    monkeypatch.setattr(FakeTime, "seconds", lambda _: clock.now())

    async def fail(_: bytes) -> None:
        raise error

    async def test() -> None:
        api = ApiHarness(keys=True)
        secret, _ = await create_key(api, "acme")
        reader = EventReader(api.api, key=secret)
        await reader.wait_for_start()
        monkeypatch.setattr(api.store, "find_api_key", fail)
        async with asyncio.timeout(6.1):
            if isinstance(error, StoreUnavailable):
                await reader.task
            else:
                with pytest.raises(ZeroDivisionError):
                    await reader.task
        assert not api.engine.events.listeners

    clock.run(test)


def test_an_error_in_a_stream_is_raised() -> None:
    """The error is raised, and the stream is removed from the listeners."""

    async def test(api: ApiHarness) -> None:
        reader = EventReader(api.api)
        await reader.wait_for_start()
        api.engine.events.publish(build_event("odd", reason=object()))
        with pytest.raises(TypeError):
            await reader.task
        assert not api.engine.events.listeners

    run_with_api(test)
