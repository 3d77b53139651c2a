"""RedisStore with real Redis servers: a single server and a Cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.idempotency.redis_store import RedisStore
from tarry.idempotency.store import ExistingRecord, StoredResponse
from tests.idempotency.conformance import CASES, Case, StoreHarness, case_name
from tests.integration.claimants import CLAIMS_PER_PROCESS, count_winners
from tests.integration.redis_cluster import redis_cluster
from tests.integration.servers import Server, redis_server

redis = import_module("redis")
aio = import_module("redis.asyncio")

OK = StoredResponse(200, ((b"content-type", b"text/plain"),), b"done")


@pytest.fixture(scope="module")
def restartable_server() -> Iterator[Server]:
    """Run a server that a test may restart."""
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def cluster_url() -> Iterator[str]:
    """Run a Cluster of two nodes, and return the URL of one node."""
    with redis_cluster(2) as address:
        yield address


@asynccontextmanager
async def open_store(url: str, prefix: str) -> AsyncIterator[RedisStore]:
    """Return a new store, and close it."""
    store = RedisStore(url, prefix=prefix)
    try:
        yield store
    finally:
        await store.close()


async def move_to_past(client: Any, prefix: str, seconds: float) -> None:
    """Move all records into the past, because the clock of a server cannot be set."""
    async for key in client.scan_iter(match=f"{prefix}*"):
        await client.hincrby(key, "free_at", -round(seconds * 1e6))
        await client.pexpire(key, await client.pttl(key) - round(seconds * 1e3))


@pytest.mark.parametrize("case", CASES, ids=case_name)
async def test_conformance(case: Case, redis_url: str, prefix: str) -> None:
    """RedisStore passes the conformance suite."""
    client = aio.Redis.from_url(redis_url)
    store, twin = (RedisStore(redis_url, prefix=prefix) for _ in range(2))
    try:
        await case(
            StoreHarness(
                store, twin, lambda s: move_to_past(client, prefix, s), expires_records=True
            )
        )
    finally:
        await store.close()
        await twin.close()
        await client.aclose()


@pytest.mark.parametrize("case", CASES, ids=case_name)
async def test_conformance_on_a_cluster(case: Case, cluster_url: str, prefix: str) -> None:
    """RedisStore passes the conformance suite on a Cluster."""
    async with aio.RedisCluster.from_url(cluster_url) as client:
        store, twin = (RedisStore(client, prefix=prefix) for _ in range(2))
        await case(
            StoreHarness(
                store, twin, lambda s: move_to_past(client, prefix, s), expires_records=True
            )
        )


async def test_lease_expires_by_the_clock_of_the_server(redis_url: str, prefix: str) -> None:
    """A second claim gets the key when the lease of the first has expired on the server."""
    async with open_store(redis_url, prefix) as store:
        assert await store.claim("k", "print", "first", 0.05) is None
        claims: list[ExistingRecord | None] = []
        while not claims or claims[-1] is not None:
            claims.append(await store.claim("k", "print", "second", 60))
        assert all(
            0 < existing.record.free_at - existing.now <= 0.05 for existing in claims if existing
        )


def test_one_of_many_processes_gets_the_key(redis_url: str, prefix: str) -> None:
    """One of 50 claims from 3 processes gets the key."""
    assert (3, 50) == (len(CLAIMS_PER_PROCESS), sum(CLAIMS_PER_PROCESS))

    assert [0, 0, 1] == sorted(count_winners("redis", redis_url, prefix))


async def test_records_expire(redis_url: str, prefix: str) -> None:
    """Redis removes a response after its retention, and a lease after its duration."""
    async with open_store(redis_url, prefix) as store:
        with redis.Redis.from_url(redis_url) as client:
            await store.claim("k", "print", "first", 30)
            assert 29_000 < int(client.pttl(f"{prefix}k")) <= 30_000

            await store.extend("k", "print", "first", 90)
            assert 89_000 < int(client.pttl(f"{prefix}k")) <= 90_000

            await store.finish("k", "print", "first", OK, 60)
            assert 59_000 < int(client.pttl(f"{prefix}k")) <= 60_000


async def test_expired_record_is_ignored(redis_url: str, prefix: str) -> None:
    """An expired response is ignored, although Redis has not removed it yet."""
    async with open_store(redis_url, prefix) as store:
        await store.claim("k", "print", "first", 60)
        await store.finish("k", "print", "first", OK, 60)
        with redis.Redis.from_url(redis_url) as client:
            client.hset(f"{prefix}k", "free_at", "0")

        assert await store.claim("k", "new", "second", 60) is None

        existing = await store.claim("k", "new", "third", 60)
        assert existing is not None
        assert ("new", None) == (existing.record.fingerprint, existing.record.response)


async def test_store_reconnects_after_a_restart(restartable_server: Server, prefix: str) -> None:
    """A claim that a restart has deleted can be finished, and its response is stored."""
    async with open_store(restartable_server.address, prefix) as store:
        await store.claim("k", "print", "first", 60)
        # This blocks the event loop, so the pool does not notice the closed connection.
        restartable_server.restart()

        assert await store.finish("k", "print", "first", OK, 60)
        existing = await store.claim("k", "print", "second", 60)
        assert existing is not None
        assert OK == existing.record.response


async def test_claim_fails_while_the_server_is_down(
    restartable_server: Server, prefix: str
) -> None:
    """A claim raises ConnectionError while the server is down, and succeeds after the start."""
    async with open_store(restartable_server.address, prefix) as store:
        restartable_server.stop()
        try:
            with pytest.raises(redis.ConnectionError):
                await store.claim("k", "print", "first", 60)
        finally:
            restartable_server.start()

        assert await store.claim("k", "print", "first", 60) is None


async def test_terminated_connection_is_replaced(restartable_server: Server, prefix: str) -> None:
    """A claim stays valid when the connection that made it is terminated."""
    async with open_store(restartable_server.address, prefix) as store:
        await store.claim("k", "print", "first", 60)
        with redis.Redis.from_url(restartable_server.address) as client:
            assert 1 == client.client_kill_filter(_type="normal", skipme=True)

        assert await store.extend("k", "print", "first", 60)
        assert await store.claim("k", "print", "second", 60) is not None


async def test_unknown_scripts_are_loaded_again(restartable_server: Server, prefix: str) -> None:
    """A call works after the server has flushed its scripts."""
    async with open_store(restartable_server.address, prefix) as store:
        with redis.Redis.from_url(restartable_server.address) as client:
            await store.claim("k", "print", "first", 60)
            for step in (
                store.extend("k", "print", "first", 60),
                store.finish("k", "print", "first", OK, 60),
            ):
                client.script_flush()
                assert await step


async def test_client_of_the_caller_stays_open(redis_url: str, prefix: str) -> None:
    """A client that the caller passes is used and not closed."""
    async with aio.Redis.from_url(redis_url) as client:
        store = RedisStore(client, prefix=prefix)
        connection = await client.client_id()
        assert await store.claim("k", "print", "first", 60) is None
        await store.close()
        assert connection == await client.client_id()


@pytest.mark.parametrize("argument", ["client", "url"])
def test_decoding_client_is_rejected(redis_url: str, argument: str) -> None:
    """A client that decodes responses is rejected, because it cannot read binary bodies."""
    url = f"{redis_url}?decode_responses=True"
    client = aio.Redis.from_url(redis_url, decode_responses=True)

    with pytest.raises(ConfigurationError, match="must not have decode_responses=True"):
        RedisStore(url if argument == "url" else client)
