"""Sweeps of several partitions. The sweeps of a partition are tested with real servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.store import Retention, SweepResult
from tarry.service.stores.redis import RedisTaskStore
from tarry.testing import VirtualClock

PARTITIONS = 16
REPLY_TIMEOUT_S = 3.5
RETENTION = Retention(0, 0)


class FakeConnection:
    """Partitions with 100 expired tasks each, of which some do not respond."""

    partition_count = PARTITIONS

    def __init__(self, *hanging: int) -> None:
        self.hanging = set(hanging)
        self.swept: list[tuple[int, int]] = []
        """The partitions in which tasks were removed, and how many."""

    async def run(self, partition: int, _name: str, *arguments: Any, **_options: Any) -> list[Any]:
        """Remove as many tasks as the limit allows."""
        if partition in self.hanging:
            await asyncio.sleep(REPLY_TIMEOUT_S)
            raise StoreUnavailable("no reply in time")
        limit = min(arguments[3], 100)
        if limit:
            self.swept.append((partition, limit))
        return [limit, 1, []]


def new_store(connection: FakeConnection) -> RedisTaskStore:
    """Return a store that uses a connection."""
    store = RedisTaskStore("redis+cluster://h")
    store.connection = connection  # type: ignore[assignment]
    return store


def test_partitions_that_hang_delay_a_sweep_once() -> None:
    """The partitions after the first one that hangs are swept at the same time."""

    async def main() -> None:
        now = asyncio.get_running_loop().time
        connection = FakeConnection(1, 2, 5, 9, 12)
        store = new_store(connection)
        for max_duration_s in (2 * REPLY_TIMEOUT_S, REPLY_TIMEOUT_S):
            started_at = now()
            with pytest.raises(StoreUnavailable):
                await store.sweep(RETENTION, 10_000)
            assert now() - started_at <= max_duration_s + 0.001
            assert PARTITIONS - 5 == len(connection.swept)
            connection.swept.clear()

    with VirtualClock(start=1000.0) as clock:
        clock.run(main)


def test_limit_of_a_sweep_covers_all_partitions() -> None:
    """No more tasks are removed, whether the partitions are swept in turn or at the same time."""

    async def main() -> None:
        connection = FakeConnection()
        store = new_store(connection)
        assert SweepResult(130, has_more=True) == await store.sweep(RETENTION, 130)
        assert [(0, 100), (1, 30)] == connection.swept

        connection.hanging = {15}
        with pytest.raises(StoreUnavailable):
            await store.sweep(RETENTION, 10)
        connection.swept.clear()
        with pytest.raises(StoreUnavailable):
            await store.sweep(RETENTION, 33)
        assert [3, *[2] * 14] == [removed for _, removed in connection.swept]

        connection.hanging = set()
        for expected in (33, 33):
            result = await store.sweep(RETENTION, 33)
            assert expected == result.removed_task_count
        assert (4, 33) == connection.swept[-1]

    with VirtualClock(start=1000.0) as clock:
        clock.run(main)
