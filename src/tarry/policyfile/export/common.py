"""What the targets have in common: how a policy is read for them and which words are the same."""

from __future__ import annotations

from inspect import signature
from math import isclose
from typing import TYPE_CHECKING, Any

from tarry.core.backoff import Schedule
from tarry.core.breaker import Breaker
from tarry.core.durations import format_duration
from tarry.core.outcome import RETRYABLE_CODES, RETRYABLE_STATUSES
from tarry.errors import ConfigurationError
from tarry.policyfile.durations import milliseconds
from tarry.policyfile.losses import Loss, Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tarry.core.hedging import Hedging
    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

NO_SCHEDULE = "THE SCHEDULE CANNOT BE SAID"
_FIRST_DELAYS = 32
"""No exponential ceiling that matters grows for longer."""
_SHOWN_DELAYS = 4
_EVERYBODYS_FACTOR = 2
_ANOTHER_SCHEDULE, _NOTICED = 10, 60.0
"""Times as long in all, and seconds: what then arrives is not what was meant."""
_THROTTLED_STATUS, _THROTTLED_CODE = 429, "RESOURCE_EXHAUSTED"


def filled(make: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class with its defaults filled in."""
    defaults = {name: parameter.default for name, parameter in signature(make).parameters.items()}
    return {**defaults, **given}


def breaker_of(defence: Defence) -> dict[str, Any] | None:
    """Return all arguments of the breaker."""
    return None if defence.breaker is None else filled(Breaker, defence.breaker)


# --- delays --------------------------------------------------------------------------------------


def ceilings(policy: Policy, *, throttled: bool = False) -> list[float]:
    """Return the ceilings of the first retries."""
    last = min(policy.max_attempts - 1, _FIRST_DELAYS)
    return [policy.ceiling(k, throttled) for k in range(1, last + 1)]


def slower_throttled(policy: Policy) -> bool:
    """Say whether the policy waits longer after throttling than after another failure."""
    return ceilings(policy, throttled=True) != ceilings(policy)


def bounds(policy: Policy) -> tuple[float, float]:
    """Return the first ceiling and the one that none exceeds, at least a millisecond each."""
    if policy.jitter == "decorrelated":  # which knows no ceiling, only these two
        return policy.initial_delay, policy.max_delay
    delays = ceilings(policy)
    first = max(delays[0], 0.001)
    if policy.backoff in ("exponential", "linear") and len(set(delays)) > 1:
        return first, policy.max_delay
    return first, max(*delays, first)


def delay_losses(policy: Policy, target: str, theirs: list[float], retries: int) -> list[Loss]:
    """Say where the ceilings of the target are other ones; `retries` is how many it makes."""
    if policy.jitter == "decorrelated":
        return []
    ours, most = ceilings(policy), policy.max_attempts - 1
    here, there = _in_all(policy, ours, most), _in_all(policy, theirs, retries)
    if max(here, there) >= max(_NOTICED, _ANOTHER_SCHEDULE * min(here, there)):
        meant = (
            f"{most} retries within {format_duration(here)}, "
            f"{format_duration(max(ours))} apart at most"
        )
        instead = (
            f"{NO_SCHEDULE}: {target} makes {retries} within {format_duration(there)}, "
            f"{format_duration(max(theirs))} apart at most, and gives up"
        )
        return [Loss("schedule", meant, instead, Rank.ALARM)]
    if all(map(_same, ours, theirs)):
        return []
    field, value = _culprit(policy)
    instead = f"{target} waits up to {_spelled(theirs)}, where tarry has {_spelled(ours)}"
    return [Loss(field, value, instead)]


def _in_all(policy: Policy, delays: list[float], retries: int) -> float:
    """Return the longest that all retries wait; those past the known ones wait like the last."""
    waits = sum(delays) + (retries - len(delays)) * delays[-1]
    return waits if policy.total_budget is None else min(waits, policy.total_budget)


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
    return ", ".join(map(format_duration, delays[:_SHOWN_DELAYS])) + more


def rounded(losses: list[Loss], field: str, seconds: float) -> float:
    """Round to whole milliseconds, and say so where that changes something."""
    result = milliseconds(seconds)
    if result != seconds:
        instead = f"rounded to whole milliseconds: {result:g} s"
        losses.append(Loss(field, seconds, instead, Rank.DETAIL))
    return result


# --- what no proxy does --------------------------------------------------------------------------


def proxy_losses(policy: Policy, target: str) -> list[Loss]:
    """Say what neither Envoy nor a gateway knows of a call."""
    instead = f"{target} repeats a POST like a GET: match methods in the route"
    losses = [Loss("safe", "per call", instead, Rank.SENT)]
    chosen = policy.retryable_codes != RETRYABLE_CODES  # the defaults are nobody's wish
    retries_throttled = _THROTTLED_STATUS in policy.retryable_statuses or (
        chosen and _THROTTLED_CODE in policy.retryable_codes
    )
    if retries_throttled and slower_throttled(policy):
        instead = f"{target} does not wait longer after throttling than after any other failure"
        losses.append(Loss("throttled_delay", policy.throttled_delay, instead))
    if not policy.retry_marked:
        instead = f"{target} retries what a layer below has retried already"
        losses.append(Loss("retry_marked", policy.retry_marked, instead, Rank.DETAIL))
    return losses


def other_codes(policy: Policy, known: frozenset[str], target: str) -> list[Loss]:
    """Say which gRPC codes the target cannot name, if they were chosen."""
    lost = policy.retryable_codes - known - {"OK"}
    if not lost or policy.retryable_codes == RETRYABLE_CODES:
        return []
    return [Loss("retryable_codes", lost, f"{target} cannot retry on these", Rank.SENT)]


def other_statuses(policy: Policy, target: str) -> list[Loss]:
    """Say that HTTP statuses are lost, if they were chosen."""
    if policy.retryable_statuses == RETRYABLE_STATUSES:
        return []
    instead = f"{target} knows no HTTP status"
    return [Loss("retryable_statuses", policy.retryable_statuses, instead, Rank.SENT)]


def call_timeout(policy: Policy, target: str, losses: list[Loss]) -> float | None:
    """Return the seconds for the call in all; those of an only attempt are such, too."""
    only = policy.attempt_timeout if policy.max_attempts == 1 else None
    total = policy.total_budget
    if total is None or (only is not None and only <= total):
        return only
    instead = f"{target} cuts off the attempt that runs when the time is over; tarry lets it end"
    losses.append(Loss("total_budget", total, instead))
    return total


def no_breaker(breaker: Mapping[str, Any], why: str) -> Loss:
    """Say that a breaker is left out."""
    return Loss("breaker", breaker or "its defaults", f"left out: {why}", Rank.SENT)


def breaker_losses(breaker: dict[str, Any], target: str) -> list[Loss]:
    """Say what ejecting hosts is not."""
    losses = [
        Loss(
            "breaker.probes",
            breaker["probes"],
            f"{target} ejects single hosts, for 5xx and lost connections only, and gives them "
            "their full load back when the time is over",
            Rank.SENT,
        )
    ]
    if breaker["slow_after"] is not None:
        instead = f"{target} does not eject a host for being slow"
        losses.append(Loss("breaker.slow_after", breaker["slow_after"], instead, Rank.SENT))
    return losses


def no_limiter(defence: Defence, target: str) -> list[Loss]:
    """Say that a limiter is left out."""
    if defence.limiter is None:
        return []
    instead = f"left out: {target} has none like it"
    return [Loss("limiter.kind", defence.limiter["kind"], instead, Rank.SENT)]


# --- hedging -------------------------------------------------------------------------------------


def hedging_delay(hedging: Hedging, target: str) -> float:
    """Return the seconds before a copy: a percentile that is measured cannot be written down."""
    if isinstance(hedging.after, float):
        return hedging.after
    wish = "max_extra_load alone" if hedging.after is None else repr(hedging.after)
    rule = (
        f"must be seconds to be exported to {target}, got {wish}: no live percentile is known "
        "there, so write down the one that you measure"
    )
    raise ConfigurationError("hedging.after", rule)


def refuse_hedging(defence: Defence, target: str) -> None:
    """A hedged call without its hedging is another call: nothing is exported."""
    if defence.hedging is not None:
        msg = (
            f"hedging cannot be exported to {target}, which has none: export to grpc or envoy, or "
            "write a policy with retries for it"
        )
        raise ConfigurationError(msg)
