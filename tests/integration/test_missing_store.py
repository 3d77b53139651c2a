"""Commands and services on a server without a store."""

from __future__ import annotations

import asyncio
from importlib import import_module

import pytest

from tarry.service.app import name_store
from tarry.service.stores.postgres import parse_url
from tests.cli.harness import create_store, run_command
from tests.integration.postgres import connected
from tests.integration.postgres_store import new_schema_url

redis = import_module("redis.asyncio")
PREFIX = "missing-store"


@pytest.mark.parametrize("engine", ["postgres", "redis"])
def test_only_the_service_creates_a_store(
    engine: str, postgres_dsn: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A command fails if the server has no store, also after its data was deleted."""
    path = redis_url.removeprefix("unix://")
    url = f"redis+unix://{path}?prefix={PREFIX}"
    if engine == "postgres":
        url = new_schema_url(postgres_dsn)
    created = f"created an empty store at {name_store(url)}"
    create_key = ("keys", "create", "--tenant", "shop", "--store", url)
    commands = (
        create_key,
        ("keys", "list", "--store", url),
        ("migrate", "--from", url, "--to", "new.db"),
        ("migrate", "--from", url, "--undo"),
    )

    async def delete_store() -> None:
        if engine == "postgres":
            async with connected(postgres_dsn) as connection:
                await connection.execute(f"DROP SCHEMA {parse_url(url).schema} CASCADE")
        else:
            async with redis.Redis(unix_socket_path=path) as client:
                await client.delete(*await client.keys(f"{PREFIX}*"))

    for _ in range(2):
        for command in commands:
            refused = run_command(*command)
            assert (2, "") == (refused.code, refused.out)
            assert f"error: there is no store at {name_store(url)}. Is this the" in refused.err
        assert created not in caplog.messages

        create_store(url)
        assert 1 == caplog.messages.count(created)
        key = run_command(*create_key)
        assert (0, f"store: {name_store(url)}") == (key.code, key.err.splitlines()[0])
        caplog.clear()
        asyncio.run(delete_store())
