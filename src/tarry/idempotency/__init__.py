"""Idempotency-Key middleware: a request that is sent several times takes effect once."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tarry.idempotency.middleware import IdempotencyMiddleware
    from tarry.idempotency.store import ExistingRecord, IdempotencyStore, Record, StoredResponse
    from tarry.idempotency.stores.memory import MemoryStore
    from tarry.idempotency.stores.postgres import PostgresStore
    from tarry.idempotency.stores.redis import RedisStore
    from tarry.idempotency.stores.sqlite import SqliteStore

# Imported on first use, so that a user of one store does not load the drivers of the others.
_MODULES = {
    "ExistingRecord": "store",
    "IdempotencyMiddleware": "middleware",
    "IdempotencyStore": "store",
    "MemoryStore": "stores.memory",
    "PostgresStore": "stores.postgres",
    "Record": "store",
    "RedisStore": "stores.redis",
    "SqliteStore": "stores.sqlite",
    "StoredResponse": "store",
}

__all__ = [
    "ExistingRecord",
    "IdempotencyMiddleware",
    "IdempotencyStore",
    "MemoryStore",
    "PostgresStore",
    "Record",
    "RedisStore",
    "SqliteStore",
    "StoredResponse",
]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        msg = f"module 'tarry.idempotency' has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"tarry.idempotency.{module}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
