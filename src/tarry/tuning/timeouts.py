"""The rule for the attempt timeout.

An attempt that a timeout has cut off would have taken longer; how much longer is unknown. If these
attempts were left out of the sample, the suggested timeout would be too short and would cut off
more attempts, and the timeout would shrink with each round of tuning. So the sample contains them
with an infinite duration. If a quantile of the sample is infinite, all that is known is that it is
longer than the timeout.

The timeout that cut off attempts is the timeout of the policy, or it is inferred from the log: many
attempts failed after nearly the same duration, and hardly any attempt that took longer succeeded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import repeat
from math import inf
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.text import format_duration
from tarry.simulator.metrics import quantile
from tarry.tuning.estimates import (
    quantile_interval,
    required_samples,
    round_two_digits,
    share_above,
)
from tarry.tuning.formatting import INTERVAL, format_count, format_percent
from tarry.tuning.rules import Suggestion, insufficient_data, keep_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.core.policy import Policy
    from tarry.tuning.evidence import Evidence

TIMEOUT_QUANTILE = 0.995
_FIELD = "attempt_timeout"
_MIN_TIMEOUT_S = 0.001
_EQUAL_DURATIONS_RATIO = 1.02
"""Durations within 2 % count as equal, because timers are not exact."""
_LOG_RESOLUTION_S = 0.001
"""Logged durations are whole milliseconds, so rounding can make them this much too short."""
_MIN_EQUAL_FAILURES = 3
"""Fewer failures with nearly the same duration may be a coincidence."""
_SLOW_QUANTILE = 0.99
"""Failures faster than this quantile of the successes are error responses and not timeouts. They
are ignored, because error responses can have nearly equal durations, too."""


class ObservedTimeout(NamedTuple):
    """A timeout that has cut off healthy attempts."""

    timeout: float
    cut_off_attempts: int
    is_inferred: bool
    """True if the timeout is not set by the policy but inferred from the log."""


def suggest_attempt_timeout(
    evidence: Evidence, policy: Policy, latency_target: float | None
) -> Suggestion:
    """Suggest the p99.5 of healthy attempts, so that one in 200 is cut off and retried."""
    suggestion = _suggest_by_latency(evidence, policy.attempt_timeout)
    proposed = suggestion.proposed
    if latency_target is None or proposed is None or proposed <= latency_target:
        return suggestion
    reason = "the latency target: no attempt can take longer"
    durations = evidence.success_durations
    cut_off_share = share_above(durations, latency_target) if durations else 0.0
    if cut_off_share:
        reason += f", and {format_percent(cut_off_share)} of healthy ones are cut off"
    return Suggestion(_FIELD, suggestion.current, latency_target, reason, suggestion.evidence)


def find_timeout(
    successes: Sequence[float], failures: Sequence[float], policy_timeout: float | None
) -> ObservedTimeout | None:
    """Find the timeout that has cut off attempts; None if no timeout did.

    `successes` and `failures` are the sorted durations of healthy attempts.
    """
    candidates: list[tuple[float, float, bool]] = []
    if policy_timeout is not None:
        candidates.append((policy_timeout - _LOG_RESOLUTION_S, policy_timeout, False))
    cluster = _largest_cluster(successes, failures)
    if cluster:
        candidates.append((cluster[0], median(cluster), True))
    for threshold, timeout, is_inferred in candidates:
        failed_above = len(failures) - bisect_left(failures, threshold)
        succeeded_above = len(successes) - bisect_left(successes, threshold)
        if failed_above > succeeded_above:  # otherwise most attempts did not have this timeout
            return ObservedTimeout(timeout, failed_above, is_inferred)
    return None


def _suggest_by_latency(evidence: Evidence, current: float | None) -> Suggestion:
    successes = evidence.success_durations
    required = required_samples(TIMEOUT_QUANTILE)
    if len(successes) < required:
        available = format_count(len(successes), "healthy attempt")
        return insufficient_data(_FIELD, current, available, f"{required:,} needed for p99.5")
    observed = find_timeout(successes, evidence.failure_durations, current)
    sample = list(successes)
    effective = current  # the timeout that the logged attempts had
    if observed is not None:
        sample.extend(repeat(inf, observed.cut_off_attempts))
        timeout = observed.timeout
        effective = max(
            current or 0.0, round_two_digits(timeout) if observed.is_inferred else timeout
        )
    p995 = quantile(sample, TIMEOUT_QUANTILE)
    low, high = quantile_interval(sample, TIMEOUT_QUANTILE)
    found = _describe_evidence(observed, len(sample), p995, low, high)
    if observed is not None and low == inf:
        reason = (
            f"{format_percent(observed.cut_off_attempts / len(sample))} of healthy attempts ran "
            "into the timeout, so p99.5 lies beyond it: raise it and measure again"
        )
        suggestion = keep_value(_FIELD, effective, reason, found, has_enough_data=False)
        return suggestion._replace(current=current)
    if effective is not None and (p995 == inf or _round_up(low) <= effective <= _round_up(high)):
        # A change within the confidence interval would follow chance. As the timeout cuts off the
        # longest attempts, such changes would only ever shorten it.
        reason = "p99.5 of healthy attempts, as closely as the log can tell"
        return keep_value(_FIELD, effective, reason, found)._replace(current=current)
    return Suggestion(_FIELD, current, _round_up(p995), "p99.5 of healthy attempts", found)


def _largest_cluster(successes: Sequence[float], failures: Sequence[float]) -> Sequence[float]:
    """Return the largest group of slow failures with nearly the same duration, or nothing."""
    slow = failures[bisect_left(failures, quantile(successes, _SLOW_QUANTILE)) :]
    sizes = [
        bisect_right(slow, shortest * _EQUAL_DURATIONS_RATIO) - index
        for index, shortest in enumerate(slow)
    ]
    size = max(sizes, default=0)
    first = sizes.index(size) if size >= _MIN_EQUAL_FAILURES else len(slow)
    return slow[first : first + size]


def _round_up(value: float) -> float:
    return value if value == inf else max(round_two_digits(value, up=True), _MIN_TIMEOUT_S)


def _describe_evidence(
    observed: ObservedTimeout | None, sample_size: int, p995: float, low: float, high: float
) -> str:
    times = (p995, low, high)
    if observed is None:
        return _describe_interval(sample_size, *map(format_duration, times))
    timeout = format_duration(observed.timeout)
    texts = (f"over {timeout}" if time == inf else format_duration(time) for time in times)
    cause = ": they failed after nearly the same time" if observed.is_inferred else ""
    interval = _describe_interval(sample_size, *texts)
    return f"{interval}, {observed.cut_off_attempts:,} cut off at {timeout}{cause}"


def _describe_interval(sample_size: int, p995: str, low: str, high: str) -> str:
    interval = "" if low == high else f" ({INTERVAL} {low} to {high})"
    return f"{p995}{interval} of {sample_size:,}"
