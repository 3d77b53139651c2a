"""Jitter: how a random number u from [0, 1) turns a ceiling into a delay.

A jitter is a name from `JITTERS` or any callable `(ceiling, previous, u) -> seconds`, where
`previous` is the delay before the last retry (the initial delay at first).
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

    The bound is limited to `maximum`, not the random delay (as in the AWS article of 2015):
    limited delays would pile up at the maximum, and clients would retry together again.
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
