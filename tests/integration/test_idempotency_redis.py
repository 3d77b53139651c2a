"""RedisStore on real Redis servers: a single one and a Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from importlib import import_module
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.idempotency.redis_store import RedisStore
from tarry.idempotency.store import ExistingRecord, StoredResponse
from tests.idempotency.conformance import CASES, Case, StoreHarness, case_name
from tests.integration.claimants import SHARES, count_winners
from tests.integration.redis_cluster import redis_cluster
from tests.integration.servers import Server, redis_server

redis = import_module("redis")
aio = import_module("redis.asyncio")

OK = StoredResponse(200, ((b"content-type", b"text/plain"),), b"done")


@pytest.fixture(scope="module")
def stoppable() -> Iterator[Server]:
    """Run a server that a test may restart."""
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def cluster_url() -> Iterator[str]:
    """Run a Cluster of two nodes, and return the URL of one."""
    with redis_cluster(2) as address:
        yield address


def with_store(
    url: str, prefix: str, test: Callable[[RedisStore], Coroutine[Any, Any, None]]
) -> None:
    """Run a test with a new store."""

    async def main() -> None:
        store = RedisStore(url, prefix=prefix)
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(main())


async def age(client: Any, prefix: str, seconds: float) -> None:
    """Move all records into the past, because the clock of a server cannot be set."""
    async for key in client.scan_iter(match=f"{prefix}*"):
        await client.hincrby(key, "free_at", -round(seconds * 1e6))
        await client.pexpire(key, await client.pttl(key) - round(seconds * 1e3))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case, redis_url: str, prefix: str) -> None:
    """RedisStore passes the conformance suite."""

    async def main() -> None:
        client = aio.Redis.from_url(redis_url)
        store, twin = (RedisStore(redis_url, prefix=prefix) for _ in range(2))
        try:
            await case(
                StoreHarness(store, twin, lambda s: age(client, prefix, s), expires_records=True)
            )
        finally:
            await store.close()
            await twin.close()
            await client.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance_on_a_cluster(case: Case, cluster_url: str, prefix: str) -> None:
    """RedisStore passes the conformance suite on a Cluster."""

    async def main() -> None:
        async with aio.RedisCluster.from_url(cluster_url) as client:
            store, twin = (RedisStore(client, prefix=prefix) for _ in range(2))
            await case(
                StoreHarness(store, twin, lambda s: age(client, prefix, s), expires_records=True)
            )

    asyncio.run(main())


def test_lease_expires_by_the_clock_of_the_server(redis_url: str, prefix: str) -> None:
    """A lease expires by the clock of the server."""

    async def test(store: RedisStore) -> None:
        assert await store.claim("k", "print", "first", 0.05) is None
        answers: list[ExistingRecord | None] = []
        while not answers or answers[-1] is not None:
            answers.append(await store.claim("k", "print", "second", 60))
        assert all(0 < found.record.free_at - found.now <= 0.05 for found in answers if found)

    with_store(redis_url, prefix, test)


def test_one_of_many_processes_wins(redis_url: str, prefix: str) -> None:
    """Of 50 claims of one key from 3 processes, one gets the key."""
    assert (3, 50) == (len(SHARES), sum(SHARES))

    assert [0, 0, 1] == sorted(count_winners("redis", redis_url, prefix))


def test_records_expire(redis_url: str, prefix: str) -> None:
    """Redis removes a response after its retention, and a lease after its duration."""

    async def test(store: RedisStore) -> None:
        with redis.Redis.from_url(redis_url) as client:
            await store.claim("k", "print", "first", 30)
            assert 29_000 < int(client.pttl(f"{prefix}k")) <= 30_000

            await store.extend("k", "print", "first", 90)
            assert 89_000 < int(client.pttl(f"{prefix}k")) <= 90_000

            await store.finish("k", "print", "first", OK, 60)
            assert 59_000 < int(client.pttl(f"{prefix}k")) <= 60_000

    with_store(redis_url, prefix, test)


def test_expired_record_is_ignored(redis_url: str, prefix: str) -> None:
    """An expired response is ignored, although Redis has not removed it yet."""

    async def test(store: RedisStore) -> None:
        await store.claim("k", "print", "first", 60)
        await store.finish("k", "print", "first", OK, 60)
        with redis.Redis.from_url(redis_url) as client:
            client.hset(f"{prefix}k", "free_at", "0")

        assert await store.claim("k", "new", "second", 60) is None

        found = await store.claim("k", "new", "third", 60)
        assert found is not None
        assert ("new", None) == (found.record.fingerprint, found.record.response)

    with_store(redis_url, prefix, test)


def test_restart_between_calls(stoppable: Server, prefix: str) -> None:
    """After a restart the store reconnects, and the owner writes lost records again."""

    async def test(store: RedisStore) -> None:
        await store.claim("k", "print", "first", 60)
        # The loop stands still meanwhile, so that the pool does not notice.
        stoppable.restart()

        assert await store.finish("k", "print", "first", OK, 60)
        found = await store.claim("k", "print", "second", 60)
        assert found is not None
        assert OK == found.record.response

    with_store(stoppable.address, prefix, test)


def test_server_that_is_down(stoppable: Server, prefix: str) -> None:
    """A claim fails while the server is down, and the same store works when it is back."""

    async def test(store: RedisStore) -> None:
        stoppable.stop()
        try:
            with pytest.raises(redis.ConnectionError):
                await store.claim("k", "print", "first", 60)
        finally:
            stoppable.start()

        assert await store.claim("k", "print", "first", 60) is None

    with_store(stoppable.address, prefix, test)


def test_killed_connection(stoppable: Server, prefix: str) -> None:
    """A terminated connection is replaced, and its claim holds."""

    async def test(store: RedisStore) -> None:
        await store.claim("k", "print", "first", 60)
        with redis.Redis.from_url(stoppable.address) as client:
            assert 1 == client.client_kill_filter(_type="normal", skipme=True)

        assert await store.extend("k", "print", "first", 60)
        assert await store.claim("k", "print", "second", 60) is not None

    with_store(stoppable.address, prefix, test)


def test_unknown_scripts_are_loaded_again(stoppable: Server, prefix: str) -> None:
    """Scripts are sent again to a server that does not know them."""

    async def test(store: RedisStore) -> None:
        with redis.Redis.from_url(stoppable.address) as client:
            await store.claim("k", "print", "first", 60)
            for step in (
                store.extend("k", "print", "first", 60),
                store.finish("k", "print", "first", OK, 60),
            ):
                client.script_flush()
                assert await step

    with_store(stoppable.address, prefix, test)


def test_client_of_the_caller_stays_open(redis_url: str, prefix: str) -> None:
    """A client that was passed in is used and not closed."""

    async def main() -> None:
        async with aio.Redis.from_url(redis_url) as client:
            store = RedisStore(client, prefix=prefix)
            connection = await client.client_id()
            assert await store.claim("k", "print", "first", 60) is None
            await store.close()
            assert connection == await client.client_id()

    asyncio.run(main())


@pytest.mark.parametrize("given", ["client", "url"])
def test_decoding_client_is_rejected(redis_url: str, given: str) -> None:
    """A client that decodes responses would fail on binary bodies."""
    url = f"{redis_url}?decode_responses=True"
    client = aio.Redis.from_url(redis_url, decode_responses=True)

    with pytest.raises(ConfigurationError, match="must not have decode_responses=True"):
        RedisStore(url if given == "url" else client)
