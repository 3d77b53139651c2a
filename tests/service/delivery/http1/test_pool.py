from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import pytest

from tarry.runtime.effects import effects
from tarry.service.delivery import DeliveryResult, Fault
from tarry.service.delivery.http1 import client
from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.delivery.http1.connection import CALLBACK, PendingRequest
from tarry.service.delivery.http1.connector import Connector
from tests.integration.hostile import OK
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    close_and_wait,
    new_request,
    run,
    send_all,
    wait_for,
)
from tests.service.delivery.scripted_server import (
    ReceivedRequest,
    ScriptedServer,
    respond_with,
    run_server,
)

pytestmark = pytest.mark.usefixtures("each_loop")


@asynccontextmanager
async def run_servers(number: int) -> AsyncIterator[list[ScriptedServer]]:
    """Run several servers."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_server()) for _ in range(number)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the fake current time in a list, which the test advances."""
    now = [1000.0]
    monkeypatch.setattr(effects, "now", lambda: now[0])
    return now


def with_server(
    use: Callable[[HttpDeliveryClient, ScriptedServer], Awaitable[Any]], **limits: Any
) -> tuple[Any, int, int]:
    """Run `use` with a server; return its result, the connections, and the free slots."""

    async def main() -> tuple[Any, int, int]:
        async with run_server() as server:
            delivery = HttpDeliveryClient(LOOPBACK_GUARD, **limits)
            result = await use(delivery, server)
            return result, server.connections, await close_and_wait(delivery)

    return run(main())


async def receive(server: ScriptedServer, number: int) -> list[ReceivedRequest]:
    """Return the next requests that the server receives."""
    return [await server.received.get() for _ in range(number)]


def test_connections_per_host_are_limited() -> None:
    """Further requests are queued and sent in order on connections that become free."""

    async def use(delivery: HttpDeliveryClient, server: ScriptedServer) -> list[str]:
        sent = [delivery.send(new_request(f"{server.url}{number}")) for number in range(5)]
        received = await receive(server, 2)
        for number in range(3):
            # One response at a time: requests on two connections may arrive in any order.
            received[number].respond()
            received += await receive(server, 1)
        for request in received[3:]:
            request.respond()
        assert [200] * 5 == [(await each).status for each in sent]
        return [request.path for request in received]

    paths, connections, free_slots = with_server(use, max_pool_connections=2, max_connections=9)
    assert {"/0", "/1"} == set(paths[:2])
    assert (["/2", "/3", "/4"], 2, 9) == (paths[2:], connections, free_slots)


async def test_released_slot_goes_to_a_waiting_request_for_another_server() -> None:
    """A connection is closed instead of becoming idle while a request for another server waits."""
    async with run_servers(2) as (one, other):
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=1)
        sent = [delivery.send(new_request(server.url)) for server in (one, other)]
        (await one.received.get()).respond()
        (await other.received.get()).respond()
        result = [await each for each in sent]
        free_slots = await close_and_wait(delivery)
    assert ([200, 200], 1) == ([each.status for each in result], free_slots)


async def test_idle_connection_is_closed_for_another_server() -> None:
    """Only the connection that has been idle for longest is closed."""
    async with run_servers(3) as servers:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=2)
        for server in servers:
            sent = delivery.send(new_request(server.url))
            (await server.received.get()).respond()
            await sent
        await wait_for(lambda: not servers[0].open)
        still_open = [server.open for server in servers]
        result = (still_open, await close_and_wait(delivery))
    assert ([0, 1, 1], 2) == result


async def test_cancelled_waiter_does_not_block_the_next() -> None:
    """The free slot goes to the next waiting request when the first is cancelled."""
    async with run_servers(3) as (one, second, other):
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=1)
        first = delivery.send(new_request(one.url))
        received = await one.received.get()
        cancelled, waiting = (delivery.send(new_request(server.url)) for server in (second, other))
        cancelled.cancel()
        received.close_connection()
        (await other.received.get()).respond()
        assert Fault.RESET is (await first).fault
        result = await waiting
        free_slots = await close_and_wait(delivery)
    assert (200, 1) == (result.status, free_slots)


async def test_busy_connection_is_closed_for_another_server(clock: list[float]) -> None:
    """A connection that is never idle is closed while a request for another server waits."""
    async with run_servers(2) as (busy, other):
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=1)
        sent = [delivery.send(new_request(f"{busy.url}{number}")) for number in range(3)]
        sent.append(delivery.send(new_request(f"{other.url}other")))
        seen = []
        for server in (busy, busy, other, busy):
            received = await server.received.get()
            seen.append(received.path)
            clock[0] += 6.0
            received.respond()
        assert [200] * 4 == [(await each).status for each in sent]
        await delivery.close()
        result = seen
    assert ["/0", "/1", "/other", "/2"] == result


def test_connection_is_not_counted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that arrives while a connection is established gets its own connection."""
    connect = Connector.connect
    sent: list[asyncio.Future[DeliveryResult]] = []

    async def use(delivery: HttpDeliveryClient, server: ScriptedServer) -> list[DeliveryResult]:
        async def open_then_send(connector: Connector, protocol: asyncio.Protocol) -> object:
            connected = await connect(connector, protocol)
            if len(sent) < 2:
                loop = asyncio.get_running_loop()
                loop.call_soon(lambda: sent.append(delivery.send(new_request(server.url + "2"))))
            return connected

        monkeypatch.setattr(Connector, "connect", open_then_send)
        sent.append(delivery.send(new_request(server.url + "1")))
        for received in await receive(server, 2):
            received.respond()
        return [await each for each in sent]

    result, connections, free_slots = with_server(use, max_pool_connections=2, max_connections=5)
    assert ([200, 200], 2, 5) == ([each.status for each in result], connections, free_slots)


def test_resent_request_gets_a_new_connection(caplog: pytest.LogCaptureFixture) -> None:
    """A used connection is not used, because the target may have closed it as well.

    The log shows that the target may have received the request twice.
    """

    async def main() -> tuple[int, list[int | str | None]]:
        async with run_servers(2) as (server, other):
            delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=2)
            for _ in range(2):
                warm = [delivery.send(new_request(server.url + "warm")) for _ in range(2)]
                for received in await receive(server, 2):
                    received.respond()
                await asyncio.gather(*warm)
            sent = [delivery.send(new_request(server.url + name)) for name in ("lost", "held")]
            by_path = {received.path: received for received in await receive(server, 2)}
            sent.append(delivery.send(new_request(other.url)))
            by_path["/lost"].close_connection()
            (await other.received.get()).respond()  # its new_request waited for a slot before
            by_path["/held"].respond()
            (resent,) = await receive(server, 1)
            assert "/lost" == resent.path
            resent.respond()
            statuses = [(await each).status for each in sent]
            await close_and_wait(delivery)
            return resent.connection, statuses

    with caplog.at_level(logging.DEBUG, "tarry.service"):
        assert (3, [200, 200, 200]) == run(main())
    (message,) = caplog.messages
    assert message.startswith("request sent again: the target closed the reused connection")


def test_connection_idle_for_too_long_is_not_used(clock: list[float]) -> None:
    """A connection is not used after 60 s without a request."""

    async def use(delivery: HttpDeliveryClient, server: ScriptedServer) -> None:
        for later in (0.0, 59.0, 61.0):
            clock[0] += later
            sent = delivery.send(new_request(server.url))
            (await server.received.get()).respond()
            await sent

    assert (None, 2) == with_server(use)[:2]


def test_old_connection_is_not_used(clock: list[float]) -> None:
    """A connection is not used after five minutes, even if it was never idle for long."""

    async def use(delivery: HttpDeliveryClient, server: ScriptedServer) -> None:
        for _ in range(12):
            clock[0] += 30.0
            sent = delivery.send(new_request(server.url))
            (await server.received.get()).respond()
            await sent

    assert (None, 2) == with_server(use)[:2]


def test_unused_connections_and_pools_are_swept(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle connections are closed, empty pools are removed, and then the sweep stops."""
    monkeypatch.setattr(client, "_SWEEP_INTERVAL_S", 0.01)

    async def use(delivery: HttpDeliveryClient, server: ScriptedServer) -> int:
        sent = delivery.send(new_request(server.url))
        (await server.received.get()).respond()
        await sent
        clock[0] += 61.0
        await wait_for(lambda: not server.open)
        await wait_for(lambda: delivery._sweep_timer is None)
        return len(delivery._pools)

    assert (0, 1, 7) == with_server(use, max_connections=7)


async def test_close_fails_all_requests() -> None:
    """Sent and queued requests fail with INTERNAL, and all connections are closed."""
    async with run_servers(3) as (one, other, third):
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=2, max_pool_connections=1)
        idle = delivery.send(new_request(other.url))
        (await other.received.get()).respond()
        await idle
        sent = [delivery.send(new_request(server.url)) for server in (one, one, third, third)]
        await one.received.get()
        sent.append(delivery.send(new_request(other.url)))
        free_slots = await close_and_wait(delivery)
        faults = [(await each).fault for each in sent]
        await wait_for(lambda: not (one.open or other.open or third.open))
        result = (faults, free_slots, [one.connections, other.connections])
    assert ([Fault.INTERNAL] * 5, 2, [1, 1]) == result


def test_unexpected_error_is_raised_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets the error, and the connection slot is freed."""

    async def broken(*_: object) -> object:
        raise ZeroDivisionError

    async def use(delivery: HttpDeliveryClient, server: ScriptedServer) -> bool:
        monkeypatch.setattr(Connector, "connect", broken)
        sent = delivery.send(new_request(server.url))
        with pytest.raises(ZeroDivisionError):
            await sent
        deadline = cast("PendingRequest", sent.delivery).deadline
        return deadline is not None and deadline[CALLBACK] is None

    assert (True, 0, 3) == with_server(use, max_connections=3)


def test_server_may_close_after_each_response() -> None:
    """All requests succeed, whether or not the server sends `Connection: close`."""
    for response in (OK, OK.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)):

        async def main(response: bytes = response) -> list[DeliveryResult]:
            async with run_server(respond_with(response)) as server:
                return await send_all(
                    HttpDeliveryClient(LOOPBACK_GUARD), *[new_request(server.url)] * 5
                )

        assert [200] * 5 == [each.status for each in run(main())]


def test_callback_may_send_the_next_request_on_the_same_connection() -> None:
    """The connection is released before the callback of its request is called."""

    async def use(delivery: HttpDeliveryClient, server: ScriptedServer) -> list[object]:
        results: list[object] = []
        is_done = asyncio.Event()

        def start_next(result: object) -> None:
            results.append(result)
            if len(results) < 5:
                delivery.start(new_request(server.url), start_next)
            else:
                is_done.set()

        delivery.start(new_request(server.url), start_next)
        for _ in range(5):
            (await server.received.get()).respond()
        await is_done.wait()
        return results

    results, connections, free_slots = with_server(use, max_pool_connections=1, max_connections=3)
    assert [200] * 5 == [each.status for each in results]
    assert (1, 3) == (connections, free_slots)


async def test_callback_of_a_failed_request_may_send_the_next_one() -> None:
    """Requests that fail also release their connection before the callback is called."""
    protocol, refused = Fault.PROTOCOL, Fault.REFUSED
    async with run_server(respond_with(b"RTSP/1.0 200 OK\r\n\r\n")) as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=1)
        urls = [server.url, "http://127.0.0.1:1/", "http://127.0.0.1:1/", server.url]
        faults: list[Any] = []
        is_done = asyncio.Event()

        def start_next(result: Any) -> None:
            faults.append(result.fault)
            if urls:
                delivery.start(new_request(urls.pop()), start_next)
            else:
                is_done.set()

        delivery.start(new_request(urls.pop()), start_next)
        await is_done.wait()
        value = (faults, await close_and_wait(delivery))
    assert ([protocol, refused, refused, protocol], 1) == value


async def test_next_request_uses_the_slot_of_a_lost_connection() -> None:
    """At the limit of connections, no idle connection is closed when a lost one leaves a slot."""
    async with (
        run_server(respond_with(OK, then_close=False)) as healthy,
        run_server(respond_with()) as failing,
    ):
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=2)
        await delivery.send(new_request(healthy.url))
        faults: list[Any] = []
        is_done = asyncio.Event()

        def start_next(result: Any) -> None:
            faults.append(result.fault)
            if len(faults) < 3:
                delivery.start(new_request(failing.url), start_next)
            else:
                is_done.set()

        delivery.start(new_request(failing.url), start_next)
        await is_done.wait()
        open_connections = sum(len(pool._connections) for pool in delivery._pools.values())
        await close_and_wait(delivery)
        value = (open_connections, faults.count(Fault.RESET))
    assert (1, 3) == value


def test_error_in_a_callback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An error in a callback is logged without secrets, and its connection is used again."""

    def fail(_: object) -> None:
        raise ZeroDivisionError

    async def use(delivery: HttpDeliveryClient, server: ScriptedServer) -> int | str | None:
        delivery.start(new_request(server.url), fail)
        (await server.received.get()).respond(OK.replace(b"\r\n", b"\r\nX: secret\r\n", 1))
        await wait_for(lambda: caplog.records)
        sent = delivery.send(new_request(server.url))
        (await server.received.get()).respond()
        return (await sent).status

    assert (200, 1, 3) == with_server(use, max_connections=3)
    (record,) = caplog.records
    assert "callback of a delivery failed, delivery=DeliveryResult(status=200" in caplog.text
    assert record.exc_info is not None
    assert "secret" not in caplog.text


async def test_invalid_request_calls_back_after_start() -> None:
    """A request that cannot be sent never calls back within `start`."""
    delivery = HttpDeliveryClient(LOOPBACK_GUARD)
    results: list[Any] = []
    delivery.start(new_request("http://h/", headers={"host": "other"}), results.append)
    at_once = results.copy()
    await wait_for(lambda: results)
    await delivery.close()
    assert ([], [Fault.INVALID]) == (at_once, [each.fault for each in results])


def test_cancelled_delivery_calls_back_once() -> None:
    """The callback gets a CancelledError, and nothing after this."""

    async def use(delivery: HttpDeliveryClient, server: ScriptedServer) -> list[type[object]]:
        results: list[object] = []
        started = delivery.start(new_request(server.url), results.append)
        await server.received.get()
        started.cancel()
        started.cancel()
        sent = delivery.send(new_request(server.url))
        await server.received.get()
        sent.delivery.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sent
        return [type(each) for each in results]

    assert ([asyncio.CancelledError], 2, 3) == with_server(use, max_connections=3)
