"""Division of a claim among partitions. Claims themselves are tested with real servers."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.service.store import LeaseTerms
from tarry.service.stores.redis.claim import ClaimMerger, divide
from tarry.service.stores.redis.connection import RedisConnection
from tarry.service.stores.redis.partitions import Partitions


@pytest.mark.parametrize(
    ("limit", "busy", "shares"),
    [
        (10, {2, 0, 1}, [4, 3, 3]),
        (10, {2}, [10, 0, 0]),
        (1, {0, 1}, [0, 1, 0]),
        (0, {0, 1, 2}, [0, 0, 0]),
        (5, set(), [0, 0, 0]),
    ],
)
def test_busy_partitions_share_the_limit(limit: int, busy: set[int], shares: list[int]) -> None:
    """The shares are equal; the partitions that come first get what is left."""
    assert shares == divide(limit, [2, 1, 0], busy)


class RecordingConnection(RedisConnection):
    """A connection to two partitions that always have more due tasks; it records the scripts."""

    def __init__(self) -> None:
        super().__init__("redis://localhost", None)
        self.partition_count = 2
        self.scripts: list[tuple[int, str]] = []

    async def run(self, partition: int, name: str, *_: Any, **_options: Any) -> list[Any]:
        """Record a script, and return its reply."""
        self.scripts.append((partition, name))
        return [5, 3, 0, 0, [], [], []] if name == "claim" else [5, 3]


async def test_nothing_is_leased_in_skipped_partitions() -> None:
    """If all are skipped, only the time is read: their unknown leases are being released.

    A task that was leased meanwhile would not be known to this release, and lose its lease.
    """
    connection = RecordingConnection()
    merger = ClaimMerger(Partitions(connection))
    terms = LeaseTerms("worker", 60_000, 1_000)
    await merger.claim(terms, 10, 10, {}, skip=())
    assert {(0, "claim"), (1, "claim")} <= {*connection.scripts}

    connection.scripts.clear()
    await merger.claim(terms, 10, 10, {}, skip=[1])
    assert {(0, "claim")} == {*connection.scripts}

    connection.scripts.clear()
    claim = await merger.claim(terms, 10, 10, {}, skip=[0, 1])
    assert {(0, "peek"), (1, "peek")} == {*connection.scripts}
    assert 5 == claim.now
