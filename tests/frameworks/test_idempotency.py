"""The idempotency middleware in every framework: one table of scenarios over one table of ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tarry.idempotency import IdempotencyMiddleware, SqliteStore
from tests.frameworks.shop import PIECES, Shop, ask_and_leave, client_of, served, turns
from tests.frameworks.ways import ONE_OF_EACH, Way

ORDER = {"amount": 7, "note": "für Zoë"}
REPLAYED = (b"idempotent-replayed", b"true")


def same(first: httpx.Response, second: httpx.Response) -> bool:
    """Whether the second answer is the first, to the byte, with the mark of a replay."""
    return (first.status_code, [*first.headers.raw, REPLAYED], first.content) == (
        second.status_code,
        second.headers.raw,
        second.content,
    )


def test_second_request_is_replayed(way: Way) -> None:
    """The handler reads its body and runs once; status, header, cookie and body come again."""
    shop = Shop()

    async def main() -> None:
        async with client_of(way.build(shop, IdempotencyMiddleware)) as client:
            first = await client.post("/pay", json=ORDER)
            second = await client.post("/pay", json=ORDER)

        assert (201, {"payment": 1}) == (first.status_code, first.json())
        assert ("1", "empty") == (first.headers["x-payment"], first.cookies["basket"])
        assert same(first, second)

    asyncio.run(main())
    assert [ORDER] == shop.runs


def test_other_payload_is_refused(way: Way) -> None:
    """The same key with another order is a 422, and no handler runs."""
    shop = Shop()

    async def main() -> None:
        async with client_of(way.build(shop, IdempotencyMiddleware)) as client:
            await client.post("/pay", json=ORDER)
            assert 422 == (await client.post("/pay", json={**ORDER, "amount": 8})).status_code

    asyncio.run(main())
    assert [ORDER] == shop.runs


def test_key_is_missing(way: Way) -> None:
    """Where a key is required a request without one is a 400; elsewhere it runs each time."""
    shop = Shop()

    async def main() -> None:
        app = way.build(shop, IdempotencyMiddleware, require_key=["/pay"])
        async with client_of(app) as client:
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


def test_first_is_still_running(way: Way) -> None:
    """A second request meanwhile is a 409; after the first has its answer, it gets the same."""
    shop = Shop()

    async def main() -> None:
        async with client_of(way.build(shop, IdempotencyMiddleware)) as client:
            running = asyncio.create_task(client.post("/wait"))
            await shop.running.wait()
            early = await client.post("/wait")
            shop.go_on.set()
            first = await running

            assert (409, "1") == (early.status_code, early.headers["retry-after"])
            assert 201 == first.status_code
            assert same(first, await client.post("/wait"))

    asyncio.run(main())
    assert ["wait"] == shop.runs


def test_handler_that_raises(way: Way) -> None:
    """A bug is a 500, made by the framework inside or outside; either way the next request runs."""
    shop = Shop()

    async def main() -> None:
        async with client_of(way.build(shop, IdempotencyMiddleware)) as client:
            first, second, third = [await client.post("/fail") for _ in range(3)]

        assert (500, 201) == (first.status_code, second.status_code)
        assert same(second, third)

    asyncio.run(main())
    assert ["fail", "fail"] == shop.runs


def test_refusal_is_not_kept(way: Way) -> None:
    """After the framework's own 403 who gets the permission needs no new key."""
    shop = Shop()

    async def main() -> None:
        async with client_of(way.build(shop, IdempotencyMiddleware)) as client:
            first, second = [await client.post("/refuse") for _ in range(2)]

        assert [403, 403] == [first.status_code, second.status_code]
        assert "idempotent-replayed" not in second.headers

    asyncio.run(main())
    assert ["refuse", "refuse"] == shop.runs


def test_stream_is_kept(way: Way) -> None:
    """A stream that stays below the limit is replayed whole."""
    shop = Shop()

    async def main() -> None:
        async with client_of(way.build(shop, IdempotencyMiddleware)) as client:
            first, second = [await client.post("/stream") for _ in range(2)]

        assert (200, "".join(PIECES)) == (first.status_code, first.text)
        assert same(first, second)

    asyncio.run(main())
    assert ["stream"] == shop.runs


def test_body_in_many_chunks(way: Way) -> None:
    """A body that comes byte by byte, also within characters, is the one that is parsed."""
    shop = Shop()
    body = httpx.Request("POST", "http://shop", json=ORDER).content

    async def chunks() -> AsyncIterator[bytes]:
        for byte in body:
            yield bytes([byte])

    async def main() -> None:
        headers = {"Content-Type": "application/json"}
        async with client_of(way.build(shop, IdempotencyMiddleware)) as client:
            first = await client.post("/pay", content=chunks(), headers=headers)
            assert same(first, await client.post("/pay", content=body, headers=headers))

    asyncio.run(main())
    assert [ORDER] == shop.runs


def test_handler_sees_its_client_go(way: Way) -> None:
    """Without a key it can stop: what comes after the body reaches the application."""
    shop = Shop()

    async def main() -> None:
        app = way.build(shop, IdempotencyMiddleware)
        await ask_and_leave(app, "/leave", shop, key=None)

    asyncio.run(main())
    assert shop.gone


def test_client_that_went_away_asks_again(way: Way) -> None:
    """The handler goes on, also where its framework would stop it; the retry gets its answer."""
    shop = Shop()

    async def main() -> None:
        app = way.build(shop, IdempotencyMiddleware)
        lost = asyncio.create_task(ask_and_leave(app, "/wait", shop))
        await shop.running.wait()
        await turns()
        shop.go_on.set()
        await lost
        async with client_of(app) as client:
            again = await client.post("/wait", content=b"{}")

        assert (201, "true") == (again.status_code, again.headers["idempotent-replayed"])

    asyncio.run(main())
    assert ["wait"] == shop.runs


def test_stream_that_lost_its_client_is_replayed(way: Way) -> None:
    """No framework hears that nobody listens before the stream was made whole, and kept."""
    shop = Shop(hesitates=True)

    async def main() -> None:
        app = way.build(shop, IdempotencyMiddleware)
        lost = asyncio.create_task(ask_and_leave(app, "/stream", shop))
        await shop.running.wait()
        await turns()
        shop.go_on.set()
        await lost
        async with client_of(app) as client:
            again = await client.post("/stream", content=b"{}")

        assert ("".join(PIECES), "true") == (again.text, again.headers["idempotent-replayed"])

    asyncio.run(main())
    assert ["stream"] == shop.runs


def test_stream_that_flows_stops_with_its_client(way: Way) -> None:
    """What is too large to keep is not made for nobody; its request counts as done."""
    shop = Shop(hesitates=True)

    async def main() -> None:
        app = way.build(shop, IdempotencyMiddleware, max_response_bytes=4)
        await ask_and_leave(app, "/stream", shop)
        async with client_of(app) as client:
            again = await client.post("/stream", content=b"{}")

        assert (409, 200) == (again.status_code, again.json()["originalStatus"])

    asyncio.run(main())
    assert ["stream"] == shop.runs


def test_crowd(way: Way, tmp_path: Path) -> None:
    """Of fifty requests at once one runs; the others get its answer or are asked to come again."""
    shop = Shop()

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        async with client_of(way.build(shop, IdempotencyMiddleware, store=store)) as client:
            crowd = await asyncio.gather(*(client.post("/pay", json=ORDER) for _ in range(50)))
        await store.close()

        assert {"payment": 1} in [answer.json() for answer in crowd]
        assert {201, 409} >= {answer.status_code for answer in crowd}

    asyncio.run(main())
    assert [ORDER] == shop.runs


@pytest.mark.parametrize("way", ONE_OF_EACH, ids=str)
def test_behind_a_real_server(way: Way) -> None:
    """Over sockets all is the same; and the lifespan of the application is what it was."""
    shop = Shop()

    async def main() -> None:
        async with served(way.build(shop, IdempotencyMiddleware, require_key=["/pay"])) as client:
            first = await client.post("/pay", json=ORDER)
            assert (201, "1") == (first.status_code, first.headers["x-payment"])
            assert same(first, await client.post("/pay", json=ORDER))
            assert 422 == (await client.post("/pay", json={**ORDER, "amount": 8})).status_code

    asyncio.run(main())
    assert [ORDER] == shop.runs
    assert (["up", "down"] if way.has_lifespan else []) == shop.lives
