"""The PostgreSQL store without a server; the tests with a server are in `tests/integration`."""

from __future__ import annotations

import sys

import pytest

from tarry.errors import ConfigurationError, MissingExtra
from tarry.idempotency import PostgresStore


@pytest.mark.parametrize("name", ["", "a b", 'a"', "1a", "a.b.c", "a.", "ä", "a;", "a" * 51])
def test_invalid_table_name_raises(name: str) -> None:
    """A table name that is too long or no SQL identifier raises before any SQL is run."""
    with pytest.raises(ConfigurationError, match="table must be a name of up to 50 letters"):
        PostgresStore("postgresql://", table=name)


def test_missing_asyncpg_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without asyncpg, creating the store raises `MissingExtra` with the install command."""
    monkeypatch.setitem(sys.modules, "asyncpg", None)

    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[postgres\]'"):
        PostgresStore("postgresql://")
