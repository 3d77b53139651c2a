from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tarry.runtime.clocks import system
from tarry.service.delivery.http1 import client
from tarry.service.delivery.http1.client import HttpDelivery
from tarry.service.delivery.http1.connector import Connector
from tarry.service.delivery.http1.pending_request import CALLBACK
from tarry.service.delivery.messages import DeliveryResult, Fault
from tests.integration.hostile import OK
from tests.service.delivery.harness import (
    LOOPBACK_GUARD,
    close_and_wait,
    request,
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

pytestmark = pytest.mark.usefixtures("either_loop")


@asynccontextmanager
async def serving_many(number: int) -> AsyncIterator[list[ScriptedServer]]:
    """Run some servers."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_server()) for _ in range(number)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test moves."""
    now = [1000.0]
    monkeypatch.setattr(system, "now", lambda: now[0])
    return now


def with_one(
    use: Callable[[HttpDelivery, ScriptedServer], Awaitable[Any]], **limits: Any
) -> tuple[Any, int, int]:
    """Run a test with a server; return what it returns, the connections, and the room left."""

    async def main() -> tuple[Any, int, int]:
        async with run_server() as server:
            delivery = HttpDelivery(LOOPBACK_GUARD, **limits)
            result = await use(delivery, server)
            return result, server.connections, await close_and_wait(delivery)

    return run(main())


async def arrive(server: ScriptedServer, number: int) -> list[ReceivedRequest]:
    """Return the next requests that arrive."""
    return [await server.received.get() for _ in range(number)]


def test_no_more_connections_to_a_host_than_allowed() -> None:
    """The others wait, and are sent in their order on the connections that come free."""

    async def use(delivery: HttpDelivery, server: ScriptedServer) -> list[str]:
        sent = [delivery.send(request(f"{server.url}{number}")) for number in range(5)]
        seen = []
        for received in await arrive(server, 2):
            seen.append(received.path)
            received.respond()
        for _ in range(3):
            (received,) = await arrive(server, 1)
            seen.append(received.path)
            received.respond()
        assert [200] * 5 == [(await each).status for each in sent]
        return seen

    seen, connections, left = with_one(use, max_host_connections=2, max_connections=9)
    assert {"/0", "/1"} == set(seen[:2])
    assert (["/2", "/3", "/4"], 2, 9) == (seen[2:], connections, left)


def test_a_server_that_waits_for_room_gets_it_when_another_is_done() -> None:
    """A connection is not kept idle while somebody needs the room it takes."""

    async def main() -> tuple[list[DeliveryResult], int]:
        async with serving_many(2) as (one, other):
            delivery = HttpDelivery(LOOPBACK_GUARD, max_connections=1)
            sent = [delivery.send(request(server.url)) for server in (one, other)]
            (await one.received.get()).respond()
            (await other.received.get()).respond()
            result = [await each for each in sent]
            return result, await close_and_wait(delivery)

    result, left = run(main())
    assert ([200, 200], 1) == ([each.status for each in result], left)


def test_an_idle_connection_makes_room_for_another_server() -> None:
    """The one that was idle for longest, and no more than one."""

    async def main() -> tuple[list[int], int]:
        async with serving_many(3) as servers:
            delivery = HttpDelivery(LOOPBACK_GUARD, max_connections=2)
            for server in servers:
                sent = delivery.send(request(server.url))
                (await server.received.get()).respond()
                await sent
            await wait_for(lambda: not servers[0].open)
            still_open = [server.open for server in servers]
            return still_open, await close_and_wait(delivery)

    assert ([0, 1, 1], 2) == run(main())


def test_room_that_its_first_in_line_no_longer_needs_goes_to_the_next() -> None:
    """Whoever left the line does not hold up those behind."""

    async def main() -> tuple[DeliveryResult, int]:
        async with serving_many(3) as (one, gone, other):
            delivery = HttpDelivery(LOOPBACK_GUARD, max_connections=1)
            first = delivery.send(request(one.url))
            received = await one.received.get()
            left, waiting = (delivery.send(request(server.url)) for server in (gone, other))
            left.cancel()
            received.close_connection()
            (await other.received.get()).respond()
            assert Fault.RESET is (await first).fault
            result = await waiting
            return result, await close_and_wait(delivery)

    result, left = run(main())
    assert (200, 1) == (result.status, left)


def test_a_busy_server_gives_way_after_its_turn(clock: list[float]) -> None:
    """Connections that never come to rest would leave nothing for the others."""

    async def main() -> list[str]:
        async with serving_many(2) as (busy, other):
            delivery = HttpDelivery(LOOPBACK_GUARD, max_connections=1)
            sent = [delivery.send(request(f"{busy.url}{number}")) for number in range(3)]
            sent.append(delivery.send(request(f"{other.url}other")))
            seen = []
            for server in (busy, busy, other, busy):
                received = await server.received.get()
                seen.append(received.path)
                clock[0] += 6.0
                received.respond()
            assert [200] * 4 == [(await each).status for each in sent]
            await delivery.close()
            return seen

    assert ["/0", "/1", "/other", "/2"] == run(main())


def test_a_request_that_comes_just_when_a_connection_stands_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection is not counted twice, as one that is opened and one that stands."""
    opened = Connector.connect
    sent: list[asyncio.Future[DeliveryResult]] = []

    async def use(delivery: HttpDelivery, server: ScriptedServer) -> list[DeliveryResult]:
        async def open_then_send(way: Connector, protocol: asyncio.Protocol) -> object:
            found = await opened(way, protocol)
            if len(sent) < 2:
                loop = asyncio.get_running_loop()
                loop.call_soon(lambda: sent.append(delivery.send(request(server.url + "2"))))
            return found

        monkeypatch.setattr(Connector, "connect", open_then_send)
        sent.append(delivery.send(request(server.url + "1")))
        for received in await arrive(server, 2):
            received.respond()
        return [await each for each in sent]

    result, connections, left = with_one(use, max_host_connections=2, max_connections=5)
    assert ([200, 200], 2, 5) == ([each.status for each in result], connections, left)


def test_what_is_sent_once_more_gets_a_new_connection() -> None:
    """Not another kept one, which may have been closed in silence as well."""

    async def use(
        delivery: HttpDelivery, server: ScriptedServer
    ) -> tuple[int, list[int | str | None]]:
        for _ in range(2):
            warm = [delivery.send(request(server.url + "warm")) for _ in range(2)]
            for received in await arrive(server, 2):
                received.respond()
            await asyncio.gather(*warm)
        kept = [delivery.send(request(server.url + name)) for name in ("lost", "held")]
        by_path = {received.path: received for received in await arrive(server, 2)}
        kept.append(delivery.send(request(server.url + "waits")))
        by_path["/lost"].close_connection()
        (waits,) = await arrive(server, 1)
        assert "/waits" == waits.path
        by_path["/held"].respond()
        (again,) = await arrive(server, 1)
        assert "/lost" == again.path
        again.respond()
        waits.respond()
        return again.connection, [(await each).status for each in kept]

    (number, statuses), connections, left = with_one(use, max_host_connections=2, max_connections=9)
    assert ([200, 200, 200], 4, 4, 9) == (statuses, number, connections, left)


def test_a_connection_that_was_idle_for_long_is_not_used(clock: list[float]) -> None:
    """The target has most likely closed it."""

    async def use(delivery: HttpDelivery, server: ScriptedServer) -> None:
        for later in (0.0, 59.0, 61.0):
            clock[0] += later
            sent = delivery.send(request(server.url))
            (await server.received.get()).respond()
            await sent

    assert (None, 2) == with_one(use)[:2]


def test_a_connection_that_is_old_is_not_used(clock: list[float]) -> None:
    """After five minutes a name is looked up anew, however busy the connection is."""

    async def use(delivery: HttpDelivery, server: ScriptedServer) -> None:
        for _ in range(12):
            clock[0] += 30.0
            sent = delivery.send(request(server.url))
            (await server.received.get()).respond()
            await sent

    assert (None, 2) == with_one(use)[:2]


def test_what_nobody_uses_is_swept_away(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections first, then the servers that have none; then there is nothing to sweep."""
    monkeypatch.setattr(client, "_SWEEP_INTERVAL_S", 0.01)

    async def use(delivery: HttpDelivery, server: ScriptedServer) -> bool:
        sent = delivery.send(request(server.url))
        (await server.received.get()).respond()
        await sent
        clock[0] += 61.0
        await wait_for(lambda: not server.open)
        await wait_for(lambda: not delivery._pools)
        return delivery._sweep_timer is None

    assert (True, 1, 7) == with_one(use, max_connections=7)


def test_close_leaves_nothing_in_any_state() -> None:
    """What is sent, what is opened, what waits for its host, what waits for room, what is idle."""

    async def main() -> tuple[list[Fault | None], int, list[int]]:
        async with serving_many(3) as (one, other, third):
            delivery = HttpDelivery(LOOPBACK_GUARD, max_connections=2, max_host_connections=1)
            idle = delivery.send(request(other.url))
            (await other.received.get()).respond()
            await idle
            sent = [delivery.send(request(server.url)) for server in (one, one, third, third)]
            await one.received.get()
            sent.append(delivery.send(request(other.url)))
            left = await close_and_wait(delivery)
            faults = [(await each).fault for each in sent]
            await wait_for(lambda: not (one.open or other.open or third.open))
            return faults, left, [one.connections, other.connections]

    assert ([Fault.INTERNAL] * 5, 2, [1, 1]) == run(main())


def test_a_bug_of_ours_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the exception it is; and the room is given back."""

    async def broken(*_: object) -> object:
        raise ZeroDivisionError

    async def use(delivery: HttpDelivery, server: ScriptedServer) -> bool:
        monkeypatch.setattr(Connector, "connect", broken)
        sent = delivery.send(request(server.url))
        with pytest.raises(ZeroDivisionError):
            await sent
        deadline = getattr(sent, "deadline")  # noqa: B009 - of a Sending
        return deadline[CALLBACK] is None

    assert (True, 0, 3) == with_one(use, max_connections=3)


def test_a_server_that_closes_after_each_answer_is_served_all_the_same() -> None:
    """It says so, or it does not."""
    for said in (OK, OK.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)):

        async def main(said: bytes = said) -> list[DeliveryResult]:
            async with run_server(respond_with(said)) as server:
                return await send_all(HttpDelivery(LOOPBACK_GUARD), *[request(server.url)] * 5)

        assert [200] * 5 == [each.status for each in run(main())]
