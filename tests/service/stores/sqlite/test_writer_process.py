"""The writer process: its protocol, restarts, and the end of both processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.model import Status
from tarry.service.store import FinishStatus, NewTask
from tarry.service.stores.sqlite import SqliteStore
from tarry.service.stores.sqlite.transaction import Transaction
from tarry.service.stores.sqlite.writer_process import (
    OperationCall,
    WriterProcessExecutor,
    decode_answers,
    encode_calls,
    run_calls,
)
from tests.service.delivery.harness import LOOPS, use_loop
from tests.service.delivery.harness import run as run_on_loop
from tests.service.stores.conformance.suite import CASES, Case, StoreHarness, case_name
from tests.service.stores.harness import LEASE, success_result, task, task_numbers
from tests.service.stores.synchronous_store import SynchronousSqliteStore

T = TypeVar("T")


class SerializedStore(SynchronousSqliteStore):
    """A store whose calls and results are encoded and decoded as for the writer process."""

    async def write(self, operation: Callable[[Transaction], T], weight: int = 1) -> T:
        """Run an operation that was encoded and decoded."""
        assert isinstance(operation, OperationCall)
        frame = run_calls(self.database, encode_calls([operation]))
        value: T = self._unwrap(decode_answers([operation], frame))
        return value


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance_of_the_protocol(case: Case, tmp_path: Path) -> None:
    """Nothing is lost when calls and results are encoded and decoded."""
    asyncio.run(StoreHarness(lambda clock: SerializedStore(tmp_path / "tasks.db", clock)).run(case))


def run_on_store(path: Path, main: Callable[[SqliteStore], Awaitable[None]]) -> None:
    """Run a coroutine function with an open store."""

    async def run() -> None:
        store = SqliteStore(path, writer_process=True)
        await store.open()
        try:
            await main(store)
        finally:
            await store.close()

    run_on_loop(run())


@pytest.fixture(params=LOOPS)
def either_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test on asyncio and on uvloop, which report ended processes differently."""
    use_loop(request.param, monkeypatch)


def writer_pid(store: SqliteStore) -> int:
    """Return the process id of the writer process."""
    assert isinstance(store._writer, WriterProcessExecutor)
    assert store._writer.process is not None
    return store._writer.process.pid


def is_alive(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def wait_until_ended(pid: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(30):
        while is_alive(pid):  # noqa: ASYNC110 - it may not be our child process
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("either_loop")
def test_the_writer_process_writes_and_the_service_reads(tmp_path: Path) -> None:
    """A task is added and finished there and read here; closing the store ends the process."""
    writers: list[int] = []

    async def main(store: SqliteStore) -> None:
        writers.append(writer_pid(store))
        added = await store.add([NewTask(task(n), lease_on_add=True) for n in range(3)], LEASE)
        assert [True] * 3 == [result.leased for result in added]
        done = await store.finish([success_result(result.task) for result in added])
        assert [FinishStatus.APPLIED] * 3 == done
        assert 3 == (await store.counters()).task_counts[Status.SUCCEEDED]
        assert is_alive(writers[0])

    run_on_store(tmp_path / "tasks.db", main)
    assert not is_alive(writers[0])


@pytest.mark.usefixtures("either_loop")
def test_a_killed_writer_is_started_again(tmp_path: Path) -> None:
    """Operations that it had received fail and can be repeated; leases stay valid."""

    async def main(store: SqliteStore) -> None:
        [added] = await store.add([NewTask(task(1), lease_on_add=True)], LEASE)
        os.kill(writer_pid(store), signal.SIGSTOP)
        pending = asyncio.ensure_future(store.add([NewTask(task(2))]))
        await asyncio.sleep(0)
        later = asyncio.ensure_future(store.add([NewTask(task(3))]))
        await asyncio.sleep(0)
        os.kill(writer_pid(store), signal.SIGKILL)
        with pytest.raises(StoreUnavailable, match="started again"):
            await pending
        await later
        await store.add([NewTask(task(2))])
        claimed = await store.claim(LEASE, limit=10, per_lane=10)
        assert [2, 3] == sorted(task_numbers(claimed.tasks))
        assert [FinishStatus.APPLIED] == await store.finish([success_result(added.task)])

    run_on_store(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("either_loop")
def test_an_idle_writer_that_ends_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a warning, unless the store was closed."""

    async def main(store: SqliteStore) -> None:
        before = writer_pid(store)
        os.kill(before, signal.SIGKILL)
        executor = store._writer
        assert isinstance(executor, WriterProcessExecutor)
        async with asyncio.timeout(30):
            while executor.process is not None:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)
        await store.add([NewTask(task(1))])
        assert before != writer_pid(store)

    run_on_store(tmp_path / "tasks.db", main)
    assert ["has ended, and is started again"] == [
        message.partition("tasks.db ")[2] for message in caplog.messages
    ]


@pytest.mark.usefixtures("either_loop")
def test_a_second_group_is_sent_before_the_first_is_answered(tmp_path: Path) -> None:
    """Only if it is large enough; a killed writer fails both groups."""

    async def main(store: SqliteStore) -> None:
        executor = store._writer
        assert isinstance(executor, WriterProcessExecutor)
        os.kill(writer_pid(store), signal.SIGSTOP)
        pending: list[asyncio.Future[Any]] = []
        for first, size in ((0, 1), (1, 1), (2, 200), (202, 100)):
            batch = [NewTask(task(n)) for n in range(first, first + size)]
            pending.append(asyncio.ensure_future(store.add(batch)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert [[1], [1, 200]] == [
            [entry.weight for entry in group] for group in executor._groups_in_flight
        ]
        os.kill(writer_pid(store), signal.SIGKILL)
        *lost, committed = await asyncio.gather(*pending, return_exceptions=True)
        assert [StoreUnavailable] * 3 == [type(error) for error in lost]
        assert isinstance(committed, list)
        assert 100 == len(committed)

    run_on_store(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("error", [RuntimeError("closed"), BrokenPipeError()], ids=repr)
def test_operations_sent_to_an_ended_writer_are_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The event loop may refuse to write before it reports that the process has ended."""

    def refuse(_: bytes) -> None:
        raise error

    async def main(store: SqliteStore) -> None:
        executor = store._writer
        assert isinstance(executor, WriterProcessExecutor)
        monkeypatch.setattr(executor.process, "send", refuse)
        pending = asyncio.ensure_future(store.add([NewTask(task(1))]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        os.kill(writer_pid(store), signal.SIGKILL)
        with pytest.raises(StoreUnavailable, match="started again"):
            await pending
        assert 1 == len(await store.add([NewTask(task(1))]))

    run_on_store(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("either_loop")
def test_groups_are_answered_in_their_order(tmp_path: Path) -> None:
    """Each call gets its own result, however many are in flight."""

    async def main(store: SqliteStore) -> None:
        parts = [
            [NewTask(task(n)) for n in range(first, first + 90)] for first in range(0, 900, 90)
        ]
        results = await asyncio.gather(*(store.add(part) for part in parts))
        for part, added in zip(parts, results, strict=True):
            assert [new.task.id for new in part] == [result.task.id for result in added]
        counters = await store.counters()
        assert 900 == counters.task_counts[Status.PENDING]

    run_on_store(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("either_loop")
def test_signals_for_the_service_do_not_end_the_writer(tmp_path: Path) -> None:
    """A supervisor may signal all processes, but results still have to be written."""

    async def main(store: SqliteStore) -> None:
        before = writer_pid(store)
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            os.kill(before, signal_number)
        await store.add([NewTask(task(1))])
        assert before == writer_pid(store)

    run_on_store(tmp_path / "tasks.db", main)


KILLED_SERVICE_SCRIPT = """
import asyncio, os, sys
from tarry.service.stores.sqlite import SqliteStore

async def main():
    store = SqliteStore(sys.argv[1], writer_process=True)
    await store.open()
    print(store._writer.process.pid, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
def test_the_writer_does_not_outlive_the_service(tmp_path: Path) -> None:
    """The process ends even if the service is killed."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED_SERVICE_SCRIPT, str(tmp_path / "tasks.db")],
        stdout=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    pid = int(ended.stdout)

    asyncio.run(wait_until_ended(pid))


def test_a_file_that_cannot_be_created_is_unavailable(tmp_path: Path) -> None:
    """Opening raises `StoreUnavailable`, and no process is started."""

    async def run() -> None:
        store = SqliteStore(tmp_path / "nowhere" / "tasks.db", writer_process=True)
        with pytest.raises(StoreUnavailable, match="nowhere"):
            await store.open()
        assert isinstance(store._writer, WriterProcessExecutor)
        assert store._writer.process is None
        await store.close()

    asyncio.run(run())


def test_errors_of_tarry_keep_their_class(tmp_path: Path) -> None:
    """Other errors become a `RuntimeError` with class name and message."""

    def broken(tx: Transaction, what: Any) -> None:
        raise KeyError(what)

    from tarry.service.stores.sqlite import writer_process

    writer_process.OPERATIONS["broken"] = writer_process.RemoteOperation(broken, tuple[str], None)
    try:
        store = SerializedStore(tmp_path / "tasks.db", lambda: 1)
        with pytest.raises(RuntimeError, match="KeyError: 'x'"):
            asyncio.run(store.write(OperationCall(broken, "x")))
        asyncio.run(store.close())
    finally:
        del writer_process.OPERATIONS["broken"]
