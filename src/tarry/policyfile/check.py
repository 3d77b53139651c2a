"""What a defence may say, and what is hardly meant: no mistake, but worth a warning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.durations import format_duration
from tarry.policyfile.losses import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

_FIRST_ERROR = 400
_SHORTEST = 0.005
"""Seconds: less than most calls take, so that a retry meets what the first attempt met."""
_MANY = 100
_PERMANENT_STATUSES = frozenset(
    {*range(400, 408), *range(410, 418), 422, 426, 428, 431, 451, 501, 505}
)
"""By RFC 9110 and 6585 the same request gets the same answer. Not 409 and 423, which can pass."""
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


def doubts(defence: Defence) -> list[str]:
    """Return a line for each thing that is allowed and looks wrong."""
    if defence.hedging is not None:
        return []
    policy = defence.policy
    return [*_of_answers(policy), *_of_delays(policy), *_of_time(policy)]


def _of_answers(policy: Policy) -> Iterator[str]:
    fine = {status for status in policy.retryable_statuses if status < _FIRST_ERROR}
    if fine:
        yield f"retryable_statuses has {shown(fine)}: an answer that is no error is asked for again"
    if "OK" in policy.retryable_codes:
        yield "retryable_codes has OK: a success is never retried"
    for field, permanent in (
        ("retryable_statuses", policy.retryable_statuses & _PERMANENT_STATUSES),
        ("retryable_codes", policy.retryable_codes & _PERMANENT_CODES),
    ):
        if permanent:
            yield f"{field} has {shown(permanent)}: the same request gets the same answer again"


def _of_delays(policy: Policy) -> Iterator[str]:
    if policy.max_attempts == 1:
        return
    if policy.jitter == "none":
        yield 'jitter is "none": clients that fail together come back together'
    if policy.initial_delay < _SHORTEST:
        yield (
            f"initial_delay = {policy.initial_delay:g} is {format_duration(policy.initial_delay)}: "
            "nothing has recovered by then"
        )
    if policy.max_attempts > _MANY and policy.total_budget is None:
        yield (
            f"max_attempts = {policy.max_attempts}: one call may be sent {policy.max_attempts} "
            "times; a total_budget ends it by its time"
        )


def _of_time(policy: Policy) -> Iterator[str]:
    total = policy.total_budget
    if total is None or policy.max_attempts == 1:
        return
    least, most = (policy.delay(policy.ceiling(1), None, u) for u in (0.0, 1.0))
    if least >= total:
        yield (
            f"total_budget = {total:g} leaves no time for any retry: the first waits for at least "
            f"{format_duration(least)}"
        )
    elif most > total:
        yield (
            f"total_budget = {total:g} is shorter than a wait: the first retry waits for up to "
            f"{format_duration(most)}, and there is none if {format_duration(total)} or more are "
            "drawn"
        )
