"""Tests of the activity of lanes. The conformance suite of the stores tests how it is changed."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tarry.service.lane_activity import estimate_quantile, latency_bucket


def count_buckets(durations: list[float]) -> dict[str, int]:
    """Return the histogram of durations in ms."""
    return Counter(str(latency_bucket(duration)) for duration in durations)


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("median_ms", [0.3, 12.0, 4_000.0])
def test_a_quantile_is_near_the_exact_one(quantile: float, median_ms: float) -> None:
    """A quantile that is estimated from the histogram differs by less than a tenth."""
    random = Random(7)
    durations = sorted(median_ms * random.lognormvariate(0, 0.7) for _ in range(5_000))

    estimate = estimate_quantile(count_buckets(durations), quantile)

    assert estimate == pytest.approx(durations[int(quantile * len(durations))], rel=0.1)


def test_a_quantile_is_within_the_bucket_of_the_durations() -> None:
    """If all durations are in one bucket, all quantiles are in that bucket."""
    for duration in (0.0, 0.001, 1.0, 59_999.0, 3_600_000.0):
        counts = count_buckets([duration] * 3)
        for quantile in (0.0, 0.5, 1.0):
            estimate = estimate_quantile(counts, quantile)
            assert estimate == pytest.approx(max(duration, 0.001), rel=0.2)


def test_there_is_no_quantile_without_attempts() -> None:
    """Without attempts, a quantile is None."""
    assert estimate_quantile({}, 0.5) is None
    assert estimate_quantile({"3": 0}, 0.5) is None
