"""Gateway API: an HTTPRoute with retry and timeouts, and an XBackendTrafficPolicy for a budget.

Both are experimental (GEP-1731 and GEP-3388). The route is attached to the Service itself, as a
mesh has it; behind a gateway, `parentRefs` names that instead. Durations have no fractions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.backoff import Schedule
from tarry.core.checks import check_count
from tarry.core.outcome import RETRYABLE_STATUSES
from tarry.errors import ConfigurationError
from tarry.policyfile.durations import gateway
from tarry.policyfile.export.budgets import Allowance, allowance
from tarry.policyfile.export.common import (
    NO_SCHEDULE,
    bounds,
    call_timeout,
    no_breaker,
    no_limiter,
    other_codes,
    proxy_losses,
    refuse_hedging,
    rounded,
)
from tarry.policyfile.export.istio import resource_name
from tarry.policyfile.losses import Exported, Loss, Rank, ranked, shown

if TYPE_CHECKING:
    from tarry.core.policy import Policy
    from tarry.policyfile.defence import Defence

_GATEWAY = "a gateway"
_MUST_SUPPORT = frozenset({500, 502, 503, 504})
_FIRST_CODE = 400
_LAST_PORT = 65_535
_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 1.0, 3600.0
_DEFAULT_INTERVAL = 10.0
_MOST_RETRIES = 1_000_000


def to_gateway_api(
    defence: Defence, *, host: str, port: int = 80, name: str | None = None
) -> Exported:
    """Export for the Kubernetes Service `host`, named without its namespace."""
    refuse_hedging(defence, "gateway-api")
    if "." in host:
        requirement = "must be the plain name of a Service for the Gateway API"
        raise ConfigurationError("host", requirement, host)
    if check_count("port", port) > _LAST_PORT:
        raise ConfigurationError("port", f"must be at most {_LAST_PORT}, got {port}")
    service, name = resource_name(host), resource_name(name or host)
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
    budget = allowance(defence)
    if budget is not None and "retry" in rule:
        spec = {"targetRefs": [target], "retryConstraint": _constraint(budget, losses)}
        documents.append(
            {
                "apiVersion": "gateway.networking.x-k8s.io/v1alpha1",
                "kind": "XBackendTrafficPolicy",
                "metadata": {"name": name},
                "spec": spec,
            }
        )
    if defence.breaker is not None:
        losses.append(no_breaker(defence.breaker, f"{_GATEWAY} has none"))
    losses += no_limiter(defence, _GATEWAY)
    return Exported(tuple(documents), ranked(losses))


def _add_policy(rule: dict[str, Any], policy: Policy, losses: list[Loss]) -> None:
    timeouts: dict[str, str] = {}
    total = call_timeout(policy, _GATEWAY, losses)
    if total is not None:
        timeouts["request"] = gateway("total_budget", rounded(losses, "total_budget", total))
    if policy.attempt_timeout is not None and policy.max_attempts > 1:
        # One attempt may not have more time than the call: the API refuses such a route.
        seconds = min(policy.attempt_timeout, policy.attempt_timeout if total is None else total)
        seconds = rounded(losses, "attempt_timeout", seconds)
        timeouts["backendRequest"] = gateway("attempt_timeout", seconds)
    if timeouts:
        rule["timeouts"] = timeouts
    if policy.max_attempts == 1:
        return
    codes = sorted(code for code in policy.retryable_statuses if code >= _FIRST_CODE)
    _code_losses(policy, losses)
    first = rounded(losses, "initial_delay", bounds(policy)[0])
    rule["retry"] = {
        **({"codes": codes} if codes else {}),
        "attempts": policy.max_attempts - 1,
        "backoff": gateway("initial_delay", first),
    }
    instead = f"{first:g} s is the least wait: growth, cap and jitter are up to the implementation"
    if isinstance(policy.backoff, Schedule):
        instead = f"{NO_SCHEDULE}: {instead}"
        losses.append(Loss("backoff", policy.backoff.delays, instead, Rank.ALARM))
    else:
        losses.append(Loss("backoff", policy.backoff, instead))
    losses.append(Loss("max_hint", policy.max_hint, "Retry-After is up to the implementation"))
    losses += proxy_losses(policy, _GATEWAY)


def _code_losses(policy: Policy, losses: list[Loss]) -> None:
    statuses = policy.retryable_statuses
    optional = {code for code in statuses - _MUST_SUPPORT if code >= _FIRST_CODE}
    if optional:
        instead = f"an implementation need not support more than {shown(_MUST_SUPPORT)}"
        rank = Rank.DETAIL if statuses == RETRYABLE_STATUSES else Rank.SENT
        losses.append(Loss("retryable_statuses", optional, instead, rank))
    if statuses and min(statuses) < _FIRST_CODE:
        below = {code for code in statuses if code < _FIRST_CODE}
        instead = "the Gateway API has codes from 400 on"
        losses.append(Loss("retryable_statuses", below, instead, Rank.SENT))
    losses += other_codes(policy, frozenset(), "an HTTPRoute")


def _constraint(budget: Allowance, losses: list[Loss]) -> dict[str, Any]:
    """Return the budget; where it is no share of the calls, the nearest one that is."""
    exact = 100 * budget.share
    percent = max(1, round(exact))
    window = budget.arguments["window"] if budget.kind == "ratio" else _DEFAULT_INTERVAL
    interval = min(_LONGEST_INTERVAL, max(_SHORTEST_INTERVAL, window))
    least = max(1, min(_MOST_RETRIES, round(budget.burst * interval / window)))
    if budget.kind != "ratio":
        instead = f"retries are at most {percent} % of the requests of {interval:g} s"
        losses.append(Loss("budget.kind", budget.kind, instead, Rank.SENT))
    elif abs(percent - exact) > 1e-9:  # noqa: PLR2004 - a hair
        losses.append(Loss("budget.ratio", budget.share, f"rounded to {percent} %", Rank.DETAIL))
    if interval != window:
        instead = f"{interval:g} s: it has 1 s to 1 h"
        losses.append(Loss("budget.window", window, instead, Rank.DETAIL))
    if budget.kind == "ratio" and abs(least - budget.burst * interval / window) > 1e-9:  # noqa: PLR2004
        instead = f"rounded to {least} retries in {interval:g} s"
        least_rate = budget.arguments["min_per_second"]
        losses.append(Loss("budget.min_per_second", least_rate, instead, Rank.DETAIL))
    losses.append(
        Loss("budget", budget.kind, "over it, the client gets a 503 and not the last answer")
    )
    every = gateway("budget.window", rounded(losses, "budget.window", interval))
    return {
        "budget": {"percent": percent, "interval": every},
        "minRetryRate": {"count": least, "interval": every},
    }
