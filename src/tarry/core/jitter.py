"""How a drawn number u in [0, 1) turns a ceiling into a delay.

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
    """Wait exactly the ceiling: every client that failed together returns together."""
    return ceiling


def full(ceiling: float, _previous: float, u: float, _initial: float, _maximum: float) -> float:
    """Spread over the whole window: the least load on a dependency that recovers."""
    return u * ceiling


def equal(ceiling: float, _previous: float, u: float, _initial: float, _maximum: float) -> float:
    """Spread over the upper half, so that a least wait is certain."""
    half = ceiling / 2
    return half + u * half


def decorrelated(
    _ceiling: float, previous: float, u: float, initial: float, maximum: float
) -> float:
    """Grow from the last delay instead of the attempt number.

    The bound is clamped and not the draw (as in the 2015 AWS form), because clamped draws pile
    up at the maximum and bring the clients back together.
    """
    bound = max(initial, min(maximum, 3 * previous))
    return initial + u * (bound - initial)


def custom(
    jitter: Jitter, ceiling: float, previous: float, u: float, _initial: float, _maximum: float
) -> float:
    """Ask a jitter of the user's, and check what it says."""
    return check_at_least("the result of jitter", jitter(ceiling, previous, u), 0)


JITTERS: dict[str, Callable[[float, float, float, float, float], float]] = {
    "none": none,
    "full": full,
    "equal": equal,
    "decorrelated": decorrelated,
}
