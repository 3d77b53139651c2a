"""Export to the Gateway API: an HTTPRoute, and an XBackendTrafficPolicy for a retry budget.

Retries and budgets are experimental there (GEP-1731 and GEP-3388). The route is attached to the
Service itself, as in a mesh; for a gateway, change `parentRefs`. Durations have no fractions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.backoff import Schedule
from tarry.core.checks import check_count
from tarry.core.outcome import RETRYABLE_STATUSES
from tarry.errors import ConfigurationError
from tarry.policyfile.durations import format_gateway
from tarry.policyfile.export.budgets import BudgetSummary, summarize_budget
from tarry.policyfile.export.common import (
    SCHEDULE_LOST,
    breaker_left_out,
    call_timeout,
    code_losses,
    delay_bounds,
    limiter_losses,
    proxy_losses,
    reject_hedging,
    round_delay,
)
from tarry.policyfile.export.istio import check_resource_name
from tarry.policyfile.losses import Exported, Loss, Severity, format_value, sort_losses

if TYPE_CHECKING:
    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

_GATEWAY = "a gateway"
_REQUIRED_STATUSES = frozenset({500, 502, 503, 504})
"""Every implementation must support retries for these."""
_LOWEST_STATUS = 400
_MAX_PORT = 65_535
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 1.0, 3600.0
_DEFAULT_INTERVAL_S = 10.0
_MAX_RETRY_COUNT = 1_000_000


def to_gateway_api(
    defence: Defence, *, host: str, port: int = 80, name: str | None = None
) -> Exported:
    """Export documents for the Kubernetes Service `host`, a name without a namespace."""
    reject_hedging(defence, "gateway-api")
    if "." in host:
        requirement = "must be the plain name of a Service without a namespace"
        raise ConfigurationError("host", requirement, host)
    if check_count("port", port) > _MAX_PORT:
        raise ConfigurationError("port", f"must be at most {_MAX_PORT}, got {port}")
    service, name = check_resource_name(host), check_resource_name(name or host)
    losses: list[Loss] = []
    rule: dict[str, Any] = {"backendRefs": [{"name": service, "port": port}]}
    _add_policy(rule, defence.policy, losses)
    target = {"group": "", "kind": "Service", "name": service}
    parent = {**target, "port": port}
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": name},
        "spec": {"parentRefs": [parent], "rules": [rule]},
    }
    documents: list[dict[str, Any]] = [route]
    budget = summarize_budget(defence)
    if budget is not None and "retry" in rule:
        spec = {"targetRefs": [target], "retryConstraint": _retry_constraint(budget, losses)}
        documents.append(
            {
                "apiVersion": "gateway.networking.x-k8s.io/v1alpha1",
                "kind": "XBackendTrafficPolicy",
                "metadata": {"name": name},
                "spec": spec,
            }
        )
    if defence.breaker is not None:
        losses.append(breaker_left_out(defence.breaker, f"{_GATEWAY} has none"))
    losses += limiter_losses(defence, _GATEWAY)
    return Exported(tuple(documents), sort_losses(losses))


def _add_policy(rule: dict[str, Any], policy: Policy, losses: list[Loss]) -> None:
    timeouts: dict[str, str] = {}
    total = call_timeout(policy, _GATEWAY, losses)
    if total is not None:
        timeouts["request"] = format_gateway(
            "total_budget", round_delay(losses, "total_budget", total)
        )
    if policy.attempt_timeout is not None and policy.max_attempts > 1:
        # The API rejects a route whose attempt timeout is longer than the timeout of the call.
        seconds = min(policy.attempt_timeout, policy.attempt_timeout if total is None else total)
        seconds = round_delay(losses, "attempt_timeout", seconds)
        timeouts["backendRequest"] = format_gateway("attempt_timeout", seconds)
    if timeouts:
        rule["timeouts"] = timeouts
    if policy.max_attempts == 1:
        return
    statuses = sorted(code for code in policy.retryable_statuses if code >= _LOWEST_STATUS)
    _add_status_losses(policy, losses)
    first = round_delay(losses, "initial_delay", delay_bounds(policy)[0])
    rule["retry"] = {
        **({"codes": statuses} if statuses else {}),
        "attempts": policy.max_attempts - 1,
        "backoff": format_gateway("initial_delay", first),
    }
    instead = (
        f"{first:g} s is the shortest wait; growth, cap and jitter depend on the implementation"
    )
    if isinstance(policy.backoff, Schedule):
        instead = f"{SCHEDULE_LOST}: {instead}"
        losses.append(Loss("backoff", policy.backoff.delays, instead, Severity.CRITICAL))
    else:
        losses.append(Loss("backoff", policy.backoff, instead))
    losses.append(
        Loss("max_hint", policy.max_hint, "the effect of Retry-After depends on the implementation")
    )
    losses += proxy_losses(policy, _GATEWAY)


def _add_status_losses(policy: Policy, losses: list[Loss]) -> None:
    """Add the losses of HTTP statuses and gRPC codes that a route cannot retry."""
    statuses = policy.retryable_statuses
    optional = {code for code in statuses - _REQUIRED_STATUSES if code >= _LOWEST_STATUS}
    if optional:
        instead = f"an implementation need not support more than {format_value(_REQUIRED_STATUSES)}"
        severity = Severity.DETAIL if statuses == RETRYABLE_STATUSES else Severity.LOAD
        losses.append(Loss("retryable_statuses", optional, instead, severity))
    if statuses and min(statuses) < _LOWEST_STATUS:
        below = {code for code in statuses if code < _LOWEST_STATUS}
        instead = "the Gateway API retries only statuses from 400 on"
        losses.append(Loss("retryable_statuses", below, instead, Severity.LOAD))
    losses += code_losses(policy, frozenset(), "an HTTPRoute")


def _retry_constraint(budget: BudgetSummary, losses: list[Loss]) -> dict[str, Any]:
    """Return the retry constraint that is closest to the budget: a whole percentage of calls."""
    exact_percent = 100 * budget.share
    percent = max(1, round(exact_percent))
    window = budget.arguments["window"] if budget.kind == "ratio" else _DEFAULT_INTERVAL_S
    interval = min(_MAX_INTERVAL_S, max(_MIN_INTERVAL_S, window))
    minimum = max(1, min(_MAX_RETRY_COUNT, round(budget.burst * interval / window)))
    if budget.kind != "ratio":
        instead = f"retries are at most {percent} % of the requests in {interval:g} s"
        losses.append(Loss("budget.kind", budget.kind, instead, Severity.LOAD))
    elif abs(percent - exact_percent) > 1e-9:  # noqa: PLR2004 - rounding error
        losses.append(
            Loss("budget.ratio", budget.share, f"rounded to {percent} %", Severity.DETAIL)
        )
    if interval != window:
        instead = f"changed to {interval:g} s, because the allowed range is 1 s to 1 h"
        losses.append(Loss("budget.window", window, instead, Severity.DETAIL))
    if budget.kind == "ratio" and abs(minimum - budget.burst * interval / window) > 1e-9:  # noqa: PLR2004
        instead = f"rounded to {minimum} retries in {interval:g} s"
        minimum_rate = budget.arguments["min_per_second"]
        losses.append(Loss("budget.min_per_second", minimum_rate, instead, Severity.DETAIL))
    instead = "when it is exceeded, the client gets a 503 instead of the last response"
    losses.append(Loss("budget", budget.kind, instead))
    interval_text = format_gateway("budget.window", round_delay(losses, "budget.window", interval))
    return {
        "budget": {"percent": percent, "interval": interval_text},
        "minRetryRate": {"count": minimum, "interval": interval_text},
    }
