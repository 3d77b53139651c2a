"""Helpers for the tests of PostgresStore."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from tarry.idempotency.postgres_store import PostgresStore

asyncpg = import_module("asyncpg")
SEARCH_PATH = "pg_catalog, pg_temp"
"""With this `search_path`, only built-in functions are called."""


@asynccontextmanager
async def connected(dsn: str, **settings: str) -> AsyncGenerator[Any]:
    """Open a connection that the store does not use, with settings of the server."""
    connection = await asyncpg.connect(dsn, server_settings=settings)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def open_store(dsn: str, table: str) -> AsyncIterator[PostgresStore]:
    """Return a new store, and close it."""
    store = PostgresStore(dsn, table=table)
    try:
        yield store
    finally:
        await store.close()
