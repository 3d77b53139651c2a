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

LAST = 1 - 2**-53
"""The largest number below 1, the largest possible u."""
INITIAL, MAXIMUM = 0.1, 30.0
DRAWS = 20_000

draws = st.floats(0, 1, exclude_max=True)
seconds = st.floats(0, 1e6)
names = st.sampled_from(sorted(JITTERS))


def drawn(name: str, ceiling: float = 8.0, seed: int = 7, n: int = DRAWS) -> list[float]:
    """Return n consecutive delays."""
    random, previous, delays = Random(seed), INITIAL, list[float]()
    for _ in range(n):
        previous = JITTERS[name](ceiling, previous, random.random(), INITIAL, MAXIMUM)
        delays.append(previous)
    return delays


def aws_2015(seed: int = 7, n: int = DRAWS) -> list[float]:
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
    """Return the statistic of Kolmogorov and Smirnov, times the root of n."""
    n = len(values)
    parts = [(value - low) / (high - low) for value in sorted(values)]
    gaps = (max((i + 1) / n - part, part - i / n) for i, part in enumerate(parts))
    return max(gaps) * sqrt(n)


def chi_square(values: list[float], low: float, high: float, cells: int = 100) -> float:
    """Return Pearson's statistic over cells of equal width."""
    counts = [0] * cells
    for value in values:
        counts[int((value - low) / (high - low) * cells)] += 1
    expected = len(values) / cells
    return sum((count - expected) ** 2 / expected for count in counts)


# --- the formulas --------------------------------------------------------------------------------


def test_the_names() -> None:
    """There are four jitters with names."""
    expected = {"none": none, "full": full, "equal": equal, "decorrelated": decorrelated}
    assert expected == JITTERS


@pytest.mark.parametrize(
    ("name", "u", "expected"),
    [
        ("none", 0.0, 8.0),
        ("none", 0.5, 8.0),
        ("none", LAST, 8.0),
        ("full", 0.0, 0.0),
        ("full", 0.25, 2.0),
        ("full", LAST, 8 - 2**-50),
        ("equal", 0.0, 4.0),
        ("equal", 0.25, 5.0),
        ("equal", LAST, 8.0),
        ("decorrelated", 0.0, 0.5),
        ("decorrelated", 0.5, 3.25),
        ("decorrelated", LAST, 6.0),
    ],
)
def test_by_hand(name: str, u: float, expected: float) -> None:
    """Delays at a ceiling of 8 after a delay of 2, with an initial delay of 0.5."""
    actual = JITTERS[name](8.0, 2.0, u, 0.5, 30.0)
    assert pytest.approx(expected, rel=1e-15) == actual


@given(seconds, seconds, draws)
def test_none(ceiling: float, previous: float, u: float) -> None:
    """Without jitter the delay is the ceiling."""
    assert ceiling == none(ceiling, previous, u, INITIAL, MAXIMUM)


@given(seconds, seconds, draws)
def test_full(ceiling: float, previous: float, u: float) -> None:
    """Full jitter is u * c."""
    assert u * ceiling == full(ceiling, previous, u, INITIAL, MAXIMUM)


@given(seconds, seconds, draws)
def test_equal(ceiling: float, previous: float, u: float) -> None:
    """Equal jitter is c/2 + u * c/2."""
    assert ceiling / 2 + u * ceiling / 2 == pytest.approx(
        equal(ceiling, previous, u, INITIAL, MAXIMUM)
    )


@given(seconds, seconds, draws, seconds, seconds)
def test_decorrelated(ceiling: float, previous: float, u: float, a: float, b: float) -> None:
    """Decorrelated jitter draws from the initial delay to thrice the last, clamped before it."""
    initial, maximum = sorted((a, b))
    high = 3 * previous
    high = min(high, maximum)
    high = max(high, initial)
    expected = initial + u * (high - initial)
    assert expected == decorrelated(ceiling, previous, u, initial, maximum)


@given(names, seconds, seconds, draws, st.tuples(seconds, seconds))
def test_bounds(
    name: str, ceiling: float, previous: float, u: float, ends: tuple[float, float]
) -> None:
    """No delay leaves the window of its jitter."""
    initial, maximum = sorted(ends)
    low, high = {
        "none": (ceiling, ceiling),
        "full": (0.0, ceiling),
        "equal": (ceiling / 2, ceiling),
        "decorrelated": (initial, maximum),
    }[name]
    assert low <= JITTERS[name](ceiling, previous, u, initial, maximum) <= high


@given(names, seconds, seconds, draws, draws)
def test_a_larger_draw_never_waits_less(
    name: str, ceiling: float, previous: float, u: float, v: float
) -> None:
    """The delay rises with the drawn number."""
    less, more = (
        JITTERS[name](ceiling, previous, draw, INITIAL, MAXIMUM) for draw in sorted((u, v))
    )
    assert less <= more


@given(st.sampled_from(["none", "full", "equal"]), seconds, seconds, draws)
def test_a_higher_ceiling_never_waits_less(name: str, c: float, d: float, u: float) -> None:
    """The delay rises with the ceiling."""
    less, more = (JITTERS[name](x, INITIAL, u, INITIAL, MAXIMUM) for x in sorted((c, d)))
    assert less <= more


@given(st.sampled_from(["none", "full", "equal"]), seconds, seconds, seconds, draws)
def test_only_decorrelated_remembers(
    name: str, ceiling: float, previous: float, other: float, u: float
) -> None:
    """The last delay matters to decorrelated jitter alone."""
    one, two = (JITTERS[name](ceiling, last, u, INITIAL, MAXIMUM) for last in (previous, other))
    assert one == two


@given(seconds, seconds, seconds, draws)
def test_decorrelated_does_not_look_at_the_ceiling(
    ceiling: float, other: float, previous: float, u: float
) -> None:
    """Decorrelated jitter grows from the last delay and not with the attempt number."""
    one, two = (decorrelated(c, previous, u, INITIAL, MAXIMUM) for c in (ceiling, other))
    assert one == two


# --- the distributions ---------------------------------------------------------------------------
# 1.95 is the critical value of Kolmogorov and Smirnov at 1 in 1,000, and 149 that of chi-square
# with 99 degrees of freedom.


@pytest.mark.parametrize(("name", "low"), [("full", 0.0), ("equal", 4.0)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_uniform(name: str, low: float, seed: int) -> None:
    """Full jitter is uniform below the ceiling, equal jitter in its upper half."""
    delays = drawn(name, ceiling=8.0, seed=seed)
    assert pytest.approx((low + 8.0) / 2, rel=0.01) == mean(delays)
    assert distance_from_uniform(delays, low, 8.0) < 1.95
    assert chi_square(delays, low, 8.0) < 149


def test_the_yardsticks_see_what_is_not_uniform() -> None:
    """The two statistics tell squared draws from uniform ones."""
    squared = [delay**2 / 8.0 for delay in drawn("full", ceiling=8.0)]
    assert distance_from_uniform(squared, 0.0, 8.0) > 10
    assert chi_square(squared, 0.0, 8.0) > 1_000


def test_no_jitter_returns_together() -> None:
    """Without jitter all delays are one."""
    assert {8.0} == set(drawn("none"))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_decorrelated_stays_below_the_maximum(seed: int) -> None:
    """In a long run no delay exceeds the maximum or thrice the one before."""
    delays = drawn("decorrelated", seed=seed)
    assert INITIAL <= min(delays)
    assert max(delays) <= MAXIMUM
    assert all(after <= max(INITIAL, 3 * before) for before, after in pairwise(delays))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_decorrelated_does_not_pile_up(seed: int) -> None:
    """About 1 % of the delays lie within 1 % of the maximum, where clamped draws pile up."""

    def at_the_cap(delays: list[float]) -> float:
        return mean(delay >= 0.99 * MAXIMUM for delay in delays)

    assert at_the_cap(drawn("decorrelated", seed=seed)) < 0.02
    assert at_the_cap(aws_2015(seed)) > 0.2


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_decorrelated_is_uniform_below_the_clamped_bound(seed: int) -> None:
    """After a delay of at least a third of the maximum the next one is uniform up to it."""
    pairs = pairwise(drawn("decorrelated", seed=seed))
    delays = [after for before, after in pairs if 3 * before >= MAXIMUM]
    assert len(delays) > 1_000
    assert distance_from_uniform(delays, INITIAL, MAXIMUM) < 1.95
