"""The public names of the package, and the modules that importing it loads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tarry.idempotency


def test_import_loads_no_third_party_package() -> None:
    program = """
import json, sys
import tarry.idempotency
loads_asyncio = "asyncio" in sys.modules
from tarry.idempotency import IdempotencyMiddleware, MemoryStore, SqliteStore, IdempotencyStore
print(json.dumps([loads_asyncio, [name.partition(".")[0] for name in sys.modules]]))
"""
    completed = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True
    )
    loads_asyncio, loaded = json.loads(completed.stdout)

    assert not loads_asyncio
    for package in ("starlette", "httpx", "trio", "anyio", "redis", "psycopg", "asyncpg"):
        assert package not in loaded


def test_public_names_resolve() -> None:
    """Each public name exists, and another name raises AttributeError."""
    names = tarry.idempotency.__all__

    assert sorted(set(names)) == names
    assert names == dir(tarry.idempotency)
    for name in names:
        assert name == getattr(tarry.idempotency, name).__name__
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(tarry.idempotency, "no_such_name")  # noqa: B009 - mypy rejects the attribute
