from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest

from tarry.runtime.clocks import environment
from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.delivery.http1.connection import CALLBACK, DeadlineTimer, PendingRequest
from tests.integration.hostile import HostileTargets
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    close_and_wait,
    request,
    run,
    wait_for,
    wait_until_empty,
)
from tests.service.delivery.scripted_server import never_respond, run_proxy, run_server

pytestmark = pytest.mark.usefixtures("either_loop")

PHASES = {
    "waiting": Fault.INTERNAL,
    "resolving": Fault.TIMEOUT,
    "connecting": Fault.TIMEOUT,
    "handshake": Fault.TIMEOUT,
    "connecting to the proxy": Fault.INTERNAL,
    "waiting for the proxy": Fault.INTERNAL,
    "handshake in the tunnel": Fault.TIMEOUT,
    "sending": Fault.TIMEOUT,
    "sending over TLS": Fault.TIMEOUT,
    "reading": Fault.TIMEOUT,
    "reading over TLS": Fault.TIMEOUT,
}
"""The phases of an attempt, and the fault of an attempt that times out in each."""


class Stage:
    """A request that stays in a certain phase."""

    def __init__(self, delivery: HttpDeliveryClient, sent: asyncio.Future[DeliveryResult]) -> None:
        self.delivery = delivery
        self.pending = cast("PendingRequest", sent)

    def is_at(self, phase: str) -> bool:
        """Return whether the request has reached the phase."""
        if phase == "waiting" or "sending" in phase or "reading" in phase:
            return self.pending.connection is not None
        task = self.pending.connect_task
        if phase == "handshake in the tunnel":
            # The target accepts the connection before the proxy's response reaches the client.
            pool: Any = self.pending._pool
            return task is not None and pool._connect_tasks[task][1].is_open
        return task is not None


@asynccontextmanager
async def at(
    phase: str, hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    """Send a request that stays in a phase."""
    answered = threading.Event()
    tls = hostile.contexts["good"] if "over TLS" in phase else None
    handler: Any = never_respond if "reading" not in phase else None
    async with (
        run_server(handler, tls) as server,
        run_proxy() as (proxy, _),
        unresponsive_port() as port,
    ):
        is_reached: Callable[[], int]
        url, is_reached, guard = server.url, lambda: server.connections, LOOPBACK_GUARD
        options: dict[str, Any] = {"ca_file": hostile.ca, "max_connections": 3}
        body = b"{}"
        if phase == "waiting":
            options["max_pool_connections"] = 1
        elif phase == "resolving":
            asked = threading.Event()
            monkeypatch.setattr("socket.getaddrinfo", blocking_resolver(asked, answered))
            url, is_reached = "http://slow.example/", asked.is_set
        elif phase == "connecting":
            url, is_reached = f"http://127.0.0.1:{port}/", lambda: 1
        elif phase == "connecting to the proxy":
            options["proxy"], is_reached, guard = f"http://127.0.0.1:{port}", lambda: 1, Guard()
            url = "https://target.invalid/"
        elif phase == "waiting for the proxy":
            options["proxy"], guard = server.url, Guard()
            url = "https://target.invalid/"
        elif phase == "handshake in the tunnel":
            options["proxy"] = proxy.url
            url = server.url.replace("http:", "https:")
        elif phase == "handshake":
            url = server.url.replace("http:", "https:")
        elif "sending" in phase:
            body = bytes(16 * 1024 * 1024)
        else:
            is_reached = server.received.qsize
        delivery = HttpDeliveryClient(guard, **options)
        first = stage = Stage(delivery, delivery.send(request(url, body=body)))
        await wait_for(lambda: is_reached() and stage.is_at(phase))
        if phase == "waiting":
            stage = Stage(delivery, delivery.send(request(url)))
        try:
            yield stage
        finally:
            first.pending.cancel()
            answered.set()


def blocking_resolver(
    asked: threading.Event, answered: threading.Event
) -> Callable[..., list[Any]]:
    """Return a resolver that blocks until `answered` is set."""

    def resolve(*_: object, **__: object) -> list[Any]:
        asked.set()
        answered.wait(30)
        return [(0, 0, 0, "", ("127.0.0.1", 0))]

    return resolve


@asynccontextmanager
async def unresponsive_port() -> AsyncIterator[int]:
    """Yield a port whose backlog is full, so that connection attempts get no answer."""
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
def test_timeout_frees_everything(
    phase: str, hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timeout in any phase frees the connection, and the phase determines the fault."""

    async def main() -> tuple[DeliveryResult, int]:
        async with at(phase, hostile, monkeypatch) as stage:
            pool: Any = stage.pending._pool
            pool.time_out(stage.pending)
            result = await stage.pending
            if phase == "waiting":
                assert not pool._queue
                return result, await close_and_wait(stage.delivery)
            left = await wait_until_empty(stage.delivery)
            await stage.delivery.close()
            return result, left

    result, left = run(main())
    assert (PHASES[phase], 3) == (result.fault, left)
    assert "within 20 s" in (result.error or "")


@pytest.mark.parametrize("phase", PHASES)
def test_cancelled_request_frees_everything(
    phase: str, hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request cancelled in any phase leaves no connection, no timer and no used limit."""

    async def main() -> tuple[int, bool]:
        async with at(phase, hostile, monkeypatch) as stage:
            assert stage.pending.cancel()
            assert not stage.pending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stage.pending
            is_cancelled = stage.pending.deadline[CALLBACK] is None
            if phase == "waiting":
                return await close_and_wait(stage.delivery), is_cancelled
            left = await wait_until_empty(stage.delivery)
            await stage.delivery.close()
            return left, is_cancelled

    assert (3, True) == run(main())


@pytest.mark.parametrize("phase", PHASES)
def test_close_fails_a_running_request(
    phase: str, hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the delivery fails a request in any phase with an internal fault."""

    async def main() -> tuple[DeliveryResult, int]:
        async with at(phase, hostile, monkeypatch) as stage:
            left = await close_and_wait(stage.delivery)
            return await stage.pending, left

    result, left = run(main())
    assert (Fault.INTERNAL, "the service is shutting down", 3) == (result.fault, result.error, left)


def test_deadline_fires_and_is_cancelled(hostile: HostileTargets) -> None:
    """The deadline fails a request, and a response cancels the deadline."""

    async def main() -> tuple[Fault | None, bool]:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD)
        late = await delivery.send(request(hostile.url + "never", timeout=0.05))
        answered = cast("PendingRequest", delivery.send(request(hostile.url + "ok")))
        await answered
        await delivery.close()
        return late.fault, answered.deadline[CALLBACK] is None

    assert (Fault.TIMEOUT, True) == run(main())


class Recorder:
    """Records that its deadline has passed."""

    def __init__(self, name: str, fired: list[str]) -> None:
        self._name = name
        self._fired = fired

    def on_deadline(self) -> None:
        """Record the call; raise an error if the name is "odd"."""
        self._fired.append(self._name)
        if self._name == "odd":
            raise ValueError(self._name)


def test_callbacks_run_in_the_order_of_their_times() -> None:
    """Each callback runs once, in the order of the times; cancelled ones do not run."""

    async def main() -> list[str]:
        fired: list[str] = []
        deadlines, now = DeadlineTimer(environment.now), environment.now()
        for name, after in (
            ("third", 0.03),
            ("cancelled", 0.001),
            ("second", 0.02),
            ("first", 0.01),
        ):
            deadline = deadlines.add(now + after, Recorder(name, fired).on_deadline)
            if name == "cancelled":
                deadline[CALLBACK] = None
        await wait_for(lambda: len(fired) == 3)
        assert 0 == len(deadlines._heap)
        deadlines.add(environment.now() - 1, Recorder("overdue", fired).on_deadline)
        await wait_for(lambda: len(fired) == 4)
        return fired

    assert ["first", "second", "third", "overdue"] == run(main())


def test_error_in_one_callback_does_not_affect_others() -> None:
    """Later callbacks still run after an error."""

    async def main() -> list[str]:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        fired: list[str] = []
        deadlines, now = DeadlineTimer(environment.now), environment.now()
        for name, after in (("odd", 0.0), ("even", 0.0), ("later", 0.01)):
            deadlines.add(now + after, Recorder(name, fired).on_deadline)
        await wait_for(lambda: len(fired) == 3)
        return fired

    assert ["odd", "even", "later"] == run(main())


def test_early_timer_is_set_again() -> None:
    """A timer that fires before the clock reaches the deadline is set again."""

    async def main() -> tuple[list[str], list[str]]:
        fired: list[str] = []
        now = 100.0
        deadlines = DeadlineTimer(lambda: now)
        deadlines.add(now + 0.001, Recorder("first", fired).on_deadline)
        await asyncio.sleep(0.02)
        before = list(fired)
        now += 0.001
        await wait_for(lambda: fired)
        return before, fired

    assert ([], ["first"]) == run(main())


def test_cancelled_deadlines_are_removed() -> None:
    """The heap stays in proportion to the running requests."""

    async def main() -> int:
        fired: list[str] = []
        now = 100.0
        deadlines = DeadlineTimer(lambda: now)
        for _ in range(600):
            deadlines.add(now + 60, Recorder("running", fired).on_deadline)
        for _ in range(20_000):
            deadlines.add(now + 60, Recorder("cancelled", fired).on_deadline)[CALLBACK] = None
        size = len(deadlines._heap)
        now += 61
        deadlines.add(now - 2, Recorder("overdue", fired).on_deadline)
        await wait_for(lambda: len(fired) == 601)
        assert {"running": 600, "overdue": 1} == Counter(fired)
        return size

    assert 600 <= run(main()) <= 1_200
