"""The harness of SQLite store tests: an open store, and a database file without threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service.model import Task
from tarry.service.store import AddResult, FinishStatus, NewTask, TaskResult
from tarry.service.stores.sqlite import SqliteDatabase, SqliteTaskStore, add, finish, transitions
from tarry.service.stores.sqlite.transaction import WriteTransaction
from tests.service.stores.conformance.suite import CASES, Case, StoreHarness
from tests.service.stores.harness import LEASE, ManualClock

TASK_TABLES = ("task", "state", "attempt", "tenant", "lane", "policy_use", "worker", "series")
BATCH_SIZES = (1, 2, 3, 63, 64, 65, 127, 200)


def cases_of(*modules: ModuleType) -> list[Case]:
    """Return the cases of the conformance suite that are defined in these modules."""
    names = {module.__name__ for module in modules}
    return [case for case in CASES if case.__module__ in names]


def run_case(case: Case, folder: Path) -> None:
    """Run a case of the conformance suite on a store in a file."""
    asyncio.run(
        StoreHarness(lambda clock: SqliteTaskStore(folder / "tasks.db", clock=clock)).run(case)
    )


@asynccontextmanager
async def open_store(path: Path) -> AsyncIterator[SqliteTaskStore]:
    """Open and close a store on a manual clock."""
    store = SqliteTaskStore(path, clock=ManualClock())
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def run_on_store(path: Path, main: Callable[[SqliteTaskStore], Awaitable[None]]) -> None:
    """Run a coroutine function with an open store on a manual clock."""

    async def run() -> None:
        async with open_store(path) as store:
            await main(store)

    asyncio.run(run())


def open_error(path: Path) -> str:
    """Return the message of the error that opening a file raises."""

    async def main() -> str:
        store = SqliteTaskStore(path)
        try:
            with pytest.raises(ConfigurationError) as caught:
                await store.open()
            return str(caught.value)
        finally:
            await store.close()

    return asyncio.run(main())


class DatabaseFile:
    """A database file without threads. Its methods raise the errors of operations."""

    def __init__(self, path: Path) -> None:
        self.database = SqliteDatabase(path, ManualClock())

    def run(self, *operations: Callable[[WriteTransaction], Any]) -> list[Any]:
        """Run operations in one transaction."""
        results = self.database.apply(operations)
        for _, error in results:
            if error is not None:
                raise error
        return [value for value, _ in results]

    def add(
        self, batch: list[NewTask], quota: int | None = None, lane_quota: int | None = None
    ) -> list[AddResult]:
        """Add a batch."""
        [results] = self.run(lambda tx: add.add(tx, batch, LEASE, quota, lane_quota))
        return add.to_add_results(batch, results, LEASE)

    def add_one_by_one(
        self, batch: list[NewTask], quota: int | None = None, lane_quota: int | None = None
    ) -> list[AddResult]:
        """Add tasks one by one."""
        return [added for new_task in batch for added in self.add([new_task], quota, lane_quota)]

    def finish(self, results: list[TaskResult]) -> list[FinishStatus]:
        """Finish a batch."""
        packed = [finish.pack_result(result) for result in results]
        [finished] = self.run(lambda tx: finish.finish(tx, packed))
        return list(finished)

    def finish_one_by_one(self, results: list[TaskResult]) -> list[FinishStatus]:
        """Finish attempts one by one."""
        return [finished for result in results for finished in self.finish([result])]

    def cancel(self, tasks: list[Task]) -> None:
        """Cancel tasks."""
        self.run(lambda tx: [transitions.cancel(tx, task.tenant, task.id) for task in tasks])

    def rows(self) -> dict[str, list[Any]]:
        """Return all rows of `TASK_TABLES`, by table."""
        connection, _ = self.database.open()
        select = "SELECT * FROM {}".format
        return {name: connection.execute(select(name)).fetchall() for name in TASK_TABLES}
