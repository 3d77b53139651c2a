"""The idempotency middleware with servers that hang and connection pools that are exhausted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tarry.idempotency import IdempotencyMiddleware, PostgresStore, lease
from tarry.wire.http import Receive, Scope, Send
from tests.idempotency.asgi_client import PaymentsApp, send_request
from tests.integration.claimants import open_store
from tests.integration.postgres import asyncpg
from tests.integration.servers import Server, postgres_server, redis_server


@pytest.fixture(scope="module", params=["postgres", "redis"])
def stoppable(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    """Run each kind of server, one that a test may suspend."""
    with {"postgres": postgres_server, "redis": redis_server}[request.param]() as server:
        yield request.param, server


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that the middleware waits for the store."""
    monkeypatch.setattr(lease, "STORE_TIMEOUT_S", 0.5)


def test_server_that_hangs(stoppable: tuple[str, Server], table: str) -> None:
    """New requests are refused, a running one is answered, and its response is stored later."""
    engine, server = stoppable
    payments = PaymentsApp()
    running, go_on = asyncio.Event(), asyncio.Event()

    async def pay(scope: Scope, receive: Receive, send: Send) -> None:
        running.set()
        await go_on.wait()
        await payments(scope, receive, send)

    async def main() -> None:
        store = open_store(engine, server.address, table)
        app = IdempotencyMiddleware(pay, store)
        first = asyncio.create_task(send_request(app))
        await running.wait()
        with server.suspended():
            assert 503 == (await send_request(app, key=b"another")).status
            go_on.set()
            assert b"run 1" == (await first).body
        again = await send_request(app)
        while again.status in {409, 503}:  # until it has been written
            await asyncio.sleep(0.05)
            again = await send_request(app)
        assert (b"run 1", True) == (again.body, again.is_replayed)
        await store.close()

    asyncio.run(main())
    assert 1 == payments.runs


@pytest.mark.parametrize("status", [201, 500])
def test_pool_exhausted_by_handlers(postgres_dsn: str, table: str, status: int) -> None:
    """A handler that holds the last connection still gets its response, within a time limit."""
    payments = PaymentsApp(status)

    async def main() -> None:
        async with asyncpg.create_pool(postgres_dsn, min_size=1, max_size=1) as pool:

            async def pay(scope: Scope, receive: Receive, send: Send) -> None:
                async with pool.acquire():
                    await payments(scope, receive, send)

            app = IdempotencyMiddleware(pay, PostgresStore(pool, table=table), lease=60.0)
            assert status == (await send_request(app)).status
            again = await send_request(app)
            while again.status == 409:
                await asyncio.sleep(0.05)
                again = await send_request(app)
            assert (status == 201) == again.is_replayed

    asyncio.run(main())


def test_exhausted_pool_is_unavailable(postgres_dsn: str, table: str) -> None:
    """A claim without a connection is a 503, and does not take the key later."""
    payments = PaymentsApp()

    async def main() -> None:
        async with asyncpg.create_pool(postgres_dsn, min_size=1, max_size=1) as pool:
            store = PostgresStore(pool, table=table)
            await store.sweep(1)
            app = IdempotencyMiddleware(payments, store)
            async with pool.acquire():
                assert 503 == (await send_request(app)).status
            assert 201 == (await send_request(app)).status

    asyncio.run(main())
    assert 1 == payments.runs
