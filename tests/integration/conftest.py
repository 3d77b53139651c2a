"""Fixtures: real servers, which are started once per session."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.integration.servers import postgres_server, redis_server

_numbers = count()


@pytest.fixture(scope="session")
def postgres_dsn() -> Iterator[str]:
    """Run a PostgreSQL server that tests share and must not stop."""
    with postgres_server() as server:
        yield server.address


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
