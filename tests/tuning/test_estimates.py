"""Estimates, compared with counting and with random sampling."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tarry.simulator.metrics import quantile
from tarry.tuning.estimates import (
    hedged_quantile,
    quantile_interval,
    required_samples,
    round_two_digits,
    share_above,
    wilson_interval,
)

samples = st.lists(st.floats(0, 100), min_size=1, max_size=30).map(sorted)
shares = st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0])


@pytest.mark.parametrize(("q", "size"), [(0.5, 10), (0.99, 500), (0.995, 1000), (0.999, 5000)])
def test_five_samples_lie_at_a_quantile_or_beyond(q: float, size: int) -> None:
    """The required number of samples leaves five at the quantile or beyond it."""
    sample = [float(number) for number in range(size)]

    assert size == required_samples(q)
    assert 5 == sum(one >= quantile(sample, q) for one in sample)


@pytest.mark.parametrize("q", [0.5, 0.95, 0.995])
def test_interval_contains_the_true_quantile_in_95_percent(q: float) -> None:
    """Of 300 intervals about 285 contain the true quantile."""
    random_source = Random(7)
    held = 0
    for _ in range(300):
        low, high = quantile_interval(sorted(random_source.random() for _ in range(1000)), q)
        held += low <= q <= high

    assert 279 <= held <= 300


@pytest.mark.parametrize(
    ("successes", "tries", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (2, 1000, 0.0005, 0.0073),
    ],
)
def test_wilson_interval(successes: int, tries: int, low: float, high: float) -> None:
    """The published values, including shares of 0 and 1."""
    assert (low, high) == pytest.approx(wilson_interval(successes, tries), abs=1e-4)


def test_wilson_interval_without_tries() -> None:
    """Without tries the interval is 0 to 1."""
    assert (0.0, 1.0) == wilson_interval(0, 0)


def all_pairs(sample: list[float], delay: float) -> list[float]:
    """Return the duration of a hedged call for each pair of durations of its copies."""
    return sorted(min(first, delay + second) for first in sample for second in sample)


@given(samples, shares.filter(lambda q: 0 < q < 1), st.floats(0, 100))
@example([1.0, 1.0, 5.0], 0.9, 1.0)
def test_hedged_quantile_equals_that_of_all_pairs(
    sample: list[float], q: float, delay: float
) -> None:
    """The closed form gives the quantile over all pairs of copies."""
    assume(delay == 0 or delay > 1e-6)  # a smaller delay is lost in the rounding of t + delay

    assert quantile(all_pairs(sample, delay), q) == pytest.approx(
        hedged_quantile(sample, q, delay), abs=1e-9
    )


def test_hedged_quantile_equals_that_of_random_pairs() -> None:
    """200,000 random pairs of copies have the computed p99 and load."""
    random_source = Random(7)
    sample = sorted(random_source.lognormvariate(-3, 1) for _ in range(5_000))
    delay = quantile(sample, 0.95)
    drawn: list[float] = []
    copies = 0
    for _ in range(200_000):
        first, second = random_source.choice(sample), random_source.choice(sample)
        copies += first > delay
        drawn.append(min(first, delay + second))

    assert quantile(sorted(drawn), 0.99) == pytest.approx(
        hedged_quantile(sample, 0.99, delay), rel=0.02
    )
    assert copies / 200_000 == pytest.approx(share_above(sample, delay), rel=0.05)


@given(samples, shares, st.floats(0, 100))
def test_hedged_quantile_is_never_longer(sample: list[float], q: float, delay: float) -> None:
    """A hedged quantile is at most that of a single copy."""
    assert hedged_quantile(sample, q, delay) <= quantile(sample, q)


@pytest.mark.parametrize(
    ("value", "near", "above"),
    [
        (0.0, 0.0, 0.0),
        (0.1234, 0.12, 0.13),
        (0.12, 0.12, 0.12),
        (0.0999, 0.1, 0.1),
        (9.96, 10.0, 10.0),
        (1234.0, 1200.0, 1300.0),
        (0.00035, 0.00035, 0.00035),
    ],
)
def test_round_two_digits(value: float, near: float, above: float) -> None:
    """A value is rounded to two significant digits."""
    assert (near, above) == (round_two_digits(value), round_two_digits(value, up=True))


@given(st.floats(1e-6, 1e6))
def test_rounding_up(value: float) -> None:
    """A value rounded up is at least the value, and at most a tenth more."""
    assert value * (1 - 1e-9) <= round_two_digits(value, up=True) <= value * 1.1 + 1e-12
