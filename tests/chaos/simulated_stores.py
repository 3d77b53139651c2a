"""The data on which a simulation runs, and the store objects of its processes.

Each simulated process has its own store object, as real processes have. A call of it never suspends
the coroutine, so that a call is atomic in virtual time, and the same seed has the same history.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from contextvars import Context
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from unittest.mock import patch

from tarry.service.store import Store
from tarry.service.stores.postgres import PostgresTaskStore, database
from tarry.service.stores.redis import RedisTaskStore, connection, server_client
from tests.integration.postgres_store import empty_tables
from tests.integration.servers import postgres_server, redis_server
from tests.service.stores.reference_store import ReferenceStore
from tests.service.stores.reference_store.state import ReferenceState
from tests.service.stores.synchronous_store import SynchronousSqliteStore

T = TypeVar("T")
Clock = Callable[[], int]
_CALL_TIMEOUT_S = 600.0
"""Timeouts in real time are long: a busy machine must not change the history of a seed."""
_numbers = count()


class SimulatedStores(Protocol):
    """Opens store objects over the same data."""

    def open_store(self, clock: Clock) -> Store:
        """Return a new store object, for one process; `clock` returns the virtual epoch ms."""
        ...

    def close(self) -> None:
        """Close all store objects."""
        ...


class ReferenceStores:
    """Stores over one state in memory."""

    def __init__(self) -> None:
        self._state = ReferenceState()

    def open_store(self, clock: Clock) -> Store:
        """Return a new store object."""
        return ReferenceStore(clock, self._state)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class SqliteStores:
    """Stores over one SQLite file, each with its own connection."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tasks.db"
        self._stores: list[SynchronousSqliteStore] = []

    def open_store(self, clock: Clock) -> Store:
        """Return a new store object."""
        store = SynchronousSqliteStore(self._path, clock)
        run_synchronously(store.open())
        self._stores.append(store)
        return store

    def close(self) -> None:
        """Close all connections."""
        for store in self._stores:
            store.database.close()


class ServerStores:
    """Stores on a real server.

    Sockets and virtual time do not mix: the virtual clock advances when every task waits, also if
    the server is about to reply, so a call would seem to take seconds or time out. Therefore, the
    calls are made by an event loop in another thread, in real time, and the simulation blocks until
    a call has returned. In virtual time a call takes no time, and calls are made one after the
    other. `test_postgres_races` and the tests in `tests.chaos` with real processes make concurrent
    calls.
    """

    def __init__(self, build_store: Callable[[Clock], Store]) -> None:
        self._build_store = build_store
        self._stores: list[Store] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def open_store(self, clock: Clock) -> Store:
        """Return a new store object."""
        store = self._build_store(clock)
        self._stores.append(store)
        self.run(store.open())
        return cast("Store", _BlockingStore(self, store))

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call in the thread, and wait for its result.

        In an empty context: the callbacks of a connection have the context of the call that opened
        it. With the context of a process, they would not run while this process is suspended, and
        a late effect of one of its calls would wait forever.
        """
        future = Context().run(asyncio.run_coroutine_threadsafe, call, self._loop)
        return future.result(_CALL_TIMEOUT_S)

    def close(self) -> None:
        """Close all stores, and end the thread."""
        for store in self._stores:
            self.run(store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _BlockingStore:
    """A store whose calls block the thread instead of suspending the coroutine."""

    def __init__(self, stores: ServerStores, store: Store) -> None:
        self._stores = stores
        self._store = store

    @property
    def partition_count(self) -> int:
        return self._store.partition_count

    def partition_of(self, tenant: str) -> int:
        return self._store.partition_of(tenant)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            async def call_in_thread() -> Any:
                return await method(*args, **kwargs)

            return self._stores.run(call_in_thread())

        return call


@contextmanager
def reference_stores() -> Iterator[SimulatedStores]:
    """Return stores in memory."""
    yield ReferenceStores()


@contextmanager
def sqlite_stores() -> Iterator[SimulatedStores]:
    """Return stores over a new SQLite file."""
    with tempfile.TemporaryDirectory() as folder, closing(SqliteStores(Path(folder))) as stores:
        yield stores


@contextmanager
def postgres_stores(dsn: str) -> Iterator[SimulatedStores]:
    """Return stores over empty tables of a PostgreSQL server."""
    asyncio.run(empty_tables(dsn))
    url = f"{dsn}&pool_size=2"
    with (
        patch.object(database, "CONNECT_TIMEOUT_S", _CALL_TIMEOUT_S),
        patch.object(database, "CALL_TIMEOUT_S", _CALL_TIMEOUT_S),
        closing(ServerStores(lambda clock: PostgresTaskStore(url, clock=clock))) as stores,
    ):
        yield stores


@contextmanager
def redis_stores(url: str) -> Iterator[SimulatedStores]:
    """Return stores with a new prefix on a Redis server, which has a Unix socket."""
    path, prefix = url.removeprefix("unix://"), f"simulation-{next(_numbers)}"
    store_url = f"redis+unix://{path}?prefix={prefix}&partitions=2"
    with (
        patch.object(server_client, "_REPLY_TIMEOUT_S", _CALL_TIMEOUT_S),
        patch.object(connection, "_CALL_TIMEOUT_S", _CALL_TIMEOUT_S),
        closing(ServerStores(lambda clock: RedisTaskStore(store_url, clock=clock))) as stores,
    ):
        yield stores


ENGINES = ("reference", "sqlite", "postgres", "redis")


@contextmanager
def run_engine(name: str) -> Iterator[Callable[[], AbstractContextManager[SimulatedStores]]]:
    """Start the server of an engine, if it has one; return a function that opens empty stores."""
    if name == "postgres":
        with postgres_server() as server:
            yield partial(postgres_stores, server.address)
    elif name == "redis":
        with redis_server() as server:
            yield partial(redis_stores, server.address)
    else:
        yield sqlite_stores if name == "sqlite" else reference_stores


def run_synchronously(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    msg = "the coroutine must not suspend"
    raise AssertionError(msg)
