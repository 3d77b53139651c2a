"""What a sample says about the world, and how surely. Samples are sorted, ascending."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import ceil, floor, log10, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Z = 1.96
"""Intervals hold the truth 95 times in 100."""
BEYOND = 5
"""So many samples must lie at a quantile or beyond: then its interval ends within the sample."""
_ROUNDING = 1e-12
_DIGITS = 2


def quantile_interval(ordered: Sequence[float], q: float) -> tuple[float, float]:
    """Return the values between which the quantile of the whole world lies.

    The number of samples below it is binomial, so the bounds are samples some ranks away.
    """
    size = len(ordered)
    spread = Z * sqrt(size * q * (1 - q))
    low = max(1, floor(size * q - spread))
    high = min(size, ceil(size * q + spread) + 1)
    return ordered[low - 1], ordered[high - 1]


def needed(q: float) -> int:
    """Return how many samples a quantile takes."""
    return ceil(BEYOND / (1 - q) - _ROUNDING / (1 - q))


def wilson(successes: int, tries: int) -> tuple[float, float]:
    """Return Wilson's interval of a share; unlike the plain one it is right near 0 and 1."""
    if not tries:
        return 0.0, 1.0
    share, z2 = successes / tries, Z * Z
    middle = share + z2 / (2 * tries)
    spread = Z * sqrt(share * (1 - share) / tries + z2 / (4 * tries * tries))
    whole = 1 + z2 / tries
    return max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)


def beyond(ordered: Sequence[float], value: float) -> float:
    """Return the share of the sample that exceeds a value."""
    return (len(ordered) - bisect_right(ordered, value)) / len(ordered)


def hedged_quantile(ordered: Sequence[float], q: float, delay: float) -> float:
    """Return the quantile of a call that sends a second copy after `delay`.

    It takes longer than t when the first copy does and the second, begun later, does too:
    S(t) * S(t - delay), and S(t) alone before the delay. This falls in steps, at the samples and
    at the samples moved by the delay, so the answer is one of these, and bisection finds it.
    """
    missed = 1 - q - _ROUNDING  # as with any quantile, less than 1 - q lies beyond it
    last = len(ordered) - 1

    def first_ends(t: float) -> bool:
        second = beyond(ordered, t - delay) if t >= delay else 1.0
        return beyond(ordered, t) * second <= missed

    def second_ends(t: float) -> bool:  # t + delay - delay need not be t
        return beyond(ordered, t + delay) * beyond(ordered, t) <= missed

    first = bisect_left(ordered, 1, hi=last, key=first_ends)
    second = bisect_left(ordered, 1, hi=last, key=second_ends)
    return min(ordered[first], ordered[second] + delay)


def rounded(value: float, *, up: bool = False) -> float:
    """Return a number of two digits, as people would have written it down."""
    if value <= 0:
        return 0.0
    unit = floor(log10(value)) - _DIGITS + 1
    scaled = value / 10.0**unit
    digits = ceil(scaled - _ROUNDING * scaled) if up else round(scaled)
    return float(f"{digits}e{unit}")
