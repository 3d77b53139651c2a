"""What the tests of the SQLite store share: an open store, and a database file without threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service.model import Task
from tarry.service.store import AddResult, FinishStatus, NewTask, TaskResult
from tarry.service.stores.sqlite import Database, SqliteStore, add, finish, transitions
from tarry.service.stores.sqlite.transaction import Transaction
from tests.service.stores.conformance.suite import CASES, Case, StoreHarness
from tests.service.stores.harness import LEASE, ManualClock

TABLES = ("task", "state", "attempt", "tenant", "lane", "policy_use", "worker", "series")
SIZES = (1, 2, 3, 63, 64, 65, 127, 200)


def cases_of(*parts: ModuleType) -> list[Case]:
    """Return the cases of the conformance suite that are defined in these modules."""
    names = {part.__name__ for part in parts}
    return [case for case in CASES if case.__module__ in names]


def run_case(case: Case, folder: Path) -> None:
    """Run a case of the conformance suite on a store in a file."""
    asyncio.run(StoreHarness(lambda clock: SqliteStore(folder / "tasks.db", clock=clock)).run(case))


def run_on_store(path: Path, main: Callable[[SqliteStore], Awaitable[None]]) -> None:
    """Run a coroutine function with an open store."""

    async def run() -> None:
        store = SqliteStore(path, clock=ManualClock())
        await store.open()
        try:
            await main(store)
        finally:
            await store.close()

    asyncio.run(run())


def open_error(path: Path) -> str:
    """Return the error with which a file is refused."""

    async def main() -> str:
        store = SqliteStore(path)
        try:
            with pytest.raises(ConfigurationError) as caught:
                await store.open()
            return str(caught.value)
        finally:
            await store.close()

    return asyncio.run(main())


class DatabaseFile:
    """A database file, and operations on it that must succeed."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path, ManualClock())

    def run(self, *operations: Callable[[Transaction], Any]) -> list[Any]:
        """Run operations in one transaction."""
        results = self.database.apply(operations)
        for _, error in results:
            if error is not None:
                raise error
        return [value for value, _ in results]

    def add(self, batch: list[NewTask], quota: int | None = None) -> list[AddResult]:
        """Add a batch."""
        [results] = self.run(lambda tx: add.add(tx, batch, LEASE, quota))
        return add.to_add_results(batch, LEASE, results)

    def add_singly(self, batch: list[NewTask], quota: int | None = None) -> list[AddResult]:
        """Add tasks one by one."""
        return [added for new in batch for added in self.add([new], quota)]

    def finish(self, results: list[TaskResult]) -> list[FinishStatus]:
        """Finish a batch."""
        packed = [finish.pack_result(result) for result in results]
        [finished] = self.run(lambda tx: finish.finish(tx, packed))
        return list(finished)

    def finish_singly(self, results: list[TaskResult]) -> list[FinishStatus]:
        """Finish attempts one by one."""
        return [finished for result in results for finished in self.finish([result])]

    def cancel(self, tasks: list[Task]) -> None:
        """Cancel tasks."""
        self.run(lambda tx: [transitions.cancel(tx, one.tenant, one.id) for one in tasks])

    def rows(self) -> dict[str, list[Any]]:
        """Return all rows of the tables that concern tasks."""
        connection, _ = self.database.open()
        read = "SELECT * FROM {}".format
        return {name: connection.execute(read(name)).fetchall() for name in TABLES}
