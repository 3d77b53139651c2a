"""Exports a defence to the Gateway API: an HTTPRoute, and an XBackendTrafficPolicy for a budget.

Retries (GEP-1731) are in the Standard channel of this API since version 1.7.0, and experimental
before; budgets (GEP-3388) are experimental. The route is attached to the Service itself, as in a
mesh; for a gateway, change `parentRefs`. Of a defence (a policy or hedging, with its components),
the API can express only the policy and the budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.backoff import Schedule
from tarry.core.checks import check_count
from tarry.core.outcome import RETRYABLE_STATUSES
from tarry.errors import ConfigurationError
from tarry.policyfile import translation
from tarry.policyfile.documents import check_resource_name, format_gateway_duration, k8s_resource
from tarry.policyfile.translation import Converter, Exported, Severity, format_value

if TYPE_CHECKING:
    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

_REQUIRED_STATUSES = frozenset({500, 502, 503, 504})
"""Every implementation must support retries for these statuses."""
_MIN_RETRY_STATUS = 400
_MAX_PORT = 65_535
_MIN_BUDGET_INTERVAL_S, _MAX_BUDGET_INTERVAL_S = 1.0, 3600.0
_DEFAULT_BUDGET_INTERVAL_S = 10.0
_MAX_MIN_RETRY_COUNT = 1_000_000  # the largest minRetryRate.count


def to_gateway_api(
    defence: Defence, *, host: str, port: int = 80, name: str | None = None
) -> Exported:
    """Export for the Kubernetes Service with the name `host`, without its namespace."""
    translation.reject_hedging(defence, "gateway-api")
    if "." in host:
        raise ConfigurationError("host", "must be the name of a Service, without a namespace", host)
    if check_count("port", port) > _MAX_PORT:
        raise ConfigurationError("port", f"must be at most {_MAX_PORT}, got {port}")
    check_resource_name("host", host)
    name = check_resource_name("name", name or host)
    converter = Converter("the Gateway API")
    rule: dict[str, Any] = {"backendRefs": [{"name": host, "port": port}]}
    _export_policy(rule, defence.policy, converter)
    service_ref = {"group": "", "kind": "Service", "name": host}
    spec: dict[str, Any] = {"parentRefs": [{**service_ref, "port": port}], "rules": [rule]}
    documents = [k8s_resource("gateway.networking.k8s.io/v1", "HTTPRoute", name, spec)]
    budget = translation.summarize_budget(defence)
    if budget is not None and "retry" in rule:
        version = "gateway.networking.x-k8s.io/v1alpha1"
        spec = {"targetRefs": [service_ref], "retryConstraint": _export_budget(budget, converter)}
        documents.append(k8s_resource(version, "XBackendTrafficPolicy", name, spec))
    converter.report_left_out_breaker(defence, "the Gateway API has no breaker")
    converter.report_left_out_limiter(defence)
    return Exported(tuple(documents), converter.sorted_differences())


def _export_policy(rule: dict[str, Any], policy: Policy, converter: Converter) -> None:
    timeouts: dict[str, str] = {}
    total = converter.convert_call_timeout(policy)
    if total is not None:
        timeouts["request"] = _format_rounded(converter, "total_budget", total)
    if policy.attempt_timeout is not None and policy.max_attempts > 1:
        # The API rejects a route whose attempt timeout is longer than the timeout of the call.
        seconds = min(policy.attempt_timeout, total or policy.attempt_timeout)
        timeouts["backendRequest"] = _format_rounded(converter, "attempt_timeout", seconds)
    if timeouts:
        rule["timeouts"] = timeouts
    if policy.max_attempts == 1:
        return
    statuses = sorted(status for status in policy.retryable_statuses if status >= _MIN_RETRY_STATUS)
    _report_statuses(policy, converter)
    delay = converter.round_duration("initial_delay", translation.delay_bounds(policy)[0])
    rule["retry"] = {
        **({"codes": statuses} if statuses else {}),
        "attempts": policy.max_attempts - 1,
        "backoff": format_gateway_duration("initial_delay", delay),
    }
    effect = (
        f"{delay:g} s is the shortest wait; growth, cap and jitter depend on the implementation"
    )
    if isinstance(policy.backoff, Schedule):
        effect = f"{translation.INEXPRESSIBLE_SCHEDULE}: {effect}"
        converter.report("backoff", policy.backoff.delays, effect, Severity.CRITICAL)
    else:
        converter.report("backoff", policy.backoff, effect)
    effect = "the effect of Retry-After depends on the implementation"
    converter.report("max_hint", policy.max_hint, effect)
    converter.report_proxy_behaviour(policy)


def _format_rounded(converter: Converter, field: str, seconds: float) -> str:
    return format_gateway_duration(field, converter.round_duration(field, seconds))


def _report_statuses(policy: Policy, converter: Converter) -> None:
    """Report statuses and gRPC codes that not every implementation can retry."""
    statuses = policy.retryable_statuses
    unsupported = {status for status in statuses if status < _MIN_RETRY_STATUS}
    optional = statuses - _REQUIRED_STATUSES - unsupported
    if optional:
        effect = f"an implementation need not support more than {format_value(_REQUIRED_STATUSES)}"
        severity = Severity.DETAIL if statuses == RETRYABLE_STATUSES else Severity.LOAD
        converter.report("retryable_statuses", optional, effect, severity)
    if unsupported:
        effect = "the Gateway API retries only statuses from 400 on"
        converter.report("retryable_statuses", unsupported, effect, Severity.LOAD)
    converter.report_codes(policy, frozenset())


def _export_budget(budget: translation.BudgetSummary, converter: Converter) -> dict[str, Any]:
    """Return the retryConstraint that is closest to the budget: a whole percentage of calls."""
    exact_percent = 100 * budget.ratio
    percent = max(1, round(exact_percent))
    window = budget.arguments["window"] if budget.kind == "ratio" else _DEFAULT_BUDGET_INTERVAL_S
    interval = min(_MAX_BUDGET_INTERVAL_S, max(_MIN_BUDGET_INTERVAL_S, window))
    exact_min_retries = budget.retries_without_success * interval / window
    min_retries = max(1, min(_MAX_MIN_RETRY_COUNT, round(exact_min_retries)))
    if budget.kind != "ratio":
        effect = f"retries are at most {percent} % of the requests in {interval:g} s"
        converter.report("budget.kind", budget.kind, effect, Severity.LOAD)
    elif abs(percent - exact_percent) > 1e-9:  # noqa: PLR2004 - rounding error
        converter.report("budget.ratio", budget.ratio, f"rounded to {percent} %", Severity.DETAIL)
    if interval != window:
        effect = f"changed to {interval:g} s, because the allowed range is 1 s to 1 h"
        converter.report("budget.window", window, effect, Severity.DETAIL)
    if budget.kind == "ratio" and abs(min_retries - exact_min_retries) > 1e-9:  # noqa: PLR2004 - rounding error
        effect = f"rounded to {min_retries} retries in {interval:g} s"
        minimum_rate = budget.arguments["min_per_second"]
        converter.report("budget.min_per_second", minimum_rate, effect, Severity.DETAIL)
    effect = "if the budget is exceeded, the client gets a 503 instead of the last response"
    converter.report("budget", budget.kind, effect)
    interval_text = _format_rounded(converter, "budget.window", interval)
    return {
        "budget": {"percent": percent, "interval": interval_text},
        "minRetryRate": {"count": min_retries, "interval": interval_text},
    }
