"""Distributions, compared with their closed forms."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, isfinite, log, nan, pi, sqrt
from random import Random
from statistics import NormalDist, fmean
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.simulator.distributions import (
    DISTRIBUTIONS,
    Distribution,
    Empirical,
    Exponential,
    Fixed,
    HeavyTail,
    Lognormal,
    Normal,
    Uniform,
)
from tests.core.invalid_values import invalid_values, keyword

DRAWS = 20_000
SIGMAS = 5
"""The tolerance of a share, in standard errors."""


def draw_many(distribution: Distribution, count: int = DRAWS, seed: int = 1) -> list[float]:
    """Return values drawn from a distribution."""
    draw = distribution.sampler(Random(seed))
    return [draw() for _ in range(count)]


class ConstantSource:
    """A random source that always returns the same number."""

    def __init__(self, u: float) -> None:
        self.u = u

    def random(self) -> float:
        """Return the number."""
        return self.u

    def gauss(self, mu: float, sigma: float) -> float:
        """Return a value up to 9 standard deviations from the mean."""
        return mu + sigma * (18 * self.u - 9)


LOWEST, HIGHEST = ConstantSource(0.0), ConstantSource(1 - 2**-53)


class ClosedForm(NamedTuple):
    """A distribution with its mean and quantiles."""

    distribution: Distribution
    mean: float
    quantile: Callable[[float], float]


FORMS = [
    ClosedForm(Uniform(2.0, 6.0), 4.0, lambda q: 2 + 4 * q),
    ClosedForm(Exponential(0.25), 0.25, lambda q: -0.25 * log(1 - q)),
    ClosedForm(Normal(10.0, 2.0), 10.0, NormalDist(10, 2).inv_cdf),
    ClosedForm(Normal(0.0, 3.0), 3 * sqrt(2 / pi), lambda q: 3 * NormalDist().inv_cdf((1 + q) / 2)),
    ClosedForm(
        Lognormal(0.1), 0.1 * exp(0.125), lambda q: 0.1 * exp(0.5 * NormalDist().inv_cdf(q))
    ),
    ClosedForm(Lognormal(3.0, 1.0), 3 * exp(0.5), lambda q: 3 * exp(NormalDist().inv_cdf(q))),
    ClosedForm(HeavyTail(0.5, 3.0), 0.75, lambda q: 0.5 * (1 - q) ** (-1 / 3)),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: repr(form.distribution))
def test_quantiles_are_those_of_the_closed_form(form: ClosedForm) -> None:
    """A share of about q of the draws is at most the q quantile of the closed form."""
    drawn = draw_many(form.distribution)

    for q in (0.01, 0.25, 0.5, 0.9, 0.99):
        below = sum(value <= form.quantile(q) for value in drawn) / DRAWS
        assert pytest.approx(q, abs=SIGMAS * sqrt(q * (1 - q) / DRAWS)) == below


@pytest.mark.parametrize("form", FORMS, ids=lambda form: repr(form.distribution))
def test_the_average_is_that_of_the_closed_form(form: ClosedForm) -> None:
    """The average of many draws is the mean."""
    assert pytest.approx(form.mean, rel=0.05) == fmean(draw_many(form.distribution))


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        (Fixed(0.0), 0.0),
        (Fixed(2.5), 2.5),
        (Uniform(1.0, 4.0), 2.5),
        (Exponential(0.2), 0.2),
        (Normal(3.0, 1.0), 3.0),
        (Lognormal(2.0, 0.0), 2.0),
        (Lognormal(2.0, 1.0), 2 * exp(0.5)),
        (HeavyTail(1.0), 3.0),
        (HeavyTail(2.0, 5.0), 2.5),
        (Empirical((1.0, 2.0, 6.0)), 3.0),
    ],
    ids=repr,
)
def test_every_distribution_has_a_mean(distribution: Distribution, expected: float) -> None:
    """`mean` is the expected value."""
    assert pytest.approx(expected) == distribution.mean


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=4), st.integers())
def test_empirical_draws_are_measured_values(values: list[float], seed: int) -> None:
    """All draws are measured values, and every measured value is drawn."""
    drawn = draw_many(Empirical(tuple(values)), 150, seed)

    assert set(values) == set(drawn)


def test_empirical_draws_each_measurement_equally_often() -> None:
    """A value that was measured twice is drawn twice as often."""
    drawn = draw_many(Empirical((1.0, 2.0, 2.0, 3.0)))

    assert pytest.approx(0.5, abs=SIGMAS * 0.5 / sqrt(DRAWS)) == drawn.count(2.0) / DRAWS
    assert pytest.approx(0.25, abs=SIGMAS * 0.44 / sqrt(DRAWS)) == drawn.count(3.0) / DRAWS


sizes = st.floats(0, 1e6)
positives = st.floats(1e-6, 1e6)
distributions = st.one_of(
    st.builds(Fixed, sizes),
    st.tuples(sizes, sizes).map(sorted).map(lambda bounds: Uniform(*bounds)),
    st.builds(Exponential, positives),
    st.builds(Normal, sizes, sizes),
    st.builds(Lognormal, positives, st.floats(0, 5)),
    st.builds(HeavyTail, positives, st.floats(1.01, 10)),
    st.lists(sizes, min_size=1, max_size=20).map(lambda values: Empirical(tuple(values))),
)


@given(distributions, st.integers())
def test_draws_are_finite_and_at_least_0(distribution: Distribution, seed: int) -> None:
    """For all distributions and seeds, a draw is a finite number of at least 0."""
    assert all(0 <= value < inf for value in draw_many(distribution, 20, seed))


@given(distributions)
def test_extreme_random_numbers_give_valid_durations(distribution: Distribution) -> None:
    """The lowest and highest random numbers give finite values of at least 0."""
    lowest, highest = (distribution.sampler(source)() for source in (LOWEST, HIGHEST))

    assert 0 <= lowest
    assert 0 <= highest
    assert isfinite(lowest)
    assert isfinite(highest)


@given(st.tuples(sizes, sizes).map(sorted), st.integers())
def test_uniform_stays_within_its_bounds(bounds: list[float], seed: int) -> None:
    """No draw lies outside the bounds, except for rounding."""
    low, high = bounds
    slack = 1e-9 * (1 + high)

    drawn = [*draw_many(Uniform(low, high), 20, seed), Uniform(low, high).sampler(HIGHEST)()]

    assert low <= min(drawn)
    assert max(drawn) <= high + slack
    assert low == Uniform(low, high).sampler(LOWEST)()


@given(positives, st.floats(1.01, 10), st.integers())
def test_heavy_tail_has_a_minimum(minimum: float, shape: float, seed: int) -> None:
    """No draw is below the minimum, which the lowest random number gives."""
    tail = HeavyTail(minimum, shape)

    assert minimum <= min(draw_many(tail, 20, seed))
    assert minimum == tail.sampler(LOWEST)()


@given(st.lists(sizes, min_size=1, max_size=60))
def test_extreme_random_numbers_give_first_and_last_measurement(values: list[float]) -> None:
    """The lowest random number gives the first value, and the highest one gives the last."""
    empirical = Empirical(tuple(values))

    assert (values[0], values[-1]) == tuple(
        empirical.sampler(source)() for source in (LOWEST, HIGHEST)
    )


@given(distributions, st.integers())
def test_the_same_seed_draws_the_same(distribution: Distribution, seed: int) -> None:
    """A distribution keeps no state between samplers."""
    assert draw_many(distribution, 10, seed) == draw_many(distribution, 10, seed)


# --- invalid values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "field", "value", "message"),
    [
        (make, *case.values)
        for make, rules in [
            (Fixed, {"value": "at least 0"}),
            (lambda low: Uniform(low, 2.0), {"low": "at least 0"}),
            (lambda high: Uniform(0.0, high), {"high": "at least 0"}),
            (Exponential, {"mean": "positive"}),
            (lambda mean: Normal(mean, 1.0), {"mean": "at least 0"}),
            (lambda sd: Normal(1.0, sd), {"sd": "at least 0"}),
            (Lognormal, {"median": "positive"}),
            (lambda sigma: Lognormal(1.0, sigma), {"sigma": "at least 0"}),
            (HeavyTail, {"minimum": "positive"}),
        ]
        for case in invalid_values(**rules)
    ],
)
def test_invalid_value_is_rejected_with_its_field(
    make: Callable[..., Distribution], field: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**keyword(field, value))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(2.0, 1.0), r"^high must be at least low \(2\), got 1$"),
        (lambda: HeavyTail(1.0, 1.0), "^shape must be greater than 1, or there is no mean, got 1$"),
        (lambda: HeavyTail(1.0, -2.0), "^shape must be greater than 1"),
        (lambda: HeavyTail(1.0, nan), "^shape must be finite"),
        (lambda: HeavyTail(1.0, inf), "^shape must be finite, got inf"),
        (lambda: Lognormal(1.0, 10.5), "^sigma must be at most 10, because the mean is unrealist"),
        (lambda: Empirical(()), "^values must hold at least one duration, got none$"),
        (lambda: Empirical((1.0, -0.1)), "^values must be at least 0, got -0.1$"),
        (lambda: Empirical((1.0, nan)), "^values must be finite"),
    ],
)
def test_invalid_combination_is_rejected(make: Callable[[], Distribution], message: str) -> None:
    """Values that are invalid together are rejected with the name of a field."""
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_shape_must_be_a_number() -> None:
    """A shape that is a string is rejected."""
    with pytest.raises(ConfigurationTypeError, match=r"^shape must be a number, got '2'$"):
        HeavyTail(1.0, **keyword("shape", "2"))


def test_table_of_kinds_has_every_distribution() -> None:
    expected = {Fixed, Uniform, Exponential, Normal, Lognormal, HeavyTail, Empirical}
    assert expected == set(DISTRIBUTIONS.values())
    assert 7 == len(DISTRIBUTIONS)


@given(distributions)
def test_distributions_compare_by_value(distribution: Distribution) -> None:
    """A distribution is equal to a copy made from its repr, and has the same hash."""
    copy = eval(repr(distribution))  # noqa: S307 - the repr of a value of this test

    assert distribution == copy
    assert hash(distribution) == hash(copy)
