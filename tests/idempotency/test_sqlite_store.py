"""The SQLite store: conformance, clock, locks and a disk that hangs."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from tarry.idempotency import IdempotencyMiddleware, SqliteStore, StoredResponse, lease
from tests.idempotency.asgi_client import PaymentsApp, send_request
from tests.idempotency.conformance import CASES, Case, StoreHarness, case_name
from tests.idempotency.test_store_memory import ManualClock, Run, run_on_asyncio, run_on_trio

RESPONSE = StoredResponse(200, ((b"a", b"b"),), b"done")


@pytest.mark.parametrize("run_async", [run_on_asyncio, run_on_trio])
@pytest.mark.parametrize("case", CASES, ids=case_name)
async def test_conformance(run_async: Run, case: Case, tmp_path: Path) -> None:
    """The store passes the conformance cases."""
    clock = ManualClock()
    store, second_connection = (
        SqliteStore(tmp_path / "keys.db", clock=lambda: clock.now) for _ in range(2)
    )
    try:
        await case(StoreHarness(store, second_connection, clock.advance))
    finally:
        await store.close()
        await second_connection.close()


async def test_records_are_persistent(tmp_path: Path) -> None:
    """A stored response is still there after the file is closed and opened again."""
    first = SqliteStore(tmp_path / "keys.db")
    await first.claim("k", "print", "owner", 30.0)
    await first.finish("k", "print", "owner", RESPONSE, 3600.0)
    await first.close()

    second = SqliteStore(str(tmp_path / "keys.db"))
    existing = await second.claim("k", "print", "other", 30.0)
    await second.close()

    assert existing is not None
    assert RESPONSE == existing.record.response


async def test_default_clock_is_unix_time(tmp_path: Path) -> None:
    """Without a clock the store uses Unix time."""
    store = SqliteStore(tmp_path / "keys.db")
    before = time.time()
    await store.claim("k", "print", "owner", 30.0)
    existing = await store.claim("k", "print", "other", 30.0)
    await store.close()

    assert existing is not None
    # The clock of SQLite has a resolution of one millisecond.
    assert before - 0.001 <= existing.record.free_at - 30.0 <= existing.now <= time.time() + 0.001


async def test_clock_is_read_under_the_lock(tmp_path: Path) -> None:
    """The clock is not read before the write lock is acquired: the time would be outdated."""
    clock_reads: list[float] = []

    def clock() -> float:
        clock_reads.append(0.0)
        return 0.0

    store = SqliteStore(tmp_path / "keys.db", busy_timeout=0.01, clock=clock)
    await store.sweep(1)
    clock_reads.clear()
    with closing(sqlite3.connect(tmp_path / "keys.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            await store.claim("k", "print", "owner", 30.0)
    await store.close()
    assert [] == clock_reads


async def test_busy_timeout_ends_a_call(tmp_path: Path) -> None:
    """A call raises if the database is locked for the busy timeout; a later call succeeds."""
    store = SqliteStore(tmp_path / "keys.db", busy_timeout=0.01)
    await store.sweep(1)
    with closing(sqlite3.connect(tmp_path / "keys.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            await store.claim("k", "print", "owner", 30.0)
    assert await store.claim("k", "print", "owner", 30.0) is None
    await store.close()


@pytest.mark.parametrize("run_async", [run_on_asyncio, run_on_trio])
async def test_hanging_disk_rejects_requests(
    run_async: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs causes a 503; requests succeed after the disk works again."""
    monkeypatch.setattr(lease, "STORE_TIMEOUT_S", 0.05)
    resume = Event()

    store = SqliteStore(tmp_path / "keys.db")
    app = IdempotencyMiddleware(PaymentsApp(), store)
    await store.sweep(1)
    assert store._executor is not None
    store._executor.submit(resume.wait)
    assert 503 == (await send_request(app)).status
    resume.set()
    await store.sweep(1)
    monkeypatch.undo()
    assert 201 == (await send_request(app)).status
    await store.close()
