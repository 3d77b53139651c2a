"""Distributions of durations, in seconds. A sampler draws values from a distribution."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tarry.core.checks import check_at_least, check_number, check_positive
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

Sampler: TypeAlias = "Callable[[], float]"
"""A function that draws one value from a distribution."""

_MAX_SIGMA = 10.0


class RandomSource(Protocol):
    """The methods of `random.Random` that distributions use."""

    def random(self) -> float:
        """Return a number from [0, 1)."""
        ...

    def gauss(self, mu: float, sigma: float) -> float:
        """Return a number from the normal distribution."""
        ...


class Distribution(Protocol):
    """A distribution of durations."""

    @property
    def mean(self) -> float:
        """The expected value; for `Normal`, an approximation."""
        ...

    def sampler(self, source: RandomSource) -> Sampler:
        """Return a function that draws one value, never below 0."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant duration."""

    value: float

    def __post_init__(self) -> None:
        check_at_least("value", self.value, 0)

    @property
    def mean(self) -> float:
        """The value itself."""
        return self.value

    def sampler(self, source: RandomSource) -> Sampler:  # noqa: ARG002 - part of the protocol
        """Return a function that returns the value."""
        value = self.value
        return lambda: value


@dataclass(frozen=True, slots=True)
class Uniform:
    """The uniform distribution from `low` to `high`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if check_at_least("high", self.high, 0) < check_at_least("low", self.low, 0):
            rule = f"must be at least low ({self.low:g}), got {self.high:g}"
            raise ConfigurationError("high", rule)

    @property
    def mean(self) -> float:
        """The middle of the range."""
        return (self.low + self.high) / 2

    def sampler(self, source: RandomSource) -> Sampler:
        """Return a function that draws one value."""
        low, spread, draw = self.low, self.high - self.low, source.random
        return lambda: low + spread * draw()


@dataclass(frozen=True, slots=True)
class Exponential:
    """The exponential distribution, which pauses between independent events have."""

    mean: float

    def __post_init__(self) -> None:
        check_positive("mean", self.mean)

    def sampler(self, source: RandomSource) -> Sampler:
        """Return a function that draws one value."""
        mean, draw = self.mean, source.random
        return lambda: -mean * log(1.0 - draw())


@dataclass(frozen=True, slots=True)
class Normal:
    """The absolute value of a normal distribution, as in the AWS study of contention.

    `mean` and `sd` are those of the normal distribution, before the absolute value is taken.
    """

    mean: float
    sd: float

    def __post_init__(self) -> None:
        check_at_least("mean", self.mean, 0)
        check_at_least("sd", self.sd, 0)

    def sampler(self, source: RandomSource) -> Sampler:
        """Return a function that draws one value."""
        mean, sd, draw = self.mean, self.sd, source.gauss
        return lambda: abs(draw(mean, sd))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """The log-normal distribution, the usual shape of latencies. Some are far above `median`."""

    median: float
    sigma: float = 0.5

    def __post_init__(self) -> None:
        check_positive("median", self.median)
        if check_at_least("sigma", self.sigma, 0) > _MAX_SIGMA:
            rule = f"must be at most {_MAX_SIGMA:g}, because the mean is unrealistic otherwise"
            raise ConfigurationError("sigma", f"{rule}, got {self.sigma:g}")

    @property
    def mean(self) -> float:
        """The expected value, which is above the median."""
        return self.median * exp(self.sigma**2 / 2)

    def sampler(self, source: RandomSource) -> Sampler:
        """Return a function that draws one value."""
        median, sigma, draw = self.median, self.sigma, source.gauss
        return lambda: median * exp(sigma * draw(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class HeavyTail:
    """The Pareto distribution: P(longer than t) = (minimum / t) ** shape.

    The shape must be greater than 1, because otherwise there is no mean.
    """

    minimum: float
    shape: float = 1.5

    def __post_init__(self) -> None:
        check_positive("minimum", self.minimum)
        if check_number("shape", self.shape) <= 1:
            rule = f"must be greater than 1, or there is no mean, got {self.shape:g}"
            raise ConfigurationError("shape", rule)

    @property
    def mean(self) -> float:
        """The expected value."""
        return self.minimum * self.shape / (self.shape - 1)

    def sampler(self, source: RandomSource) -> Sampler:
        """Return a function that draws one value."""
        minimum, power, draw = self.minimum, -1 / self.shape, source.random
        return lambda: minimum * (1.0 - draw()) ** power


@dataclass(frozen=True, slots=True)
class Empirical:
    """Measured durations, each drawn with the same probability."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigurationError("values", "must hold at least one duration, got none")
        for value in self.values:
            check_at_least("values", value, 0)

    @property
    def mean(self) -> float:
        """The average of the values."""
        return sum(self.values) / len(self.values)

    def sampler(self, source: RandomSource) -> Sampler:
        """Return a function that draws one value."""
        values, size, draw = self.values, len(self.values), source.random
        return lambda: values[int(draw() * size)]


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    "fixed": Fixed,
    "uniform": Uniform,
    "exponential": Exponential,
    "normal": Normal,
    "lognormal": Lognormal,
    "heavy-tail": HeavyTail,
    "empirical": Empirical,
}
