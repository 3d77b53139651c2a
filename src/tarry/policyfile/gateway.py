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
from tarry.policyfile import translation
from tarry.policyfile.documents import check_resource_name, format_gateway, k8s_resource
from tarry.policyfile.translation import Exported, Losses, Severity, format_value

if TYPE_CHECKING:
    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

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
    translation.reject_hedging(defence, "gateway-api")
    if "." in host:
        requirement = "must be the plain name of a Service without a namespace"
        raise ConfigurationError("host", requirement, host)
    if check_count("port", port) > _MAX_PORT:
        raise ConfigurationError("port", f"must be at most {_MAX_PORT}, got {port}")
    service, name = check_resource_name(host), check_resource_name(name or host)
    losses = Losses("a gateway")
    rule: dict[str, Any] = {"backendRefs": [{"name": service, "port": port}]}
    _add_policy(rule, defence.policy, losses)
    target = {"group": "", "kind": "Service", "name": service}
    spec: dict[str, Any] = {"parentRefs": [{**target, "port": port}], "rules": [rule]}
    documents = [k8s_resource("gateway.networking.k8s.io/v1", "HTTPRoute", name, spec)]
    budget = translation.summarize_budget(defence)
    if budget is not None and "retry" in rule:
        version = "gateway.networking.x-k8s.io/v1alpha1"
        spec = {"targetRefs": [target], "retryConstraint": _retry_constraint(budget, losses)}
        documents.append(k8s_resource(version, "XBackendTrafficPolicy", name, spec))
    losses.add_for_breaker(defence, "a gateway has none")
    losses.add_for_limiter(defence)
    return Exported(tuple(documents), losses.by_severity())


def _add_policy(rule: dict[str, Any], policy: Policy, losses: Losses) -> None:
    timeouts: dict[str, str] = {}
    total = losses.call_timeout(policy)
    if total is not None:
        timeouts["request"] = _format_rounded(losses, "total_budget", total)
    if policy.attempt_timeout is not None and policy.max_attempts > 1:
        # The API rejects a route whose attempt timeout is longer than the timeout of the call.
        seconds = min(policy.attempt_timeout, total or policy.attempt_timeout)
        timeouts["backendRequest"] = _format_rounded(losses, "attempt_timeout", seconds)
    if timeouts:
        rule["timeouts"] = timeouts
    if policy.max_attempts == 1:
        return
    statuses = sorted(code for code in policy.retryable_statuses if code >= _LOWEST_STATUS)
    _add_status_losses(policy, losses)
    first = losses.round_to_ms("initial_delay", translation.delay_bounds(policy)[0])
    rule["retry"] = {
        **({"codes": statuses} if statuses else {}),
        "attempts": policy.max_attempts - 1,
        "backoff": format_gateway("initial_delay", first),
    }
    instead = (
        f"{first:g} s is the shortest wait; growth, cap and jitter depend on the implementation"
    )
    if isinstance(policy.backoff, Schedule):
        instead = f"{translation.SCHEDULE_LOST}: {instead}"
        losses.add("backoff", policy.backoff.delays, instead, Severity.CRITICAL)
    else:
        losses.add("backoff", policy.backoff, instead)
    instead = "the effect of Retry-After depends on the implementation"
    losses.add("max_hint", policy.max_hint, instead)
    losses.add_for_proxy(policy)


def _format_rounded(losses: Losses, field: str, seconds: float) -> str:
    return format_gateway(field, losses.round_to_ms(field, seconds))


def _add_status_losses(policy: Policy, losses: Losses) -> None:
    """Add the losses of HTTP statuses and gRPC codes that a route cannot retry."""
    statuses = policy.retryable_statuses
    below = {code for code in statuses if code < _LOWEST_STATUS}
    optional = statuses - _REQUIRED_STATUSES - below
    if optional:
        instead = f"an implementation need not support more than {format_value(_REQUIRED_STATUSES)}"
        severity = Severity.DETAIL if statuses == RETRYABLE_STATUSES else Severity.LOAD
        losses.add("retryable_statuses", optional, instead, severity)
    if below:
        instead = "the Gateway API retries only statuses from 400 on"
        losses.add("retryable_statuses", below, instead, Severity.LOAD)
    losses.add_for_codes(policy, frozenset(), "an HTTPRoute")


def _retry_constraint(budget: translation.BudgetSummary, losses: Losses) -> dict[str, Any]:
    """Return the retry constraint that is closest to the budget: a whole percentage of calls."""
    exact_percent = 100 * budget.share
    percent = max(1, round(exact_percent))
    window = budget.arguments["window"] if budget.kind == "ratio" else _DEFAULT_INTERVAL_S
    interval = min(_MAX_INTERVAL_S, max(_MIN_INTERVAL_S, window))
    minimum = max(1, min(_MAX_RETRY_COUNT, round(budget.burst * interval / window)))
    if budget.kind != "ratio":
        instead = f"retries are at most {percent} % of the requests in {interval:g} s"
        losses.add("budget.kind", budget.kind, instead, Severity.LOAD)
    elif abs(percent - exact_percent) > 1e-9:  # noqa: PLR2004 - rounding error
        losses.add("budget.ratio", budget.share, f"rounded to {percent} %", Severity.DETAIL)
    if interval != window:
        instead = f"changed to {interval:g} s, because the allowed range is 1 s to 1 h"
        losses.add("budget.window", window, instead, Severity.DETAIL)
    if budget.kind == "ratio" and abs(minimum - budget.burst * interval / window) > 1e-9:  # noqa: PLR2004
        instead = f"rounded to {minimum} retries in {interval:g} s"
        minimum_rate = budget.arguments["min_per_second"]
        losses.add("budget.min_per_second", minimum_rate, instead, Severity.DETAIL)
    instead = "when it is exceeded, the client gets a 503 instead of the last response"
    losses.add("budget", budget.kind, instead)
    interval_text = _format_rounded(losses, "budget.window", interval)
    return {
        "budget": {"percent": percent, "interval": interval_text},
        "minRetryRate": {"count": minimum, "interval": interval_text},
    }
