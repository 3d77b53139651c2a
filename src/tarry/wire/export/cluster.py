"""Envoy: what belongs into a Cluster, its circuit breakers and its outlier detection.

Envoy's "circuit breakers" are limits. What a breaker does comes nearest to outlier detection,
which takes single hosts out of a cluster.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from tarry.wire.durations import proto
from tarry.wire.export.budgets import DEFAULT_IN_FLIGHT, in_flight
from tarry.wire.export.common import breaker_of, no_limiter, rounded
from tarry.wire.losses import Loss, Rank

if TYPE_CHECKING:
    from tarry.wire.defence import Defence

_ENVOY = "Envoy"


def cluster_settings(defence: Defence, losses: list[Loss], *, retries: bool) -> dict[str, Any]:
    """Return what the Cluster has to say of the limiter, the budget and the breaker."""
    settings: dict[str, Any] = {}
    threshold: dict[str, Any] = {}
    if defence.limiter is not None and defence.limiter["kind"] == "in-flight":
        threshold["max_requests"] = defence.limiter["limit"]
        instead = "Envoy has no ramp after an outage: the whole limit holds at once"
        losses.append(Loss("limiter.kind", "in-flight", instead))
    else:
        losses += no_limiter(defence, _ENVOY)
    budget = in_flight(defence, _ENVOY, losses) if retries else None
    if budget is not None:
        percent, least = budget
        threshold["retry_budget"] = {
            "budget_percent": {"value": percent},
            "min_retry_concurrency": least,
        }
    elif retries:
        instead = f"Envoy makes {DEFAULT_IN_FLIGHT} retries at a time, unless the cluster says more"
        losses.append(Loss("budget", None, instead, Rank.SENT))
    if threshold:
        settings["circuit_breakers"] = {"thresholds": [threshold]}
    breaker = breaker_of(defence)
    if breaker is not None:
        settings["outlier_detection"] = _outlier_detection(breaker, losses)
        if defence.hedging is not None:
            instead = (
                "Envoy takes an attempt that gets a copy for a failure of its host, so the hosts "
                "that are slow now and then are ejected while they are healthy"
            )
            losses.append(Loss("breaker.failure_rate", breaker["failure_rate"], instead, Rank.SENT))
        # Below 50 % of healthy hosts Envoy would use the ejected ones again.
        settings["common_lb_config"] = {"healthy_panic_threshold": {"value": 0}}
    return settings


def _outlier_detection(breaker: dict[str, Any], losses: list[Loss]) -> dict[str, Any]:
    """Eject by share and by row, as asked; switch off what Envoy would do besides."""
    percent = 100 * breaker["failure_rate"]
    whole = max(1, ceil(percent - 1e-9))
    if abs(whole - percent) > 1e-9:  # noqa: PLR2004 - a hair
        rounding = Loss(
            "breaker.failure_rate", breaker["failure_rate"], f"{whole} % in Envoy", Rank.DETAIL
        )
        losses.append(rounding)
    consecutive = breaker["consecutive"]
    # Ejections grow by their number, which a bound of one base undoes.
    longest = breaker["open_for"] if breaker["growth"] == 1 else breaker["max_open"]
    detection: dict[str, Any] = {
        "failure_percentage_threshold": whole,
        "failure_percentage_request_volume": breaker["min_calls"],
        "failure_percentage_minimum_hosts": 1,
        "enforcing_failure_percentage": 100,
        "enforcing_success_rate": 0,
        "enforcing_consecutive_5xx": 0 if consecutive is None else 100,
        "interval": _ejection(losses, "window", breaker["window"]),
        "base_ejection_time": _ejection(losses, "open_for", breaker["open_for"]),
        "max_ejection_time": _ejection(losses, "max_open", longest),
        "max_ejection_percent": 100,
    }
    if consecutive is not None:
        detection["consecutive_5xx"] = consecutive
    if breaker["spread"]:
        jitter = breaker["spread"] * breaker["open_for"]
        detection["max_ejection_time_jitter"] = _ejection(losses, "spread", jitter)
    losses += breaker_losses(breaker, _ENVOY)
    if longest > breaker["open_for"]:
        instead = "ejection n lasts n x open_for in Envoy, up to max_open, and spread does not grow"
        losses.append(Loss("breaker.growth", breaker["growth"], instead, Rank.DETAIL))
    return detection


def _ejection(losses: list[Loss], field: str, seconds: float) -> str:
    return proto(f"breaker.{field}", rounded(losses, f"breaker.{field}", seconds))


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
