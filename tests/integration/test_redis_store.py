"""The Redis store with real servers: conformance on a single server and in a Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tarry.service.stores.redis import RedisStore
from tests.integration.redis_cluster import redis_cluster
from tests.service.stores.comparison import STORE_FACTORIES, StoreFactory
from tests.service.stores.conformance.suite import CASES, Case, StoreHarness, case_name
from tests.service.stores.state_machine import StoreMachine

_numbers = count()


@pytest.fixture(scope="module")
def cluster_url() -> Iterator[str]:
    """Run a Cluster of three nodes, and return a store URL of one node."""
    with redis_cluster(3) as address:
        yield address.replace("redis://", "redis+cluster://")


def store_url(redis_url: str, **parameters: object) -> str:
    """Return the URL of a store that no other test uses, on a server with a Unix socket."""
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    path = redis_url.removeprefix("unix://")
    return f"redis+unix://{path}?prefix=test-{next(_numbers)}&{query}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case, redis_url: str) -> None:
    """RedisStore passes the conformance suite with one partition."""
    url = store_url(redis_url)
    asyncio.run(StoreHarness(lambda clock: RedisStore(url, clock=clock)).run(case))


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance_in_a_cluster(case: Case, cluster_url: str) -> None:
    """RedisStore passes the conformance suite with several partitions on the nodes of a Cluster."""
    url = f"{cluster_url}?prefix=test-{next(_numbers)}&partitions=4"
    asyncio.run(StoreHarness(lambda clock: RedisStore(url, clock=clock)).run(case))


def test_redis_and_the_reference_store_have_equal_results(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the same random calls, the Redis store has the results and contents of the model."""

    def redis_store_factory(_: Path) -> StoreFactory:
        url = store_url(redis_url, partitions=2)
        return lambda clock: RedisStore(url, clock=clock)

    monkeypatch.delitem(STORE_FACTORIES, "sqlite")
    monkeypatch.setitem(STORE_FACTORIES, "redis", redis_store_factory)
    state_machine_settings = settings(
        max_examples=settings().max_examples // 40, stateful_step_count=25
    )
    run_state_machine_as_test(StoreMachine, settings=state_machine_settings)
