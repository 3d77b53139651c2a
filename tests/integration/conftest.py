"""Fixtures: real servers, which are started once per session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest

from tests.integration.postgres import connected
from tests.integration.postgres_shadows import plant_shadows
from tests.integration.servers import postgres_server, redis_server

_numbers = count()


@pytest.fixture(scope="session")
def postgres_dsn() -> Iterator[str]:
    """Run a PostgreSQL server that tests share and must not stop."""
    with postgres_server() as server:
        yield server.address


@pytest.fixture(scope="session")
def shadowed_dsn(postgres_dsn: str) -> str:
    """Return the address of a database with functions of another role, see `plant_shadows`."""

    async def create() -> str:
        async with connected(postgres_dsn) as connection:
            await connection.execute("CREATE DATABASE shadowed")
        dsn = postgres_dsn.replace("/postgres?", "/shadowed?")
        await plant_shadows(dsn)
        return dsn

    return asyncio.run(create())


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """Run a Redis server that tests share and must not stop."""
    with redis_server() as server:
        yield server.address


@pytest.fixture
def table() -> str:
    """Return the name of a table that no other test uses."""
    return f"records_{next(_numbers)}"


@pytest.fixture
def prefix() -> str:
    """Return a key prefix that no other test uses."""
    return f"records:{next(_numbers)}:"
