"""Functions that the exporters share: delays, and the losses that several targets have.

A loss is a setting that the target cannot express. A ceiling is the upper bound of a delay.
"""

from __future__ import annotations

from inspect import signature
from math import isclose
from typing import TYPE_CHECKING, Any

from tarry.core.backoff import Schedule
from tarry.core.breaker import Breaker
from tarry.core.outcome import RETRYABLE_CODES, RETRYABLE_STATUSES
from tarry.core.text import format_duration
from tarry.errors import ConfigurationError
from tarry.policyfile.durations import round_to_ms
from tarry.policyfile.losses import Loss, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tarry.core.hedging import Hedging
    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

SCHEDULE_LOST = "THE SCHEDULE CANNOT BE EXPRESSED"
_MAX_COMPARED_DELAYS = 32
"""Delays are compared for this many retries; later exponential ceilings no longer grow."""
_MAX_LISTED_DELAYS = 4
_COMMON_MULTIPLIER = 2
"""The multiplier of backoff in all targets."""
_CRITICAL_RATIO, _MIN_CRITICAL_S = 10, 60.0
"""The schedule is lost when a total wait of at least 60 s differs by this factor."""
_THROTTLED_STATUS, _THROTTLED_CODE = 429, "RESOURCE_EXHAUSTED"


def with_defaults(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a class; missing arguments have their default values."""
    defaults = {
        name: parameter.default for name, parameter in signature(factory).parameters.items()
    }
    return {**defaults, **arguments}


def breaker_arguments(defence: Defence) -> dict[str, Any] | None:
    """Return all arguments of the breaker, or None without a breaker."""
    return None if defence.breaker is None else with_defaults(Breaker, defence.breaker)


# --- delays --------------------------------------------------------------------------------------


def first_ceilings(policy: Policy, *, throttled: bool = False) -> list[float]:
    """Return the ceilings of the first 32 retries, or of all if there are fewer."""
    last = min(policy.max_attempts - 1, _MAX_COMPARED_DELAYS)
    return [policy.ceiling(k, throttled) for k in range(1, last + 1)]


def waits_longer_when_throttled(policy: Policy) -> bool:
    """Return whether the policy waits longer after throttling than after other failures."""
    return first_ceilings(policy, throttled=True) != first_ceilings(policy)


def delay_bounds(policy: Policy) -> tuple[float, float]:
    """Return the first and the largest ceiling, at least a millisecond each."""
    if policy.jitter == "decorrelated":  # it has no ceilings, only these bounds
        return policy.initial_delay, policy.max_delay
    delays = first_ceilings(policy)
    first = max(delays[0], 0.001)
    if policy.backoff in ("exponential", "linear") and len(set(delays)) > 1:
        return first, policy.max_delay
    return first, max(*delays, first)


def delay_losses(
    policy: Policy, target: str, target_delays: list[float], retries: int
) -> list[Loss]:
    """Return the loss when the delays of the target, for `retries` retries, are different."""
    if policy.jitter == "decorrelated":
        return []
    delays, max_retries = first_ceilings(policy), policy.max_attempts - 1
    total = _total_wait(policy, delays, max_retries)
    target_total = _total_wait(policy, target_delays, retries)
    shorter, longer = sorted((total, target_total))
    if longer >= max(_MIN_CRITICAL_S, _CRITICAL_RATIO * shorter):
        schedule = (
            f"{max_retries} retries within {format_duration(total)}, "
            f"{format_duration(max(delays))} apart at most"
        )
        instead = (
            f"{SCHEDULE_LOST}: {target} makes {retries} within {format_duration(target_total)}, "
            f"{format_duration(max(target_delays))} apart at most, and gives up"
        )
        return [Loss("schedule", schedule, instead, Severity.CRITICAL)]
    if all(map(_is_close, delays, target_delays)):
        return []
    field, value = _field_of_difference(policy)
    instead = (
        f"{target} waits up to {_format_delays(target_delays)}, where tarry has "
        f"{_format_delays(delays)}"
    )
    return [Loss(field, value, instead)]


def _total_wait(policy: Policy, delays: list[float], retries: int) -> float:
    """Return the longest total wait; retries after those in `delays` repeat the last delay."""
    waits = sum(delays) + (retries - len(delays)) * delays[-1]
    return waits if policy.total_budget is None else min(waits, policy.total_budget)


def _field_of_difference(policy: Policy) -> tuple[str, object]:
    """Return the field of the policy that makes its delays differ from the target's."""
    if isinstance(policy.backoff, Schedule):
        return "backoff", policy.backoff.delays
    if policy.backoff != "exponential":
        return "backoff", policy.backoff
    if policy.multiplier != _COMMON_MULTIPLIER:
        return "multiplier", policy.multiplier
    return "max_delay", policy.max_delay


def _is_close(delay: float, target_delay: float) -> bool:
    return isclose(delay, target_delay, rel_tol=1e-6)


def _format_delays(delays: list[float]) -> str:
    more = ", ..." if len(delays) > _MAX_LISTED_DELAYS else ""
    return ", ".join(map(format_duration, delays[:_MAX_LISTED_DELAYS])) + more


def round_delay(losses: list[Loss], field: str, seconds: float) -> float:
    """Return seconds rounded to whole milliseconds; add a loss when that changes the value."""
    result = round_to_ms(seconds)
    if result != seconds:
        instead = f"rounded to whole milliseconds: {result:g} s"
        losses.append(Loss(field, seconds, instead, Severity.DETAIL))
    return result


# --- losses of proxies ---------------------------------------------------------------------------


def proxy_losses(policy: Policy, target: str) -> list[Loss]:
    """Return the losses of every target that is a proxy."""
    instead = f"{target} repeats a POST like a GET: match methods in the route"
    losses = [Loss("safe", "per call", instead, Severity.LOAD)]
    chosen = policy.retryable_codes != RETRYABLE_CODES  # whether the user has set them
    retries_throttled = _THROTTLED_STATUS in policy.retryable_statuses or (
        chosen and _THROTTLED_CODE in policy.retryable_codes
    )
    if retries_throttled and waits_longer_when_throttled(policy):
        instead = f"{target} does not wait longer after throttling than after any other failure"
        losses.append(Loss("throttled_delay", policy.throttled_delay, instead))
    if not policy.retry_marked:
        instead = f"{target} retries also what a layer below has already retried"
        losses.append(Loss("retry_marked", policy.retry_marked, instead, Severity.DETAIL))
    return losses


def code_losses(policy: Policy, known: frozenset[str], target: str) -> list[Loss]:
    """Return the loss of gRPC codes that the target does not know, unless they are defaults."""
    lost = policy.retryable_codes - known - {"OK"}
    if not lost or policy.retryable_codes == RETRYABLE_CODES:
        return []
    return [Loss("retryable_codes", lost, f"{target} cannot retry on these codes", Severity.LOAD)]


def status_losses(policy: Policy, target: str) -> list[Loss]:
    """Return the loss of the HTTP statuses, unless they are the defaults."""
    if policy.retryable_statuses == RETRYABLE_STATUSES:
        return []
    instead = f"{target} has no HTTP statuses"
    return [Loss("retryable_statuses", policy.retryable_statuses, instead, Severity.LOAD)]


def call_timeout(policy: Policy, target: str, losses: list[Loss]) -> float | None:
    """Return the timeout of the whole call, and add a loss when it is the total budget.

    If the policy has one attempt, the timeout of the attempt is also the timeout of the call.
    """
    single_attempt = policy.attempt_timeout if policy.max_attempts == 1 else None
    total = policy.total_budget
    if total is None or (single_attempt is not None and single_attempt <= total):
        return single_attempt
    instead = f"{target} stops a running attempt when the time is over; tarry lets it finish"
    losses.append(Loss("total_budget", total, instead))
    return total


def breaker_left_out(breaker: Mapping[str, Any], cause: str) -> Loss:
    """Return the loss of a breaker that is left out of the export."""
    return Loss("breaker", breaker or "its defaults", f"left out: {cause}", Severity.LOAD)


def breaker_losses(breaker: dict[str, Any], target: str) -> list[Loss]:
    """Return the losses when a breaker is replaced by the ejection of single hosts."""
    losses = [
        Loss(
            "breaker.probes",
            breaker["probes"],
            f"{target} ejects single hosts, for 5xx and lost connections only, and sends them "
            "their full load again after the ejection",
            Severity.LOAD,
        )
    ]
    if breaker["slow_after"] is not None:
        instead = f"{target} does not eject a host for being slow"
        losses.append(Loss("breaker.slow_after", breaker["slow_after"], instead, Severity.LOAD))
    return losses


def limiter_losses(defence: Defence, target: str) -> list[Loss]:
    """Return the loss of a limiter that is left out of the export."""
    if defence.limiter is None:
        return []
    instead = f"left out: {target} has no such limiter"
    return [Loss("limiter.kind", defence.limiter["kind"], instead, Severity.LOAD)]


# --- hedging -------------------------------------------------------------------------------------


def hedging_delay(hedging: Hedging, target: str) -> float:
    """Return the seconds before a copy is sent; a percentile raises ConfigurationError."""
    if isinstance(hedging.after, float):
        return hedging.after
    setting = "max_extra_load alone" if hedging.after is None else repr(hedging.after)
    rule = (
        f"must be seconds to be exported to {target}, got {setting}: {target} does not "
        "measure percentiles, so set the value that you measured"
    )
    raise ConfigurationError("hedging.after", rule)


def reject_hedging(defence: Defence, target: str) -> None:
    """Raise ConfigurationError if the defence hedges, because the target cannot hedge."""
    if defence.hedging is not None:
        msg = (
            f"hedging cannot be exported to {target}, which has no hedging: export to grpc or "
            "envoy, or use a policy with retries"
        )
        raise ConfigurationError(msg)
