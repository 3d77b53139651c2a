"""Backoff and jitter, which choose the delay before retry k (k = 1, 2, ...).

Backoff returns the ceiling, which is the delay before jitter. A policy has either the name of a
function in `BACKOFFS`, or a callable of the user that takes k and returns seconds.

Jitter chooses a random delay, usually below the ceiling. A policy has either the name of a function
in `JITTERS`, or a callable of the user, `(ceiling, previous, random_number) -> seconds`. `previous`
is the last delay, or the initial delay for the first retry. `random_number` is from [0, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from tarry.core.checks import Seconds, check_at_least, to_seconds
from tarry.core.values import ImmutableValue
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
        return maximum if initial else 0.0


BACKOFFS: dict[str, Callable[[int, float, float, float], float]] = {
    "fixed": fixed,
    "linear": linear,
    "exponential": exponential,
}


class Schedule(ImmutableValue):
    """A backoff with a list of ceilings, `Schedule((5, 300, 1800))`, the last of which repeats."""

    __slots__ = _fields = ("delays",)

    delays: tuple[float, ...]

    def __init__(self, delays: Iterable[Seconds]) -> None:
        if not isinstance(delays, Iterable):
            raise ConfigurationTypeError("delays", "must be a collection of seconds", delays)
        checked = tuple(
            check_at_least(f"delays[{i}]", to_seconds(delay), 0) for i, delay in enumerate(delays)
        )
        if not checked:
            raise ConfigurationError("delays", "must contain at least one delay, got none")
        self._set_fields(checked)

    def __call__(self, k: int) -> float:
        """Return the ceiling of the delay before retry k."""
        return self.delays[min(k, len(self.delays)) - 1]


JitterName = Literal["none", "full", "equal", "decorrelated"]
Jitter = Callable[[float, float, float], float]


def none(
    ceiling: float, _previous: float, _random_number: float, _initial: float, _maximum: float
) -> float:
    """Return the ceiling itself. Clients that fail together then retry together."""
    return ceiling


def full(
    ceiling: float, _previous: float, random_number: float, _initial: float, _maximum: float
) -> float:
    """Return a delay from 0 to the ceiling, which spreads the retries of many clients most."""
    return random_number * ceiling


def equal(
    ceiling: float, _previous: float, random_number: float, _initial: float, _maximum: float
) -> float:
    """Return a delay from half the ceiling to the ceiling, which guarantees a minimum wait."""
    half = ceiling / 2
    return half + random_number * half


def decorrelated(
    _ceiling: float, previous: float, random_number: float, initial: float, maximum: float
) -> float:
    """Return a delay from `initial` to three times the previous delay, whatever the ceiling is.

    `maximum` limits the upper bound. The AWS article of 2015 limits the random delay instead: then
    many delays would equal the maximum, and clients would retry together again.
    """
    bound = max(initial, min(maximum, 3 * previous))
    return initial + random_number * (bound - initial)


def call_jitter(
    jitter: Jitter,
    ceiling: float,
    previous: float,
    random_number: float,
    _initial: float,
    _maximum: float,
) -> float:
    """Call a jitter function of the user and check its result."""
    return check_at_least("the result of jitter", jitter(ceiling, previous, random_number), 0)


JITTERS: dict[str, Callable[[float, float, float, float, float], float]] = {
    "none": none,
    "full": full,
    "equal": equal,
    "decorrelated": decorrelated,
}
