"""Jitter: the choice of a random delay below the ceiling, the upper bound that backoff returns.

A jitter is a name from `JITTERS` or any callable `(ceiling, previous, u) -> seconds`. `previous` is
the delay before the last retry, or the initial delay for the first retry. `u` is a random number
from [0, 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tarry.core.checks import check_at_least

JitterName = Literal["none", "full", "equal", "decorrelated"]
Jitter = Callable[[float, float, float], float]


def none(ceiling: float, _previous: float, _u: float, _initial: float, _maximum: float) -> float:
    """Return the ceiling itself: clients that fail together retry together."""
    return ceiling


def full(ceiling: float, _previous: float, u: float, _initial: float, _maximum: float) -> float:
    """Return a delay from 0 to the ceiling: the least load on a dependency that recovers."""
    return u * ceiling


def equal(ceiling: float, _previous: float, u: float, _initial: float, _maximum: float) -> float:
    """Return a delay from half the ceiling to the ceiling, which guarantees a minimum wait."""
    half = ceiling / 2
    return half + u * half


def decorrelated(
    _ceiling: float, previous: float, u: float, initial: float, maximum: float
) -> float:
    """Return a delay that grows from the previous delay instead of the attempt number.

    `maximum` limits the bound of the random delay. The AWS article of 2015 limits the random delay
    itself; then many delays would equal the maximum, and clients would retry together again.
    """
    bound = max(initial, min(maximum, 3 * previous))
    return initial + u * (bound - initial)


def custom(
    jitter: Jitter, ceiling: float, previous: float, u: float, _initial: float, _maximum: float
) -> float:
    """Call a jitter function of the user and check its result."""
    return check_at_least("the result of jitter", jitter(ceiling, previous, u), 0)


JITTERS: dict[str, Callable[[float, float, float, float, float], float]] = {
    "none": none,
    "full": full,
    "equal": equal,
    "decorrelated": decorrelated,
}
