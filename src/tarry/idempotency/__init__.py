"""Idempotency-Key middleware: a request that is sent several times takes effect once."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tarry.idempotency.middleware import IdempotencyMiddleware
    from tarry.idempotency.postgres_store import PostgresStore
    from tarry.idempotency.redis_store import RedisStore
    from tarry.idempotency.sqlite_store import SqliteStore
    from tarry.idempotency.store import (
        ExistingRecord,
        IdempotencyStore,
        MemoryStore,
        Record,
        StoredResponse,
    )
    from tarry.runtime.derived_keys import derive_key

# Imported on first use, so that a user of one store does not load the drivers of the others.
# All other names are in the module `store`.
_MODULES = {
    "IdempotencyMiddleware": "tarry.idempotency.middleware",
    "PostgresStore": "tarry.idempotency.postgres_store",
    "RedisStore": "tarry.idempotency.redis_store",
    "SqliteStore": "tarry.idempotency.sqlite_store",
    "derive_key": "tarry.runtime.derived_keys",
}

__all__ = [
    "ExistingRecord", "IdempotencyMiddleware", "IdempotencyStore", "MemoryStore", "PostgresStore",
    "Record", "RedisStore", "SqliteStore", "StoredResponse", "derive_key",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tarry.idempotency' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_MODULES.get(name, "tarry.idempotency.store"))
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return __all__
