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
from tarry.policyfile import translation
from tarry.policyfile.defence import Defence, part_arguments
from tarry.policyfile.documents import format_proto, round_to_ms
from tarry.policyfile.translation import Exported, Losses, Severity

if TYPE_CHECKING:
    from tarry.core.hedging import Hedging

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
    losses = Losses("Envoy")
    action: dict[str, Any] = {"cluster": cluster, "timeout": "0s"}  # the default is 15 s
    if defence.hedging is not None:
        _add_hedging(action, defence.hedging, losses)
    else:
        _add_policy(action, defence.policy, losses)
    route = {"match": {"prefix": "/"}, "route": action}
    virtual_host = {"name": cluster, "domains": [host], "routes": [route]}
    settings = _cluster_settings(defence, losses, retries="retry_policy" in action)
    documents: list[dict[str, Any]] = [virtual_host]
    if settings:
        documents.append({"name": cluster, **settings})
    return Exported(tuple(documents), losses.by_severity())


# The next four functions are also used for Istio, which configures Envoy.
def retry_conditions(policy: Policy, losses: Losses) -> list[str]:
    """Return the retry conditions that are not HTTP statuses."""
    losses.add_for_codes(policy, _GRPC_CODES, losses.system)
    known = sorted(policy.retryable_codes & _GRPC_CODES)
    return [*_NO_RESPONSE, *(code.lower().replace("_", "-") for code in known)]


def add_backoff_losses(policy: Policy, losses: Losses, base: float, cap: float) -> None:
    """Add the losses of other delays and of other jitter than that of Envoy's backoff."""
    target_delays = [min(cap, base * 2**k) for k in range(len(translation.first_ceilings(policy)))]
    losses.add_for_delays(policy, target_delays, policy.max_attempts - 1)
    if policy.jitter != "full":
        instead = f"{losses.system} chooses every delay from 0 to the ceiling (full)"
        losses.add("jitter", policy.jitter, instead)
    chosen = policy.retryable_statuses != RETRYABLE_STATUSES  # whether the user has set them
    if chosen and _TOO_EARLY in policy.retryable_statuses:
        instead = f"{losses.system} retries this status at once, without delay"
        losses.add("retryable_statuses", _TOO_EARLY, instead, Severity.DETAIL)


def in_flight_limit(defence: Defence, losses: Losses) -> int | None:
    """Return the limit of an in-flight limiter, or None if there is none; add the losses."""
    if defence.limiter is None or defence.limiter["kind"] != "in-flight":
        losses.add_for_limiter(defence)
        return None
    instead = f"{losses.system} has no ramp after an outage: the full limit applies at once"
    losses.add("limiter.kind", "in-flight", instead)
    limit: int = defence.limiter["limit"]
    return limit


def add_ejection_losses(breaker: dict[str, Any], losses: Losses) -> None:
    """Add the losses when a breaker is replaced by the ejection of single hosts."""
    instead = (
        f"{losses.system} ejects single hosts, for 5xx and lost connections only, and sends them "
        "their full load again after the ejection"
    )
    losses.add("breaker.probes", breaker["probes"], instead, Severity.LOAD)
    if breaker["slow_after"] is not None:
        instead = f"{losses.system} does not eject a host for being slow"
        losses.add("breaker.slow_after", breaker["slow_after"], instead, Severity.LOAD)


def _add_policy(action: dict[str, Any], policy: Policy, losses: Losses) -> None:
    timeout = losses.call_timeout(policy)
    if timeout is not None:
        action["timeout"] = losses.format_proto("total_budget", timeout)
    if policy.max_attempts == 1:
        return
    base, cap = map(round_to_ms, translation.delay_bounds(policy))
    retry = action["retry_policy"] = _conditions(policy, losses)
    retry["num_retries"] = policy.max_attempts - 1
    if policy.attempt_timeout is not None:
        timeout_text = losses.format_proto("attempt_timeout", policy.attempt_timeout)
        retry["per_try_timeout"] = timeout_text
    base_text, cap_text = format_proto("initial_delay", base), format_proto("max_delay", cap)
    retry["retry_back_off"] = {"base_interval": base_text, "max_interval": cap_text}
    add_backoff_losses(policy, losses, base, cap)
    if policy.max_hint:
        instead = (
            "Envoy reads Retry-After in whole seconds only, adds up to half, and ignores a longer "
            "wait instead of giving up"
        )
        losses.add("max_hint", policy.max_hint, instead, Severity.DETAIL)
        retry["rate_limited_retry_back_off"] = {
            "reset_headers": [{"name": "Retry-After", "format": "SECONDS"}],
            "max_interval": losses.format_proto("max_hint", policy.max_hint),
        }
    else:
        instead = "Envoy ignores Retry-After, where tarry would give up"
        losses.add("max_hint", policy.max_hint, instead)
    losses.add_for_proxy(policy)


def _conditions(policy: Policy, losses: Losses) -> dict[str, Any]:
    conditions = retry_conditions(policy, losses)
    if not policy.retryable_statuses:
        return {"retry_on": ",".join(conditions)}
    retry_on = ",".join([*conditions, "retriable-status-codes"])
    return {"retry_on": retry_on, "retriable_status_codes": sorted(policy.retryable_statuses)}


def _add_hedging(action: dict[str, Any], hedging: Hedging, losses: Losses) -> None:
    """Add hedging: a slow attempt is not stopped, and another one starts in parallel."""
    after = translation.hedging_delay(hedging, "envoy")
    retry = action["retry_policy"] = _conditions(Policy(), losses)
    retry["num_retries"] = hedging.max_attempts - 1
    retry["per_try_timeout"] = losses.format_proto("hedging.after", after)
    # For Envoy a copy is a retry. With the default backoff it would start up to 25 ms late.
    retry["retry_back_off"] = dict(_NO_BACKOFF)
    action["hedge_policy"] = {"hedge_on_per_try_timeout": True}
    instead = "Envoy sends a copy when per_try_timeout is over, and repeats a POST like a GET"
    losses.add("hedging.after", after, instead, Severity.LOAD)
    if hedging.max_extra_load is not None:
        instead = "Envoy bounds copies by its retry budget only"
        losses.add("hedging.max_extra_load", hedging.max_extra_load, instead, Severity.LOAD)
    instead = "Envoy ignores Retry-After here"
    losses.add("hedging.max_hint", hedging.max_hint, instead, Severity.DETAIL)


def _cluster_settings(defence: Defence, losses: Losses, *, retries: bool) -> dict[str, Any]:
    """Return the settings of the Cluster for the limiter, the budget and the breaker."""
    settings: dict[str, Any] = {}
    threshold: dict[str, Any] = {}
    limit = in_flight_limit(defence, losses)
    if limit is not None:
        threshold["max_requests"] = limit
    budget = losses.in_flight_budget(defence) if retries else None
    if budget is not None:
        percent, minimum = {"value": budget[0]}, budget[1]
        threshold["retry_budget"] = {"budget_percent": percent, "min_retry_concurrency": minimum}
    elif retries:
        default = translation.DEFAULT_MIN_RETRIES_IN_FLIGHT
        instead = f"Envoy makes {default} retries at a time, unless the cluster sets more"
        losses.add("budget", None, instead, Severity.LOAD)
    if threshold:
        settings["circuit_breakers"] = {"thresholds": [threshold]}
    breaker = part_arguments(defence, "breaker")
    if breaker is not None:
        settings["outlier_detection"] = _outlier_detection(breaker, losses)
        if defence.hedging is not None:
            instead = (
                "Envoy counts an attempt that gets a copy as a failure of its host, so hosts that "
                "are slow now and then are ejected although they are healthy"
            )
            losses.add("breaker.failure_rate", breaker["failure_rate"], instead, Severity.LOAD)
        # By default Envoy uses ejected hosts again when fewer than 50 % are healthy.
        settings["common_lb_config"] = {"healthy_panic_threshold": {"value": 0}}
    return settings


def _outlier_detection(breaker: dict[str, Any], losses: Losses) -> dict[str, Any]:
    """Return outlier detection by failure rate and consecutive errors; other rules are off."""
    rate, consecutive = breaker["failure_rate"], breaker["consecutive"]
    open_for, percent = breaker["open_for"], 100 * rate
    whole = max(1, ceil(percent - 1e-9))
    if abs(whole - percent) > 1e-9:  # noqa: PLR2004 - rounding error
        losses.add("breaker.failure_rate", rate, f"{whole} % in Envoy", Severity.DETAIL)
    # Envoy's ejection times always grow; a maximum equal to the base time prevents that.
    longest = open_for if breaker["growth"] == 1 else breaker["max_open"]
    detection: dict[str, Any] = {
        "failure_percentage_threshold": whole,
        "failure_percentage_request_volume": breaker["min_calls"],
        "failure_percentage_minimum_hosts": 1,
        "enforcing_failure_percentage": 100,
        "enforcing_success_rate": 0,
        "enforcing_consecutive_5xx": 0 if consecutive is None else 100,
        "interval": losses.format_proto("breaker.window", breaker["window"]),
        "base_ejection_time": losses.format_proto("breaker.open_for", open_for),
        "max_ejection_time": losses.format_proto("breaker.max_open", longest),
        "max_ejection_percent": 100,
    }
    if consecutive is not None:
        detection["consecutive_5xx"] = consecutive
    if breaker["spread"]:
        jitter = breaker["spread"] * open_for
        detection["max_ejection_time_jitter"] = losses.format_proto("breaker.spread", jitter)
    add_ejection_losses(breaker, losses)
    if longest > open_for:
        instead = "ejection n lasts n x open_for in Envoy, up to max_open, and spread does not grow"
        losses.add("breaker.growth", breaker["growth"], instead, Severity.DETAIL)
    return detection
