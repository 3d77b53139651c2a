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
from tests.service.delivery.harness import HERE, closed, request, run, send_all, until
from tests.service.delivery.scripted_server import Arrived, Served, saying, serving

pytestmark = pytest.mark.usefixtures("either_loop")


@asynccontextmanager
async def serving_many(number: int) -> AsyncIterator[list[Served]]:
    """Run some servers."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving()) for _ in range(number)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test moves."""
    now = [1000.0]
    monkeypatch.setattr(system, "now", lambda: now[0])
    return now


def with_one(
    use: Callable[[HttpDelivery, Served], Awaitable[Any]], **limits: Any
) -> tuple[Any, int, int]:
    """Run a test with a server; return what it returns, the connections, and the room left."""

    async def main() -> tuple[Any, int, int]:
        async with serving() as served:
            delivery = HttpDelivery(HERE, **limits)
            result = await use(delivery, served)
            return result, served.connections, await closed(delivery)

    return run(main())


async def arrive(served: Served, number: int) -> list[Arrived]:
    """Return the next requests that arrive."""
    return [await served.arrived.get() for _ in range(number)]


def test_no_more_connections_to_a_host_than_allowed() -> None:
    """The others wait, and are sent in their order on the connections that come free."""

    async def use(delivery: HttpDelivery, served: Served) -> list[str]:
        sent = [delivery.send(request(f"{served.url}{number}")) for number in range(5)]
        seen = []
        for arrived in await arrive(served, 2):
            seen.append(arrived.path)
            arrived.answer()
        for _ in range(3):
            (arrived,) = await arrive(served, 1)
            seen.append(arrived.path)
            arrived.answer()
        assert [200] * 5 == [(await each).status for each in sent]
        return seen

    seen, connections, left = with_one(use, max_host_connections=2, max_connections=9)
    assert {"/0", "/1"} == set(seen[:2])
    assert (["/2", "/3", "/4"], 2, 9) == (seen[2:], connections, left)


def test_a_server_that_waits_for_room_gets_it_when_another_is_done() -> None:
    """A connection is not kept idle while somebody needs the room it takes."""

    async def main() -> tuple[list[DeliveryResult], int]:
        async with serving_many(2) as (one, other):
            delivery = HttpDelivery(HERE, max_connections=1)
            sent = [delivery.send(request(served.url)) for served in (one, other)]
            (await one.arrived.get()).answer()
            (await other.arrived.get()).answer()
            delivered = [await each for each in sent]
            return delivered, await closed(delivery)

    delivered, left = run(main())
    assert ([200, 200], 1) == ([each.status for each in delivered], left)


def test_an_idle_connection_makes_room_for_another_server() -> None:
    """The one that was idle for longest, and no more than one."""

    async def main() -> tuple[list[int], int]:
        async with serving_many(3) as servers:
            delivery = HttpDelivery(HERE, max_connections=2)
            for served in servers:
                sent = delivery.send(request(served.url))
                (await served.arrived.get()).answer()
                await sent
            await until(lambda: not servers[0].open)
            still_open = [served.open for served in servers]
            return still_open, await closed(delivery)

    assert ([0, 1, 1], 2) == run(main())


def test_room_that_its_first_in_line_no_longer_needs_goes_to_the_next() -> None:
    """Whoever left the line does not hold up those behind."""

    async def main() -> tuple[DeliveryResult, int]:
        async with serving_many(3) as (one, gone, other):
            delivery = HttpDelivery(HERE, max_connections=1)
            first = delivery.send(request(one.url))
            arrived = await one.arrived.get()
            left, waiting = (delivery.send(request(served.url)) for served in (gone, other))
            left.cancel()
            arrived.hang_up()
            (await other.arrived.get()).answer()
            assert Fault.RESET is (await first).fault
            delivered = await waiting
            return delivered, await closed(delivery)

    delivered, left = run(main())
    assert (200, 1) == (delivered.status, left)


def test_a_busy_server_gives_way_after_its_turn(clock: list[float]) -> None:
    """Connections that never come to rest would leave nothing for the others."""

    async def main() -> list[str]:
        async with serving_many(2) as (busy, other):
            delivery = HttpDelivery(HERE, max_connections=1)
            sent = [delivery.send(request(f"{busy.url}{number}")) for number in range(3)]
            sent.append(delivery.send(request(f"{other.url}other")))
            seen = []
            for served in (busy, busy, other, busy):
                arrived = await served.arrived.get()
                seen.append(arrived.path)
                clock[0] += 6.0
                arrived.answer()
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

    async def use(delivery: HttpDelivery, served: Served) -> list[DeliveryResult]:
        async def open_then_send(way: Connector, protocol: asyncio.Protocol) -> object:
            found = await opened(way, protocol)
            if len(sent) < 2:
                loop = asyncio.get_running_loop()
                loop.call_soon(lambda: sent.append(delivery.send(request(served.url + "2"))))
            return found

        monkeypatch.setattr(Connector, "connect", open_then_send)
        sent.append(delivery.send(request(served.url + "1")))
        for arrived in await arrive(served, 2):
            arrived.answer()
        return [await each for each in sent]

    delivered, connections, left = with_one(use, max_host_connections=2, max_connections=5)
    assert ([200, 200], 2, 5) == ([each.status for each in delivered], connections, left)


def test_what_is_sent_once_more_gets_a_new_connection() -> None:
    """Not another kept one, which may have been closed in silence as well."""

    async def use(delivery: HttpDelivery, served: Served) -> tuple[int, list[int | str | None]]:
        for _ in range(2):
            warm = [delivery.send(request(served.url + "warm")) for _ in range(2)]
            for arrived in await arrive(served, 2):
                arrived.answer()
            await asyncio.gather(*warm)
        kept = [delivery.send(request(served.url + name)) for name in ("lost", "held")]
        by_path = {arrived.path: arrived for arrived in await arrive(served, 2)}
        kept.append(delivery.send(request(served.url + "waits")))
        by_path["/lost"].hang_up()
        (waits,) = await arrive(served, 1)
        assert "/waits" == waits.path
        by_path["/held"].answer()
        (again,) = await arrive(served, 1)
        assert "/lost" == again.path
        again.answer()
        waits.answer()
        return again.connection, [(await each).status for each in kept]

    (number, statuses), connections, left = with_one(use, max_host_connections=2, max_connections=9)
    assert ([200, 200, 200], 4, 4, 9) == (statuses, number, connections, left)


def test_a_connection_that_was_idle_for_long_is_not_used(clock: list[float]) -> None:
    """The target has most likely closed it."""

    async def use(delivery: HttpDelivery, served: Served) -> None:
        for later in (0.0, 59.0, 61.0):
            clock[0] += later
            sent = delivery.send(request(served.url))
            (await served.arrived.get()).answer()
            await sent

    assert (None, 2) == with_one(use)[:2]


def test_a_connection_that_is_old_is_not_used(clock: list[float]) -> None:
    """After five minutes a name is looked up anew, however busy the connection is."""

    async def use(delivery: HttpDelivery, served: Served) -> None:
        for _ in range(12):
            clock[0] += 30.0
            sent = delivery.send(request(served.url))
            (await served.arrived.get()).answer()
            await sent

    assert (None, 2) == with_one(use)[:2]


def test_what_nobody_uses_is_swept_away(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections first, then the servers that have none; then there is nothing to sweep."""
    monkeypatch.setattr(client, "_SWEEP_INTERVAL_S", 0.01)

    async def use(delivery: HttpDelivery, served: Served) -> bool:
        sent = delivery.send(request(served.url))
        (await served.arrived.get()).answer()
        await sent
        clock[0] += 61.0
        await until(lambda: not served.open)
        await until(lambda: not delivery._pools)
        return delivery._sweep_timer is None

    assert (True, 1, 7) == with_one(use, max_connections=7)


def test_close_leaves_nothing_in_any_state() -> None:
    """What is sent, what is opened, what waits for its host, what waits for room, what is idle."""

    async def main() -> tuple[list[Fault | None], int, list[int]]:
        async with serving_many(3) as (one, other, third):
            delivery = HttpDelivery(HERE, max_connections=2, max_host_connections=1)
            idle = delivery.send(request(other.url))
            (await other.arrived.get()).answer()
            await idle
            sent = [delivery.send(request(served.url)) for served in (one, one, third, third)]
            await one.arrived.get()
            sent.append(delivery.send(request(other.url)))
            left = await closed(delivery)
            faults = [(await each).fault for each in sent]
            await until(lambda: not (one.open or other.open or third.open))
            return faults, left, [one.connections, other.connections]

    assert ([Fault.INTERNAL] * 5, 2, [1, 1]) == run(main())


def test_a_bug_of_ours_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the exception it is; and the room is given back."""

    async def broken(*_: object) -> object:
        raise ZeroDivisionError

    async def use(delivery: HttpDelivery, served: Served) -> bool:
        monkeypatch.setattr(Connector, "connect", broken)
        sent = delivery.send(request(served.url))
        with pytest.raises(ZeroDivisionError):
            await sent
        deadline = getattr(sent, "deadline")  # noqa: B009 - of a Sending
        return deadline[CALLBACK] is None

    assert (True, 0, 3) == with_one(use, max_connections=3)


def test_a_server_that_closes_after_each_answer_is_served_all_the_same() -> None:
    """It says so, or it does not."""
    for said in (OK, OK.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)):

        async def main(said: bytes = said) -> list[DeliveryResult]:
            async with serving(saying(said)) as served:
                return await send_all(HttpDelivery(HERE), *[request(served.url)] * 5)

        assert [200] * 5 == [each.status for each in run(main())]
