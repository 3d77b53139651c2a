"""A write API that is safe to retry: requests with an `Idempotency-Key` take effect once."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tarry.idempotency.asgi import IdempotencyMiddleware
    from tarry.idempotency.record import Record, StoredResponse
    from tarry.idempotency.store import Store, Taken
    from tarry.idempotency.stores.memory import MemoryStore
    from tarry.idempotency.stores.postgres import PostgresStore
    from tarry.idempotency.stores.redis import RedisStore
    from tarry.idempotency.stores.sqlite import SqliteStore

_HOMES = {
    "IdempotencyMiddleware": "asgi",
    "MemoryStore": "stores.memory",
    "PostgresStore": "stores.postgres",
    "Record": "record",
    "RedisStore": "stores.redis",
    "SqliteStore": "stores.sqlite",
    "Store": "store",
    "StoredResponse": "record",
    "Taken": "store",
}

__all__ = [
    "IdempotencyMiddleware",
    "MemoryStore",
    "PostgresStore",
    "Record",
    "RedisStore",
    "SqliteStore",
    "Store",
    "StoredResponse",
    "Taken",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        msg = f"module 'tarry.idempotency' has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"tarry.idempotency.{home}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
