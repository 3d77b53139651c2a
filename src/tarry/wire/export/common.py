"""What the targets have in common: how a policy is read for them and which words are the same."""

from __future__ import annotations

from inspect import signature
from math import isclose
from typing import TYPE_CHECKING, Any

from tarry.core.backoff import Schedule
from tarry.core.breaker import Breaker
from tarry.core.explain import duration
from tarry.core.outcome import RETRYABLE_CODES, RETRYABLE_STATUSES
from tarry.errors import ConfigurationError
from tarry.wire.durations import milliseconds
from tarry.wire.losses import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tarry.core.policy import Policy
    from tarry.wire.defence import Defence

_FIRST_DELAYS = 32
"""No exponential ceiling that matters grows for longer."""
_SHOWN_DELAYS = 4
_EVERYBODYS_FACTOR = 2
_THROTTLED_STATUS, _THROTTLED_CODE = 429, "RESOURCE_EXHAUSTED"


def filled(make: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class with its defaults filled in."""
    defaults = {name: parameter.default for name, parameter in signature(make).parameters.items()}
    return {**defaults, **given}


def breaker_of(defence: Defence) -> dict[str, Any] | None:
    """Return all arguments of the breaker."""
    return None if defence.breaker is None else filled(Breaker, defence.breaker)


# --- delays --------------------------------------------------------------------------------------


def ceilings(policy: Policy) -> list[float]:
    """Return the ceilings of the first retries."""
    return [policy.ceiling(k) for k in range(1, min(policy.max_attempts - 1, _FIRST_DELAYS) + 1)]


def bounds(policy: Policy) -> tuple[float, float]:
    """Return the first ceiling and the one that none exceeds, at least a millisecond each."""
    if policy.jitter == "decorrelated":  # which knows no ceiling, only these two
        return policy.initial_delay, policy.max_delay
    delays = ceilings(policy)
    first = max(delays[0], 0.001)
    if policy.backoff in ("exponential", "linear") and len(set(delays)) > 1:
        return first, policy.max_delay
    return first, max(*delays, first)


def delay_losses(policy: Policy, target: str, theirs: list[float]) -> list[Loss]:
    """Say where the ceilings of the target are other ones."""
    ours = ceilings(policy)
    if policy.jitter == "decorrelated" or all(map(_same, ours, theirs)):
        return []
    field, value = _culprit(policy)
    instead = f"{target} waits up to {_spelled(theirs)}, where tarry has {_spelled(ours)}"
    return [Loss(field, value, instead)]


def _culprit(policy: Policy) -> tuple[str, object]:
    if isinstance(policy.backoff, Schedule):
        return "backoff", policy.backoff.delays
    if policy.backoff != "exponential":
        return "backoff", policy.backoff
    if policy.multiplier != _EVERYBODYS_FACTOR:
        return "multiplier", policy.multiplier
    return "max_delay", policy.max_delay


def _same(ours: float, theirs: float) -> bool:
    return isclose(ours, theirs, rel_tol=1e-6)


def _spelled(delays: list[float]) -> str:
    more = ", ..." if len(delays) > _SHOWN_DELAYS else ""
    return ", ".join(map(duration, delays[:_SHOWN_DELAYS])) + more


def rounded(losses: list[Loss], field: str, seconds: float) -> float:
    """Round to whole milliseconds, and say so where that changes something."""
    result = milliseconds(seconds)
    if result != seconds:
        losses.append(Loss(field, seconds, f"rounded to whole milliseconds: {result:g} s"))
    return result


# --- what no proxy does --------------------------------------------------------------------------


def proxy_losses(policy: Policy, target: str) -> list[Loss]:
    """Say what neither Envoy nor a gateway knows of a call."""
    losses = [
        Loss("safe", "per call", f"{target} repeats a POST like a GET: match methods in the route")
    ]
    throttled = max(policy.initial_delay, min(policy.throttled_delay, policy.max_delay))
    chosen = policy.retryable_codes != RETRYABLE_CODES  # the defaults are nobody's wish
    retries_throttled = _THROTTLED_STATUS in policy.retryable_statuses or (
        chosen and _THROTTLED_CODE in policy.retryable_codes
    )
    if retries_throttled and throttled != policy.initial_delay:
        instead = f"{target} does not wait longer after throttling than after any other failure"
        losses.append(Loss("throttled_delay", policy.throttled_delay, instead))
    if not policy.retry_marked:
        instead = f"{target} retries what a layer below has retried already"
        losses.append(Loss("retry_marked", policy.retry_marked, instead))
    return losses


def other_codes(policy: Policy, known: frozenset[str], target: str) -> list[Loss]:
    """Say which gRPC codes the target cannot name, if they were chosen."""
    lost = policy.retryable_codes - known - {"OK"}
    if not lost or policy.retryable_codes == RETRYABLE_CODES:
        return []
    return [Loss("retryable_codes", lost, f"{target} cannot retry on these")]


def other_statuses(policy: Policy, target: str) -> list[Loss]:
    """Say that HTTP statuses are lost, if they were chosen."""
    if policy.retryable_statuses == RETRYABLE_STATUSES:
        return []
    return [Loss("retryable_statuses", policy.retryable_statuses, f"{target} knows no HTTP status")]


def call_timeout(policy: Policy, target: str, losses: list[Loss]) -> float | None:
    """Return the seconds for the call in all; those of an only attempt are such, too."""
    only = policy.attempt_timeout if policy.max_attempts == 1 else None
    total = policy.total_budget
    if total is None or (only is not None and only <= total):
        return only
    instead = f"{target} cuts off the attempt that runs when the time is over; tarry lets it end"
    losses.append(Loss("total_budget", total, instead))
    return total


def no_limiter(defence: Defence, target: str) -> list[Loss]:
    """Say that a limiter is left out."""
    if defence.limiter is None:
        return []
    return [Loss("limiter.kind", defence.limiter["kind"], f"left out: {target} has none like it")]


def refuse_hedging(defence: Defence, target: str) -> None:
    """A hedged call without its hedging is another call: nothing is exported."""
    if defence.hedging is not None:
        msg = (
            f"hedging cannot be exported to {target}, which has none: export to grpc or envoy, or "
            "write a policy with retries for it"
        )
        raise ConfigurationError(msg)
