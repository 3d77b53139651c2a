"""The SQLite store: the conformance cases, its clock and its thread."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from tarry.idempotency import IdempotencyMiddleware, SqliteStore, StoredResponse, lease
from tests.idempotency.asgi_client import PaymentsApp, send_request
from tests.idempotency.conformance import CASES, Case, StoreHarness, case_name
from tests.idempotency.test_store_memory import ManualClock, Run, on_asyncio, on_trio

OK = StoredResponse(200, ((b"a", b"b"),), b"done")


@pytest.mark.parametrize("run", [on_asyncio, on_trio])
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_conformance(case: Case, run: Run, tmp_path: Path) -> None:
    """The store passes the conformance cases."""

    async def main() -> None:
        clock = ManualClock()
        store, twin = (SqliteStore(tmp_path / "keys.db", clock=lambda: clock.now) for _ in "12")
        try:
            await case(StoreHarness(store, twin, clock.advance))
        finally:
            await store.close()
            await twin.close()

    run(main)


def test_records_are_persistent(tmp_path: Path) -> None:
    """A stored response is there after the file is opened again."""

    async def main() -> None:
        first = SqliteStore(tmp_path / "keys.db")
        await first.claim("k", "print", "owner", 30.0)
        await first.finish("k", "print", "owner", OK, 3600.0)
        await first.close()

        second = SqliteStore(str(tmp_path / "keys.db"))
        existing = await second.claim("k", "print", "other", 30.0)
        await second.close()

        assert existing is not None
        assert OK == existing.record.response

    asyncio.run(main())


def test_default_clock_is_unix_time(tmp_path: Path) -> None:
    """Without a clock the file has seconds since 1970, which are the same for every process."""

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        before = time.time()
        await store.claim("k", "print", "owner", 30.0)
        existing = await store.claim("k", "print", "other", 30.0)
        await store.close()

        assert existing is not None
        # SQLite's clock ticks in milliseconds.
        assert (
            before - 0.001 <= existing.record.free_at - 30.0 <= existing.now <= time.time() + 0.001
        )

    asyncio.run(main())


def test_time_is_read_under_the_lock(tmp_path: Path) -> None:
    """The clock is not read while another process writes: the time would be outdated."""
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


def test_busy_timeout(tmp_path: Path) -> None:
    """A call does not wait forever for another process, and works after that has finished."""

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
def test_hanging_disk_rejects_requests(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer causes a 503. When it works again, requests succeed."""
    monkeypatch.setattr(lease, "STORE_TIMEOUT_S", 0.05)
    stuck = Event()

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        app = IdempotencyMiddleware(PaymentsApp(), store)
        await store.sweep(1)
        assert store._executor is not None
        store._executor.submit(stuck.wait)
        assert 503 == (await send_request(app)).status
        stuck.set()
        await store.sweep(1)
        monkeypatch.undo()
        assert 201 == (await send_request(app)).status
        await store.close()

    run(main)
