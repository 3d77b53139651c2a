"""The URL of a store in PostgreSQL."""

from __future__ import annotations

from importlib import import_module

import pytest

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.stores.postgres import PostgresStore
from tarry.service.stores.postgres.database import Database, PostgresOptions, parse_url
from tarry.service.stores.postgres.schema import Schema


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("postgresql://h/d", PostgresOptions("postgresql://h/d")),
        (
            "postgres://u:p@h1,h2/d?target_session_attrs=read-write&schema=s&pool_size=3",
            PostgresOptions(
                "postgres://u:p@h1,h2/d?target_session_attrs=read-write", "s", pool_size=3
            ),
        ),
        (
            "postgresql://h/d?statement_cache=off&listen=off",
            PostgresOptions("postgresql://h/d", statement_cache=False, listen=False),
        ),
    ],
)
def test_options_of_the_store_are_removed_from_the_url(url: str, options: PostgresOptions) -> None:
    """Asyncpg gets the URL without the parameters that only the store knows."""
    assert options == parse_url(url)


@pytest.mark.parametrize(
    "query", ["schema=", "schema=a.b", "pool_size=0", "pool_size=x", "listen=1"]
)
def test_a_malformed_option_is_an_error(query: str) -> None:
    """The error names the option."""
    with pytest.raises(ConfigurationError, match=f"store must have .*{query.partition('=')[0]}"):
        PostgresStore(f"postgresql://h/d?{query}")


def test_statements_use_the_schema_of_the_store() -> None:
    """Names are qualified, because a search path would be state of the connection."""
    statement = "SELECT * FROM tarry.task_key, tarry.tenant"

    assert statement == Schema().sql(statement)
    assert 'SELECT * FROM "other".task_key, "other".tenant' == Schema("other").sql(statement)


def test_a_connection_that_is_being_closed_is_unavailable() -> None:
    """A statement that asyncpg refuses after the last error of a stopping server is repeated."""
    error = import_module("asyncpg").InternalClientError("cannot switch to state 12")
    with pytest.raises(StoreUnavailable), Database("postgresql://h/d").map_errors():
        raise error
