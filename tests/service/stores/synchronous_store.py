"""The SQLite store without threads, for deterministic simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tarry.service.stores.sqlite import SqliteDatabase, SqliteTaskStore
from tarry.service.stores.sqlite.executor import BatchOperation
from tarry.service.stores.sqlite.transaction import ReadTransaction, WriteTransaction

S = TypeVar("S")
T = TypeVar("T")


class SynchronousSqliteStore(SqliteTaskStore):
    """A `SqliteTaskStore` that runs each operation at once in the calling thread."""

    def __init__(self, path: Path, clock: Callable[[], int]) -> None:
        super().__init__(path, clock=clock)
        self.database = SqliteDatabase(path, clock)  # without the worker lock of `SqliteTaskStore`

    async def open(self) -> None:
        """Open the file."""
        self.database.open()

    async def write(
        self, operation: Callable[[WriteTransaction], T], weight: int = 1, *, urgent: bool = True
    ) -> T:
        """Run an operation."""
        value: T = self._unwrap(self.database.apply([operation]))
        return value

    async def read(self, query: Callable[[ReadTransaction], T]) -> T:
        """Run a query."""
        value: T = self._unwrap(self.database.read([query]))
        return value

    async def _write_batch(
        self, operation: BatchOperation[S, T], items: Sequence[S], priority: int, *arguments: Any
    ) -> list[T]:
        """Run an operation on items."""
        value: Any = await self.write(operation.build(items, *arguments))
        results: Any = operation.unpack(items, value, *arguments)
        return list(results)

    def _unwrap(self, results: list[tuple[Any, Exception | None]]) -> Any:
        """Return the value of the only result, or raise its error."""
        [(value, error)] = results
        if error is not None:
            raise error
        return value
