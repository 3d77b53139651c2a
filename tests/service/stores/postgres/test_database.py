"""The URL of a store in PostgreSQL, and the errors of the server."""

from __future__ import annotations

import asyncio
from importlib import import_module

import pytest

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.stores.postgres import PostgresTaskStore
from tarry.service.stores.postgres.database import (
    Database,
    PostgresOptions,
    _ErrorMapping,
    _Retryable,
    parse_url,
)
from tarry.service.stores.postgres.schema import Schema

asyncpg = import_module("asyncpg")


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
    with pytest.raises(ConfigurationError, match=f"store must have .*{query.partition('=')[0]}"):
        PostgresTaskStore(f"postgresql://h/d?{query}")


@pytest.mark.parametrize("url", ["postgresql://u:secret@h:port/d", "postgresql://h/d?sslmode=no"])
def test_a_url_that_asyncpg_rejects_is_an_error(url: str) -> None:
    """The error names the setting and the URL, without its password."""
    database = Database(url)
    with pytest.raises(ConfigurationError, match=r"store: postgresql://.*h.* is not valid: ") as no:
        asyncio.run(database.open())
    assert "secret" not in str(no.value)


@pytest.mark.parametrize(
    "password", ["secret/x", "secret#x", "secret?x", "x@y:secret", "x/y@secret"]
)
def test_a_password_that_is_not_escaped_is_not_shown(password: str) -> None:
    """Asyncpg takes the text before or after a special character for the port, and quotes it."""
    database = Database(f"postgresql://u:{password}@h/d?application_name=a")
    with pytest.raises(ConfigurationError, match="percent-encode special characters") as no:
        asyncio.run(database.open())
    assert "secret" not in str(no.value)
    assert no.value.__cause__ is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionResetError(), "ConnectionResetError"),
        (TimeoutError(), "no reply in time"),
        (OSError("starting\nDETAIL:  soon"), "soon"),
    ],
)
def test_the_reason_is_one_line(error: OSError, reason: str) -> None:
    """An error without a text has its type as the reason, and a line feed is not logged."""
    mapping = Database("postgresql://h/d").map_errors()
    with pytest.raises(StoreUnavailable, match=rf"^PostgreSQL at .*: .*{reason}$"), mapping:
        raise error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "cannot be reached: .* refused"),
        (FileNotFoundError(2, "No such file"), "cannot be reached: .* No such file"),  # its socket
        (
            asyncpg.InternalClientError(
                "cannot switch to state 15; another operation (2) is in progress"
            ),
            "has closed the connection: it was stopped, or it has crashed",
        ),
        (
            asyncpg.InterfaceError(
                "cannot call Transaction.__aexit__(): the underlying connection is closed"
            ),
            "has closed the connection: it was stopped, or it has crashed",
        ),
        (
            asyncpg.ConnectionDoesNotExistError(
                "connection was closed in the middle of operation: terminating connection due to "
                "administrator command"
            ),
            "has closed the connection: terminating connection due to administrator command",
        ),
    ],
)
def test_the_reason_says_that_the_server_is_down(error: Exception, reason: str) -> None:
    """An operator reads what has happened to the server, not to the state of a connection."""
    mapping = Database("postgresql://h/d").map_errors()
    with (
        pytest.raises(StoreUnavailable, match=rf"^PostgreSQL at \S+: the server {reason}$"),
        mapping,
    ):
        raise error


def test_statements_use_the_schema_of_the_store() -> None:
    """Names are qualified, because a search path would be state of the connection."""
    statement = "SELECT * FROM tarry.task_key, tarry.tenant"

    assert statement == Schema().sql(statement)
    assert 'SELECT * FROM "other".task_key, "other".tenant' == Schema("other").sql(statement)


def test_a_connection_that_is_being_closed_is_unavailable() -> None:
    """A statement that asyncpg refuses after the last error of a stopping server is repeated."""
    error = asyncpg.InternalClientError("cannot switch to state 12")
    with pytest.raises(StoreUnavailable), Database("postgresql://h/d").map_errors():
        raise error


@pytest.mark.parametrize(
    "state",
    [
        "08006",  # connection failure
        "25006",  # read-only
        "25P03",  # timeout of an idle transaction
        "26000",  # a pooler has lost a prepared statement
        "28P01",  # the password was changed
        "3F000",  # the schema is missing, for example while a backup is restored
        "40001",  # serialization failure
        "40003",  # completion unknown
        "42501",  # permission denied
        "42883",  # a function is missing
        "42P01",  # a table is missing
        "42P05",  # another client of a pooler has prepared the statement
        "53100",  # disk full
        "53300",  # too many connections
        "55006",  # object in use
        "55P03",  # lock timeout
        "57014",  # cancelled by an operator or a timeout
        "57P01",  # shutdown
        "57P03",  # starting
        "58030",  # input or output error
        "XX001",  # corrupted data
    ],
)
def test_errors_of_the_state_of_a_server_are_temporary(state: str) -> None:
    """A result that such an error has refused is written again."""
    database = Database("postgresql://h/d")
    mapping = _ErrorMapping(database._asyncpg, "h", is_open=True)
    with pytest.raises((StoreUnavailable, _Retryable)), mapping:
        raise asyncpg.PostgresError.new({"C": state, "M": "message"})


@pytest.mark.parametrize("state", ["21000", "22003", "22021", "23505", "42601", "54000", "P0001"])
def test_errors_of_a_result_are_not_temporary(state: str) -> None:
    """A result that the server will never accept is not written again."""
    database = Database("postgresql://h/d")
    mapping = _ErrorMapping(database._asyncpg, "h", is_open=True)
    with pytest.raises(asyncpg.PostgresError), mapping:
        raise asyncpg.PostgresError.new({"C": state, "M": "message"})


def test_an_outdated_prepared_statement_is_retried() -> None:
    """After an upgrade of the schema by another process, a statement may have other columns."""
    fields = {"C": "0A000", "R": "RevalidateCachedQuery", "M": "message"}
    with pytest.raises(_Retryable), Database("postgresql://h/d").map_errors():
        raise asyncpg.PostgresError.new(fields)


def test_missing_permissions_are_an_error_of_the_configuration_at_first() -> None:
    """A store that cannot be opened without other permissions is not opened again and again."""
    mapping = Database("postgresql://h/d").map_errors()
    with pytest.raises(ConfigurationError, match="permission denied"), mapping:
        raise asyncpg.PostgresError.new({"C": "42501", "M": "permission denied"})
