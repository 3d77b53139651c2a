from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest

from tarry.runtime.clocks import system
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDelivery
from tarry.service.delivery.http1.pending_request import CALLBACK, DeadlineTimer, PendingRequest
from tarry.service.delivery.messages import DeliveryResult, Fault
from tests.integration.hostile import Hostile
from tests.service.delivery.harness import HERE, closed, emptied, request, run, until
from tests.service.delivery.scripted_server import proxying, serving, silent

pytestmark = pytest.mark.usefixtures("either_loop")

PHASES = {
    "waiting": Fault.INTERNAL,
    "looking up": Fault.TIMEOUT,
    "connecting": Fault.TIMEOUT,
    "handshake": Fault.TIMEOUT,
    "reaching the proxy": Fault.INTERNAL,
    "asking the proxy": Fault.INTERNAL,
    "handshake in the tunnel": Fault.TIMEOUT,
    "sending": Fault.TIMEOUT,
    "sending over TLS": Fault.TIMEOUT,
    "reading": Fault.TIMEOUT,
    "reading over TLS": Fault.TIMEOUT,
}
"""Where an attempt can be when it ends, and whose fault it is when its time is over there."""


class Stage:
    """A request that has come to a certain phase, and stays there."""

    def __init__(self, delivery: HttpDelivery, sent: asyncio.Future[DeliveryResult]) -> None:
        self.delivery = delivery
        self.sending = cast("PendingRequest", sent)

    def is_at(self, phase: str) -> bool:
        """Whether it has a connection, or is getting one."""
        if phase == "waiting" or "sending" in phase or "reading" in phase:
            return self.sending.connection is not None
        return self.sending.connecting is not None


@asynccontextmanager
async def at(phase: str, hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Bring a request to a phase."""
    answered = threading.Event()
    tls = hostile.contexts["good"] if "over TLS" in phase else None
    behave: Any = silent if "reading" not in phase else None
    async with serving(behave, tls) as served, proxying() as (proxy, _), full() as port:
        there: Callable[[], int]
        url, there, guard = served.url, lambda: served.connections, HERE
        options: dict[str, Any] = {"ca": hostile.ca, "max_connections": 3}
        body = b"{}"
        if phase == "waiting":
            options["max_host_connections"] = 1
        elif phase == "looking up":
            asked = threading.Event()
            monkeypatch.setattr("socket.getaddrinfo", held(asked, answered))
            url, there = "http://slow.example/", asked.is_set
        elif phase == "connecting":
            url, there = f"http://127.0.0.1:{port}/", lambda: 1
        elif phase == "reaching the proxy":
            options["proxy"], there, guard = f"http://127.0.0.1:{port}", lambda: 1, Guard()
            url = "https://target.invalid/"
        elif phase == "asking the proxy":
            options["proxy"], guard = served.url, Guard()
            url = "https://target.invalid/"
        elif phase == "handshake in the tunnel":
            options["proxy"] = proxy.url
            url = served.url.replace("http:", "https:")
        elif phase == "handshake":
            url = served.url.replace("http:", "https:")
        elif "sending" in phase:
            body = bytes(16 * 1024 * 1024)
        else:
            there = served.arrived.qsize
        delivery = HttpDelivery(guard, **options)
        first = stage = Stage(delivery, delivery.send(request(url, body=body)))
        await until(lambda: there() and stage.is_at(phase))
        if phase == "waiting":
            stage = Stage(delivery, delivery.send(request(url)))
        try:
            yield stage
        finally:
            first.sending.cancel()
            answered.set()


def held(asked: threading.Event, answered: threading.Event) -> Callable[..., list[Any]]:
    """A resolver that takes its time."""

    def resolve(*_: object, **__: object) -> list[Any]:
        asked.set()
        answered.wait(30)
        return [(0, 0, 0, "", ("127.0.0.1", 0))]

    return resolve


@asynccontextmanager
async def full() -> AsyncIterator[int]:
    """A port that answers no more connections: its queue is full, and nobody accepts."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        port: int = listening.getsockname()[1]
        queued = [socket.socket() for _ in range(4)]
        for each in queued:
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.connect(("127.0.0.1", port))
        await asyncio.sleep(0)
        yield port
        for each in queued:
            each.close()


@pytest.mark.parametrize("phase", PHASES)
def test_time_that_is_over_leaves_nothing(
    phase: str, hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever phase; what held the attempt up says whose fault it is."""

    async def main() -> tuple[DeliveryResult, int]:
        async with at(phase, hostile, monkeypatch) as stage:
            owner: Any = stage.sending._owner
            owner.time_out(stage.sending)
            delivered = await stage.sending
            if phase == "waiting":
                assert not owner._queue
                return delivered, await closed(stage.delivery)
            left = await emptied(stage.delivery)
            await stage.delivery.close()
            return delivered, left

    delivered, left = run(main())
    assert (PHASES[phase], 3) == (delivered.fault, left)
    assert "within 20 s" in (delivered.error or "")


@pytest.mark.parametrize("phase", PHASES)
def test_a_cancelled_request_leaves_nothing(
    phase: str, hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever phase: no connection, no timer, no room that is taken."""

    async def main() -> tuple[int, bool]:
        async with at(phase, hostile, monkeypatch) as stage:
            assert stage.sending.cancel()
            assert not stage.sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stage.sending
            assert stage.sending.deadline is not None
            is_quiet = stage.sending.deadline[CALLBACK] is None
            if phase == "waiting":
                return await closed(stage.delivery), is_quiet
            left = await emptied(stage.delivery)
            await stage.delivery.close()
            return left, is_quiet

    assert (3, True) == run(main())


@pytest.mark.parametrize("phase", PHASES)
def test_close_ends_a_request(
    phase: str, hostile: Hostile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever phase, and as a fault of ours."""

    async def main() -> tuple[DeliveryResult, int]:
        async with at(phase, hostile, monkeypatch) as stage:
            left = await closed(stage.delivery)
            return await stage.sending, left

    delivered, left = run(main())
    assert (Fault.INTERNAL, "the delivery is closed", 3) == (delivered.fault, delivered.error, left)


def test_time_runs_by_itself(hostile: Hostile) -> None:
    """The timer of a request ends it, and an answer ends the timer."""

    async def main() -> tuple[Fault | None, bool]:
        delivery = HttpDelivery(HERE)
        late = await delivery.send(request(hostile.url + "never", timeout=0.05))
        answered = cast("PendingRequest", delivery.send(request(hostile.url + "ok")))
        await answered
        await delivery.close()
        assert answered.deadline is not None
        return late.fault, answered.deadline[CALLBACK] is None

    assert (Fault.TIMEOUT, True) == run(main())


class Who:
    """Waits for its time."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name = name
        self._told = told

    def on_deadline(self) -> None:
        """Note it, or fail."""
        self._told.append(self._name)
        if self._name == "odd":
            raise ValueError(self._name)


def test_each_is_told_when_its_time_has_come() -> None:
    """In the order of their times, whenever they were set; not who ended before, and once."""

    async def main() -> list[str]:
        told: list[str] = []
        deadlines, now = DeadlineTimer(system.now), system.now()
        for name, after in (("third", 0.03), ("ended", 0.001), ("second", 0.02), ("first", 0.01)):
            deadline = deadlines.add(now + after, Who(name, told).on_deadline)
            if name == "ended":
                deadline[CALLBACK] = None
        await until(lambda: len(told) == 3)
        assert 0 == len(deadlines)
        deadlines.add(system.now() - 1, Who("late already", told).on_deadline)
        await until(lambda: len(told) == 4)
        return told

    assert ["first", "second", "third", "late already"] == run(main())


def test_an_error_of_one_keeps_no_other_from_its_end() -> None:
    """Nor does it stop the timer."""

    async def main() -> list[str]:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        told: list[str] = []
        deadlines, now = DeadlineTimer(system.now), system.now()
        for name, after in (("odd", 0.0), ("even", 0.0), ("later", 0.01)):
            deadlines.add(now + after, Who(name, told).on_deadline)
        await until(lambda: len(told) == 3)
        return told

    assert ["odd", "even", "later"] == run(main())


def test_a_timer_that_fires_early_is_set_anew() -> None:
    """The clock says when a time has come."""

    async def main() -> tuple[list[str], list[str]]:
        told: list[str] = []
        now = 100.0
        deadlines = DeadlineTimer(lambda: now)
        deadlines.add(now + 0.001, Who("first", told).on_deadline)
        await asyncio.sleep(0.02)
        before = list(told)
        now += 0.001
        await until(lambda: told)
        return before, told

    assert ([], ["first"]) == run(main())


def test_those_that_have_ended_are_not_kept() -> None:
    """However many requests there were, only those count that run."""

    async def main() -> int:
        told: list[str] = []
        now = 100.0
        deadlines = DeadlineTimer(lambda: now)
        for _ in range(600):
            deadlines.add(now + 60, Who("running", told).on_deadline)
        for _ in range(20_000):
            deadlines.add(now + 60, Who("ended", told).on_deadline)[CALLBACK] = None
        most = len(deadlines)
        now += 61
        deadlines.add(now - 2, Who("late already", told).on_deadline)
        await until(lambda: len(told) == 601)
        assert {"running": 600, "late already": 1} == Counter(told)
        return most

    assert 600 <= run(main()) <= 1_200
