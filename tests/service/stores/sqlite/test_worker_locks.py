"""Workers that die: their leases end at once, known by a lock that dies with the process."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tarry.service.model import LOST, Status
from tarry.service.store import CancelStatus, FinishStatus, Retention
from tarry.service.stores.sqlite import SqliteStore, store, worker_locks
from tarry.service.stores.sqlite.worker_locks import WorkerLock
from tests.service.stores.harness import (
    HOUR_MS,
    OTHER_LEASE,
    START_MS,
    ManualClock,
    success_result,
    task_id,
    task_numbers,
)

KEEP = Retention(HOUR_MS, HOUR_MS)

WORKER = """
import asyncio, sys
from tarry.service.store import NewTask
from tarry.service.stores.sqlite import SqliteStore
from tests.service.stores.harness import LEASE, START_MS, ManualClock, task

async def main():
    store = SqliteStore(sys.argv[1], clock=ManualClock())
    await store.open()
    times = (START_MS, START_MS + 500, START_MS + 600, START_MS + 99_000)
    await store.add([NewTask(task(n, next_attempt_at=at)) for n, at in enumerate(times)])
    assert 3 == len((await store.claim(LEASE, limit=10, per_lane=10)).tasks)
    print("leased", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def worker(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds leases: one that may be under way, and two ahead of their time."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        assert "leased\n" == process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def locks(path: Path) -> list[str]:
    """The lock files beside a database."""
    return sorted(found.name for found in path.parent.glob("*.worker-*"))


async def opened(path: Path) -> SqliteStore:
    """A store on the same clock."""
    store = SqliteStore(path, clock=ManualClock())
    await store.open()
    return store


def test_a_killed_worker_is_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next store to open gives its tasks out again: one attempt lost, two never begun."""
    monkeypatch.setattr(store, "_LEASES_PER_RECOVERY", 1)
    path = tmp_path / "tasks.db"
    with worker(path) as process:
        process.kill()
        process.wait()

        async def main() -> None:
            store = await opened(path)
            try:
                assert {0: 1, 1: 0, 2: 0, 3: 0} == {
                    number: (await store.get_task("acme", task_id(number))).status  # type: ignore[union-attr]
                    for number in range(4)
                }
                claimed = await store.claim(OTHER_LEASE, limit=10, per_lane=10)

                assert [0, 1, 2] == sorted(task_numbers(claimed.tasks))
                attempts = {held.id: held.attempts for held in claimed.tasks}
                assert {task_id(0): 1, task_id(1): 0, task_id(2): 0} == attempts
                [lost] = await store.list_attempts("acme", task_id(0))
                assert (LOST, "worker", START_MS) == (lost.outcome, lost.worker, lost.scheduled_at)
                assert [FinishStatus.DONE] * 3 == await store.finish(
                    [success_result(held) for held in claimed.tasks]
                )
                lane = await store.get_lane("acme/https:a.example:443")
                assert lane is not None
                assert (1, 0) == (lane.pending, lane.in_flight)
                assert 1 == len(locks(path))
            finally:
                await store.close()

        asyncio.run(main())
    assert [] == locks(path)


def test_a_sweep_finds_the_dead(tmp_path: Path) -> None:
    """A store that was open already learns of a death when it sweeps, in steps if need be."""
    path = tmp_path / "tasks.db"

    async def main() -> None:
        store = await opened(path)
        try:
            with worker(path) as process:
                assert 2 == len(locks(path))
                assert not (await store.sweep(KEEP, 100)).more
                assert [] == (await store.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
                cancelled = await store.cancel("acme", task_id(2))
                assert CancelStatus.REQUESTED is cancelled
                process.kill()
                process.wait()
            steps = 1
            while (await store.sweep(KEEP, 1)).more:
                steps += 1

            assert 3 <= steps <= 6
            claimed = await store.claim(OTHER_LEASE, limit=10, per_lane=10)
            assert [0, 1] == sorted(task_numbers(claimed.tasks))
            ended = await store.get_task("acme", task_id(2))
            assert ended is not None
            assert (Status.CANCELLED, 0) == (ended.status, ended.attempts)
            assert 1 == len(locks(path))
            [(workers, _)] = store.database.read(
                [lambda tx: tx.execute("SELECT name FROM worker").fetchall()]
            )
            assert {("other",), ("worker",)} >= set(workers)
        finally:
            await store.close()

    asyncio.run(main())


def test_a_stopped_worker_is_not_dead(tmp_path: Path) -> None:
    """A process that only stands still keeps its leases until they end by their time."""
    path = tmp_path / "tasks.db"

    async def main(process: subprocess.Popen[str]) -> None:
        store = await opened(path)
        try:
            process.send_signal(signal.SIGSTOP)
            await store.sweep(KEEP, 100)
            assert [] == (await store.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
            assert 3 == (await store.counters()).tasks[Status.IN_FLIGHT]
        finally:
            await store.close()

    with worker(path) as process:
        asyncio.run(main(process))


def test_a_store_that_closes_leaves_its_leases(tmp_path: Path) -> None:
    """Who holds leases when his store is closed has given them up; by any name of the file."""
    path = tmp_path / "tasks.db"
    link = tmp_path / "link.db"
    link.symlink_to(path)

    async def main() -> None:
        with worker(path):
            other = await opened(link)
            assert [] == (await other.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
            await other.close()
        one, two = await opened(path), await opened(path)
        held = (await one.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
        assert 3 == len(held)
        await two.sweep(KEEP, 10)
        assert [] == (await two.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
        await one.close()
        await two.sweep(KEEP, 10)
        assert 3 == len((await two.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks)
        await two.close()

    asyncio.run(main())


def test_a_lock_without_a_worker_is_tidied_away(tmp_path: Path) -> None:
    """The file of a store that died before it had a worker goes; the files of others stay."""
    path = tmp_path / "tasks.db"
    (tmp_path / "tasks.db.worker-0123").touch()
    (tmp_path / "tasks.db.keep").touch()
    living = WorkerLock(path)
    living.acquire()

    async def main() -> None:
        store = await opened(path)
        assert f"tasks.db.worker-{living.token}" in locks(path)
        assert "tasks.db.worker-0123" not in locks(path)
        await store.close()

    asyncio.run(main())
    assert (tmp_path / "tasks.db.keep").exists()
    living.release()
    assert [] == locks(path)


def test_without_locks_nobody_is_known_to_be_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is not there, or a file system without locks, leaves leases to their time."""
    nowhere = WorkerLock(tmp_path / "nowhere" / "tasks.db")
    nowhere.acquire()
    assert nowhere.token is None
    nowhere.release()
    living = WorkerLock(tmp_path / "tasks.db")
    living.acquire()

    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    other = WorkerLock(tmp_path / "tasks.db")
    other.acquire()
    assert other.token is None
    assert [] == other.remove_dead([str(living.token)])
    assert [f"tasks.db.worker-{living.token}"] == locks(tmp_path / "tasks.db")
    monkeypatch.setattr(worker_locks, "fcntl", None)
    assert [] == other.remove_dead([str(living.token)])
    living.release()


def test_a_lock_that_is_tidied_away_while_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds his new file gone, or held by one who tidies up, takes another."""
    path = tmp_path / "tasks.db"
    flock = fcntl.flock
    turns: list[int] = []

    def meddled(file: int, operation: int) -> None:
        turns.append(file)
        if len(turns) == 1:
            (tmp_path / locks(path)[0]).unlink()
        if len(turns) == 2:
            raise BlockingIOError
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", meddled)
    ours = WorkerLock(path)
    ours.acquire()

    assert 3 == len(turns)
    assert f"tasks.db.worker-{ours.token}" in locks(path)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert [] == WorkerLock(path).remove_dead([str(ours.token)])
    WorkerLock(path).remove_leftover_files()
    assert [f"tasks.db.worker-{ours.token}"] == locks(path)
    token = str(ours.token)
    ours.release()
    assert [token] == WorkerLock(path).remove_dead([token])


def test_what_is_no_lock_is_nobodys_death(tmp_path: Path) -> None:
    """Something else under the name of a lock is left alone."""
    (tmp_path / "tasks.db.worker-folder").mkdir()

    assert [] == WorkerLock(tmp_path / "tasks.db").remove_dead(["folder"])
