"""Export to Envoy: a VirtualHost with its retry policy, and the settings of its Cluster.

The names are those of the protobufs in envoy.config.route.v3 and envoy.config.cluster.v3. The
delay of retry n is random between 0 and base_interval x 2**(n - 1), which is full jitter. The bound
in Envoy's documentation, base_interval x (2**n - 1), is that of versions of 2018.

Envoy's "circuit breakers" are limits. The closest equivalent of a breaker is outlier detection,
which ejects single hosts of a cluster.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from tarry.core.outcome import RETRYABLE_STATUSES
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.durations import format_proto, round_to_ms
from tarry.policyfile.export.budgets import DEFAULT_MIN_RETRIES_IN_FLIGHT, in_flight_budget
from tarry.policyfile.export.common import (
    breaker_arguments,
    breaker_losses,
    call_timeout,
    code_losses,
    delay_bounds,
    delay_losses,
    first_ceilings,
    hedging_delay,
    limiter_losses,
    proxy_losses,
    round_delay,
)
from tarry.policyfile.losses import Exported, Loss, Severity, sort_losses

if TYPE_CHECKING:
    from tarry.core.hedging import Hedging
    from tarry.policyfile.defence import Defence

_ENVOY = "Envoy"
_GRPC_CODES = frozenset(
    {"CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
)
_NO_RESPONSE = ("connect-failure", "refused-stream", "reset")
"""Retry conditions for attempts without a response; `reset` also covers a timeout."""
_TOO_EARLY = 425
_NO_BACKOFF = {"base_interval": "0.001s", "max_interval": "0.001s"}
"""Envoy waits a random number of whole milliseconds below the interval, here always 0."""


def to_envoy(defence: Defence, *, host: str, name: str | None = None) -> Exported:
    """Export to a VirtualHost for the domain `host` and to the Cluster behind it."""
    if not host:
        raise ConfigurationError("host", "must name the domain that clients call, got nothing")
    cluster = name or host.partition(".")[0]
    losses: list[Loss] = []
    action: dict[str, Any] = {"cluster": cluster, "timeout": "0s"}  # the default is 15 s
    if defence.hedging is not None:
        _add_hedging(action, defence.hedging, losses)
    else:
        _add_policy(action, defence.policy, losses)
    route = {"match": {"prefix": "/"}, "route": action}
    virtual_host = {"name": cluster, "domains": [host], "routes": [route]}
    settings = cluster_settings(defence, losses, retries="retry_policy" in action)
    documents: list[dict[str, Any]] = [virtual_host]
    if settings:
        documents.append({"name": cluster, **settings})
    return Exported(tuple(documents), sort_losses(losses))


def retry_conditions(policy: Policy, target: str, losses: list[Loss]) -> list[str]:
    """Return the retry conditions that are not HTTP statuses."""
    losses += code_losses(policy, _GRPC_CODES, target)
    known = sorted(policy.retryable_codes & _GRPC_CODES)
    return [*_NO_RESPONSE, *(code.lower().replace("_", "-") for code in known)]


def jitter_losses(policy: Policy, target: str) -> list[Loss]:
    """Return the loss of a jitter other than full."""
    if policy.jitter == "full":
        return []
    instead = f"{target} chooses every delay from 0 to the ceiling (full)"
    return [Loss("jitter", policy.jitter, instead)]


def too_early_losses(policy: Policy, target: str) -> list[Loss]:
    """Return the loss of the delay after status 425, unless the statuses are the defaults."""
    chosen = policy.retryable_statuses != RETRYABLE_STATUSES
    if not chosen or _TOO_EARLY not in policy.retryable_statuses:
        return []
    instead = f"{target} retries this status at once, without delay"
    return [Loss("retryable_statuses", _TOO_EARLY, instead, Severity.DETAIL)]


def _add_policy(action: dict[str, Any], policy: Policy, losses: list[Loss]) -> None:
    timeout = call_timeout(policy, _ENVOY, losses)
    if timeout is not None:
        action["timeout"] = format_proto(
            "total_budget", round_delay(losses, "total_budget", timeout)
        )
    if policy.max_attempts == 1:
        return
    first, longest = delay_bounds(policy)
    base, cap = round_to_ms(first), round_to_ms(longest)
    retry = _conditions(policy, losses)
    retry["num_retries"] = policy.max_attempts - 1
    if policy.attempt_timeout is not None:
        seconds = round_delay(losses, "attempt_timeout", policy.attempt_timeout)
        retry["per_try_timeout"] = format_proto("attempt_timeout", seconds)
    retry["retry_back_off"] = {
        "base_interval": format_proto("initial_delay", base),
        "max_interval": format_proto("max_delay", cap),
    }
    action["retry_policy"] = retry
    target_delays = [min(cap, base * 2**k) for k in range(len(first_ceilings(policy)))]
    losses += delay_losses(policy, _ENVOY, target_delays, policy.max_attempts - 1)
    losses += jitter_losses(policy, _ENVOY)
    losses += too_early_losses(policy, _ENVOY)
    if policy.max_hint:
        retry["rate_limited_retry_back_off"] = _add_max_hint(policy.max_hint, losses)
    else:
        instead = "Envoy ignores Retry-After, where tarry would give up"
        losses.append(Loss("max_hint", policy.max_hint, instead))
    losses += proxy_losses(policy, _ENVOY)


def _conditions(policy: Policy, losses: list[Loss]) -> dict[str, Any]:
    conditions = retry_conditions(policy, _ENVOY, losses)
    if not policy.retryable_statuses:
        return {"retry_on": ",".join(conditions)}
    return {
        "retry_on": ",".join([*conditions, "retriable-status-codes"]),
        "retriable_status_codes": sorted(policy.retryable_statuses),
    }


def _add_max_hint(max_hint: float, losses: list[Loss]) -> dict[str, Any]:
    instead = (
        "Envoy reads Retry-After in whole seconds only, adds up to half, and ignores a longer wait "
        "instead of giving up"
    )
    losses.append(Loss("max_hint", max_hint, instead, Severity.DETAIL))
    return {
        "reset_headers": [{"name": "Retry-After", "format": "SECONDS"}],
        "max_interval": format_proto("max_hint", round_delay(losses, "max_hint", max_hint)),
    }


def _add_hedging(action: dict[str, Any], hedging: Hedging, losses: list[Loss]) -> None:
    """Add hedging: a slow attempt is not stopped, and another one starts in parallel."""
    after = hedging_delay(hedging, "envoy")
    retry = _conditions(Policy(), losses)
    retry["num_retries"] = hedging.max_attempts - 1
    seconds = round_delay(losses, "hedging.after", after)
    retry["per_try_timeout"] = format_proto("hedging.after", seconds)
    # For Envoy a copy is a retry. With the default backoff it would start up to 25 ms late.
    retry["retry_back_off"] = dict(_NO_BACKOFF)
    action["retry_policy"] = retry
    action["hedge_policy"] = {"hedge_on_per_try_timeout": True}
    instead = "Envoy sends a copy when per_try_timeout is over, and repeats a POST like a GET"
    losses.append(Loss("hedging.after", after, instead, Severity.LOAD))
    if hedging.max_extra_load is not None:
        instead = "Envoy bounds copies by its retry budget only"
        load = Loss("hedging.max_extra_load", hedging.max_extra_load, instead, Severity.LOAD)
        losses.append(load)
    instead = "Envoy ignores Retry-After here"
    losses.append(Loss("hedging.max_hint", hedging.max_hint, instead, Severity.DETAIL))


def cluster_settings(defence: Defence, losses: list[Loss], *, retries: bool) -> dict[str, Any]:
    """Return the settings of the Cluster for the limiter, the budget and the breaker."""
    settings: dict[str, Any] = {}
    threshold: dict[str, Any] = {}
    if defence.limiter is not None and defence.limiter["kind"] == "in-flight":
        threshold["max_requests"] = defence.limiter["limit"]
        instead = "Envoy has no ramp after an outage: the full limit applies at once"
        losses.append(Loss("limiter.kind", "in-flight", instead))
    else:
        losses += limiter_losses(defence, _ENVOY)
    budget = in_flight_budget(defence, _ENVOY, losses) if retries else None
    if budget is not None:
        percent, minimum = budget
        threshold["retry_budget"] = {
            "budget_percent": {"value": percent},
            "min_retry_concurrency": minimum,
        }
    elif retries:
        instead = (
            f"Envoy makes {DEFAULT_MIN_RETRIES_IN_FLIGHT} retries at a time, unless the cluster "
            "sets more"
        )
        losses.append(Loss("budget", None, instead, Severity.LOAD))
    if threshold:
        settings["circuit_breakers"] = {"thresholds": [threshold]}
    breaker = breaker_arguments(defence)
    if breaker is not None:
        settings["outlier_detection"] = _outlier_detection(breaker, losses)
        if defence.hedging is not None:
            instead = (
                "Envoy counts an attempt that gets a copy as a failure of its host, so hosts that "
                "are slow now and then are ejected although they are healthy"
            )
            losses.append(
                Loss("breaker.failure_rate", breaker["failure_rate"], instead, Severity.LOAD)
            )
        # By default Envoy uses ejected hosts again when fewer than 50 % are healthy.
        settings["common_lb_config"] = {"healthy_panic_threshold": {"value": 0}}
    return settings


def _outlier_detection(breaker: dict[str, Any], losses: list[Loss]) -> dict[str, Any]:
    """Return outlier detection by failure rate and consecutive errors; other rules are off."""
    percent = 100 * breaker["failure_rate"]
    whole = max(1, ceil(percent - 1e-9))
    if abs(whole - percent) > 1e-9:  # noqa: PLR2004 - rounding error
        rounding = Loss(
            "breaker.failure_rate", breaker["failure_rate"], f"{whole} % in Envoy", Severity.DETAIL
        )
        losses.append(rounding)
    consecutive = breaker["consecutive"]
    # Envoy's ejection times always grow; a maximum equal to the base time prevents that.
    longest = breaker["open_for"] if breaker["growth"] == 1 else breaker["max_open"]
    detection: dict[str, Any] = {
        "failure_percentage_threshold": whole,
        "failure_percentage_request_volume": breaker["min_calls"],
        "failure_percentage_minimum_hosts": 1,
        "enforcing_failure_percentage": 100,
        "enforcing_success_rate": 0,
        "enforcing_consecutive_5xx": 0 if consecutive is None else 100,
        "interval": _format_ejection(losses, "window", breaker["window"]),
        "base_ejection_time": _format_ejection(losses, "open_for", breaker["open_for"]),
        "max_ejection_time": _format_ejection(losses, "max_open", longest),
        "max_ejection_percent": 100,
    }
    if consecutive is not None:
        detection["consecutive_5xx"] = consecutive
    if breaker["spread"]:
        jitter = breaker["spread"] * breaker["open_for"]
        detection["max_ejection_time_jitter"] = _format_ejection(losses, "spread", jitter)
    losses += breaker_losses(breaker, _ENVOY)
    if longest > breaker["open_for"]:
        instead = "ejection n lasts n x open_for in Envoy, up to max_open, and spread does not grow"
        losses.append(Loss("breaker.growth", breaker["growth"], instead, Severity.DETAIL))
    return detection


def _format_ejection(losses: list[Loss], field: str, seconds: float) -> str:
    return format_proto(f"breaker.{field}", round_delay(losses, f"breaker.{field}", seconds))
