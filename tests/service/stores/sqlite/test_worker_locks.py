"""Worker locks: leases of a dead process are recovered at once, by means of a file lock."""

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
from tarry.service.store import (
    CancelStatus,
    ConfiguredLimits,
    FinishStatus,
    NewTask,
    Retention,
)
from tarry.service.stores.sqlite import SqliteTaskStore, store, worker_locks
from tarry.service.stores.sqlite.worker_locks import LeaderLock, WorkerLock
from tests.service.stores.harness import (
    HOUR_MS,
    LANE,
    LEASE,
    OTHER_LEASE,
    START_MS,
    ManualClock,
    success_result,
    task,
    task_id,
    task_numbers,
)

RETENTION = Retention(HOUR_MS, HOUR_MS)

WORKER_SCRIPT = """
import asyncio, sys
from tarry.service.store import NewTask
from tarry.service.stores.sqlite import SqliteTaskStore
from tests.service.stores.harness import LEASE, START_MS, ManualClock, task

async def main():
    store = SqliteTaskStore(sys.argv[1], clock=ManualClock())
    await store.open()
    times = (START_MS, START_MS + 500, START_MS + 600, START_MS + 99_000)
    await store.add([NewTask(task(n, next_attempt_at=at)) for n, at in enumerate(times)])
    leased = (await store.claim(LEASE, limit=10, per_lane=10)).tasks
    assert 3 == len(leased)
    for started in leased[: int(sys.argv[2])]:
        store.record_start(1, started)
    print("leased", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def worker_process(path: Path, start_count: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Yield a process with three leases: one task is due, and two are due later.

    It records the starts of the first tasks in the same slot, so that the last one is left.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER_SCRIPT, str(path), str(start_count)],
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


def lock_files(path: Path) -> list[str]:
    """Return the names of the lock files of a database."""
    return sorted(found.name for found in path.parent.glob("*.worker-*"))


async def open_store(path: Path) -> SqliteTaskStore:
    """Return an open store whose clock is at `START_MS`."""
    store = SqliteTaskStore(path, clock=ManualClock())
    await store.open()
    return store


def test_opening_a_store_recovers_leases_of_a_killed_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt of the due task is logged as lost, and the two later tasks are PENDING."""
    monkeypatch.setattr(store, "_MAX_LEASES_PER_TRANSACTION", 1)
    path = tmp_path / "tasks.db"
    with worker_process(path) as process:
        process.kill()
        process.wait()

        async def main() -> None:
            store = await open_store(path)
            try:
                assert {0: 1, 1: 0, 2: 0, 3: 0} == {
                    # The tasks exist, so `get_task` does not return None.
                    number: (await store.get_task("acme", task_id(number))).status  # type: ignore[union-attr]
                    for number in range(4)
                }
                claimed = await store.claim(OTHER_LEASE, limit=10, per_lane=10)

                assert [0, 1, 2] == sorted(task_numbers(claimed.tasks))
                attempts = {leased.id: leased.attempts for leased in claimed.tasks}
                assert {task_id(0): 1, task_id(1): 0, task_id(2): 0} == attempts
                [lost] = await store.list_attempts("acme", task_id(0))
                assert (LOST, "worker", START_MS) == (lost.outcome, lost.worker, lost.scheduled_at)
                assert [FinishStatus.APPLIED] * 3 == await store.finish(
                    [success_result(leased) for leased in claimed.tasks]
                )
                lane = await store.get_lane("acme/https:a.example:443")
                assert lane is not None
                assert (1, 0) == (lane.pending, lane.in_flight)
                assert 1 == len(lock_files(path))
            finally:
                await store.close()

        asyncio.run(main())
    assert [] == lock_files(path)


@pytest.mark.parametrize("leases_per_transaction", [1, 10])
def test_only_started_attempts_of_a_killed_worker_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leases_per_transaction: int
) -> None:
    """Of two due tasks, the one whose start was recorded last is logged as lost."""
    monkeypatch.setattr(store, "_MAX_LEASES_PER_TRANSACTION", leases_per_transaction)
    path = tmp_path / "tasks.db"
    with worker_process(path, start_count=2) as process:
        process.kill()
        process.wait()

    async def main() -> None:
        clock = ManualClock()
        clock.advance(550)
        store = SqliteTaskStore(path, clock=clock)
        await store.open()
        claimed = (await store.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
        lost = {leased.id: leased.lost_attempts for leased in claimed}
        assert {task_id(0): 0, task_id(1): 1, task_id(2): 0} == lost
        assert [] == await store.list_attempts("acme", task_id(0))
        assert 1 == len(lock_files(path))
        await store.close()

    asyncio.run(main())


def test_a_sweep_recovers_leases_of_a_killed_worker(tmp_path: Path) -> None:
    """A sweep of an open store recovers the leases, in steps of its limit."""
    path = tmp_path / "tasks.db"

    async def main() -> None:
        store = await open_store(path)
        try:
            with worker_process(path) as process:
                assert 2 == len(lock_files(path))
                assert not (await store.sweep(RETENTION, 100)).has_more
                assert [] == (await store.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
                cancelled = await store.cancel("acme", task_id(2))
                assert CancelStatus.REQUESTED is cancelled
                process.kill()
                process.wait()
            step_count = 1
            while (await store.sweep(RETENTION, 1)).has_more:
                step_count += 1

            assert 3 <= step_count <= 6
            claimed = await store.claim(OTHER_LEASE, limit=10, per_lane=10)
            assert [0, 1] == sorted(task_numbers(claimed.tasks))
            cancelled_task = await store.get_task("acme", task_id(2))
            assert cancelled_task is not None
            assert (Status.CANCELLED, 0) == (cancelled_task.status, cancelled_task.attempts)
            assert 1 == len(lock_files(path))
            [(workers, _)] = store.database.read(
                [lambda tx: tx.execute("SELECT name FROM worker").fetchall()]
            )
            assert {("other",), ("worker",)} >= set(workers)
        finally:
            await store.close()

    asyncio.run(main())


def test_a_suspended_worker_keeps_its_leases(tmp_path: Path) -> None:
    """A sweep does not recover leases of a process that is suspended by SIGSTOP."""
    path = tmp_path / "tasks.db"

    async def main(process: subprocess.Popen[str]) -> None:
        store = await open_store(path)
        try:
            process.send_signal(signal.SIGSTOP)
            await store.sweep(RETENTION, 100)
            assert [] == (await store.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
            assert 3 == (await store.counters()).task_counts[Status.IN_FLIGHT]
        finally:
            await store.close()

    with worker_process(path) as process:
        asyncio.run(main(process))


def test_leases_of_a_closed_store_are_recovered(tmp_path: Path) -> None:
    """A sweep recovers leases of a closed store, also if stores use different paths."""
    path = tmp_path / "tasks.db"
    link = tmp_path / "link.db"
    link.symlink_to(path)

    async def main() -> None:
        with worker_process(path):
            other = await open_store(link)
            assert [] == (await other.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
            await other.close()
        first, second = await open_store(path), await open_store(path)
        leased = (await first.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
        assert 3 == len(leased)
        await second.sweep(RETENTION, 10)
        assert [] == (await second.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks
        await first.close()
        await second.sweep(RETENTION, 10)
        assert 3 == len((await second.claim(LEASE, limit=10, per_lane=10)).tasks)
        await second.close()

    asyncio.run(main())


def test_limits_are_not_shared_with_a_dead_process(tmp_path: Path) -> None:
    """A dead process has no share, although its task in a paused lane is still IN_FLIGHT."""

    async def count_processes(store: SqliteTaskStore) -> int:
        limits = await store.load_limits(ConfiguredLimits(version=-1))
        assert limits is not None
        return limits.process_count

    async def main() -> None:
        first, second = [await open_store(tmp_path / "tasks.db") for _ in range(2)]
        await first.add([NewTask(task(1), lease_on_add=True)], LEASE)
        await second.add([NewTask(task(2), lease_on_add=True)], OTHER_LEASE)
        assert (2, 2) == (await count_processes(first), await count_processes(second))
        await second.pause(LANE)
        await first.close()
        await second.sweep(RETENTION, 10)
        assert 2 == (await second.counters()).task_counts[Status.IN_FLIGHT]
        assert 1 == await count_processes(second)
        await second.close()

    asyncio.run(main())


def test_a_leftover_lock_file_is_removed(tmp_path: Path) -> None:
    """Opening a store removes unlocked lock files, and no other files."""
    path = tmp_path / "tasks.db"
    (tmp_path / "tasks.db.worker-0123").touch()
    (tmp_path / "tasks.db.keep").touch()
    held_lock = WorkerLock(path)
    held_lock.acquire()

    async def main() -> None:
        store = await open_store(path)
        assert f"tasks.db.worker-{held_lock.token}" in lock_files(path)
        assert "tasks.db.worker-0123" not in lock_files(path)
        await store.close()

    asyncio.run(main())
    assert (tmp_path / "tasks.db.keep").exists()
    held_lock.release()
    assert [] == lock_files(path)


def test_unsupported_locks_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a missing folder or a file system without locks, no lock is acquired or removed."""
    missing_folder = WorkerLock(tmp_path / "nowhere" / "tasks.db")
    missing_folder.acquire()
    assert missing_folder.token is None
    missing_folder.release()
    held_lock = WorkerLock(tmp_path / "tasks.db")
    held_lock.acquire()

    def raise_no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", raise_no_locks)
    other = WorkerLock(tmp_path / "tasks.db")
    other.acquire()
    assert other.token is None
    assert [] == other.find_dead_locks([str(held_lock.token)])
    assert [f"tasks.db.worker-{held_lock.token}"] == lock_files(tmp_path / "tasks.db")
    monkeypatch.setattr(worker_locks, "fcntl", None)
    assert [] == other.find_dead_locks([str(held_lock.token)])
    held_lock.release()


@pytest.mark.parametrize("written_bytes", [0, 100_000])
def test_a_full_disk_does_not_prevent_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_bytes: int
) -> None:
    """Starts are not recorded if the disk has no space, or too little, for the records."""
    pwrite = os.pwrite

    def write_part(descriptor: int, data: bytes, offset: int) -> int:
        if not written_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data[:written_bytes], offset)

    monkeypatch.setattr(os, "pwrite", write_part)
    lock = WorkerLock(tmp_path / "tasks.db")
    lock.acquire()
    lock.record_start(0, task_id(1), 1)

    assert lock.token is not None
    assert set() == WorkerLock(tmp_path / "tasks.db").read_starts(lock.token)
    assert [0] == [path.stat().st_size for path in tmp_path.iterdir()]
    lock.release()


def test_a_lock_file_removed_during_acquire_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process deletes or locks the new file, a different file is created."""
    path = tmp_path / "tasks.db"
    flock = fcntl.flock
    locked_files: list[int] = []

    def interfering_flock(file: int, operation: int) -> None:
        locked_files.append(file)
        if len(locked_files) == 1:
            (tmp_path / lock_files(path)[0]).unlink()
        if len(locked_files) == 2:
            raise BlockingIOError
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", interfering_flock)
    lock = WorkerLock(path)
    lock.acquire()

    assert 3 == len(locked_files)
    assert f"tasks.db.worker-{lock.token}" in lock_files(path)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert [] == WorkerLock(path).find_dead_locks([str(lock.token)])
    WorkerLock(path).remove_dead_files(())
    assert [f"tasks.db.worker-{lock.token}"] == lock_files(path)
    token = str(lock.token)
    lock.release()
    assert [token] == WorkerLock(path).find_dead_locks([token])


def test_a_folder_named_like_a_lock_is_ignored(tmp_path: Path) -> None:
    """A folder with the name of a lock file is not removed."""
    (tmp_path / "tasks.db.worker-folder").mkdir()

    assert [] == WorkerLock(tmp_path / "tasks.db").find_dead_locks(["folder"])


def test_a_lock_file_that_cannot_be_deleted_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is released although its file stays, and other processes detect that."""

    def fail(self: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "operation not permitted")

    path = tmp_path / "tasks.db"
    lock, other = WorkerLock(path), WorkerLock(path)
    lock.acquire()
    token = str(lock.token)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        assert [] == other.find_dead_locks([token])

        lock.release()

        assert lock.token is None
        assert [token] == other.find_dead_locks([token])
        assert [f"tasks.db.worker-{token}"] == lock_files(path)
    other.remove_dead_files(())
    assert [] == lock_files(path)


def test_lock_files_are_private(tmp_path: Path) -> None:
    """Another user cannot open a lock file, and so cannot hold the lock of a dead process."""
    lock, leader_lock = WorkerLock(tmp_path / "tasks.db"), LeaderLock(tmp_path / "tasks.db")
    lock.acquire()
    assert leader_lock.try_acquire()

    assert {0o600} == {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    lock.release()
    leader_lock.release()


LEADER_SCRIPT = """
import sys
from tarry.service.stores.sqlite.worker_locks import LeaderLock

lock = LeaderLock(sys.argv[1])
print(lock.try_acquire(), flush=True)
sys.stdin.read()
"""


def test_leadership_ends_with_the_process(tmp_path: Path) -> None:
    """Another store leads after the process of the leader was killed."""
    path = tmp_path / "tasks.db"
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER_SCRIPT, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        assert process.stdout is not None
        assert "True\n" == process.stdout.readline()
        lock = LeaderLock(path)
        assert not lock.try_acquire()
        process.kill()
        process.wait()
        assert lock.try_acquire()
        assert not LeaderLock(path).try_acquire()
        lock.release()
    assert [] == list(tmp_path.iterdir())


def test_a_leader_lock_whose_file_was_deleted_is_not_acquired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file is deleted between opening and locking it, the next try uses a new file."""
    lock, open_file = LeaderLock(tmp_path / "tasks.db"), os.open

    def open_and_delete(path: Path, flags: int, mode: int) -> int:
        descriptor = open_file(path, flags, mode)
        path.unlink()
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_and_delete)
        assert not lock.try_acquire()
    assert lock.try_acquire()
    lock.release()


def test_every_store_leads_if_files_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without file locks, or in a folder that is missing, each store leads."""
    assert LeaderLock(tmp_path / "missing" / "tasks.db").try_acquire()

    def fail(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    assert [True, True] == [LeaderLock(tmp_path / "tasks.db").try_acquire() for _ in range(2)]
