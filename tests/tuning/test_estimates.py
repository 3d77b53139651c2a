"""Quantiles, intervals and the closed form of hedging, against counting and against dice."""

from __future__ import annotations

from math import ceil
from random import Random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tarry.tuning.estimates import (
    beyond,
    hedged_quantile,
    needed,
    quantile,
    quantile_interval,
    rounded,
    wilson,
)

samples = st.lists(st.floats(0, 100), min_size=1, max_size=30).map(sorted)
shares = st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0])


@given(samples, shares)
@example([1.0, 2.0], 0.5)
def test_a_quantile_is_the_least_value_that_covers_its_share(sample: list[float], q: float) -> None:
    """At least the share q is not longer, and of any shorter value that is not true."""
    found = quantile(sample, q)

    assert sum(value <= found for value in sample) >= q * len(sample) - 1e-9
    assert sum(value < found for value in sample) < q * len(sample) or found == sample[0]


def test_quantiles_of_a_thousand() -> None:
    """The p99.5 of 1 to 1,000 is 995, whatever the rounding of floats has to say."""
    assert [500, 950, 995, 999, 1000] == [
        quantile(range(1, 1001), q) for q in (0.5, 0.95, 0.995, 0.999, 1.0)
    ]


@pytest.mark.parametrize(("q", "size"), [(0.5, 10), (0.99, 500), (0.995, 1000), (0.999, 5000)])
def test_five_samples_lie_beyond(q: float, size: int) -> None:
    """A quantile takes so many samples that five are beyond it."""
    assert size == needed(q)
    assert 5 == size - ceil(q * size)


@pytest.mark.parametrize("q", [0.5, 0.95, 0.995])
def test_an_interval_holds_the_truth_95_times_in_100(q: float) -> None:
    """Of 300 samples of which the truth is known, about 285 have it between their bounds."""
    dice = Random(7)
    held = 0
    for _ in range(300):
        low, high = quantile_interval(sorted(dice.random() for _ in range(1000)), q)
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
def test_the_interval_of_wilson(successes: int, tries: int, low: float, high: float) -> None:
    """The published values, also where nothing or everything succeeded."""
    assert (low, high) == pytest.approx(wilson(successes, tries), abs=1e-4)


def test_without_tries_everything_is_possible() -> None:
    """Nothing tried, nothing known."""
    assert (0.0, 1.0) == wilson(0, 0)


def every_pair(sample: list[float], delay: float) -> list[float]:
    """Return how long a hedged call takes, for each pair of durations of its copies."""
    return sorted(min(first, delay + second) for first in sample for second in sample)


@given(samples, shares.filter(lambda q: 0 < q < 1), st.floats(0, 100))
@example([1.0, 1.0, 5.0], 0.9, 1.0)
def test_the_closed_form_is_what_all_pairs_give(
    sample: list[float], q: float, delay: float
) -> None:
    """The quantile over every pair of copies, without making the pairs."""
    assume(delay == 0 or delay > 1e-6)  # below, t + delay is t for one of them and not the other

    assert quantile(every_pair(sample, delay), q) == pytest.approx(
        hedged_quantile(sample, q, delay), abs=1e-9
    )


def test_the_closed_form_is_what_dice_give() -> None:
    """Two independent copies, drawn 200,000 times, have the p99 and the load that is worked out."""
    dice = Random(7)
    sample = sorted(dice.lognormvariate(-3, 1) for _ in range(5_000))
    delay = quantile(sample, 0.95)
    drawn, copies = [], 0
    for _ in range(200_000):
        first, second = dice.choice(sample), dice.choice(sample)
        copies += first > delay
        drawn.append(min(first, delay + second))

    assert quantile(sorted(drawn), 0.99) == pytest.approx(
        hedged_quantile(sample, 0.99, delay), rel=0.02
    )
    assert copies / 200_000 == pytest.approx(beyond(sample, delay), rel=0.05)


@given(samples, shares, st.floats(0, 100))
def test_a_second_copy_never_makes_it_slower(sample: list[float], q: float, delay: float) -> None:
    """The first answer wins, so that a hedged quantile is at most the plain one."""
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
def test_numbers_of_two_digits(value: float, near: float, above: float) -> None:
    """A proposal is a number that a person would have written."""
    assert (near, above) == (rounded(value), rounded(value, up=True))


@given(st.floats(1e-6, 1e6))
def test_rounding_up_is_never_down(value: float) -> None:
    """A timeout is at least what was measured, and at most a tenth more."""
    assert value * (1 - 1e-9) <= rounded(value, up=True) <= value * 1.1 + 1e-12
