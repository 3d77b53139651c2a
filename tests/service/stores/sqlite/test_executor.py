"""Group commit in the SQLite store: one transaction for many callers.

The weight of an operation is the approximate number of tasks that it changes.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.group_commit import BACKGROUND, URGENT
from tarry.service.model import Status
from tarry.service.store import AddStatus, FinishStatus, NewTask
from tarry.service.stores.sqlite import SqliteTaskStore, executor
from tarry.service.stores.sqlite.transaction import WriteTransaction
from tests.service.stores.harness import LEASE, success_result, task
from tests.service.stores.sqlite.harness import open_store


async def submit_together(
    store: SqliteTaskStore, operations: Iterable[Awaitable[Any]]
) -> list[Any]:
    """Submit operations while the writer is blocked, so that they form one group."""
    started, may_finish = threading.Event(), threading.Event()

    def block_writer(tx: WriteTransaction) -> None:
        started.set()
        may_finish.wait()

    blocking = asyncio.ensure_future(store.write(block_writer))
    await asyncio.to_thread(started.wait)
    waiting = [asyncio.ensure_future(operation) for operation in operations]
    await asyncio.sleep(0)
    may_finish.set()
    await blocking
    return await asyncio.gather(*waiting, return_exceptions=True)


def trace_statements(store: SqliteTaskStore) -> list[str]:
    """Return a list to which the statements of later write transactions are added."""
    statements: list[str] = []
    store.database.open()[0].set_trace_callback(statements.append)
    return statements


async def test_waiting_operations_share_a_transaction(tmp_path: Path) -> None:
    """Sixty operations that wait together are committed in one transaction."""
    async with open_store(tmp_path / "tasks.db") as store:
        statements = trace_statements(store)
        results = await submit_together(store, (store.add([NewTask(task(n))]) for n in range(60)))

        assert [AddStatus.ADDED] * 60 == [added.status for [added] in results]
        # The first transaction is that of `block_writer`.
        assert 2 == statements.count("COMMIT")
        leased = (await store.claim(LEASE, limit=60, per_lane=60)).tasks
        statements = trace_statements(store)
        statuses = await submit_together(
            store, (store.finish([success_result(task)]) for task in leased)
        )

        assert [[FinishStatus.APPLIED]] * 60 == statuses
        assert 2 == statements.count("COMMIT")


async def test_a_group_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches that wait together are split into several transactions."""
    monkeypatch.setattr(executor, "MAX_TRANSACTION_TASKS", 100)

    async with open_store(tmp_path / "tasks.db") as store:
        statements = trace_statements(store)
        await asyncio.gather(
            *(store.add([NewTask(task(100 * n + m)) for m in range(100)]) for n in range(5))
        )

        assert 5 == statements.count("COMMIT")


async def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that exceed the queue limit fail at once, and the others are committed."""
    monkeypatch.setattr(executor, "MAX_PENDING", 50)

    async with open_store(tmp_path / "tasks.db") as store:
        results = await asyncio.gather(
            *(store.add([NewTask(task(number))]) for number in range(100)), return_exceptions=True
        )

        rejected = [result for result in results if isinstance(result, StoreUnavailable)]
        assert 50 == len(rejected)
        assert "50 changes wait" in str(rejected[0])
        assert 50 == (await store.counters()).task_counts[Status.PENDING]
        await store.add([NewTask(task(200))])


async def test_a_failing_operation_does_not_affect_its_group(tmp_path: Path) -> None:
    """Only the caller of a failing operation gets the error; the others are committed."""
    async with open_store(tmp_path / "tasks.db") as store:
        batch_with_invalid_task = [
            NewTask(task(1000, "new", "gamma")),
            NewTask(task(1001, packed_content=object())),
        ]
        results = await submit_together(
            store,
            [
                *(store.add([NewTask(task(number))]) for number in range(5)),
                store.add(batch_with_invalid_task),
                store.add([NewTask(task(5)), NewTask(task(6, key="other"))]),
                store.add([NewTask(task(7, key="\ud800"))]),
            ],
        )

        is_error = [isinstance(result, Exception) for result in results]
        assert [False] * 5 + [True, False, True] == is_error
        assert {Status.PENDING: 7} == {
            status: count for status, count in (await store.counters()).task_counts.items() if count
        }
        assert await store.get_lane("gamma/https:new.example:443") is None
        assert 7 == len((await store.claim(LEASE, limit=100, per_lane=100)).tasks)
        [added] = await store.add([NewTask(task(1000, "new", "gamma"))])
        assert AddStatus.ADDED is added.status


async def test_a_cancelled_caller_does_not_affect_its_group(tmp_path: Path) -> None:
    """If one caller is cancelled, the other operations of the group return their results."""
    async with open_store(tmp_path / "tasks.db") as store:
        operations = [
            asyncio.ensure_future(store.add([NewTask(task(number))])) for number in range(10)
        ]
        await asyncio.sleep(0)
        operations[3].cancel()

        results = await asyncio.gather(*operations, return_exceptions=True)

        assert [3] == [n for n, result in enumerate(results) if isinstance(result, BaseException)]
        assert 10 == (await store.counters()).task_counts[Status.PENDING]


async def test_an_unexpected_error_reaches_all_callers() -> None:
    """Every caller of a group gets an unexpected error, and the thread continues."""

    def fail(operations: object) -> list[tuple[Any, Exception | None]]:
        raise MemoryError

    broken = executor.ThreadExecutor("broken", fail)
    for _ in range(2):
        with pytest.raises(MemoryError):
            await broken.submit(lambda _: None, 1)
    await broken.close()


async def test_close_waits_for_operations_of_weight_0() -> None:
    """An operation with weight 0, such as a claim with a limit of 0, runs before close ends."""
    thread_executor = executor.ThreadExecutor(
        "test", lambda operations: [(operation, None) for operation in operations]
    )
    future = thread_executor.submit("claim", 0)
    await thread_executor.close()

    assert future.done()
    assert "claim" == await future


class SleepSelector(selectors.DefaultSelector):
    """A selector that sets `fell_asleep` when the event loop has nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.fell_asleep = threading.Event()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for files. The event loop passes no timeout if it has no callbacks and no timers."""
        if timeout is None:
            self.fell_asleep.set()
        return super().select(timeout)


def test_close_waits_without_polling_for_operations_of_cancelled_callers() -> None:
    """The event loop sleeps during close: polling would take the GIL from the thread."""
    selector = SleepSelector()
    was_asleep: list[bool] = []

    def run(operations: Sequence[str]) -> list[tuple[Any, Exception | None]]:
        was_asleep.append(selector.fell_asleep.wait(10))
        return [(operation, None) for operation in operations]

    async def main() -> None:
        thread_executor = executor.ThreadExecutor("test", run)
        futures = [thread_executor.submit("add", 1), thread_executor.submit("add", 1)]
        await asyncio.sleep(0)
        for future in futures:
            future.cancel()
        await thread_executor.close()

        assert [True] == was_asleep

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(main())


async def test_urgent_operations_run_before_waiting_results_and_claims() -> None:
    """An urgent operation is in the next group, and this group also has a bulk operation."""
    started, may_finish = threading.Event(), threading.Event()
    groups: list[list[str]] = []

    def run(work: Sequence[str]) -> list[tuple[Any, Exception | None]]:
        groups.append(list(work))
        started.set()
        may_finish.wait()
        return [(item, None) for item in work]

    thread = executor.ThreadExecutor("test", run)
    futures = [thread.submit("first", 1)]
    await asyncio.to_thread(started.wait)
    futures += [thread.submit(f"finish {number}", 3_000) for number in range(4)]
    await asyncio.sleep(0)  # one of them is in flight now
    futures.append(thread.submit("add", 1, URGENT))
    may_finish.set()
    await asyncio.gather(*futures)
    await thread.close()
    assert [["first"], ["finish 0"], ["add", "finish 1"], ["finish 2"], ["finish 3"]] == groups


@pytest.mark.parametrize(
    ("priority", "sizes"), [(URGENT, [1, 64, 64, 22]), (BACKGROUND, [1, 128, 22])]
)
async def test_waiting_operations_of_many_tasks_do_not_share_a_transaction(
    priority: int, sizes: list[int]
) -> None:
    """A group adds at most 64 tasks and changes 128 others, so that no operation waits for long."""
    started, may_finish = threading.Event(), threading.Event()
    group_sizes: list[int] = []

    def run(work: Sequence[int]) -> list[tuple[Any, Exception | None]]:
        group_sizes.append(len(work))
        started.set()
        may_finish.wait()
        return [(item, None) for item in work]

    thread = executor.ThreadExecutor("test", run)
    futures = [thread.submit(0, 1)]
    await asyncio.to_thread(started.wait)
    futures += [thread.submit(number, 1, priority) for number in range(150)]
    may_finish.set()
    await asyncio.gather(*futures)
    await thread.close()
    assert sizes == group_sizes
