"""Tests for latency quantiles, compared with sorted lists."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tarry.core.downstream import MAX_LATENCY_SAMPLES, Latency

durations = st.floats(0, 1e6)
quantiles = st.floats(0, 1)


def latency_of(values: list[float]) -> Latency:
    """Return a latency that has seen `values`, in this order."""
    latency = Latency()
    for value in values:
        latency.add(value)
    return latency


@pytest.mark.parametrize("q", [0.0, 0.5, 0.95, 1.0])
def test_nothing_seen_nothing_known(q: float) -> None:
    """Without durations there is no quantile."""
    latency = Latency()
    assert None is latency.quantile(q)
    assert 0 == len(latency)


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        (0.0, 1.0),
        (0.005, 1.0),
        (0.01, 2.0),
        (0.25, 26.0),
        (0.5, 51.0),
        (0.75, 76.0),
        (0.95, 96.0),
        (0.99, 100.0),
        (0.999, 100.0),
        (1.0, 100.0),
    ],
)
def test_the_quantiles_of_one_to_a_hundred(q: float, expected: float) -> None:
    """Of 1 to 100 in any order, the quantile is the first number with the share q below it."""
    assert expected == latency_of([float(n * 37 % 101) for n in range(1, 101)]).quantile(q)


@given(durations, quantiles)
def test_one_duration_is_every_quantile(duration: float, q: float) -> None:
    """With one duration every quantile is that duration."""
    assert duration == latency_of([duration]).quantile(q)


@given(st.lists(durations, min_size=4, max_size=30), quantiles)
@example([1.0, 1.0, 2.0], 0.5)
@example([1.0, 2.0], 0.5)
def test_a_share_q_did_not_exceed_it(values: list[float], q: float) -> None:
    """The share q lies at or below the quantile, no more than that below it, and it was seen."""
    found = latency_of(values).quantile(q)
    assert found in values
    assert found is not None
    assert sum(value <= found for value in values) >= q * len(values)
    assert sum(value < found for value in values) <= q * len(values)


@given(st.lists(durations, min_size=1, max_size=30), quantiles, quantiles)
def test_higher_share_longer_time(values: list[float], p: float, q: float) -> None:
    """A higher share never has a lower quantile."""
    latency = latency_of(values)
    low, high = latency.quantile(min(p, q)), latency.quantile(max(p, q))
    assert low is not None
    assert high is not None
    assert low <= high


@given(st.lists(st.tuples(durations, quantiles), min_size=5, max_size=30))
def test_exact_while_it_fills(rounds: list[tuple[float, float]]) -> None:
    """Up to 512 durations, quantiles are exact."""
    latency = Latency()
    seen: list[float] = []
    for duration, q in rounds:
        latency.add(duration)
        seen.append(duration)
        place = min(int(q * len(seen)), len(seen) - 1)
        assert sorted(seen)[place] == latency.quantile(q)


@pytest.mark.parametrize("seen", [511, 512, 513, 1_000, 10_000])
def test_only_the_last_512_are_remembered(seen: int) -> None:
    """However many are seen, the quantiles are those of the last 512."""
    latency = latency_of([float(n) for n in range(seen)])
    kept = [float(n) for n in range(seen)][-512:]
    assert 512 == MAX_LATENCY_SAMPLES
    assert len(kept) == len(latency)
    assert [kept[0], kept[len(kept) // 2], kept[-1]] == [
        latency.quantile(q) for q in (0.0, 0.5, 1.0)
    ]


def test_a_full_memory_is_not_far_behind() -> None:
    """A quantile is at most 32 durations old."""
    latency = latency_of([0.0] * 512)
    for n in range(1, 2_000):
        latency.add(float(n))
        newest = latency.quantile(1.0)
        assert newest is not None
        assert n - 32 < newest <= n


def test_replaced_durations_are_gone() -> None:
    """After 512 new durations no old one has an effect."""
    latency = latency_of([1.0] * 512)
    before = latency.quantile(0.5)
    for _ in range(512):
        latency.add(2.0)
    assert (1.0, 2.0) == (before, latency.quantile(0.5))
