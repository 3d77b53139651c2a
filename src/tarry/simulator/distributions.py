"""How long things take: distributions to draw from. Seconds throughout."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tarry.core.checks import check_at_least, check_number, check_positive
from tarry.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

Sampler: TypeAlias = "Callable[[], float]"

_WIDEST = 10.0


class Dice(Protocol):
    """Where chance comes from; a `random.Random` with a seed."""

    def random(self) -> float:
        """Draw from [0, 1)."""
        ...

    def gauss(self, mu: float, sigma: float) -> float:
        """Draw from a bell."""
        ...


class Distribution(Protocol):
    """Anything that can be drawn from."""

    @property
    def mean(self) -> float:
        """The expected value."""
        ...

    def sampler(self, dice: Dice) -> Sampler:
        """Return a function that draws one value, never below 0."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    value: float

    def __post_init__(self) -> None:
        check_at_least("value", self.value, 0)

    @property
    def mean(self) -> float:
        """The value."""
        return self.value

    def sampler(self, dice: Dice) -> Sampler:  # noqa: ARG002 - part of the protocol
        """Draw without dice."""
        value = self.value
        return lambda: value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Anything from `low` to `high` alike."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if check_at_least("high", self.high, 0) < check_at_least("low", self.low, 0):
            rule = f"must be at least low ({self.low:g}), got {self.high:g}"
            raise ConfigurationError("high", rule)

    @property
    def mean(self) -> float:
        """The middle."""
        return (self.low + self.high) / 2

    def sampler(self, dice: Dice) -> Sampler:
        """Draw."""
        low, spread, draw = self.low, self.high - self.low, dice.random
        return lambda: low + spread * draw()


@dataclass(frozen=True, slots=True)
class Exponential:
    """Without memory: the pause between independent events."""

    mean: float

    def __post_init__(self) -> None:
        check_positive("mean", self.mean)

    def sampler(self, dice: Dice) -> Sampler:
        """Draw."""
        mean, draw = self.mean, dice.random
        return lambda: -mean * log(1.0 - draw())


@dataclass(frozen=True, slots=True)
class Normal:
    """A bell around `mean`; what falls below 0 is folded up, as in the AWS study."""

    mean: float
    sd: float

    def __post_init__(self) -> None:
        check_at_least("mean", self.mean, 0)
        check_at_least("sd", self.sd, 0)

    def sampler(self, dice: Dice) -> Sampler:
        """Draw."""
        mean, sd, draw = self.mean, self.sd, dice.gauss
        return lambda: abs(draw(mean, sd))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Mostly near `median`, sometimes several times as long; the usual shape of a healthy call."""

    median: float
    sigma: float = 0.5

    def __post_init__(self) -> None:
        check_positive("median", self.median)
        if check_at_least("sigma", self.sigma, 0) > _WIDEST:
            rule = f"must be at most {_WIDEST:g}, or there is hardly a mean, got {self.sigma:g}"
            raise ConfigurationError("sigma", rule)

    @property
    def mean(self) -> float:
        """Above the median, the more the larger sigma is."""
        return self.median * exp(self.sigma**2 / 2)

    def sampler(self, dice: Dice) -> Sampler:
        """Draw."""
        median, sigma, draw = self.median, self.sigma, dice.gauss
        return lambda: median * exp(sigma * draw(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class HeavyTail:
    """Pareto: P(longer than t) = (minimum / t) ** shape. One call in a thousand takes ages.

    A shape of at most 1 has no mean, and is refused.
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

    def sampler(self, dice: Dice) -> Sampler:
        """Draw."""
        minimum, power, draw = self.minimum, -1 / self.shape, dice.random
        return lambda: minimum * (1.0 - draw()) ** power


@dataclass(frozen=True, slots=True)
class Empirical:
    """Durations that were measured; each is as likely as any other."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigurationError("values", "must hold at least one duration, got none")
        for value in self.values:
            check_at_least("values", value, 0)

    @property
    def mean(self) -> float:
        """The average."""
        return sum(self.values) / len(self.values)

    def sampler(self, dice: Dice) -> Sampler:
        """Draw."""
        values, size, draw = self.values, len(self.values), dice.random
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
