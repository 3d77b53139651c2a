"""The idempotency middleware in each framework."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tarry.idempotency import IdempotencyMiddleware, SqliteStore
from tests.frameworks.integrations import DOCUMENTED_INTEGRATIONS, Integration
from tests.frameworks.shop import (
    CHUNKS,
    Shop,
    open_asgi_client,
    open_server_client,
    run_pending_callbacks,
    send_and_disconnect,
)

ORDER = {"amount": 7, "note": "für Zoë"}
REPLAYED = (b"idempotent-replayed", b"true")


def is_stored_copy(first: httpx.Response, second: httpx.Response) -> bool:
    """Return whether the second response is the stored first one."""
    return (first.status_code, [*first.headers.raw, REPLAYED], first.content) == (
        second.status_code,
        second.headers.raw,
        second.content,
    )


def test_repeated_request_gets_the_stored_response(integration: Integration) -> None:
    """The handler runs once; status, header, cookie and body are the same."""
    shop = Shop()

    async def main() -> None:
        async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
            first = await client.post("/pay", json=ORDER)
            second = await client.post("/pay", json=ORDER)

        assert (201, {"payment": 1}) == (first.status_code, first.json())
        assert ("1", "empty") == (first.headers["x-payment"], first.cookies["basket"])
        assert is_stored_copy(first, second)

    asyncio.run(main())
    assert [ORDER] == shop.runs


def test_other_payload_is_422(integration: Integration) -> None:
    """The same key with another body is a 422, and no handler runs."""
    shop = Shop()

    async def main() -> None:
        async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
            await client.post("/pay", json=ORDER)
            assert 422 == (await client.post("/pay", json={**ORDER, "amount": 8})).status_code

    asyncio.run(main())
    assert [ORDER] == shop.runs


def test_missing_key_is_400(integration: Integration) -> None:
    """Where a key is required, a request without one is a 400; elsewhere it runs each time."""
    shop = Shop()

    async def main() -> None:
        app = integration.build(shop, IdempotencyMiddleware, require_key=["/pay"])
        async with open_asgi_client(app) as client:
            del client.headers["Idempotency-Key"]
            refused = await client.post("/pay", json=ORDER)
            assert (400, "Idempotency-Key is missing") == (
                refused.status_code,
                refused.json()["title"],
            )
            for _ in range(2):
                await client.post("/stream")

    asyncio.run(main())
    assert ["stream", "stream"] == shop.runs


def test_request_in_progress_is_409(integration: Integration) -> None:
    """A concurrent second request is a 409; after the first has finished, it gets its response."""
    shop = Shop()

    async def main() -> None:
        async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
            running = asyncio.create_task(client.post("/wait"))
            await shop.running.wait()
            early = await client.post("/wait")
            shop.go_on.set()
            first = await running

            assert (409, "1") == (early.status_code, early.headers["retry-after"])
            assert 201 == first.status_code
            assert is_stored_copy(first, await client.post("/wait"))

    asyncio.run(main())
    assert ["wait"] == shop.runs


def test_raising_handler(integration: Integration) -> None:
    """An error is a 500, raised inside or outside of the middleware; the next request runs."""
    shop = Shop()

    async def main() -> None:
        async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
            first, second, third = [await client.post("/fail") for _ in range(3)]

        assert (500, 201) == (first.status_code, second.status_code)
        assert is_stored_copy(second, third)

    asyncio.run(main())
    assert ["fail", "fail"] == shop.runs


def test_403_is_not_stored(integration: Integration) -> None:
    """After the framework's own 403, a client with the permission needs no new key."""
    shop = Shop()

    async def main() -> None:
        async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
            first, second = [await client.post("/refuse") for _ in range(2)]

        assert [403, 403] == [first.status_code, second.status_code]
        assert "idempotent-replayed" not in second.headers

    asyncio.run(main())
    assert ["refuse", "refuse"] == shop.runs


def test_stream_is_stored(integration: Integration) -> None:
    """A stream below the limit is stored as a whole."""
    shop = Shop()

    async def main() -> None:
        async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
            first, second = [await client.post("/stream") for _ in range(2)]

        assert (200, "".join(CHUNKS)) == (first.status_code, first.text)
        assert is_stored_copy(first, second)

    asyncio.run(main())
    assert ["stream"] == shop.runs


def test_body_in_many_chunks(integration: Integration) -> None:
    """A body that arrives byte by byte, also within characters, is parsed."""
    shop = Shop()
    body = httpx.Request("POST", "http://shop", json=ORDER).content

    async def chunks() -> AsyncIterator[bytes]:
        for byte in body:
            yield bytes([byte])

    async def main() -> None:
        headers = {"Content-Type": "application/json"}
        async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
            first = await client.post("/pay", content=chunks(), headers=headers)
            assert is_stored_copy(first, await client.post("/pay", content=body, headers=headers))

    asyncio.run(main())
    assert [ORDER] == shop.runs


def test_handler_sees_the_disconnect(integration: Integration) -> None:
    """Without a key the handler can stop: the disconnect reaches the application."""
    shop = Shop()

    async def main() -> None:
        app = integration.build(shop, IdempotencyMiddleware)
        await send_and_disconnect(app, "/leave", shop, key=None)

    asyncio.run(main())
    assert shop.saw_disconnect


def test_retry_after_a_disconnect(integration: Integration) -> None:
    """The handler goes on, also where its framework would stop it; the retry gets its response."""
    shop = Shop()

    async def main() -> None:
        app = integration.build(shop, IdempotencyMiddleware)
        disconnected = asyncio.create_task(send_and_disconnect(app, "/wait", shop))
        await shop.running.wait()
        await run_pending_callbacks()
        shop.go_on.set()
        await disconnected
        async with open_asgi_client(app) as client:
            again = await client.post("/wait", content=b"{}")

        assert (201, "true") == (again.status_code, again.headers["idempotent-replayed"])

    asyncio.run(main())
    assert ["wait"] == shop.runs


def test_stream_of_a_disconnected_client_is_stored(integration: Integration) -> None:
    """The framework sees the disconnect only after the stream is complete and stored."""
    shop = Shop(pauses_stream=True)

    async def main() -> None:
        app = integration.build(shop, IdempotencyMiddleware)
        disconnected = asyncio.create_task(send_and_disconnect(app, "/stream", shop))
        await shop.running.wait()
        await run_pending_callbacks()
        shop.go_on.set()
        await disconnected
        async with open_asgi_client(app) as client:
            again = await client.post("/stream", content=b"{}")

        assert ("".join(CHUNKS), "true") == (again.text, again.headers["idempotent-replayed"])

    asyncio.run(main())
    assert ["stream"] == shop.runs


def test_large_stream_stops_on_a_disconnect(integration: Integration) -> None:
    """A stream above the limit stops on a disconnect; its request counts as done."""
    shop = Shop(pauses_stream=True)

    async def main() -> None:
        app = integration.build(shop, IdempotencyMiddleware, max_response_bytes=4)
        await send_and_disconnect(app, "/stream", shop)
        async with open_asgi_client(app) as client:
            again = await client.post("/stream", content=b"{}")

        assert (409, 200) == (again.status_code, again.json()["originalStatus"])

    asyncio.run(main())
    assert ["stream"] == shop.runs


def test_concurrent_requests(integration: Integration, tmp_path: Path) -> None:
    """One of fifty concurrent requests runs; the others get its response or a 409."""
    shop = Shop()

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        async with open_asgi_client(
            integration.build(shop, IdempotencyMiddleware, store=store)
        ) as client:
            crowd = await asyncio.gather(*(client.post("/pay", json=ORDER) for _ in range(50)))
        await store.close()

        assert {"payment": 1} in [response.json() for response in crowd]
        assert {201, 409} >= {response.status_code for response in crowd}

    asyncio.run(main())
    assert [ORDER] == shop.runs


@pytest.mark.parametrize("integration", DOCUMENTED_INTEGRATIONS, ids=str)
def test_behind_a_real_server(integration: Integration) -> None:
    """The behaviour is the same over sockets, and the application's lifespan runs."""
    shop = Shop()

    async def main() -> None:
        async with open_server_client(
            integration.build(shop, IdempotencyMiddleware, require_key=["/pay"])
        ) as client:
            first = await client.post("/pay", json=ORDER)
            assert (201, "1") == (first.status_code, first.headers["x-payment"])
            assert is_stored_copy(first, await client.post("/pay", json=ORDER))
            assert 422 == (await client.post("/pay", json={**ORDER, "amount": 8})).status_code

    asyncio.run(main())
    assert [ORDER] == shop.runs
    assert (["up", "down"] if integration.has_lifespan else []) == shop.lifespan_events
