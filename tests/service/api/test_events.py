from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.api.application import Api
from tarry.service.api.context import ApiLimits
from tarry.service.api.events import EventResource
from tarry.service.engine.reporting import Event
from tarry.service.model import AttemptRecord
from tarry.testing import VirtualClock
from tests.service.api.harness import NOW, Rig, Time, with_rig
from tests.service.api.test_keys import key_for


class Reader:
    """Reads `/events` until it leaves."""

    def __init__(self, api: Api, method: str = "GET", key: str = "") -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.leave = asyncio.Event()
        scope = {
            "type": "http",
            "method": method,
            "path": "/events",
            "query_string": b"",
            "headers": [(b"x-api-key", key.encode())] if key else [],
        }
        self.task = asyncio.ensure_future(api(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.sent.put(message)

    async def begun(self) -> dict[str, Any]:
        """The headers, when the greeting has come."""
        start = await self.sent.get()
        assert b": hello\n\n" == (await self.sent.get())["body"]
        return start

    async def event(self) -> tuple[str, str, Any]:
        """The next event: its id, its name and its data."""
        lines = (await self.sent.get())["body"].decode().split("\n")
        assert ["", ""] == lines[3:]
        number, kind, data = (line.partition(": ")[2] for line in lines[:3])
        return number, kind, json.loads(data)


def event(kind: str, tenant: str = "default", **fields: Any) -> Event:
    """Something that happened."""
    lane = f"{tenant}/https:a:443"
    return Event(kind=kind, at=NOW, tenant=tenant, lane=lane, **fields)


def test_events_are_told_as_they_happen() -> None:
    """To the tenant whose they are, with an id each."""

    async def test(rig: Rig) -> None:
        reader = Reader(rig.api)
        start = await reader.begun()
        assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
        rig.engine.events.publish(event("added", "other"))
        rig.engine.events.publish(event("added", task_id="i", attempts=0))
        rig.engine.events.publish(event("parked"))
        expected = {
            "kind": "added",
            "at": NOW,
            "lane": "https:a:443",
            "taskId": "i",
            "attemptNumber": 0,
        }
        assert (f"{NOW}-1", "added", expected) == await reader.event()
        assert (f"{NOW}-2", "parked") == (await reader.event())[:2]
        reader.leave.set()
        await reader.task
        assert not rig.engine.events

    with_rig(test)


def test_an_attempt_is_told_without_the_words_of_its_target() -> None:
    """They may echo a secret, which is not known here."""

    async def test(rig: Rig) -> None:
        reader = Reader(rig.api)
        await reader.begun()
        attempt = AttemptRecord(
            number=1, scheduled_at=NOW, started_at=NOW, status=401, outcome="permanent", excerpt="s"
        )
        rig.engine.events.publish(event("attempt", task_id="i", attempt=attempt))
        told = (await reader.event())[2]["attempt"]
        assert (401, None, "i") == (
            told["responseStatus"],
            told["responseExcerpt"],
            told["taskId"],
        )
        attempt.status, attempt.error = "UNAUTHENTICATED", "token s is not valid"
        rig.engine.events.publish(event("attempt", task_id="i", attempt=attempt))
        assert (await reader.event())[2]["attempt"]["errorMessage"] is None
        reader.leave.set()
        await reader.task

    with_rig(test)


def test_a_reader_that_is_too_slow_is_told_what_it_missed() -> None:
    """Before the first event that it did not miss."""

    async def test(rig: Rig) -> None:
        reader = Reader(rig.api)
        await reader.begun()
        for i in range(1_005):
            rig.engine.events.publish(event("added", task_id=str(i)))
        first = await reader.event()
        assert ("missed", {"kind": "missed", "missed": 5}) == first[1:]
        assert "5" == (await reader.event())[2]["taskId"]
        reader.leave.set()
        await reader.task

    with_rig(test)


def test_silence_is_broken_by_a_comment() -> None:
    """So that proxies keep the connection."""

    async def test(rig: Rig) -> None:
        rig.api._events._heartbeat_s = 0.0
        reader = Reader(rig.api)
        await reader.begun()
        assert b": still here\n\n" == (await reader.sent.get())["body"]
        reader.leave.set()
        await reader.task

    with_rig(test)


def test_streams_end_with_the_service() -> None:
    """Its readers would hold up the end otherwise."""

    async def test(rig: Rig) -> None:
        reader = Reader(rig.api)
        await reader.begun()
        rig.api.close()
        await reader.task
        assert {"type": "http.response.body", "body": b""} == await reader.sent.get()
        assert not rig.engine.events

    with_rig(test)


def test_there_are_only_so_many_readers() -> None:
    """503 with Retry-After; the place of one that leaves is free."""

    async def test(rig: Rig) -> None:
        reader = Reader(rig.api)
        await reader.begun()
        refused = await rig.ask("GET", "/events")
        assert (503, "10") == (refused.status, refused.header("retry-after"))
        reader.leave.set()
        await reader.task
        head = Reader(rig.api, "HEAD")
        await head.task
        assert 200 == (await head.sent.get())["status"]
        assert b"" == (await head.sent.get())["body"]
        assert isinstance(rig.api._events, EventResource)
        assert not rig.engine.events

    with_rig(test, limits=ApiLimits(max_event_streams=1))


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_revoked_key_reads_no_more(is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream ends when the key is believed no longer, whether events flow or not."""
    clock = VirtualClock()
    monkeypatch.setattr(Time, "seconds", lambda _: clock.now())

    async def publish(rig: Rig) -> None:
        while True:
            await asyncio.sleep(0.1)
            rig.engine.events.publish(event("added", "acme"))

    async def test() -> None:
        rig = Rig(keys=True)
        secret, key = await key_for(rig, "acme")
        reader = Reader(rig.api, key=secret)
        await reader.begun()
        busy = asyncio.ensure_future(publish(rig)) if is_busy else None
        await asyncio.sleep(59.9)
        assert not reader.task.done()
        assert await rig.store.revoke_key(key.id)
        async with asyncio.timeout(6.1):
            await reader.task
        sent = [await reader.sent.get() for _ in range(reader.sent.qsize())]
        assert {"type": "http.response.body", "body": b""} == sent[-1]
        assert not rig.engine.events
        if busy is not None:
            busy.cancel()

    clock.run(test)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), ZeroDivisionError()])
def test_a_reader_whose_key_cannot_be_looked_up_is_let_go(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is away is told elsewhere; any other error is not swallowed."""
    clock = VirtualClock()
    monkeypatch.setattr(Time, "seconds", lambda _: clock.now())

    async def fail(_: bytes) -> None:
        raise error

    async def test() -> None:
        rig = Rig(keys=True)
        secret, _ = await key_for(rig, "acme")
        reader = Reader(rig.api, key=secret)
        await reader.begun()
        monkeypatch.setattr(rig.store, "find_key", fail)
        async with asyncio.timeout(6.1):
            if isinstance(error, StoreUnavailable):
                await reader.task
            else:
                with pytest.raises(ZeroDivisionError):
                    await reader.task
        assert not rig.engine.events

    clock.run(test)


def test_a_stream_that_fails_says_so() -> None:
    """An error of ours is not swallowed, and its place is free again."""

    async def test(rig: Rig) -> None:
        reader = Reader(rig.api)
        await reader.begun()
        rig.engine.events.publish(event("odd", reason=object()))
        with pytest.raises(TypeError):
            await reader.task
        assert not rig.engine.events

    with_rig(test)
