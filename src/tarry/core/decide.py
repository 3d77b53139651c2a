"""`decide`: the only place that decides whether a failed attempt is retried, and when.

The checks run in this order: retryable, repeatable, not already retried by a layer below, attempts
left, breaker and retry budget, length of the hint (the wait that the server asked for), time left.
The first check that fails gives a `Stop` with its own reason. `decide` does not charge the retry
budget: the caller does so after a `Wait`. An exact hint (gRPC pushback) sets the delay exactly, and
backoff starts over after it.

With a total budget or a deadline, jitter draws the delay from the part of its range that fits into
the time left. So a call ends only when not even the shortest delay fits. A hint is never shortened.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Protocol

from tarry.core.outcome import Kind, Outcome
from tarry.core.verdict import Reason, Stop, Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.hints import Hint
    from tarry.core.policy import Policy

HINT_SPREAD = 0.1
"""The largest random wait that is added to a hint, as a fraction of the hint.

If the backoff delay is longer than this random wait, the backoff delay is added instead. Without
an addition, clients that got the same hint would retry together.
"""

_MIN_TIME_LEFT_SHARE = 0.1
"""No wait starts if less than this fraction of the initial delay is left: otherwise, more and more
attempts would start just before the end."""

_TRANSIENT, _THROTTLED = Kind.TRANSIENT, Kind.THROTTLED
# tuple.__new__ takes half the time of Wait(...), and every retry creates one.
_new_wait: Callable[[type[Wait], tuple[float, float, Hint | None]], Wait]
# pyright cannot infer the type of `tuple.__new__`; the annotation above states it.
_new_wait = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class CallProgress(Protocol):
    """The attributes that `decide` reads, which `Progress` and `Call` have in common."""

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
        """The last wait in seconds; None before the first wait, and after an exact hint."""
        ...

    @property
    def backoff_offset(self) -> int:
        """The value of `attempts` when an exact hint last restarted the backoff; 0 if none did."""
        ...


class DownstreamView(Protocol):
    """The methods of a `Downstream` that `decide` uses."""

    def check_retry(self, outcome: Outcome, now: float) -> Stop | None:
        """Return a `Stop` if a retry after `outcome` is rejected, else None. Changes no state."""
        ...

    def expected_duration(self) -> float:
        """Return the median duration of recent successful attempts in seconds; 0 without any."""
        ...


def decide(
    policy: Policy,
    progress: CallProgress,
    outcome: Outcome,
    now: float,
    random_number: float,
    downstream: DownstreamView | None = None,
    deadline: float | None = None,
) -> Wait | Stop:
    """Decide after a failed attempt: return `Wait` with the delay before the next one, or `Stop`.

    `deadline` is a time on the clock of `now`; `random_number` is from [0, 1), for the jitter.
    """
    kind = outcome.kind
    if kind is not _TRANSIENT and kind is not _THROTTLED:
        if kind is not Kind.OVERLOADED:
            return Stop(Reason.PERMANENT)
        hint = outcome.hint
        return Stop(Reason.OVERLOADED, None if hint is None else hint.delay, hint)
    if not outcome.repeatable:
        return Stop(Reason.NOT_REPEATABLE)
    if outcome.retried_below and not policy.ignore_retried_below:
        return Stop(Reason.RETRIED_BELOW)
    attempts = progress.attempts
    if attempts >= policy.max_attempts:
        return Stop(Reason.ATTEMPTS)
    if downstream is not None:
        rejection = downstream.check_retry(outcome, now)
        if rejection is not None:
            return rejection

    budget_left = time_left = inf
    if policy.total_budget is not None or deadline is not None:
        ends_at = now if downstream is None else now + downstream.expected_duration()
        if policy.total_budget is not None:
            budget_left = progress.started + policy.total_budget - ends_at
        time_left = budget_left if deadline is None else min(budget_left, deadline - ends_at)
    throttled = kind is _THROTTLED
    # The number of the next retry, counted from the attempt after which backoff started over.
    k = attempts - progress.backoff_offset
    delay_table = policy.delay_table
    if 0 < k < len(delay_table) and not throttled:
        # `ceiling` is the delay before jitter; jitter adds a part of `width` to `shortest`.
        ceiling, shortest, width = delay_table[k]
        if shortest + width > time_left:
            width = max(0.0, time_left - shortest)
        delay = shortest + random_number * width
    else:
        ceiling = policy.ceiling(k, throttled)
        previous = progress.previous_delay
        delay = _draw_delay(policy, ceiling, previous, random_number, throttled, time_left)
    hint = outcome.hint
    hint_delay = None
    if hint is not None and (hint_delay := hint.delay) is not None:
        if hint_delay > policy.max_hint:
            return Stop(Reason.HINT_TOO_LONG, hint_delay, hint)
        delay = _apply_hint(hint_delay, delay, policy, hint, random_number, time_left)

    if delay >= time_left or time_left < _MIN_TIME_LEFT_SHARE * policy.initial_delay:
        reason = Reason.TOTAL_BUDGET if budget_left == time_left else Reason.DEADLINE
        return Stop(reason, hint_delay, hint)
    return _new_wait(Wait, (delay, ceiling, hint))


def _draw_delay(
    policy: Policy,
    ceiling: float,
    previous: float | None,
    random_number: float,
    throttled: bool,  # noqa: FBT001 - as in `Policy.delay`
    time_left: float,
) -> float:
    """Return a delay as `Policy.delay` does, from the part of its range that fits into `time_left`.

    If no part of the range fits, the delay is at least `time_left`.
    """
    delay = policy.delay(ceiling, previous, random_number, throttled)
    if time_left == inf:
        return delay
    if not isinstance(policy.jitter, str):
        if delay >= time_left > 0:  # the range of a function of the user is not known
            delay = policy.delay(min(ceiling, time_left), previous, random_number, throttled)
        return delay
    # If only delays that are too long were drawn again, more attempts than before would start just
    # before the end, with hardly any time.
    shortest = policy.delay(ceiling, previous, 0.0, throttled)
    longest = min(policy.delay(ceiling, previous, 1.0, throttled), time_left)
    return shortest + random_number * max(0.0, longest - shortest)


def _apply_hint(
    hint_delay: float,
    delay: float,
    policy: Policy,
    hint: Hint,
    random_number: float,
    time_left: float,
) -> float:
    """Return `hint_delay` for an exact hint, otherwise a delay that is at least as long."""
    if hint.exact:
        return hint_delay
    if policy.jitter == "none":
        return max(delay, hint_delay)
    # A random wait is added, because clients that all got "120" must not retry together.
    delay = hint_delay + max(delay, random_number * hint_delay * HINT_SPREAD)
    if delay >= time_left > hint_delay:
        delay = hint_delay + random_number * (time_left - hint_delay)
    return delay
