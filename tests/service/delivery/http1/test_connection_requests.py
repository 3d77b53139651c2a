from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest

from tarry.runtime.effects import effects
from tarry.service.delivery import DeliveryFuture, DeliveryResult, Fault
from tarry.service.delivery.guard import Guard
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.delivery.http1.connection import CALLBACK, DeadlineTimer, PendingRequest
from tests.integration.hostile import HostileTargets
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    close_and_wait,
    new_request,
    run,
    wait_for,
    wait_until_empty,
)
from tests.service.delivery.scripted_server import never_respond, run_proxy, run_server

pytestmark = pytest.mark.usefixtures("each_loop")

PHASES = {
    "waiting": Fault.INTERNAL,
    "resolving": Fault.DNS,
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
"""Phases of an attempt, with the fault of an attempt that times out in the phase."""


class PausedRequest:
    """A request that stays in one phase."""

    def __init__(self, delivery: HttpDeliveryClient, sent: DeliveryFuture) -> None:
        self.delivery = delivery
        self.sent = sent
        self.pending = cast("PendingRequest", sent.delivery)

    def has_reached(self, phase: str) -> bool:
        """Return whether the request has reached the phase."""
        if phase == "waiting" or "sending" in phase or "reading" in phase:
            return self.pending.connection is not None
        task = self.pending.connect_task
        if phase == "handshake in the tunnel":
            # The target accepts the connection before the proxy's response reaches the client.
            pool: Any = self.pending.pool
            return task is not None and pool._connect_tasks[task][1].is_open
        return task is not None


@asynccontextmanager
async def send_and_pause(
    phase: str, hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PausedRequest]:
    """Send a request to a server that keeps it in a phase."""
    may_answer = threading.Event()
    tls = hostile.tls_contexts["good"] if "over TLS" in phase else None
    handler: Any = never_respond if "reading" not in phase else None
    async with (
        run_server(handler, tls) as server,
        run_proxy() as (proxy, _),
        unresponsive_port() as port,
    ):
        is_reached: Callable[[], int]
        url, is_reached, guard = server.url, lambda: server.connections, LOOPBACK_GUARD
        options: dict[str, Any] = {"ca_file": hostile.ca_file, "max_connections": 3}
        body = b"{}"
        if phase == "waiting":
            options["max_pool_connections"] = 1
        elif phase == "resolving":
            called = threading.Event()
            monkeypatch.setattr("socket.getaddrinfo", blocking_resolver(called, may_answer))
            url, is_reached = "http://slow.example/", called.is_set
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
        first = paused = PausedRequest(delivery, delivery.send(new_request(url, body=body)))
        await wait_for(lambda: is_reached() and paused.has_reached(phase))
        if phase == "waiting":
            paused = PausedRequest(delivery, delivery.send(new_request(url)))
        try:
            yield paused
        finally:
            first.sent.cancel()
            may_answer.set()


def blocking_resolver(
    called: threading.Event, may_answer: threading.Event
) -> Callable[..., list[Any]]:
    """Return a resolver that sets `called` and blocks until `may_answer` is set."""

    def resolve(*_: object, **__: object) -> list[Any]:
        called.set()
        may_answer.wait(30)
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
def test_timeout_frees_the_connection(
    phase: str, hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timeout in any phase frees the connection slot; the fault depends on the phase."""

    async def main() -> tuple[DeliveryResult, int]:
        async with send_and_pause(phase, hostile, monkeypatch) as paused:
            pool: Any = paused.pending.pool
            pool.time_out(paused.pending)
            result = await paused.sent
            if phase == "waiting":
                assert not pool._queue
                return result, await close_and_wait(paused.delivery)
            free_slots = await wait_until_empty(paused.delivery)
            await paused.delivery.close()
            return result, free_slots

    result, free_slots = run(main())
    assert (PHASES[phase], 3) == (result.fault, free_slots)
    assert (phase == "resolving") == (result.pause_s is not None)
    assert "within 20 s" in (result.error or "")


@pytest.mark.parametrize("phase", PHASES)
def test_cancellation_frees_the_connection(
    phase: str, hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling a request in any phase frees the connection slot and cancels the deadline."""

    async def main() -> tuple[int, bool]:
        async with send_and_pause(phase, hostile, monkeypatch) as paused:
            deadline = paused.pending.deadline
            assert paused.sent.cancel()
            assert not paused.sent.cancel()
            with pytest.raises(asyncio.CancelledError):
                await paused.sent
            is_cancelled = deadline is not None and deadline[CALLBACK] is None
            if phase == "waiting":
                return await close_and_wait(paused.delivery), is_cancelled
            free_slots = await wait_until_empty(paused.delivery)
            await paused.delivery.close()
            return free_slots, is_cancelled

    assert (3, True) == run(main())


@pytest.mark.parametrize("phase", PHASES)
async def test_close_fails_a_running_request(
    phase: str, hostile: HostileTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the client fails a request in any phase with an INTERNAL fault."""
    async with send_and_pause(phase, hostile, monkeypatch) as paused:
        free_slots = await close_and_wait(paused.delivery)
        result = await paused.sent
    assert (Fault.INTERNAL, "the service is shutting down", 3) == (
        result.fault,
        result.error,
        free_slots,
    )


async def test_deadline_fails_a_request_unless_a_response_arrives(hostile: HostileTargets) -> None:
    delivery = HttpDeliveryClient(LOOPBACK_GUARD)
    late = await delivery.send(new_request(hostile.url + "never", timeout=0.05))
    answered = delivery.send(new_request(hostile.url + "ok"))
    deadline = cast("PendingRequest", answered.delivery).deadline
    await answered
    await delivery.close()
    assert (Fault.TIMEOUT, True) == (
        late.fault,
        deadline is not None and deadline[CALLBACK] is None,
    )


class DeadlineRecorder:
    """Records its name when its deadline passes."""

    def __init__(self, name: str, fired: list[str]) -> None:
        self._name = name
        self._fired = fired

    def on_deadline(self) -> None:
        """Record the call; raise an error if the name is "failing"."""
        self._fired.append(self._name)
        if self._name == "failing":
            raise ValueError(self._name)


async def test_callbacks_run_in_the_order_of_their_times() -> None:
    """Each callback runs once, in the order of the times; cancelled callbacks do not run."""
    fired: list[str] = []
    deadlines, now = DeadlineTimer(effects.now), effects.now()
    for name, after in (("third", 0.03), ("cancelled", 0.001), ("second", 0.02), ("first", 0.01)):
        deadline = deadlines.add(now + after, DeadlineRecorder(name, fired).on_deadline)
        if name == "cancelled":
            deadline[CALLBACK] = None
    await wait_for(lambda: len(fired) == 3)
    assert 0 == len(deadlines._heap)
    deadlines.add(effects.now() - 1, DeadlineRecorder("overdue", fired).on_deadline)
    await wait_for(lambda: len(fired) == 4)
    assert ["first", "second", "third", "overdue"] == fired


async def test_error_in_one_callback_does_not_affect_others() -> None:
    """Callbacks run after another callback has raised an error."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    fired: list[str] = []
    deadlines, now = DeadlineTimer(effects.now), effects.now()
    for name, after in (("failing", 0.0), ("other", 0.0), ("later", 0.01)):
        deadlines.add(now + after, DeadlineRecorder(name, fired).on_deadline)
    await wait_for(lambda: len(fired) == 3)
    assert ["failing", "other", "later"] == fired


async def test_many_deadlines_are_handled_in_slices() -> None:
    """Of 900 deadlines that pass together, only a few callbacks run in one turn of the event loop.

    A closed timer calls back no more.
    """
    fired: list[str] = []
    deadlines = DeadlineTimer(effects.now)
    due = effects.now() + 0.01
    for number in range(900):
        deadlines.add(due, DeadlineRecorder(str(number), fired).on_deadline)
    max_callbacks = count_before = 0
    while len(fired) < 800:
        await asyncio.sleep(0)
        max_callbacks = max(max_callbacks, len(fired) - count_before)
        count_before = len(fired)
    deadlines.close()
    for _ in range(50):
        await asyncio.sleep(0)
    assert max_callbacks <= 16
    assert [str(number) for number in range(len(fired))] == fired
    assert len(fired) < 900
    assert not deadlines._heap


async def test_timer_that_fires_early_is_set_again() -> None:
    """A timer that fires before the clock reaches the deadline is set again."""
    fired: list[str] = []
    now = 100.0
    deadlines = DeadlineTimer(lambda: now)
    deadlines.add(now + 0.001, DeadlineRecorder("first", fired).on_deadline)
    await asyncio.sleep(0.02)
    before = list(fired)
    now += 0.001
    await wait_for(lambda: fired)
    assert ([], ["first"]) == (before, fired)


async def test_cancelled_deadlines_are_removed() -> None:
    """The heap contains at most about as many cancelled as pending deadlines."""
    fired: list[str] = []
    now = 100.0
    deadlines = DeadlineTimer(lambda: now)
    for _ in range(600):
        deadlines.add(now + 60, DeadlineRecorder("running", fired).on_deadline)
    for _ in range(20_000):
        deadlines.add(now + 60, DeadlineRecorder("cancelled", fired).on_deadline)[CALLBACK] = None
    size = len(deadlines._heap)
    now += 61
    deadlines.add(now - 2, DeadlineRecorder("overdue", fired).on_deadline)
    await wait_for(lambda: len(fired) == 601)
    assert {"running": 600, "overdue": 1} == Counter(fired)
    assert 600 <= (size) <= 1_200
