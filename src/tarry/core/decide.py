"""The one place where "should this be retried, and when?" is answered.

The questions come in the order of the design; each "no" is a `Stop` with its own reason, and
nothing is charged here: a caller that gets a `Wait` pays for it.
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
"""The least window, as a part of the hint, over which clients told the same time return."""

_TRANSIENT, _THROTTLED = Kind.TRANSIENT, Kind.THROTTLED
# Half the price of Wait(...), and this is the hot end of every failure.
_wait: Callable[[type[Wait], tuple[float, float, Hint | None]], Wait]
_wait = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class HowFar(Protocol):
    """A `Progress`, or a live `Call`, which knows the same."""

    @property
    def attempts(self) -> int:
        """Attempts begun."""
        ...

    @property
    def started(self) -> float:
        """When the call began."""
        ...

    @property
    def previous_delay(self) -> float | None:
        """The last delay, None before the first."""
        ...

    @property
    def backoff_offset(self) -> int:
        """The attempt from which backoff counts anew."""
        ...


class Dependency(Protocol):
    """What is asked of a `Downstream` here."""

    def check_retry(self, outcome: Outcome, now: float) -> Stop | None:
        """Say why a retry after `outcome` may not go, and change nothing."""
        ...

    def expected_duration(self) -> float:
        """Return how long an attempt takes as a rule."""
        ...


def decide(
    policy: Policy,
    progress: HowFar,
    outcome: Outcome,
    now: float,
    u: float,
    downstream: Dependency | None = None,
    deadline: float | None = None,
) -> Wait | Stop:
    """Say whether and when the next attempt comes after `outcome`.

    `deadline` is a moment on the same base as `now`; `u` is one number drawn from [0, 1).
    """
    kind = outcome.kind
    if kind is not _TRANSIENT and kind is not _THROTTLED:
        if kind is not Kind.OVERLOADED:
            return Stop(Reason.PERMANENT)
        said = outcome.hint
        return Stop(Reason.OVERLOADED, None if said is None else duration_or_none(said.delay), said)
    if not outcome.safe:
        return Stop(Reason.UNSAFE)
    if outcome.retried and not policy.retry_marked:
        return Stop(Reason.RETRIED_BELOW)
    attempts = progress.attempts
    if attempts >= policy.max_attempts:
        return Stop(Reason.ATTEMPTS)
    if downstream is not None:
        refusal = downstream.check_retry(outcome, now)
        if refusal is not None:
            return refusal

    throttled = kind is _THROTTLED
    k = attempts - progress.backoff_offset
    table = policy.delay_table
    if 0 < k < len(table) and not throttled:
        ceiling, least, spread = table[k]
        delay = least + u * spread
    else:
        ceiling = policy.ceiling(k, throttled)
        delay = policy.delay(ceiling, progress.previous_delay, u, throttled)
    hint = outcome.hint
    floor = None
    if hint is not None and (floor := duration_or_none(hint.delay)) is not None:
        if floor > policy.max_hint:
            return Stop(Reason.HINT_TOO_LONG, floor, hint)
        delay = _at_least(floor, delay, policy, hint, u)

    if policy.total_budget is not None or deadline is not None:
        end = now + delay + (0.0 if downstream is None else downstream.expected_duration())
        if policy.total_budget is not None and end - progress.started >= policy.total_budget:
            return Stop(Reason.TOTAL_BUDGET, floor, hint)
        if deadline is not None and end >= deadline:
            return Stop(Reason.DEADLINE, floor, hint)
    return _wait(Wait, (delay, ceiling, hint))


def _at_least(floor: float, delay: float, policy: Policy, hint: Hint, u: float) -> float:
    """Return the delay that a server's hint makes of ours."""
    if hint.exact:
        return floor
    if policy.jitter == "none":
        return max(delay, floor)
    # On top of the floor, never below it: clients told "120" must not return together.
    return floor + max(delay, u * floor * HINT_SPREAD)
