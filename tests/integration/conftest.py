"""Real servers, started once for all tests that ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.integration.servers import postgres_server, redis_server

_numbers = count()


@pytest.fixture(scope="session")
def postgres_dsn() -> Iterator[str]:
    """A PostgreSQL server that no test may stop."""
    with postgres_server() as server:
        yield server.address


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis server that no test may stop."""
    with redis_server() as server:
        yield server.address


@pytest.fixture
def table() -> str:
    """The name of a table that no other test uses."""
    return f"records_{next(_numbers)}"


@pytest.fixture
def prefix() -> str:
    """A prefix of keys that no other test uses."""
    return f"records:{next(_numbers)}:"
