"""The writer process: protocol, restarts, and shutdown."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from inspect import Parameter
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.model import Status
from tarry.service.store import FinishStatus, NewTask
from tarry.service.stores.sqlite import SqliteTaskStore, add
from tarry.service.stores.sqlite.operations import OPERATIONS, OperationCall, write_operation
from tarry.service.stores.sqlite.transaction import WriteTransaction
from tarry.service.stores.sqlite.writer_process import (
    LogCollector,
    WriterProcess,
    WriterProcessExecutor,
    decode_answers,
    encode_calls,
    run_calls,
)
from tests.service.delivery.harness import LOOPS, use_loop
from tests.service.delivery.harness import run as run_on_loop
from tests.service.stores.conformance.suite import CASES, Case, StoreHarness, case_name
from tests.service.stores.harness import (
    HOUR_MS,
    LEASE,
    OTHER_LEASE,
    success_result,
    task,
    task_numbers,
)
from tests.service.stores.synchronous_store import SynchronousSqliteStore

T = TypeVar("T")


class SerializedStore(SynchronousSqliteStore):
    """A store whose calls and results are encoded and decoded as for the writer process."""

    async def write(
        self, operation: Callable[[WriteTransaction], T], weight: int = 1, *, urgent: bool = True
    ) -> T:
        """Encode, decode and run an operation."""
        assert isinstance(operation, OperationCall)
        frame = run_calls(self.database, encode_calls([operation]), LogCollector())
        value: T = self._unwrap(decode_answers([operation], frame))
        return value


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance_of_the_protocol(case: Case, tmp_path: Path) -> None:
    """A store that encodes and decodes calls and results passes the conformance suite."""
    asyncio.run(StoreHarness(lambda clock: SerializedStore(tmp_path / "tasks.db", clock)).run(case))


def run_on_store(path: Path, main: Callable[[SqliteTaskStore], Awaitable[None]]) -> None:
    """Run a coroutine function with an open store."""

    async def run() -> None:
        store = SqliteTaskStore(path, writer_process=True)
        await store.open()
        try:
            await main(store)
        finally:
            await store.close()

    run_on_loop(run())


@pytest.fixture(params=LOOPS)
def each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test on asyncio and on uvloop, which report ended processes differently."""
    use_loop(request.param, monkeypatch)


def writer_pid(store: SqliteTaskStore) -> int:
    """Return the process id of the writer process."""
    assert isinstance(store._writer, WriterProcessExecutor)
    assert store._writer.process is not None
    return store._writer.process.pid


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def wait_until_ended(pid: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(30):
        while is_alive(pid):  # noqa: ASYNC110 - it may not be a child process
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("each_loop")
def test_the_writer_process_writes_and_the_service_reads(tmp_path: Path) -> None:
    """Tasks are written by the writer process, which ends when the store is closed."""
    writer_pids: list[int] = []

    async def main(store: SqliteTaskStore) -> None:
        writer_pids.append(writer_pid(store))
        added = await store.add([NewTask(task(n), lease_on_add=True) for n in range(3)], LEASE)
        assert [True] * 3 == [result.leased for result in added]
        statuses = await store.finish([success_result(result.task) for result in added])
        assert [FinishStatus.APPLIED] * 3 == statuses
        assert 3 == (await store.counters()).task_counts[Status.SUCCEEDED]
        assert is_alive(writer_pids[0])

    run_on_store(tmp_path / "tasks.db", main)
    assert not is_alive(writer_pids[0])


@pytest.mark.usefixtures("each_loop")
def test_a_killed_writer_is_started_again(tmp_path: Path) -> None:
    """Operations sent to a killed writer fail and can be repeated; leases stay valid."""

    async def main(store: SqliteTaskStore) -> None:
        [added] = await store.add([NewTask(task(1), lease_on_add=True)], LEASE)
        os.kill(writer_pid(store), signal.SIGSTOP)
        sent = asyncio.ensure_future(store.add([NewTask(task(2))]))
        await asyncio.sleep(0)
        unsent = asyncio.ensure_future(store.add([NewTask(task(3))]))
        await asyncio.sleep(0)
        os.kill(writer_pid(store), signal.SIGKILL)
        with pytest.raises(StoreUnavailable, match="started again"):
            await sent
        await unsent
        await store.add([NewTask(task(2))])
        claimed = await store.claim(LEASE, limit=10, per_lane=10)
        assert [2, 3] == sorted(task_numbers(claimed.tasks))
        assert [FinishStatus.APPLIED] == await store.finish([success_result(added.task)])

    run_on_store(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("each_loop")
def test_lease_of_an_unacknowledged_task_can_be_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is killed after a commit leaves a lease that the service does not know."""

    def kill_and_discard_answer(process: WriterProcess, _fd: int, _data: bytes) -> None:
        os.kill(process.pid, signal.SIGKILL)

    async def main(store: SqliteTaskStore) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(WriterProcess, "pipe_data_received", kill_and_discard_answer)
            with pytest.raises(StoreUnavailable, match="started again"):
                await store.add([NewTask(task(1), lease_on_add=True)], LEASE)
        assert [] == (await store.claim(LEASE, limit=10, per_lane=10)).tasks
        assert 1 == await store.release_unknown_leases(LEASE, [])
        assert [1] == task_numbers((await store.claim(LEASE, limit=10, per_lane=10)).tasks)

    run_on_store(tmp_path / "tasks.db", main)


SHIFTED_CLOCK = """
import time
from pathlib import Path

unix_time, shift = time.time, Path({path!r})
shift.write_text("0")
time.time = lambda: unix_time() + float(shift.read_text())
"""


def test_a_jump_of_the_wall_clock_changes_no_due_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the clock of the machine is set, the writer ends no lease and no wait too early."""
    shift = tmp_path / "shift"
    (tmp_path / "sitecustomize.py").write_text(SHIFTED_CLOCK.format(path=str(shift)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    async def main(store: SqliteTaskStore) -> None:
        await store.add([NewTask(task(1), lease_on_add=True)], LEASE)
        [waiting] = await store.add([NewTask(task(2), delay_ms=HOUR_MS)])
        assert "0" == shift.read_text()  # the writer uses the clock that is shifted here
        shift.write_text("7200")
        [added] = await store.add([NewTask(task(3), delay_ms=HOUR_MS)])

        assert added.task.next_attempt_at - waiting.task.next_attempt_at < HOUR_MS
        assert [] == (await store.claim(OTHER_LEASE, limit=10, per_lane=10)).tasks

    run_on_store(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("each_loop")
def test_an_idle_writer_that_ends_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If an idle writer ends, one warning is logged, and the writer is started again."""

    async def main(store: SqliteTaskStore) -> None:
        caplog.clear()  # "created an empty store"
        pid = writer_pid(store)
        os.kill(pid, signal.SIGKILL)
        executor = store._writer
        assert isinstance(executor, WriterProcessExecutor)
        async with asyncio.timeout(30):
            while executor.process is not None:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)
        await store.add([NewTask(task(1))])
        assert pid != writer_pid(store)

    run_on_store(tmp_path / "tasks.db", main)
    assert ["has ended, and is started again"] == [
        message.partition("tasks.db ")[2] for message in caplog.messages
    ]


@pytest.mark.usefixtures("each_loop")
def test_the_service_logs_the_records_of_the_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A record of the writer gets the level and the format of the service's log."""

    async def main(store: SqliteTaskStore) -> None:
        await store.add([NewTask(task(1))])
        (tmp_path / "tasks.db-wal").unlink()
        await store.add([NewTask(task(2))])
        await store.add([NewTask(task(3))])

    run_on_store(tmp_path / "tasks.db", main)
    [_, record] = caplog.records
    assert ("tarry.service", "ERROR") == (record.name, record.levelname)
    assert record.getMessage().startswith("write-ahead log deleted while open")
    assert "" == capfd.readouterr().err


@pytest.mark.usefixtures("each_loop")
def test_a_second_group_is_sent_before_the_first_is_committed(tmp_path: Path) -> None:
    """A large second group is sent early; if the writer is killed, both groups fail."""

    async def main(store: SqliteTaskStore) -> None:
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
            [entry.weight for call in group.calls for entry in call]
            for group in executor._groups_in_flight
        ]
        os.kill(writer_pid(store), signal.SIGKILL)
        *failed, committed = await asyncio.gather(*pending, return_exceptions=True)
        assert [StoreUnavailable] * 3 == [type(error) for error in failed]
        assert isinstance(committed, list)
        assert 100 == len(committed)

    run_on_store(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("each_loop")
@pytest.mark.parametrize("error", [RuntimeError("closed"), BrokenPipeError()], ids=repr)
def test_operations_sent_to_an_ended_writer_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An operation fails with `StoreUnavailable` if the pipe to the writer is closed."""

    def fail_to_send(_: bytes) -> None:
        raise error

    async def main(store: SqliteTaskStore) -> None:
        executor = store._writer
        assert isinstance(executor, WriterProcessExecutor)
        monkeypatch.setattr(executor.process, "send", fail_to_send)
        pending = asyncio.ensure_future(store.add([NewTask(task(1))]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        os.kill(writer_pid(store), signal.SIGKILL)
        with pytest.raises(StoreUnavailable, match="started again"):
            await pending
        assert 1 == len(await store.add([NewTask(task(1))]))

    run_on_store(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("each_loop")
def test_each_call_gets_its_own_result(tmp_path: Path) -> None:
    async def main(store: SqliteTaskStore) -> None:
        batches = [
            [NewTask(task(n)) for n in range(first, first + 90)] for first in range(0, 900, 90)
        ]
        results = await asyncio.gather(*(store.add(batch) for batch in batches))
        for batch, added in zip(batches, results, strict=True):
            assert [new_task.task.id for new_task in batch] == [result.task.id for result in added]
        counters = await store.counters()
        assert 900 == counters.task_counts[Status.PENDING]

    run_on_store(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("each_loop")
def test_signals_for_the_service_do_not_end_the_writer(tmp_path: Path) -> None:
    """The writer ignores SIGINT and SIGTERM, which a supervisor may send to all processes."""

    async def main(store: SqliteTaskStore) -> None:
        pid = writer_pid(store)
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, signal_number)
        await store.add([NewTask(task(1))])
        assert pid == writer_pid(store)

    run_on_store(tmp_path / "tasks.db", main)


KILLED_SERVICE_SCRIPT = """
import asyncio, os, sys
from tarry.service.stores.sqlite import SqliteTaskStore, add

async def main():
    store = SqliteTaskStore(sys.argv[1], writer_process=True)
    await store.open()
    print(store._writer.process.pid, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_the_writer_does_not_outlive_the_service(tmp_path: Path) -> None:
    """The writer process ends if the service is killed."""
    completed = subprocess.run(
        [sys.executable, "-c", KILLED_SERVICE_SCRIPT, str(tmp_path / "tasks.db")],
        stdout=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    pid = int(completed.stdout)

    asyncio.run(wait_until_ended(pid))


async def test_opening_fails_if_the_file_cannot_be_created(tmp_path: Path) -> None:
    """Opening a file in a missing folder raises `StoreUnavailable`, and starts no process."""
    store = SqliteTaskStore(tmp_path / "nowhere" / "tasks.db", writer_process=True)
    with pytest.raises(StoreUnavailable, match="nowhere"):
        await store.open()
    assert isinstance(store._writer, WriterProcessExecutor)
    assert store._writer.process is None
    await store.close()


def test_other_errors_become_runtime_errors(tmp_path: Path) -> None:
    """An error that is not of tarry becomes a `RuntimeError` with class name and message."""

    @write_operation
    def raise_key_error(tx: WriteTransaction, key: str) -> None:
        raise KeyError(key)

    try:
        store = SerializedStore(tmp_path / "tasks.db", lambda: 1)
        with pytest.raises(RuntimeError, match="KeyError: 'x'"):
            asyncio.run(store.write(OperationCall(raise_key_error, "x")))
        asyncio.run(store.close())
    finally:
        del OPERATIONS["raise_key_error"]


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_operations_can_be_sent(name: str) -> None:
    """All arguments are sent by position, and the types of arguments and result are known."""
    run = OPERATIONS[name]

    kinds = {parameter.kind for parameter in run.signature.parameters.values()}

    assert {Parameter.POSITIONAL_OR_KEYWORD} == kinds
    assert callable(run.decode_arguments)
    assert callable(run.decode_result)


def test_arguments_are_sent_by_position() -> None:
    """Arguments that are passed by name, and default values, are sent too."""
    new = NewTask(task(1))

    call = OperationCall(add.add, [new], None, quota=7)

    assert ([new], None, 7, None) == call.arguments


def test_two_operations_with_one_name_are_rejected() -> None:
    """The name says which operation runs, so it must be unique."""
    with pytest.raises(ValueError, match="two operations have the name cancel"):

        @write_operation
        def cancel(tx: WriteTransaction) -> None: ...
