"""Tests for jitter: exact values, bounds and distributions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.backoff import JITTERS, decorrelated, equal, full, none

LARGEST_BELOW_ONE = 1 - 2**-53
"""The largest float below 1, which is the largest value of u."""
INITIAL, MAXIMUM = 0.1, 30.0
SAMPLE_SIZE = 20_000

random_numbers = st.floats(0, 1, exclude_max=True)
seconds = st.floats(0, 1e6)
names = st.sampled_from(sorted(JITTERS))


def draw_delays(
    name: str, ceiling: float = 8.0, seed: int = 7, n: int = SAMPLE_SIZE
) -> list[float]:
    """Return n consecutive delays."""
    random, previous, delays = Random(seed), INITIAL, list[float]()
    for _ in range(n):
        previous = JITTERS[name](ceiling, previous, random.random(), INITIAL, MAXIMUM)
        delays.append(previous)
    return delays


def draw_aws_2015_delays(seed: int = 7, n: int = SAMPLE_SIZE) -> list[float]:
    """Return n delays of the first published decorrelated jitter, which clamps the delay."""
    random, previous, delays = Random(seed), INITIAL, list[float]()
    for _ in range(n):
        previous = min(MAXIMUM, random.uniform(INITIAL, 3 * previous))
        delays.append(previous)
    return delays


def mean(values: Iterable[float]) -> float:
    """Return the mean."""
    values = list(values)
    return sum(values) / len(values)


def distance_from_uniform(values: list[float], low: float, high: float) -> float:
    """Return the Kolmogorov-Smirnov statistic, times the square root of n."""
    n = len(values)
    positions = [(value - low) / (high - low) for value in sorted(values)]
    gaps = (max((i + 1) / n - position, position - i / n) for i, position in enumerate(positions))
    return max(gaps) * sqrt(n)


def chi_square(values: list[float], low: float, high: float, cells: int = 100) -> float:
    """Return Pearson's chi-square statistic over cells of equal width."""
    counts = [0] * cells
    for value in values:
        counts[int((value - low) / (high - low) * cells)] += 1
    expected = len(values) / cells
    return sum((count - expected) ** 2 / expected for count in counts)


# --- formulas ------------------------------------------------------------------------------------


def test_names_of_jitters() -> None:
    """The jitters are named none, full, equal and decorrelated."""
    expected = {"none": none, "full": full, "equal": equal, "decorrelated": decorrelated}
    assert expected == JITTERS


@pytest.mark.parametrize(
    ("name", "u", "expected"),
    [
        ("none", 0.0, 8.0),
        ("none", 0.5, 8.0),
        ("none", LARGEST_BELOW_ONE, 8.0),
        ("full", 0.0, 0.0),
        ("full", 0.25, 2.0),
        ("full", LARGEST_BELOW_ONE, 8 - 2**-50),
        ("equal", 0.0, 4.0),
        ("equal", 0.25, 5.0),
        ("equal", LARGEST_BELOW_ONE, 8.0),
        ("decorrelated", 0.0, 0.5),
        ("decorrelated", 0.5, 3.25),
        ("decorrelated", LARGEST_BELOW_ONE, 6.0),
    ],
)
def test_delay_for_a_random_number(name: str, u: float, expected: float) -> None:
    """Each jitter has the expected delays for ceiling 8, previous delay 2 and initial delay 0.5."""
    actual = JITTERS[name](8.0, 2.0, u, 0.5, 30.0)
    assert pytest.approx(expected, rel=1e-15) == actual


@given(seconds, seconds, random_numbers)
def test_none(ceiling: float, previous: float, u: float) -> None:
    """Without jitter the delay is the ceiling."""
    assert ceiling == none(ceiling, previous, u, INITIAL, MAXIMUM)


@given(seconds, seconds, random_numbers)
def test_full(ceiling: float, previous: float, u: float) -> None:
    """Full jitter is u * ceiling."""
    assert u * ceiling == full(ceiling, previous, u, INITIAL, MAXIMUM)


@given(seconds, seconds, random_numbers)
def test_equal(ceiling: float, previous: float, u: float) -> None:
    """Equal jitter is ceiling/2 + u * ceiling/2."""
    assert ceiling / 2 + u * ceiling / 2 == pytest.approx(
        equal(ceiling, previous, u, INITIAL, MAXIMUM)
    )


@given(seconds, seconds, random_numbers, seconds, seconds)
def test_decorrelated(ceiling: float, previous: float, u: float, a: float, b: float) -> None:
    """Decorrelated jitter is uniform from the initial delay to min(3 * previous, maximum)."""
    initial, maximum = sorted((a, b))
    high = 3 * previous
    high = min(high, maximum)
    high = max(high, initial)
    expected = initial + u * (high - initial)
    assert expected == decorrelated(ceiling, previous, u, initial, maximum)


@given(names, seconds, seconds, random_numbers, st.tuples(seconds, seconds))
def test_bounds(
    name: str, ceiling: float, previous: float, u: float, limits: tuple[float, float]
) -> None:
    """Every delay lies within the bounds of its jitter."""
    initial, maximum = sorted(limits)
    low, high = {
        "none": (ceiling, ceiling),
        "full": (0.0, ceiling),
        "equal": (ceiling / 2, ceiling),
        "decorrelated": (initial, maximum),
    }[name]
    assert low <= JITTERS[name](ceiling, previous, u, initial, maximum) <= high


@given(names, seconds, seconds, random_numbers, random_numbers)
def test_larger_random_number_never_shortens_the_delay(
    name: str, ceiling: float, previous: float, u: float, v: float
) -> None:
    """A larger random number gives the same delay or a longer one."""
    shorter, longer = (
        JITTERS[name](ceiling, previous, number, INITIAL, MAXIMUM) for number in sorted((u, v))
    )
    assert shorter <= longer


@given(st.sampled_from(["none", "full", "equal"]), seconds, seconds, random_numbers)
def test_higher_ceiling_never_shortens_the_delay(name: str, c: float, d: float, u: float) -> None:
    """A higher ceiling gives the same delay or a longer one."""
    shorter, longer = (
        JITTERS[name](ceiling, INITIAL, u, INITIAL, MAXIMUM) for ceiling in sorted((c, d))
    )
    assert shorter <= longer


@given(st.sampled_from(["none", "full", "equal"]), seconds, seconds, seconds, random_numbers)
def test_previous_delay_affects_only_decorrelated_jitter(
    name: str, ceiling: float, previous: float, other: float, u: float
) -> None:
    """The other jitters do not depend on the previous delay."""
    one, two = (JITTERS[name](ceiling, delay, u, INITIAL, MAXIMUM) for delay in (previous, other))
    assert one == two


@given(seconds, seconds, seconds, random_numbers)
def test_decorrelated_does_not_depend_on_the_ceiling(
    ceiling: float, other: float, previous: float, u: float
) -> None:
    """Decorrelated jitter depends on the previous delay, not on the ceiling."""
    one, two = (decorrelated(c, previous, u, INITIAL, MAXIMUM) for c in (ceiling, other))
    assert one == two


# --- distributions -------------------------------------------------------------------------------
# At a significance level of 0.001 the critical value of Kolmogorov-Smirnov is 1.95, and that of
# chi-square with 99 degrees of freedom is 149.


@pytest.mark.parametrize(("name", "low"), [("full", 0.0), ("equal", 4.0)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_uniform(name: str, low: float, seed: int) -> None:
    """Full jitter is uniform from 0 to the ceiling, equal jitter from half the ceiling to it."""
    delays = draw_delays(name, ceiling=8.0, seed=seed)
    assert pytest.approx((low + 8.0) / 2, rel=0.01) == mean(delays)
    assert distance_from_uniform(delays, low, 8.0) < 1.95
    assert chi_square(delays, low, 8.0) < 149


def test_statistics_detect_a_distribution_that_is_not_uniform() -> None:
    """Both statistics are far above their critical values for squared random numbers."""
    squared = [delay**2 / 8.0 for delay in draw_delays("full", ceiling=8.0)]
    assert distance_from_uniform(squared, 0.0, 8.0) > 10
    assert chi_square(squared, 0.0, 8.0) > 1_000


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_decorrelated_stays_below_the_maximum(seed: int) -> None:
    """In a long run no delay exceeds the maximum or three times the previous delay."""
    delays = draw_delays("decorrelated", seed=seed)
    assert INITIAL <= min(delays)
    assert max(delays) <= MAXIMUM
    assert all(after <= max(INITIAL, 3 * before) for before, after in pairwise(delays))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_decorrelated_does_not_cluster_at_the_maximum(seed: int) -> None:
    """Under 2 % of the delays lie within 1 % of the maximum; clamping delays gives over 20 %."""

    def share_near_maximum(delays: list[float]) -> float:
        return mean(delay >= 0.99 * MAXIMUM for delay in delays)

    assert share_near_maximum(draw_delays("decorrelated", seed=seed)) < 0.02
    assert share_near_maximum(draw_aws_2015_delays(seed)) > 0.2


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_decorrelated_is_uniform_below_the_clamped_bound(seed: int) -> None:
    """After a delay of at least a third of the maximum, the next is uniform up to the maximum."""
    pairs = pairwise(draw_delays("decorrelated", seed=seed))
    delays = [after for before, after in pairs if 3 * before >= MAXIMUM]
    assert len(delays) > 1_000
    assert distance_from_uniform(delays, INITIAL, MAXIMUM) < 1.95
