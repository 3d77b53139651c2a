"""The PostgreSQL store without a server; the tests with a server are in `tests/integration`."""

from __future__ import annotations

import asyncio
import sys
from traceback import format_exception

import pytest

from tarry.errors import ConfigurationError, MissingExtra
from tarry.idempotency import PostgresStore


@pytest.mark.parametrize("name", ["", "a b", 'a"', "1a", "a.b.c", "a.", "ä", "a;", "a" * 51])
def test_invalid_table_name_raises(name: str) -> None:
    """A table name that is too long or no SQL identifier raises before any SQL is run."""
    with pytest.raises(ConfigurationError, match="table must be a name of up to 50 letters"):
        PostgresStore("postgresql://", table=name)


@pytest.mark.parametrize("url", ["postgres//u:s3cret@h/db", "postgresql:/u:s3cret@h", "h:s3cret@h"])
def test_mistyped_url_raises(url: str) -> None:
    """The error has the right form and not the password."""
    with pytest.raises(ConfigurationError, match="like postgresql://USER:PASSWORD@HOST") as raised:
        PostgresStore(url)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("url", ["postgresql://u:s3cret/db", "postgresql://u:s3cret/x@h/db"])
def test_password_in_place_of_the_port_raises(url: str) -> None:
    """The error does not show the password, as the error of asyncpg does."""
    with pytest.raises(ConfigurationError, match="special characters of the password") as raised:
        asyncio.run(PostgresStore(url).release("key", "owner"))
    assert "s3cret" not in "".join(format_exception(raised.value))


def test_missing_asyncpg_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without asyncpg, creating the store raises `MissingExtra` with the install command."""
    monkeypatch.setitem(sys.modules, "asyncpg", None)

    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[postgres\]'"):
        PostgresStore("postgresql://")
