"""The SQLite store whose writer is a process of its own: what crosses, and who ends when."""

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
from tarry.service.stores.sqlite.operations import OperationCall
from tarry.service.stores.sqlite.transaction import Transaction
from tarry.service.stores.sqlite.writer_process import (
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


class Sent(SynchronousSqliteStore):
    """A store whose calls and answers take the form in which they cross."""

    async def _write(self, operation: Callable[[Transaction], T], weight: int = 1) -> T:
        assert isinstance(operation, OperationCall)
        frame = run_calls(self.database, encode_calls([operation]))
        value: T = self._answer(decode_answers([operation], frame))
        return value


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance_of_what_crosses(case: Case, tmp_path: Path) -> None:
    """Nothing is lost between the two processes."""
    asyncio.run(StoreHarness(lambda clock: Sent(tmp_path / "tasks.db", clock)).run(case))


def on(path: Path, main: Callable[[SqliteStore], Awaitable[None]]) -> None:
    """Run a test on an open store."""

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
    """The test runs twice: loops differ in what they say of a process that has ended."""
    use_loop(request.param, monkeypatch)


def writer_of(store: SqliteStore) -> int:
    """Return the id of the process that writes."""
    assert isinstance(store._writer, WriterProcessExecutor)
    assert store._writer.process is not None
    return store._writer.process.pid


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def until_gone(pid: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(30):
        while is_alive(pid):  # noqa: ASYNC110 - it may be nobody's child
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("either_loop")
def test_a_task_lives_in_both_processes(tmp_path: Path) -> None:
    """It is added and finished by one, and read by the other; the writer ends with the store."""
    writers: list[int] = []

    async def main(store: SqliteStore) -> None:
        writers.append(writer_of(store))
        added = await store.add([NewTask(task(n), direct=True) for n in range(3)], LEASE)
        assert [True] * 3 == [each.leased for each in added]
        done = await store.finish([success_result(each.task) for each in added])
        assert [FinishStatus.DONE] * 3 == done
        assert 3 == (await store.counters()).tasks[Status.SUCCEEDED]
        assert is_alive(writers[0])

    on(tmp_path / "tasks.db", main)
    assert not is_alive(writers[0])


@pytest.mark.usefixtures("either_loop")
def test_a_writer_that_is_killed_is_started_again(tmp_path: Path) -> None:
    """What it was asked for is refused, and can be asked for again; leases are still held."""

    async def main(store: SqliteStore) -> None:
        [added] = await store.add([NewTask(task(1), direct=True)], LEASE)
        os.kill(writer_of(store), signal.SIGSTOP)
        asked = asyncio.ensure_future(store.add([NewTask(task(2))]))
        await asyncio.sleep(0)
        later = asyncio.ensure_future(store.add([NewTask(task(3))]))
        await asyncio.sleep(0)
        os.kill(writer_of(store), signal.SIGKILL)
        with pytest.raises(StoreUnavailable, match="started again"):
            await asked
        await later
        await store.add([NewTask(task(2))])
        claimed = await store.claim(LEASE, limit=10, per_lane=10)
        assert [2, 3] == sorted(task_numbers(claimed.tasks))
        assert [FinishStatus.DONE] == await store.finish([success_result(added.task)])

    on(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("either_loop")
def test_a_writer_that_ends_is_told_of_though_nobody_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who looks at the log sees it; the end of the store is none of that kind."""

    async def main(store: SqliteStore) -> None:
        before = writer_of(store)
        os.kill(before, signal.SIGKILL)
        executor = store._writer
        assert isinstance(executor, WriterProcessExecutor)
        async with asyncio.timeout(30):
            while executor.process is not None:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0.01)
        await store.add([NewTask(task(1))])
        assert before != writer_of(store)

    on(tmp_path / "tasks.db", main)
    assert ["has ended, and is started again"] == [
        message.partition("tasks.db ")[2] for message in caplog.messages
    ]


@pytest.mark.usefixtures("either_loop")
def test_a_second_group_goes_before_the_first_is_answered(tmp_path: Path) -> None:
    """When it is large enough; what comes after it waits. A writer that is killed had both."""

    async def main(store: SqliteStore) -> None:
        executor = store._writer
        assert isinstance(executor, WriterProcessExecutor)
        os.kill(writer_of(store), signal.SIGSTOP)
        asked: list[asyncio.Future[Any]] = []
        for first, size in ((0, 1), (1, 1), (2, 200), (202, 100)):
            news = [NewTask(task(n)) for n in range(first, first + size)]
            asked.append(asyncio.ensure_future(store.add(news)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert [[1], [1, 200]] == [
            [entry.weight for entry in group] for group in executor._in_flight
        ]
        os.kill(writer_of(store), signal.SIGKILL)
        *lost, kept = await asyncio.gather(*asked, return_exceptions=True)
        assert [StoreUnavailable] * 3 == [type(error) for error in lost]
        assert isinstance(kept, list)
        assert 100 == len(kept)

    on(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("either_loop")
@pytest.mark.parametrize("error", [RuntimeError("closed"), BrokenPipeError()], ids=repr)
def test_whoever_asks_a_dying_writer_is_told_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A loop may refuse to write to one before it says that it has ended: uvloop does."""

    def refuse(_: bytes) -> None:
        raise error

    async def main(store: SqliteStore) -> None:
        executor = store._writer
        assert isinstance(executor, WriterProcessExecutor)
        monkeypatch.setattr(executor.process, "send", refuse)
        asked = asyncio.ensure_future(store.add([NewTask(task(1))]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        os.kill(writer_of(store), signal.SIGKILL)
        with pytest.raises(StoreUnavailable, match="started again"):
            await asked
        assert 1 == len(await store.add([NewTask(task(1))]))

    on(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("either_loop")
def test_groups_are_answered_in_their_order(tmp_path: Path) -> None:
    """Each call gets its own answer, however many are on their way."""

    async def main(store: SqliteStore) -> None:
        parts = [
            [NewTask(task(n)) for n in range(first, first + 90)] for first in range(0, 900, 90)
        ]
        answers = await asyncio.gather(*(store.add(part) for part in parts))
        for part, added in zip(parts, answers, strict=True):
            assert [new.task.id for new in part] == [each.task.id for each in added]
        counters = await store.counters()
        assert 900 == counters.tasks[Status.PENDING]

    on(tmp_path / "tasks.db", main)


@pytest.mark.usefixtures("either_loop")
def test_signals_for_the_service_do_not_end_the_writer(tmp_path: Path) -> None:
    """A supervisor may send them to all processes: what runs is still to be written down."""

    async def main(store: SqliteStore) -> None:
        before = writer_of(store)
        for each in (signal.SIGINT, signal.SIGTERM):
            os.kill(before, each)
        await store.add([NewTask(task(1))])
        assert before == writer_of(store)

    on(tmp_path / "tasks.db", main)


_DIES = """
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
    """Also when that is killed."""
    ended = subprocess.run(
        [sys.executable, "-c", _DIES, str(tmp_path / "tasks.db")],
        stdout=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    pid = int(ended.stdout)

    asyncio.run(until_gone(pid))


def test_a_file_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """In the words of the store, and no process is started for it."""

    async def run() -> None:
        store = SqliteStore(tmp_path / "nowhere" / "tasks.db", writer_process=True)
        with pytest.raises(StoreUnavailable, match="nowhere"):
            await store.open()
        assert isinstance(store._writer, WriterProcessExecutor)
        assert store._writer.process is None
        await store.close()

    asyncio.run(run())


def test_an_error_keeps_its_kind(tmp_path: Path) -> None:
    """One of tarry's own is itself, any other is told in words."""

    def broken(tx: Transaction, what: Any) -> None:
        raise KeyError(what)

    from tarry.service.stores.sqlite import operations

    operations.OPERATIONS["broken"] = operations.Operation(broken, tuple[str], None)
    try:
        store = Sent(tmp_path / "tasks.db", lambda: 1)
        with pytest.raises(RuntimeError, match="KeyError: 'x'"):
            asyncio.run(store._write(OperationCall(broken, "x")))
        asyncio.run(store.close())
    finally:
        del operations.OPERATIONS["broken"]
