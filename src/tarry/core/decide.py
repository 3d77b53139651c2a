"""`decide`: the only place that decides whether a failed attempt is retried, and when.

The checks run in a fixed order: retryable, safe to repeat, already retried by a layer below,
attempts left, breaker and retry budget, delay, time left. Each failed check is a `Stop` with its
own reason. Nothing is charged here: a caller that gets a `Wait` pays for the retry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tarry.core.checks import duration_or_none
from tarry.core.outcome import Kind
from tarry.core.verdict import Reason, Stop, Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.hints import Hint
    from tarry.core.outcome import Outcome
    from tarry.core.policy import Policy

HINT_SPREAD = 0.1
"""Clients that got the same hint spread over at least this fraction of it on top."""

_TRANSIENT, _THROTTLED = Kind.TRANSIENT, Kind.THROTTLED
# tuple.__new__ takes half the time of Wait(...), and every retry creates one.
_wait: Callable[[type[Wait], tuple[float, float, Hint | None]], Wait]
_wait = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class CallProgress(Protocol):
    """The attributes that a stored `Progress` and a running `Call` have in common."""

    @property
    def attempts(self) -> int:
        """Number of attempts started."""
        ...

    @property
    def started(self) -> float:
        """The time at which the call started."""
        ...

    @property
    def previous_delay(self) -> float | None:
        """The last delay; None before the first."""
        ...

    @property
    def backoff_offset(self) -> int:
        """Number of attempts that backoff no longer counts."""
        ...


class RetryGate(Protocol):
    """The part of a `Downstream` that `decide` uses."""

    def check_retry(self, outcome: Outcome, now: float) -> Stop | None:
        """Return why a retry after `outcome` is rejected, or None; changes nothing."""
        ...

    def expected_duration(self) -> float:
        """Return the usual duration of an attempt."""
        ...


def decide(
    policy: Policy,
    progress: CallProgress,
    outcome: Outcome,
    now: float,
    u: float,
    downstream: RetryGate | None = None,
    deadline: float | None = None,
) -> Wait | Stop:
    """Return whether and when the next attempt starts after `outcome`.

    `deadline` is on the same time base as `now`; `u` is a random number from [0, 1).
    """
    kind = outcome.kind
    if kind is not _TRANSIENT and kind is not _THROTTLED:
        if kind is not Kind.OVERLOADED:
            return Stop(Reason.PERMANENT)
        hint = outcome.hint
        return Stop(Reason.OVERLOADED, None if hint is None else duration_or_none(hint.delay), hint)
    if not outcome.safe:
        return Stop(Reason.UNSAFE)
    if outcome.retried and not policy.retry_marked:
        return Stop(Reason.RETRIED_BELOW)
    attempts = progress.attempts
    if attempts >= policy.max_attempts:
        return Stop(Reason.ATTEMPTS)
    if downstream is not None:
        rejection = downstream.check_retry(outcome, now)
        if rejection is not None:
            return rejection

    throttled = kind is _THROTTLED
    k = attempts - progress.backoff_offset
    table = policy.delay_table
    if 0 < k < len(table) and not throttled:
        ceiling, shortest, width = table[k]
        delay = shortest + u * width
    else:
        ceiling = policy.ceiling(k, throttled)
        delay = policy.delay(ceiling, progress.previous_delay, u, throttled)
    hint = outcome.hint
    floor = None
    if hint is not None and (floor := duration_or_none(hint.delay)) is not None:
        if floor > policy.max_hint:
            return Stop(Reason.HINT_TOO_LONG, floor, hint)
        delay = _apply_hint(floor, delay, policy, hint, u)

    if policy.total_budget is not None or deadline is not None:
        end = now + delay + (0.0 if downstream is None else downstream.expected_duration())
        if policy.total_budget is not None and end - progress.started >= policy.total_budget:
            return Stop(Reason.TOTAL_BUDGET, floor, hint)
        if deadline is not None and end >= deadline:
            return Stop(Reason.DEADLINE, floor, hint)
    return _wait(Wait, (delay, ceiling, hint))


def _apply_hint(floor: float, delay: float, policy: Policy, hint: Hint, u: float) -> float:
    """Return the delay with the server's hint as its minimum."""
    if hint.exact:
        return floor
    if policy.jitter == "none":
        return max(delay, floor)
    # The jitter is added to the floor: clients that all got "120" must not retry together.
    return floor + max(delay, u * floor * HINT_SPREAD)
