"""Statistical estimates from samples, with confidence intervals. `ordered` is a sorted sample."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import ceil, floor, log10, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Z_SCORE = 1.96
"""The z-score of the confidence level 95 %, which all intervals have."""
MIN_SAMPLES_BEYOND = 5
"""Values that must lie above a quantile, so that the sample contains the end of its interval."""
_ROUNDING_ERROR = 1e-12
_DIGITS = 2


def quantile_interval(ordered: Sequence[float], q: float) -> tuple[float, float]:
    """Return the confidence interval of a quantile.

    The number of values below the true quantile has a binomial distribution with the standard
    deviation sqrt(size * q * (1 - q)). So the bounds are the values `spread` ranks below and above
    the rank of the quantile.
    """
    size = len(ordered)
    spread = Z_SCORE * sqrt(size * q * (1 - q))
    low = max(1, floor(size * q - spread))
    high = min(size, ceil(size * q + spread) + 1)
    return ordered[low - 1], ordered[high - 1]


def required_samples(q: float) -> int:
    """Return the size that a sample must have to estimate the quantile `q`."""
    return ceil(MIN_SAMPLES_BEYOND / (1 - q) - _ROUNDING_ERROR / (1 - q))


def wilson_interval(successes: int, tries: int) -> tuple[float, float]:
    """Return Wilson's confidence interval of a success rate; it is accurate even near 0 and 1."""
    if not tries:
        return 0.0, 1.0
    share, z_squared = successes / tries, Z_SCORE * Z_SCORE
    centre = share + z_squared / (2 * tries)
    spread = Z_SCORE * sqrt(share * (1 - share) / tries + z_squared / (4 * tries * tries))
    divisor = 1 + z_squared / tries
    return max(0.0, (centre - spread) / divisor), min(1.0, (centre + spread) / divisor)


def share_above(ordered: Sequence[float], value: float) -> float:
    """Return the share of the sample that is greater than `value`."""
    return (len(ordered) - bisect_right(ordered, value)) / len(ordered)


def hedged_quantile(ordered: Sequence[float], q: float, delay: float) -> float:
    """Return the quantile of a call that sends a second copy after `delay`.

    A hedged call takes longer than t if both copies do. Let S(t) be the share of the sample above
    t. Before the delay, only the first copy runs, and the probability is S(t). After it, the second
    copy has run for t - delay, and the probability is S(t) * S(t - delay). This product falls only
    where t is a sampled value or a sampled value plus the delay. So the quantile is one of these
    values, and bisection finds it.
    """
    max_share = 1 - q - _ROUNDING_ERROR
    last = len(ordered) - 1

    def is_reached_at(t: float) -> bool:
        second_copy_share = share_above(ordered, t - delay) if t >= delay else 1.0
        return share_above(ordered, t) * second_copy_share <= max_share

    # Equal to is_reached_at(t + delay), except for rounding: (t + delay) - delay need not equal t.
    def is_reached_at_shifted(t: float) -> bool:
        return share_above(ordered, t + delay) * share_above(ordered, t) <= max_share

    index = bisect_left(ordered, 1, hi=last, key=is_reached_at)
    shifted_index = bisect_left(ordered, 1, hi=last, key=is_reached_at_shifted)
    return min(ordered[index], ordered[shifted_index] + delay)


def round_two_digits(value: float, *, up: bool = False) -> float:
    """Round a value to two significant digits: to the nearest, or upwards if `up` is set."""
    if value <= 0:
        return 0.0
    exponent = floor(log10(value)) - _DIGITS + 1
    scaled = value / 10.0**exponent
    digits = ceil(scaled - _ROUNDING_ERROR * scaled) if up else round(scaled)
    return float(f"{digits}e{exponent}")
