"""Statistical estimates from samples, with confidence intervals. Samples are sorted, ascending."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import ceil, floor, log10, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Z_SCORE = 1.96
"""Of a confidence level of 95 %, for all intervals."""
MIN_SAMPLES_BEYOND = 5
"""Samples that must lie beyond a quantile, so that its interval ends within the sample."""
_ROUNDING_ERROR = 1e-12
_DIGITS = 2


def quantile_interval(ordered: Sequence[float], q: float) -> tuple[float, float]:
    """Return the confidence interval of a quantile.

    The number of samples below the true quantile is binomial, so the bounds of the interval are
    samples some ranks away.
    """
    size = len(ordered)
    spread = Z_SCORE * sqrt(size * q * (1 - q))
    low = max(1, floor(size * q - spread))
    high = min(size, ceil(size * q + spread) + 1)
    return ordered[low - 1], ordered[high - 1]


def required_samples(q: float) -> int:
    """Return the number of samples that estimating a quantile requires."""
    return ceil(MIN_SAMPLES_BEYOND / (1 - q) - _ROUNDING_ERROR / (1 - q))


def wilson_interval(successes: int, tries: int) -> tuple[float, float]:
    """Return Wilson's confidence interval of a share, which is also accurate near 0 and 1."""
    if not tries:
        return 0.0, 1.0
    share, z_squared = successes / tries, Z_SCORE * Z_SCORE
    centre = share + z_squared / (2 * tries)
    spread = Z_SCORE * sqrt(share * (1 - share) / tries + z_squared / (4 * tries * tries))
    divisor = 1 + z_squared / tries
    return max(0.0, (centre - spread) / divisor), min(1.0, (centre + spread) / divisor)


def share_above(ordered: Sequence[float], value: float) -> float:
    """Return the share of the sample that is above a value."""
    return (len(ordered) - bisect_right(ordered, value)) / len(ordered)


def hedged_quantile(ordered: Sequence[float], q: float, delay: float) -> float:
    """Return the quantile of a call that sends a second copy after `delay`.

    The call takes longer than t if the first copy does and the second copy, sent later, does too:
    with S(t) = share_above(t) that is S(t) * S(t - delay), and S(t) alone before the delay. This
    product falls in steps, at the samples and at the samples shifted by the delay. So the quantile
    is one of these values, and bisection finds it.
    """
    max_share = 1 - q - _ROUNDING_ERROR
    last = len(ordered) - 1

    def is_reached_at(t: float) -> bool:
        second = share_above(ordered, t - delay) if t >= delay else 1.0
        return share_above(ordered, t) * second <= max_share

    # The same for t + delay. It is written out because (t + delay) - delay need not equal t.
    def is_reached_at_shifted(t: float) -> bool:
        return share_above(ordered, t + delay) * share_above(ordered, t) <= max_share

    sample = bisect_left(ordered, 1, hi=last, key=is_reached_at)
    shifted = bisect_left(ordered, 1, hi=last, key=is_reached_at_shifted)
    return min(ordered[sample], ordered[shifted] + delay)


def round_two_digits(value: float, *, up: bool = False) -> float:
    """Return a value rounded to two significant digits, or rounded up to them."""
    if value <= 0:
        return 0.0
    exponent = floor(log10(value)) - _DIGITS + 1
    scaled = value / 10.0**exponent
    digits = ceil(scaled - _ROUNDING_ERROR * scaled) if up else round(scaled)
    return float(f"{digits}e{exponent}")
