"""Backoff: the ceiling of the delay before retry k (k = 1, 2, ...), its bound before jitter.

A backoff is a name from `BACKOFFS` or any callable that takes k and returns seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from tarry.core.checks import check_at_least
from tarry.core.value import Value
from tarry.errors import ConfigurationError, ConfigurationTypeError

BackoffName = Literal["fixed", "linear", "exponential"]
Backoff = Callable[[int], float]


def fixed(_k: int, initial: float, _multiplier: float, _maximum: float) -> float:
    """Return `initial` for every retry."""
    return initial


def linear(k: int, initial: float, _multiplier: float, maximum: float) -> float:
    """Return a ceiling that grows by `initial` with each retry."""
    return min(maximum, initial * k)


def exponential(k: int, initial: float, multiplier: float, maximum: float) -> float:
    """Return a ceiling that grows by the factor `multiplier` with each retry."""
    try:
        return min(maximum, initial * multiplier ** (k - 1))
    except OverflowError:  # the power exceeds the largest float, about 1e308
        return maximum


BACKOFFS: dict[str, Callable[[int, float, float, float], float]] = {
    "fixed": fixed,
    "linear": linear,
    "exponential": exponential,
}


class Schedule(Value):
    """A backoff given as a list of delays: `Schedule((5, 300, 1800))`. The last delay repeats."""

    __slots__ = _fields = ("delays",)

    delays: tuple[float, ...]

    def __init__(self, delays: Iterable[float]) -> None:
        if not isinstance(delays, Iterable):
            raise ConfigurationTypeError("delays", "must be a collection of seconds", delays)
        checked = tuple(check_at_least(f"delays[{i}]", d, 0) for i, d in enumerate(delays))
        if not checked:
            raise ConfigurationError("delays", "must contain at least one delay, got none")
        self._set(delays=checked)

    def __call__(self, k: int) -> float:
        """Return the ceiling of the delay before retry k."""
        return self.delays[min(k, len(self.delays)) - 1]
