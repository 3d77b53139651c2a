"""Tests for latency quantiles, compared with sorted lists."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tarry.core.downstream import MAX_LATENCY_SAMPLES, Latency

durations = st.floats(0, 1e6)
quantiles = st.floats(0, 1)


def measure(values: list[float]) -> Latency:
    """Return a latency to which `values` were added in this order."""
    latency = Latency()
    for value in values:
        latency.add(value)
    return latency


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
def test_quantiles_of_one_to_a_hundred(q: float, expected: float) -> None:
    """Of 1 to 100, the quantile is the first number with at least the share q below it."""
    assert expected == measure([float(n * 37 % 101) for n in range(1, 101)]).quantile(q)


@given(durations, quantiles)
def test_one_duration_is_every_quantile(duration: float, q: float) -> None:
    assert duration == measure([duration]).quantile(q)


@given(st.lists(durations, min_size=4, max_size=30), quantiles)
@example([1.0, 1.0, 2.0], 0.5)
@example([1.0, 2.0], 0.5)
def test_definition_of_a_quantile(values: list[float], q: float) -> None:
    """A quantile is one of n durations: at least q are at or below it, at most q (n + 1) below."""
    quantile = measure(values).quantile(q)
    assert quantile in values
    assert quantile is not None
    assert sum(value <= quantile for value in values) >= q * len(values)
    assert sum(value < quantile for value in values) <= q * (len(values) + 1)


@given(st.lists(durations, min_size=1, max_size=30), quantiles, quantiles)
def test_quantiles_are_ordered(values: list[float], p: float, q: float) -> None:
    """A larger q never has a lower quantile."""
    latency = measure(values)
    low, high = latency.quantile(min(p, q)), latency.quantile(max(p, q))
    assert low is not None
    assert high is not None
    assert low <= high


@given(st.lists(st.tuples(durations, quantiles), min_size=5, max_size=30))
def test_quantiles_of_few_durations_are_exact(rounds: list[tuple[float, float]]) -> None:
    """Until the window of 512 durations is full, quantiles are exact."""
    latency = Latency()
    added: list[float] = []
    for duration, q in rounds:
        latency.add(duration)
        added.append(duration)
        rank = min(max(1, ceil(q * (len(added) + 1))), len(added))
        assert sorted(added)[rank - 1] == latency.quantile(q)


@pytest.mark.parametrize("count", [511, 512, 513, 1_000, 10_000])
def test_only_the_last_512_are_kept(count: int) -> None:
    """The quantiles are those of the last 512 durations."""
    latency = measure([float(n) for n in range(count)])
    kept = [float(n) for n in range(count)][-512:]
    assert 512 == MAX_LATENCY_SAMPLES
    assert len(kept) == len(latency)
    assert [kept[0], kept[len(kept) // 2], kept[-1]] == [
        latency.quantile(q) for q in (0.0, 0.5, 1.0)
    ]


def test_quantiles_of_a_full_window_are_recent() -> None:
    """With a full window a quantile is at most 32 durations old."""
    latency = measure([0.0] * 512)
    for n in range(1, 2_000):
        latency.add(float(n))
        newest = latency.quantile(1.0)
        assert newest is not None
        assert n - 32 < newest <= n


def test_replaced_durations_have_no_effect() -> None:
    """After 512 new durations no old duration affects a quantile."""
    latency = measure([1.0] * 512)
    before = latency.quantile(0.5)
    for _ in range(512):
        latency.add(2.0)
    assert (1.0, 2.0) == (before, latency.quantile(0.5))


def test_tail_of_a_full_window() -> None:
    """The quantile 0.99 of 512 durations has five of them at or above it: 1 % of 513."""
    latency = measure([float(n) for n in range(512)])
    assert 507.0 == latency.quantile(0.99)


@pytest.mark.parametrize(
    ("bound", "random_number", "expected"),
    [(2.0, 0.0, 3.0), (2.0, 0.99, 4.0), (0.0, 0.5, 3.0), (4.0, 0.5, 4.0), (9.0, 0.0, 9.0)],
)
def test_longer_than(bound: float, random_number: float, expected: float) -> None:
    """One of the longer durations is drawn; the bound itself if there is none."""
    latency = measure([4.0, 1.0, 3.0, 2.0])
    assert 2.0 < (latency.quantile(0.5) or 0.0)
    assert expected == latency.longer_than(bound, random_number)
