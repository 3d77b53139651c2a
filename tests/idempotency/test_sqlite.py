"""The store in a SQLite file: the conformance cases on both loops, and the file itself."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from tarry.idempotency import IdempotencyMiddleware, SqliteStore, StoredResponse, lease
from tests.idempotency.asking import Payments, ask
from tests.idempotency.conformance import CASES, Bench, Case, name_of
from tests.idempotency.test_memory import Clock, Run, on_asyncio, on_trio

OK = StoredResponse(200, ((b"a", b"b"),), b"done")


@pytest.mark.parametrize("run", [on_asyncio, on_trio])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_conformance(case: Case, run: Run, tmp_path: Path) -> None:
    """The store does what every store must do."""

    async def main() -> None:
        clock = Clock()
        store, twin = (SqliteStore(tmp_path / "keys.db", clock=lambda: clock.now) for _ in "12")
        try:
            await case(Bench(store, twin, clock.advance))
        finally:
            await store.close()
            await twin.close()

    run(main)


def test_records_outlive_the_process(tmp_path: Path) -> None:
    """What was kept is there when the file is opened again."""

    async def main() -> None:
        first = SqliteStore(tmp_path / "keys.db")
        await first.claim("k", "print", "owner", 30.0)
        await first.finish("k", "print", "owner", OK, 3600.0)
        await first.close()

        second = SqliteStore(str(tmp_path / "keys.db"))
        found = await second.claim("k", "print", "other", 30.0)
        await second.close()

        assert found is not None
        assert OK == found.record.response

    asyncio.run(main())


def test_time_is_the_wall_clock_of_the_machine(tmp_path: Path) -> None:
    """Without a clock the file has seconds since 1970, which mean the same to every process."""

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        before = time.time()
        await store.claim("k", "print", "owner", 30.0)
        found = await store.claim("k", "print", "other", 30.0)
        await store.close()

        assert found is not None
        # SQLite's clock ticks in milliseconds.
        assert before - 0.001 <= found.record.free_at - 30.0 <= found.now <= time.time() + 0.001

    asyncio.run(main())


def test_time_is_read_under_the_lock(tmp_path: Path) -> None:
    """While another process writes, the clock is not read: it would be late when its turn comes."""
    reads: list[float] = []

    def clock() -> float:
        reads.append(0.0)
        return 0.0

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db", busy_timeout=0.01, clock=clock)
        await store.sweep(1)
        reads.clear()
        with closing(sqlite3.connect(tmp_path / "keys.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                await store.claim("k", "print", "owner", 30.0)
        await store.close()

    asyncio.run(main())
    assert [] == reads


def test_a_writer_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    """A call does not wait for ever for another process, and works again once that is done."""

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db", busy_timeout=0.01)
        await store.sweep(1)
        with closing(sqlite3.connect(tmp_path / "keys.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                await store.claim("k", "print", "owner", 30.0)
        assert await store.claim("k", "print", "owner", 30.0) is None
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("run", [on_asyncio, on_trio])
def test_a_thread_that_is_stuck_keeps_nobody_waiting(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer is a 503, on both loops; when it is back all goes on."""
    monkeypatch.setattr(lease, "STORE_TIMEOUT_S", 0.05)
    stuck = Event()

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        app = IdempotencyMiddleware(Payments(), store)
        await store.sweep(1)
        assert store._executor is not None
        store._executor.submit(stuck.wait)
        assert 503 == (await ask(app)).status
        stuck.set()
        await store.sweep(1)
        monkeypatch.undo()
        assert 201 == (await ask(app)).status
        await store.close()

    run(main)
