"""Export to Istio: a VirtualService with retries and timeout, and a DestinationRule if needed.

Istio configures Envoy, so it has at most the features of Envoy. It supports fewer settings: it can
set the base of the backoff but not its cap (10 x the base), and outlier detection counts only
consecutive errors.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError
from tarry.policyfile.durations import format_proto, round_to_ms
from tarry.policyfile.export.budgets import in_flight_budget
from tarry.policyfile.export.common import (
    breaker_arguments,
    breaker_losses,
    call_timeout,
    delay_bounds,
    delay_losses,
    first_ceilings,
    limiter_losses,
    proxy_losses,
    reject_hedging,
    round_delay,
)
from tarry.policyfile.export.envoy import jitter_losses, retry_conditions, too_early_losses
from tarry.policyfile.losses import Exported, Loss, Severity, sort_losses

if TYPE_CHECKING:
    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

_ISTIO = "Istio"
_API_VERSION = "networking.istio.io/v1"
_CAP_FACTOR = 10
"""Without a cap, Envoy limits the backoff to this multiple of its base."""
_MAX_EJECTION_S = 300.0
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def to_istio(defence: Defence, *, host: str, name: str | None = None) -> Exported:
    """Export documents for the service `host`, such as payments.prod.svc.cluster.local."""
    reject_hedging(defence, "istio")
    if not host:
        raise ConfigurationError("host", "must name the service that is called, got nothing")
    name = check_resource_name(name or host.partition(".")[0])
    losses: list[Loss] = []
    route: dict[str, Any] = {"route": [{"destination": {"host": host}}]}
    timeout = call_timeout(defence.policy, _ISTIO, losses)
    if timeout is not None:
        route["timeout"] = format_proto(
            "total_budget", round_delay(losses, "total_budget", timeout)
        )
    route["retries"] = _retries(defence.policy, losses)
    virtual_service = _resource("VirtualService", name, {"hosts": [host], "http": [route]})
    traffic = _traffic_policy(defence, losses)
    if not traffic:
        return Exported((virtual_service,), sort_losses(losses))
    rule = _resource("DestinationRule", name, {"host": host, "trafficPolicy": traffic})
    return Exported((virtual_service, rule), sort_losses(losses))


def check_resource_name(name: str) -> str:
    """Return the name, or raise ConfigurationError if Kubernetes does not allow it."""
    if not _NAME.fullmatch(name):
        rule = "must be lower case letters, digits and '-', at most 63 characters"
        raise ConfigurationError("name", rule, name)
    return name


def _resource(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": _API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _retries(policy: Policy, losses: list[Loss]) -> dict[str, Any]:
    if policy.max_attempts == 1:
        return {"attempts": 0}  # explicit, because the default is 2
    base = round_to_ms(delay_bounds(policy)[0])
    conditions = [
        *map(str, sorted(policy.retryable_statuses)),
        *retry_conditions(policy, _ISTIO, losses),
    ]
    retries: dict[str, Any] = {"attempts": policy.max_attempts - 1}
    if policy.attempt_timeout is not None:
        seconds = round_delay(losses, "attempt_timeout", policy.attempt_timeout)
        retries["perTryTimeout"] = format_proto("attempt_timeout", seconds)
    retries["retryOn"] = ",".join(conditions)
    retries["backoff"] = format_proto("initial_delay", base)
    target_delays = [
        min(_CAP_FACTOR * base, base * 2**k) for k in range(len(first_ceilings(policy)))
    ]
    losses += delay_losses(policy, _ISTIO, target_delays, policy.max_attempts - 1)
    losses += jitter_losses(policy, _ISTIO)
    losses += too_early_losses(policy, _ISTIO)
    losses.append(Loss("max_hint", policy.max_hint, "Istio does not read Retry-After"))
    losses += proxy_losses(policy, _ISTIO)
    return retries


def _traffic_policy(defence: Defence, losses: list[Loss]) -> dict[str, Any]:
    traffic: dict[str, Any] = {}
    if defence.limiter is not None and defence.limiter["kind"] == "in-flight":
        traffic["connectionPool"] = {"http": {"http2MaxRequests": defence.limiter["limit"]}}
        instead = "Istio has no ramp after an outage: the full limit applies at once"
        losses.append(Loss("limiter.kind", "in-flight", instead))
    else:
        losses += limiter_losses(defence, _ISTIO)
    retries = defence.policy.max_attempts > 1
    budget = in_flight_budget(defence, _ISTIO, losses) if retries else None
    if budget is not None:
        percent, minimum = budget
        traffic["retryBudget"] = {"percent": percent, "minRetryConcurrency": minimum}
    breaker = breaker_arguments(defence)
    if breaker is not None:
        detection = _outlier_detection(breaker, losses)
        if detection is not None:
            traffic["outlierDetection"] = detection
    return traffic


def _outlier_detection(breaker: dict[str, Any], losses: list[Loss]) -> dict[str, Any] | None:
    rate, consecutive, open_for = (
        breaker[field] for field in ("failure_rate", "consecutive", "open_for")
    )
    if consecutive is None:
        instead = "left out: Istio ejects hosts by errors in a row only, so set breaker.consecutive"
        losses.append(Loss("breaker.failure_rate", rate, instead, Severity.LOAD))
        return None
    instead = "Istio ejects by errors in a row only"
    losses.append(Loss("breaker.failure_rate", rate, instead, Severity.LOAD))
    losses += breaker_losses(breaker, _ISTIO)
    longest = max(_MAX_EJECTION_S, open_for)
    instead = f"ejection n lasts n x {open_for:g} s in Istio, {longest:g} s at most, without spread"
    losses.append(Loss("breaker.growth", breaker["growth"], instead, Severity.DETAIL))
    seconds = round_delay(losses, "breaker.open_for", open_for)
    return {
        "consecutive5xxErrors": consecutive,
        "baseEjectionTime": format_proto("breaker.open_for", seconds),
        "maxEjectionPercent": 100,
    }
