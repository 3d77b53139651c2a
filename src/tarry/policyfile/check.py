"""Warnings about settings of a policy file that are valid but look like mistakes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.text import format_duration
from tarry.policyfile.losses import format_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

_FIRST_ERROR = 400
_MIN_USEFUL_DELAY_S = 0.005
"""Shorter than most calls, so the dependency is still in the same state at the retry."""
_MANY_ATTEMPTS = 100
_PERMANENT_STATUSES = frozenset(
    {*range(400, 408), *range(410, 418), 422, 426, 428, 431, 451, 501, 505}
)
"""Statuses for which the same request fails again, by RFC 9110 and RFC 6585.

409 and 423 are not listed, because they can be temporary.
"""
_PERMANENT_CODES = frozenset(
    {
        "ALREADY_EXISTS",
        "FAILED_PRECONDITION",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "OUT_OF_RANGE",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "UNIMPLEMENTED",
    }
)


def find_warnings(defence: Defence) -> list[str]:
    """Return a warning for each setting that is valid but probably a mistake."""
    if defence.hedging is not None:
        return []
    policy = defence.policy
    return [*_warn_about_outcomes(policy), *_warn_about_delays(policy), *_warn_about_time(policy)]


def _warn_about_outcomes(policy: Policy) -> Iterator[str]:
    success = {status for status in policy.retryable_statuses if status < _FIRST_ERROR}
    if success:
        yield (
            f"retryable_statuses has {format_value(success)}: responses without an error are "
            "retried"
        )
    if "OK" in policy.retryable_codes:
        yield "retryable_codes has OK: a success is never retried"
    for field, permanent in (
        ("retryable_statuses", policy.retryable_statuses & _PERMANENT_STATUSES),
        ("retryable_codes", policy.retryable_codes & _PERMANENT_CODES),
    ):
        if permanent:
            yield f"{field} has {format_value(permanent)}: the same request fails again"


def _warn_about_delays(policy: Policy) -> Iterator[str]:
    if policy.max_attempts == 1:
        return
    if policy.jitter == "none":
        yield 'jitter is "none": clients that fail together retry together'
    if policy.initial_delay < _MIN_USEFUL_DELAY_S:
        yield (
            f"initial_delay = {policy.initial_delay:g} is {format_duration(policy.initial_delay)}: "
            "too short for a dependency to recover"
        )
    if policy.max_attempts > _MANY_ATTEMPTS and policy.total_budget is None:
        yield (
            f"max_attempts = {policy.max_attempts}: one call may be sent {policy.max_attempts} "
            "times; a total_budget limits its time"
        )


def _warn_about_time(policy: Policy) -> Iterator[str]:
    total = policy.total_budget
    if total is None or policy.max_attempts == 1:
        return
    shortest, longest = (policy.delay(policy.ceiling(1), None, u) for u in (0.0, 1.0))
    if shortest >= total:
        yield (
            f"total_budget = {total:g} leaves no time for any retry: the first waits for at least "
            f"{format_duration(shortest)}"
        )
    elif longest > total:
        yield (
            f"total_budget = {total:g} is shorter than a wait: the first retry waits for up to "
            f"{format_duration(longest)}, and there is no retry if the delay is "
            f"{format_duration(total)} or longer"
        )
