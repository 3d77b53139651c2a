"""The PostgreSQL store without a server; `tests/integration` has the tests with one."""

from __future__ import annotations

import sys

import pytest

from tarry.errors import ConfigurationError, MissingExtra
from tarry.idempotency import PostgresStore


@pytest.mark.parametrize("name", ["", "a b", 'a"', "1a", "a.b.c", "a.", "ä", "a;", "a" * 51])
def test_table_name_is_validated(name: str) -> None:
    """A name with special characters is rejected before it is used in SQL."""
    with pytest.raises(ConfigurationError, match="table must be a name of up to 50 letters"):
        PostgresStore("postgresql://", table=name)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without asyncpg the error has the install line."""
    monkeypatch.setitem(sys.modules, "asyncpg", None)

    with pytest.raises(MissingExtra, match=r"pip install 'tarry\[postgres\]'"):
        PostgresStore("postgresql://")
