"""Tests of the activity of lanes. The conformance suite of the stores tests how it is changed."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tarry.service.records.lane_activity import estimate_quantiles, latency_bucket


def count_buckets(durations: list[float]) -> dict[str, int]:
    """Return the histogram of durations in ms."""
    return Counter(str(latency_bucket(duration)) for duration in durations)


@pytest.mark.parametrize("median_ms", [0.3, 12.0, 4_000.0])
def test_quantiles_are_near_the_exact_ones(median_ms: float) -> None:
    """Quantiles that are estimated from the histogram differ by less than a tenth."""
    random, quantiles = Random(7), (0.0, 0.5, 0.5, 0.9, 0.99)
    durations = sorted(median_ms * random.lognormvariate(0, 0.7) for _ in range(5_000))

    estimates = estimate_quantiles(count_buckets(durations), quantiles)

    exact = [durations[int(quantile * len(durations))] for quantile in quantiles]
    assert estimates[1:] == pytest.approx(exact[1:], rel=0.1)
    assert estimates[0] == pytest.approx(exact[0], rel=0.2)


def test_quantiles_are_within_the_bucket_of_the_durations() -> None:
    """If all durations are in one bucket, all quantiles are in that bucket."""
    for duration in (0.0, 0.001, 1.0, 59_999.0, 3_600_000.0):
        for number in (1, 3, 7):
            estimates = estimate_quantiles(count_buckets([duration] * number), (0.0, 0.5, 1.0))
            assert estimates == pytest.approx([max(duration, 0.001)] * 3, rel=0.2)


def test_there_are_no_quantiles_without_attempts() -> None:
    assert [] == estimate_quantiles({}, (0.5,))
    assert [] == estimate_quantiles({"3": 0}, (0.5,))
