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
REPLAYED_HEADER = (b"idempotent-replayed", b"true")


def is_stored_copy(first: httpx.Response, second: httpx.Response) -> bool:
    """Return whether the second response is the stored copy of the first one, without cookies."""
    headers = [header for header in first.headers.raw if header[0].lower() != b"set-cookie"]
    return (first.status_code, [*headers, REPLAYED_HEADER], first.content) == (
        second.status_code,
        second.headers.raw,
        second.content,
    )


async def test_repeated_request_gets_the_stored_response(integration: Integration) -> None:
    """A repeated request gets the same status, headers and body; the handler runs once."""
    shop = Shop()

    async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
        first = await client.post("/pay", json=ORDER)
        second = await client.post("/pay", json=ORDER)

    assert (201, {"payment": 1}) == (first.status_code, first.json())
    assert ("1", "empty") == (first.headers["x-payment"], first.cookies["basket"])
    assert is_stored_copy(first, second)
    assert [ORDER] == shop.runs


async def test_key_with_and_without_quotes_is_one_key(integration: Integration) -> None:
    """A repeated request whose key has quotes gets the response of the key without quotes."""
    shop = Shop()

    async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
        responses = [
            await client.post("/pay", json=ORDER, headers={"Idempotency-Key": key})
            for key in ("order_7 of shop", '"order_7 of shop"')
        ]

    assert is_stored_copy(*responses)
    assert [ORDER] == shop.runs


async def test_other_payload_is_422(integration: Integration) -> None:
    """The same key with another body gets a 422, and the handler does not run."""
    shop = Shop()

    async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
        await client.post("/pay", json=ORDER)
        assert 422 == (await client.post("/pay", json={**ORDER, "amount": 8})).status_code
    assert [ORDER] == shop.runs


async def test_missing_key_is_400_where_it_is_required(integration: Integration) -> None:
    """Without a key, a path that requires one responds with 400; another path runs its handler."""
    shop = Shop()

    app = integration.build(shop, IdempotencyMiddleware, require_key=["/pay"])
    async with open_asgi_client(app) as client:
        del client.headers["Idempotency-Key"]
        rejected = await client.post("/pay", json=ORDER)
        assert (400, "Idempotency-Key is missing") == (
            rejected.status_code,
            rejected.json()["title"],
        )
        for _ in range(2):
            await client.post("/stream")
    assert ["stream", "stream"] == shop.runs


async def test_request_in_progress_is_409(integration: Integration) -> None:
    """A concurrent request gets a 409; a later one gets the stored response of the first."""
    shop = Shop()

    async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
        first_request = asyncio.create_task(client.post("/wait"))
        await shop.handler_started.wait()
        concurrent = await client.post("/wait")
        shop.resume.set()
        first = await first_request

        assert (409, "1") == (concurrent.status_code, concurrent.headers["retry-after"])
        assert 201 == first.status_code
        assert is_stored_copy(first, await client.post("/wait"))
    assert ["wait"] == shop.runs


async def test_error_is_not_stored(integration: Integration) -> None:
    """A handler that raises causes a 500, which is not stored; the next request runs it again."""
    shop = Shop()

    async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
        first, second, third = [await client.post("/fail") for _ in range(3)]

    assert (500, 201) == (first.status_code, second.status_code)
    assert is_stored_copy(second, third)
    assert ["fail", "fail"] == shop.runs


async def test_403_is_not_stored(integration: Integration) -> None:
    """A 403 of the framework is not stored; the next request with the same key runs the handler."""
    shop = Shop()

    async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
        first, second = [await client.post("/forbidden") for _ in range(2)]

    assert [403, 403] == [first.status_code, second.status_code]
    assert "idempotent-replayed" not in second.headers
    assert ["forbidden", "forbidden"] == shop.runs


async def test_stream_is_stored(integration: Integration) -> None:
    """A streamed response below the size limit is stored."""
    shop = Shop()

    async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
        first, second = [await client.post("/stream") for _ in range(2)]

    assert (200, "".join(CHUNKS)) == (first.status_code, first.text)
    assert is_stored_copy(first, second)
    assert ["stream"] == shop.runs


async def test_request_body_in_many_chunks(integration: Integration) -> None:
    """A request body that arrives byte by byte reaches the handler complete."""
    shop = Shop()
    body = httpx.Request("POST", "http://shop", json=ORDER).content

    async def chunks() -> AsyncIterator[bytes]:
        for byte in body:
            yield bytes([byte])

    headers = {"Content-Type": "application/json"}
    async with open_asgi_client(integration.build(shop, IdempotencyMiddleware)) as client:
        first = await client.post("/pay", content=chunks(), headers=headers)
        assert is_stored_copy(first, await client.post("/pay", content=body, headers=headers))
    assert [ORDER] == shop.runs


async def test_handler_sees_the_disconnect_without_a_key(integration: Integration) -> None:
    shop = Shop()

    app = integration.build(shop, IdempotencyMiddleware)
    await send_and_disconnect(app, "/disconnect", shop, key=None)
    assert shop.saw_disconnect


async def test_response_to_a_disconnected_client_is_stored(integration: Integration) -> None:
    """The handler completes after a disconnect, and a retry gets its stored response."""
    shop = Shop()

    app = integration.build(shop, IdempotencyMiddleware)
    disconnected = asyncio.create_task(send_and_disconnect(app, "/wait", shop))
    await shop.handler_started.wait()
    await run_pending_callbacks()
    shop.resume.set()
    await disconnected
    async with open_asgi_client(app) as client:
        retried = await client.post("/wait", content=b"{}")

    assert (201, "true") == (retried.status_code, retried.headers["idempotent-replayed"])
    assert ["wait"] == shop.runs


async def test_stream_to_a_disconnected_client_is_stored(integration: Integration) -> None:
    """A stream completes after a disconnect, and a retry gets its stored response."""
    shop = Shop(pauses_stream=True)

    app = integration.build(shop, IdempotencyMiddleware)
    disconnected = asyncio.create_task(send_and_disconnect(app, "/stream", shop))
    await shop.handler_started.wait()
    await run_pending_callbacks()
    shop.resume.set()
    await disconnected
    async with open_asgi_client(app) as client:
        retried = await client.post("/stream", content=b"{}")

    assert ("".join(CHUNKS), "true") == (retried.text, retried.headers["idempotent-replayed"])
    assert ["stream"] == shop.runs


async def test_large_stream_stops_on_a_disconnect(integration: Integration) -> None:
    """A stream above the size limit stops on a disconnect, and a retry gets a 409."""
    shop = Shop(pauses_stream=True)

    app = integration.build(shop, IdempotencyMiddleware, max_response_bytes=4)
    await send_and_disconnect(app, "/stream", shop)
    async with open_asgi_client(app) as client:
        retried = await client.post("/stream", content=b"{}")

    assert (409, 200) == (retried.status_code, retried.json()["originalStatus"])
    assert ["stream"] == shop.runs


async def test_one_of_many_concurrent_requests_runs(
    integration: Integration, tmp_path: Path
) -> None:
    """One of fifty concurrent requests runs; the others get its stored response or a 409."""
    shop = Shop()

    store = SqliteStore(tmp_path / "keys.db")
    async with open_asgi_client(
        integration.build(shop, IdempotencyMiddleware, store=store)
    ) as client:
        responses = await asyncio.gather(*(client.post("/pay", json=ORDER) for _ in range(50)))
    await store.close()

    assert {"payment": 1} in [response.json() for response in responses]
    assert {201, 409} >= {response.status_code for response in responses}
    assert [ORDER] == shop.runs


@pytest.mark.parametrize("integration", DOCUMENTED_INTEGRATIONS, ids=str)
async def test_real_server(integration: Integration) -> None:
    """The middleware works in a real server, and the lifespan of the application runs."""
    shop = Shop()

    async with open_server_client(
        integration.build(shop, IdempotencyMiddleware, require_key=["/pay"])
    ) as client:
        first = await client.post("/pay", json=ORDER)
        assert (201, "1") == (first.status_code, first.headers["x-payment"])
        assert is_stored_copy(first, await client.post("/pay", json=ORDER))
        assert 422 == (await client.post("/pay", json={**ORDER, "amount": 8})).status_code
    assert [ORDER] == shop.runs
    assert (["startup", "shutdown"] if integration.has_lifespan else []) == shop.lifespan_events
