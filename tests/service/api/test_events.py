"""`GET /events`: server-sent events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.api import events
from tarry.service.api.application import Api
from tarry.service.api.context import ApiLimits
from tarry.service.api.events import EventResource
from tarry.service.engine.reporting import EngineEvent
from tarry.service.model import AttemptRecord
from tarry.service.records.api_keys import revoke_api_key
from tarry.service.store import Store
from tarry.testing import VirtualClock
from tarry.wire.tasks import EventKind
from tests.service.api.harness import NOW, ApiHarness, FakeTime
from tests.service.api.test_auth import create_key


class EventReader:
    """A client of `/events`. It reads while `is_reading` is set, until `disconnect` is set."""

    def __init__(self, api: Api, method: str = "GET", key: str = "") -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.disconnect = asyncio.Event()
        self.is_reading = asyncio.Event()
        self.is_reading.set()
        self._unread: list[bytes] = []
        """Events of the last part."""
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
        await self.is_reading.wait()
        await self.sent.put(message)

    async def wait_for_start(self) -> dict[str, Any]:
        """Return the response headers after the first comment has arrived."""
        start = await self.sent.get()
        assert b": hello\n\n" == (await self.sent.get())["body"]
        return start

    async def next_event(self) -> tuple[str, str, Any]:
        """Return the id, the name and the data of the next event."""
        if not self._unread:
            *self._unread, end = (await self.sent.get())["body"].split(b"\n\n")
            assert b"" == end
        lines = self._unread.pop(0).decode().split("\n")
        fields = dict(line.split(": ", 1) for line in lines)
        return fields.get("id", ""), fields["event"], json.loads(fields["data"])

    async def read_all(self) -> list[tuple[str, str, Any]]:
        """Return all events that have been sent."""
        found: list[tuple[str, str, Any]] = []
        while self._unread or not self.sent.empty():
            found.append(await self.next_event())
        return found


def build_event(kind: EventKind, tenant: str = "default", **fields: Any) -> EngineEvent:
    """Return an event of a lane of the tenant."""
    lane = f"{tenant}/https:a:443"
    return EngineEvent(kind=kind, at=NOW, tenant=tenant, lane=lane, **fields)


async def test_events_are_sent_to_their_tenant(api: ApiHarness) -> None:
    """A stream has only the events of its tenant, each with an id."""
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


async def test_events_contain_no_text_of_the_target(api: ApiHarness) -> None:
    """Excerpt and error message, which may contain secrets, are null in events."""
    reader = EventReader(api.api)
    await reader.wait_for_start()
    attempt = AttemptRecord(
        attempt_number=1,
        scheduled_at=NOW,
        started_at=NOW,
        response_status=401,
        outcome="permanent",
        response_excerpt="s",
    )
    api.engine.events.publish(build_event("attempt", task_id="i", attempt=attempt))
    returned = (await reader.next_event())[2]["attempt"]
    assert (401, None, "i") == (
        returned["responseStatus"],
        returned["responseExcerpt"],
        returned["taskId"],
    )
    attempt.response_status, attempt.error_message = "UNAUTHENTICATED", "token s is not valid"
    api.engine.events.publish(build_event("attempt", task_id="i", attempt=attempt))
    assert (await reader.next_event())[2]["attempt"]["errorMessage"] is None
    reader.disconnect.set()
    await reader.task


def test_an_event_is_encoded_once_for_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that happen together are sent together, and other tenants' are not encoded."""
    encoded: list[Any] = []
    encode = events._encode

    def count_and_encode(event: Any) -> bytes:
        encoded.append(event)
        return encode(event)

    monkeypatch.setattr(events, "_encode", count_and_encode)

    async def test(api: ApiHarness) -> None:
        readers = [EventReader(api.api) for _ in range(100)]
        for reader in readers:
            await reader.wait_for_start()
        for i in range(50):
            api.engine.events.publish(build_event("added", task_id=str(i)))
            api.engine.events.publish(build_event("added", "other", task_id=str(i)))
        await asyncio.sleep(60)
        assert 50 == len(encoded)
        for reader in readers:
            parts = [reader.sent.get_nowait() for _ in range(reader.sent.qsize())]
            assert 1 == len([part for part in parts if b"data: " in part["body"]])
            assert 50 == sum(part["body"].count(b"data: ") for part in parts)
            reader.disconnect.set()
            await reader.task

    VirtualClock().run(lambda: test(ApiHarness()))


def test_a_busy_stream_sends_its_events_together() -> None:
    """The first event is sent at once, and about ten parts a second follow, with all events."""

    async def test(api: ApiHarness) -> None:
        reader = EventReader(api.api)
        await reader.wait_for_start()
        for i in range(1_000):
            api.engine.events.publish(build_event("added", task_id=str(i)))
            await asyncio.sleep(0.01)
            if not i:
                assert 1 == reader.sent.qsize()
        await asyncio.sleep(1)
        assert 70 < reader.sent.qsize() < 140
        found = await reader.read_all()
        assert [str(i) for i in range(1_000)] == [data["taskId"] for _, _, data in found]
        reader.disconnect.set()
        await reader.task

    VirtualClock().run(lambda: test(ApiHarness()))


def test_streams_do_not_send_all_at_the_same_time() -> None:
    """An event wakes all idle streams. While more events follow, the streams send in turn."""
    clock = VirtualClock()
    sent_at: list[float] = []

    class TimedReader(EventReader):
        async def _send(self, message: Any) -> None:
            sent_at.append(clock.now())
            await super()._send(message)

    async def test(api: ApiHarness) -> None:
        readers = [TimedReader(api.api) for _ in range(20)]
        for _ in range(3_000):
            api.engine.events.publish(build_event("added"))
            await asyncio.sleep(0.001)
        last_second = [moment for moment in sent_at if moment > clock.now() - 1]
        assert 140 < len(last_second) < 280
        assert max(map(last_second.count, last_second)) <= 3
        for reader in readers:
            reader.disconnect.set()
            await reader.task

    clock.run(lambda: test(ApiHarness()))


def test_a_slow_reader_receives_the_number_of_missed_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It misses the events that the buffer has dropped. Other readers miss nothing."""
    monkeypatch.setattr(events, "_MAX_TENANT_BUFFER_BYTES", 50_000)

    async def test(api: ApiHarness) -> None:
        slow, fast = EventReader(api.api), EventReader(api.api)
        await slow.wait_for_start()
        await fast.wait_for_start()
        slow.is_reading.clear()
        for i in range(2_000):
            api.engine.events.publish(build_event("added", task_id=str(i)))
            await asyncio.sleep(0.001)
        buffer = api.api._events._buffers["default"]
        assert 49_000 < sum(map(len, buffer._events)) == buffer._buffered_bytes <= 50_000
        slow.is_reading.set()
        await asyncio.sleep(1)

        assert [str(i) for i in range(2_000)] == [
            data["taskId"] for _, _, data in await fast.read_all()
        ]
        first, missed, *rest = await slow.read_all()
        assert "0" == first[2]["taskId"]
        assert ("", "missed") == missed[:2]
        assert {"kind": "missed", "missed": 2_000 - 1 - len(rest)} == missed[2]
        assert [str(i) for i in range(2_000 - len(rest), 2_000)] == [
            data["taskId"] for _, _, data in rest
        ]
        for reader in (slow, fast):
            reader.disconnect.set()
            await reader.task

    VirtualClock().run(lambda: test(ApiHarness()))


def test_a_stream_that_is_behind_sends_small_parts() -> None:
    """The parts have about 64 KiB, and follow each other more quickly than new events."""

    async def test(api: ApiHarness) -> None:
        reader = EventReader(api.api)
        await reader.wait_for_start()
        for i in range(5_000):
            api.engine.events.publish(build_event("added", task_id=str(i)))
        await asyncio.sleep(0.05)
        parts = [reader.sent.get_nowait()["body"] for _ in range(reader.sent.qsize())]
        assert 5 < len(parts)
        assert max(map(len, parts)) < 70_000
        assert 5_000 == sum(part.count(b"data: ") for part in parts)
        reader.disconnect.set()
        await reader.task

    VirtualClock().run(lambda: test(ApiHarness()))


async def test_tenants_share_the_memory_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many tenants, a buffer is smaller. It is removed with the last stream of its tenant."""
    monkeypatch.setattr(events, "_MAX_BUFFER_BYTES", 10_000)

    api = ApiHarness(keys=True)
    tenants = ["acme", "beta"]
    readers = [EventReader(api.api, key=(await create_key(api, tenant))[0]) for tenant in tenants]
    for reader in readers:
        await reader.wait_for_start()
    for _ in range(1_000):
        for tenant in tenants:
            api.engine.events.publish(build_event("added", tenant))
    buffers = api.api._events._buffers
    assert set(tenants) == set(buffers)
    assert all(4_500 < buffer._buffered_bytes <= 5_000 for buffer in buffers.values())
    for reader in readers:
        reader.disconnect.set()
        await reader.task
    assert not buffers


async def test_an_idle_stream_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments are sent regularly, so that proxies keep the connection open."""
    monkeypatch.setattr(events, "_HEARTBEAT_S", 0.0)
    api = ApiHarness()

    reader = EventReader(api.api)
    await reader.wait_for_start()
    assert b": still here\n\n" == (await reader.sent.get())["body"]
    reader.disconnect.set()
    await reader.task


async def test_streams_end_with_the_service(api: ApiHarness) -> None:
    """Closing the API ends open streams."""
    reader = EventReader(api.api)
    await reader.wait_for_start()
    api.api.close()
    await reader.task
    assert {"type": "http.response.body", "body": b""} == await reader.sent.get()
    assert not api.engine.events.listeners


async def test_tenants_share_the_streams() -> None:
    """A tenant may have as many streams as are free; then it gets a 429, but others a stream."""
    api = ApiHarness(keys=True, limits=ApiLimits(max_event_streams=4))
    secrets = [(await create_key(api, tenant))[0] for tenant in ("acme", "beta")]
    acme, beta = ({"X-API-Key": secret} for secret in secrets)
    readers = [EventReader(api.api, key=secrets[0]) for _ in range(2)]
    for reader in readers:
        await reader.wait_for_start()
    rejected = await api.request("GET", "/events", headers=acme)
    assert (429, "10") == (rejected.status, rejected.header("retry-after"))
    assert "2 open event streams" in rejected.problem["detail"]
    readers.append(EventReader(api.api, key=secrets[1]))
    await readers[-1].wait_for_start()
    assert 429 == (await api.request("GET", "/events", headers=beta)).status
    for reader in readers:
        reader.disconnect.set()
        await reader.task


async def test_the_number_of_streams_is_limited() -> None:
    """Without a free stream, all tenants are rejected; a closed stream frees its slot."""
    api = ApiHarness(keys=True, limits=ApiLimits(max_event_streams=1))
    secrets = [(await create_key(api, tenant))[0] for tenant in ("acme", "beta")]
    reader = EventReader(api.api, key=secrets[0])
    await reader.wait_for_start()
    rejected = await api.request("GET", "/events", headers={"X-API-Key": secrets[1]})
    assert (503, "10") == (rejected.status, rejected.header("retry-after"))
    reader.disconnect.set()
    await reader.task
    head = EventReader(api.api, "HEAD", secrets[1])
    await head.task
    assert 200 == (await head.sent.get())["status"]
    assert b"" == (await head.sent.get())["body"]
    assert isinstance(api.api._events, EventResource)
    assert not api.engine.events.listeners


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
        assert await revoke_api_key(api.store, key.id)
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

    async def fail(_store: Store, _digest: bytes) -> None:
        raise error

    async def test() -> None:
        api = ApiHarness(keys=True)
        secret, _ = await create_key(api, "acme")
        reader = EventReader(api.api, key=secret)
        await reader.wait_for_start()
        monkeypatch.setattr("tarry.service.api.auth.find_api_key", fail)
        async with asyncio.timeout(6.1):
            if isinstance(error, StoreUnavailable):
                await reader.task
            else:
                with pytest.raises(ZeroDivisionError):
                    await reader.task
        assert not api.engine.events.listeners

    clock.run(test)


async def test_an_event_that_cannot_be_encoded_is_dropped(
    api: ApiHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged, and the streams continue."""
    reader = EventReader(api.api)
    await reader.wait_for_start()
    api.engine.events.publish(build_event("deferred", reason=object()))
    api.engine.events.publish(build_event("added"))
    assert "added" == (await reader.next_event())[1]
    assert "event listener failed, event=deferred" in caplog.text
    reader.disconnect.set()
    await reader.task
