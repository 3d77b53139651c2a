"""Group commits: what waits together is written together, and each has its own answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.model import Status
from tarry.service.store import AddStatus, FinishStatus, NewTask
from tarry.service.stores.sqlite import SqliteStore, executor
from tarry.service.stores.sqlite.transaction import Transaction
from tests.service.stores.harness import LEASE, success_result, task
from tests.service.stores.sqlite.test_store import on

T = TypeVar("T")


async def together(store: SqliteStore, calls: Iterable[Coroutine[Any, Any, T]]) -> list[Any]:
    """Make calls while the writer is busy, so that all wait when it comes back."""
    started, gate = threading.Event(), threading.Event()

    def busy(tx: Transaction) -> None:
        started.set()
        gate.wait()

    first = asyncio.ensure_future(store._write(busy))
    await asyncio.to_thread(started.wait)
    waiting = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    gate.set()
    await first
    return await asyncio.gather(*waiting, return_exceptions=True)


def test_what_waits_together_is_written_together(tmp_path: Path) -> None:
    """A thousand callers with a task each have their answers after one transaction."""

    async def main(store: SqliteStore) -> None:
        before = store.database.commits
        answers = await together(store, (store.add([NewTask(task(n))]) for n in range(1000)))

        assert [AddStatus.ADDED] * 1000 == [added.status for [added] in answers]
        assert 1 == store.database.commits - before
        held = (await store.claim(LEASE, limit=1000, per_lane=1000)).tasks
        before = store.database.commits
        done = await together(store, (store.finish([success_result(one)]) for one in held))

        assert [[FinishStatus.DONE]] * 1000 == done
        assert 1 == store.database.commits - before

    on(tmp_path / "tasks.db", main)


def test_a_group_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches that wait together are not one transaction without end."""
    monkeypatch.setattr(executor, "_MAX_GROUP_WEIGHT", 100)

    async def main(store: SqliteStore) -> None:
        before = store.database.commits
        await asyncio.gather(
            *(store.add([NewTask(task(100 * n + m)) for m in range(100)]) for n in range(5))
        )

        assert 5 == store.database.commits - before

    on(tmp_path / "tasks.db", main)


def test_what_may_wait_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than that is refused at once, and the store goes on with the rest."""
    monkeypatch.setattr(executor, "MAX_PENDING", 50)

    async def main(store: SqliteStore) -> None:
        answers = await asyncio.gather(
            *(store.add([NewTask(task(number))]) for number in range(100)), return_exceptions=True
        )

        refused = [answer for answer in answers if isinstance(answer, StoreUnavailable)]
        assert 50 == len(refused)
        assert "50 changes wait" in str(refused[0])
        assert 50 == (await store.counters()).tasks[Status.PENDING]
        await store.add([NewTask(task(200))])

    on(tmp_path / "tasks.db", main)


def test_a_bad_operation_harms_no_other(tmp_path: Path) -> None:
    """What fails in a group is told to its caller alone, and leaves nothing of itself behind."""

    async def main(store: SqliteStore) -> None:
        bad = [NewTask(task(1000, "new", "stranger")), NewTask(task(1001, content=object()))]
        answers = await together(
            store,
            [
                *(store.add([NewTask(task(number))]) for number in range(5)),
                store.add(bad),
                store.add([NewTask(task(5)), NewTask(task(6, key="other"))]),
                store.add([NewTask(task(7, key="\ud800"))]),
            ],
        )

        failed = [isinstance(answer, Exception) for answer in answers]
        assert [False] * 5 + [True, False, True] == failed
        assert {Status.PENDING: 7} == {
            status: count for status, count in (await store.counters()).tasks.items() if count
        }
        assert await store.get_lane("stranger/https:new.example:443") is None
        assert 7 == len((await store.claim(LEASE, limit=100, per_lane=100)).tasks)
        [added] = await store.add([NewTask(task(1000, "new", "stranger"))])
        assert AddStatus.ADDED is added.status

    on(tmp_path / "tasks.db", main)


def test_who_goes_away_does_not_stop_the_rest(tmp_path: Path) -> None:
    """A caller that is cancelled while its operation waits leaves the others their answers."""

    async def main(store: SqliteStore) -> None:
        calls = [asyncio.ensure_future(store.add([NewTask(task(number))])) for number in range(10)]
        await asyncio.sleep(0)
        calls[3].cancel()

        answers = await asyncio.gather(*calls, return_exceptions=True)

        assert [3] == [n for n, answer in enumerate(answers) if isinstance(answer, BaseException)]
        assert 10 == (await store.counters()).tasks[Status.PENDING]

    on(tmp_path / "tasks.db", main)


def test_nobody_waits_for_a_thread_that_failed() -> None:
    """An error of the machinery itself is told to all who wait, and the thread goes on."""

    def fail(work: object) -> list[tuple[Any, Exception | None]]:
        raise MemoryError

    async def main() -> None:
        broken = executor.ThreadExecutor("broken", fail)
        for _ in range(2):
            with pytest.raises(MemoryError):
                await broken.submit(lambda _: None, 1)
        await broken.close()

    asyncio.run(main())
