"""The idempotency middleware with database servers that hang and exhausted connection pools."""

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
def suspendable_server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    """Run a server that a test may suspend, of each kind."""
    with {"postgres": postgres_server, "redis": redis_server}[request.param]() as server:
        yield request.param, server


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeout of store calls."""
    monkeypatch.setattr(lease, "STORE_TIMEOUT_S", 0.5)


def test_requests_are_answered_while_the_server_hangs(
    suspendable_server: tuple[str, Server], table: str
) -> None:
    """New requests get a 503; a running request is answered and its response stored later."""
    engine, server = suspendable_server
    payments = PaymentsApp()
    running, may_finish = asyncio.Event(), asyncio.Event()

    async def pay(scope: Scope, receive: Receive, send: Send) -> None:
        running.set()
        await may_finish.wait()
        await payments(scope, receive, send)

    async def main() -> None:
        store = open_store(engine, server.address, table)
        app = IdempotencyMiddleware(pay, store)
        first = asyncio.create_task(send_request(app))
        await running.wait()
        with server.suspended():
            assert 503 == (await send_request(app, key=b"another")).status
            may_finish.set()
            assert b"run 1" == (await first).body
        repeated = await send_request(app)
        while repeated.status in {409, 503}:  # until the response is stored
            await asyncio.sleep(0.05)
            repeated = await send_request(app)
        assert (b"run 1", True) == (repeated.body, repeated.is_replayed)
        await store.close()

    asyncio.run(main())
    assert 1 == payments.runs


@pytest.mark.parametrize("status", [201, 500])
def test_response_is_sent_while_the_handler_uses_the_last_connection(
    postgres_dsn: str, table: str, status: int
) -> None:
    """The response is sent and stored later; a 500 is not stored."""
    payments = PaymentsApp(status)

    async def main() -> None:
        async with asyncpg.create_pool(postgres_dsn, min_size=1, max_size=1) as pool:

            async def pay(scope: Scope, receive: Receive, send: Send) -> None:
                async with pool.acquire():
                    await payments(scope, receive, send)

            app = IdempotencyMiddleware(pay, PostgresStore(pool, table=table), lease=60.0)
            assert status == (await send_request(app)).status
            repeated = await send_request(app)
            while repeated.status == 409:
                await asyncio.sleep(0.05)
                repeated = await send_request(app)
            assert (status == 201) == repeated.is_replayed

    asyncio.run(main())


def test_exhausted_pool_is_unavailable(
    postgres_dsn: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose claim gets no connection gets a 503, and its key stays free."""
    payments = PaymentsApp()

    async def main() -> None:
        async with asyncpg.create_pool(postgres_dsn, min_size=1, max_size=1) as pool:
            store = PostgresStore(pool, table=table)
            await store.sweep(1)
            app = IdempotencyMiddleware(payments, store)
            async with pool.acquire():
                assert 503 == (await send_request(app)).status
            monkeypatch.setattr(lease, "STORE_TIMEOUT_S", 60.0)
            assert 201 == (await send_request(app)).status

    asyncio.run(main())
    assert 1 == payments.runs
