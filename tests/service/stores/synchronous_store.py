"""The SQLite store without threads, as a simulation runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tarry.service.stores.sqlite import Database, SqliteStore
from tarry.service.stores.sqlite.transaction import ReadTransaction, Transaction

T = TypeVar("T")


class SynchronousSqliteStore(SqliteStore):
    """The store without threads, as a simulation runs it."""

    def __init__(self, path: Path, clock: Callable[[], int]) -> None:
        super().__init__(path, clock=clock)
        self.database = Database(path, clock)

    async def open(self) -> None:
        """Open the file."""
        self.database.open()

    async def close(self) -> None:
        """Close the file."""
        self.database.close()

    async def _write(self, operation: Callable[[Transaction], T], weight: int = 1) -> T:
        value: T = self._answer(self.database.apply([operation]))
        return value

    async def _read(self, question: Callable[[ReadTransaction], T]) -> T:
        value: T = self._answer(self.database.read([question]))
        return value

    def _answer(self, answers: list[tuple[Any, Exception | None]]) -> Any:
        [(value, error)] = answers
        if error is not None:
            raise error
        return value
