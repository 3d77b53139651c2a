"""Istio: a VirtualService with retries and timeout, and a DestinationRule where one is needed.

Istio configures Envoys, so what Envoy cannot do, it cannot do either. It passes on less: the base
of the backoff and not its cap (10 x the base), and outlier detection by errors in a row only.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError
from tarry.policyfile.durations import milliseconds, proto
from tarry.policyfile.export.budgets import in_flight
from tarry.policyfile.export.common import (
    bounds,
    breaker_losses,
    breaker_of,
    call_timeout,
    ceilings,
    delay_losses,
    no_limiter,
    proxy_losses,
    refuse_hedging,
    rounded,
)
from tarry.policyfile.export.envoy import full_jitter, retry_on, too_early
from tarry.policyfile.losses import Exported, Loss, Rank, ranked

if TYPE_CHECKING:
    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

_ISTIO = "Istio"
_API_VERSION = "networking.istio.io/v1"
_CAP = 10
"""Times the base: the cap that Envoy takes when it is given none."""
_LONGEST_EJECTION = 300.0
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def to_istio(defence: Defence, *, host: str, name: str | None = None) -> Exported:
    """Export for the service `host`, such as payments.prod.svc.cluster.local."""
    refuse_hedging(defence, "istio")
    if not host:
        raise ConfigurationError("host", "must name the service that is called, got nothing")
    name = resource_name(name or host.partition(".")[0])
    losses: list[Loss] = []
    route: dict[str, Any] = {"route": [{"destination": {"host": host}}]}
    timeout = call_timeout(defence.policy, _ISTIO, losses)
    if timeout is not None:
        route["timeout"] = proto("total_budget", rounded(losses, "total_budget", timeout))
    route["retries"] = _retries(defence.policy, losses)
    virtual_service = _resource("VirtualService", name, {"hosts": [host], "http": [route]})
    traffic = _traffic_policy(defence, losses)
    if not traffic:
        return Exported((virtual_service,), ranked(losses))
    rule = _resource("DestinationRule", name, {"host": host, "trafficPolicy": traffic})
    return Exported((virtual_service, rule), ranked(losses))


def resource_name(name: str) -> str:
    """Check a name by the rule of Kubernetes."""
    if not _NAME.fullmatch(name):
        rule = "must be lower case letters, digits and '-', at most 63"
        raise ConfigurationError("name", rule, name)
    return name


def _resource(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": _API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _retries(policy: Policy, losses: list[Loss]) -> dict[str, Any]:
    if policy.max_attempts == 1:
        return {"attempts": 0}  # said, because left out it would be 2
    base = milliseconds(bounds(policy)[0])
    conditions = [*map(str, sorted(policy.retryable_statuses)), *retry_on(policy, _ISTIO, losses)]
    retries: dict[str, Any] = {"attempts": policy.max_attempts - 1}
    if policy.attempt_timeout is not None:
        seconds = rounded(losses, "attempt_timeout", policy.attempt_timeout)
        retries["perTryTimeout"] = proto("attempt_timeout", seconds)
    retries["retryOn"] = ",".join(conditions)
    retries["backoff"] = proto("initial_delay", base)
    theirs = [min(_CAP * base, base * 2**k) for k in range(len(ceilings(policy)))]
    losses += delay_losses(policy, _ISTIO, theirs, policy.max_attempts - 1)
    losses += full_jitter(policy, _ISTIO)
    losses += too_early(policy, _ISTIO)
    losses.append(Loss("max_hint", policy.max_hint, "Istio does not read Retry-After"))
    losses += proxy_losses(policy, _ISTIO)
    return retries


def _traffic_policy(defence: Defence, losses: list[Loss]) -> dict[str, Any]:
    traffic: dict[str, Any] = {}
    if defence.limiter is not None and defence.limiter["kind"] == "in-flight":
        traffic["connectionPool"] = {"http": {"http2MaxRequests": defence.limiter["limit"]}}
        instead = "Istio has no ramp after an outage: the whole limit holds at once"
        losses.append(Loss("limiter.kind", "in-flight", instead))
    else:
        losses += no_limiter(defence, _ISTIO)
    retries = defence.policy.max_attempts > 1
    budget = in_flight(defence, _ISTIO, losses) if retries else None
    if budget is not None:
        percent, least = budget
        traffic["retryBudget"] = {"percent": percent, "minRetryConcurrency": least}
    breaker = breaker_of(defence)
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
        losses.append(Loss("breaker.failure_rate", rate, instead, Rank.SENT))
        return None
    instead = "Istio ejects by errors in a row only"
    losses.append(Loss("breaker.failure_rate", rate, instead, Rank.SENT))
    losses += breaker_losses(breaker, _ISTIO)
    longest = max(_LONGEST_EJECTION, open_for)
    instead = f"ejection n lasts n x {open_for:g} s in Istio, {longest:g} s at most, without spread"
    losses.append(Loss("breaker.growth", breaker["growth"], instead, Rank.DETAIL))
    seconds = rounded(losses, "breaker.open_for", open_for)
    return {
        "consecutive5xxErrors": consecutive,
        "baseEjectionTime": proto("breaker.open_for", seconds),
        "maxEjectionPercent": 100,
    }
