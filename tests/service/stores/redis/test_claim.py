"""Division of a claim among partitions. Claims themselves are tested with real servers."""

from __future__ import annotations

import pytest

from tarry.service.stores.redis.claim import divide


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
