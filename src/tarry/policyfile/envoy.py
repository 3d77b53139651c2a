"""Exports a defence to Envoy: a VirtualHost with its retry policy, and settings of its Cluster.

A defence is a policy or hedging, with its breaker, budget and limiter. The documents have the field
names of the protobufs in envoy.config.route.v3 and envoy.config.cluster.v3. Envoy's delay before
retry n is random between 0 and base_interval x 2**(n - 1), which is full jitter. The upper limit in
Envoy's documentation, base_interval x (2**n - 1), applied to versions of 2018.

Envoy's "circuit breakers" are limits. Its closest equivalent of a breaker is outlier detection,
which ejects single hosts of a cluster.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from tarry.core.outcome import RETRYABLE_STATUSES
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile import translation
from tarry.policyfile.defence import Defence, component_arguments
from tarry.policyfile.documents import format_proto_duration, round_to_ms
from tarry.policyfile.translation import Converter, Exported, Severity

if TYPE_CHECKING:
    from tarry.core.hedging import Hedging

_SUPPORTED_GRPC_CODES = frozenset(
    {"CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
)
_NO_RESPONSE_CONDITIONS = ("connect-failure", "refused-stream", "reset")
"""Retry conditions for attempts without a response; `reset` also covers a timeout."""
_TOO_EARLY_STATUS = 425
_NO_BACKOFF = {"base_interval": "0.001s", "max_interval": "0.001s"}
"""Envoy waits a random number of whole milliseconds below the interval, here always 0."""


def to_envoy(defence: Defence, *, host: str, name: str | None = None) -> Exported:
    """Export to a VirtualHost for the domain `host`, and to the Cluster that serves it."""
    if not host:
        raise ConfigurationError("host", "must name the domain that clients call, got nothing")
    cluster = name or host.partition(".")[0]
    converter = Converter("Envoy")
    action: dict[str, Any] = {"cluster": cluster, "timeout": "0s"}  # no timeout; default: 15 s
    if defence.hedging is not None:
        _export_hedging(action, defence.hedging, converter)
    else:
        _export_policy(action, defence.policy, converter)
    route = {"match": {"prefix": "/"}, "route": action}
    virtual_host = {"name": cluster, "domains": [host], "routes": [route]}
    settings = _export_cluster(defence, converter, has_retries="retry_policy" in action)
    documents: list[dict[str, Any]] = [virtual_host]
    if settings:
        documents.append({"name": cluster, **settings})
    return Exported(tuple(documents), converter.sorted_differences())


# The next four functions are also used for Istio, which configures Envoy.
def retry_conditions(policy: Policy, converter: Converter) -> list[str]:
    """Return the retry conditions that are not HTTP statuses, and report unsupported gRPC codes."""
    converter.report_codes(policy, _SUPPORTED_GRPC_CODES)
    supported = sorted(policy.retryable_codes & _SUPPORTED_GRPC_CODES)
    return [*_NO_RESPONSE_CONDITIONS, *(code.lower().replace("_", "-") for code in supported)]


def report_backoff(policy: Policy, converter: Converter, base: float, cap: float) -> None:
    """Report how delays and jitter differ from a backoff of Envoy with this base and cap."""
    envoy_delays = [min(cap, base * 2**k) for k in range(len(translation.first_ceilings(policy)))]
    converter.report_delays(policy, envoy_delays, policy.max_attempts - 1)
    if policy.jitter != "full":
        effect = f"{converter.system} chooses every delay from 0 to the ceiling (full jitter)"
        converter.report("jitter", policy.jitter, effect)
    has_custom_statuses = policy.retryable_statuses != RETRYABLE_STATUSES
    if has_custom_statuses and _TOO_EARLY_STATUS in policy.retryable_statuses:
        effect = f"{converter.system} retries this status at once, without delay"
        converter.report("retryable_statuses", _TOO_EARLY_STATUS, effect, Severity.DETAIL)


def convert_limiter(defence: Defence, converter: Converter) -> int | None:
    """Return the limit of the in-flight limiter, or None if the defence has no such limiter."""
    if defence.limiter is None or defence.limiter["kind"] != "in-flight":
        converter.report_left_out_limiter(defence)
        return None
    effect = f"{converter.system} has no ramp after an outage: the full limit applies at once"
    converter.report("limiter.kind", "in-flight", effect)
    limit: int = defence.limiter["limit"]
    return limit


def report_ejection(breaker: dict[str, Any], converter: Converter) -> None:
    """Report how the ejection of single hosts differs from a breaker."""
    effect = (
        f"{converter.system} ejects single hosts, for 5xx and lost connections only, and sends "
        "them their full load again after the ejection"
    )
    converter.report("breaker.probes", breaker["probes"], effect, Severity.LOAD)
    if breaker["timeouts"] is not None:
        effect = f"{converter.system} does not count time-outs separately"
        converter.report("breaker.timeouts", breaker["timeouts"], effect, Severity.LOAD)
    if breaker["slow_after"] is not None:
        effect = f"{converter.system} does not eject a host for being slow"
        converter.report("breaker.slow_after", breaker["slow_after"], effect, Severity.LOAD)


def _export_policy(action: dict[str, Any], policy: Policy, converter: Converter) -> None:
    timeout = converter.convert_call_timeout(policy)
    if timeout is not None:
        action["timeout"] = converter.format_rounded("total_budget", timeout)
    if policy.max_attempts == 1:
        return
    base, cap = map(round_to_ms, translation.delay_bounds(policy))
    retry = action["retry_policy"] = _export_conditions(policy, converter)
    retry["num_retries"] = policy.max_attempts - 1
    if policy.attempt_timeout is not None:
        timeout_text = converter.format_rounded("attempt_timeout", policy.attempt_timeout)
        retry["per_try_timeout"] = timeout_text
    retry["retry_back_off"] = {
        "base_interval": format_proto_duration("initial_delay", base),
        "max_interval": format_proto_duration("max_delay", cap),
    }
    report_backoff(policy, converter, base, cap)
    if policy.max_hint:
        effect = (
            "Envoy reads Retry-After in whole seconds only, adds up to half of it, and ignores a "
            "wait longer than max_hint instead of giving up"
        )
        converter.report("max_hint", policy.max_hint, effect, Severity.DETAIL)
        retry["rate_limited_retry_back_off"] = {
            "reset_headers": [{"name": "Retry-After", "format": "SECONDS"}],
            "max_interval": converter.format_rounded("max_hint", policy.max_hint),
        }
    else:
        effect = "Envoy ignores Retry-After; tarry gives up instead"
        converter.report("max_hint", policy.max_hint, effect)
    converter.report_proxy_behaviour(policy)


def _export_conditions(policy: Policy, converter: Converter) -> dict[str, Any]:
    conditions = retry_conditions(policy, converter)
    if not policy.retryable_statuses:
        return {"retry_on": ",".join(conditions)}
    retry_on = ",".join([*conditions, "retriable-status-codes"])
    return {"retry_on": retry_on, "retriable_status_codes": sorted(policy.retryable_statuses)}


def _export_hedging(action: dict[str, Any], hedging: Hedging, converter: Converter) -> None:
    """Add hedging: when an attempt is slow, another one (a hedge) starts in parallel."""
    after = translation.hedging_delay(hedging, "envoy")
    retry = action["retry_policy"] = _export_conditions(Policy(), converter)
    retry["num_retries"] = hedging.max_attempts - 1
    retry["per_try_timeout"] = converter.format_rounded("hedging.after", after)
    # For Envoy a hedge is a retry. With the default backoff it would start up to 25 ms late.
    retry["retry_back_off"] = dict(_NO_BACKOFF)
    action["hedge_policy"] = {"hedge_on_per_try_timeout": True}
    effect = "Envoy starts a hedge when per_try_timeout is over, also for a POST"
    converter.report("hedging.after", after, effect, Severity.LOAD)
    if hedging.max_extra_load is not None:
        effect = "Envoy limits hedges by its retry budget only"
        converter.report("hedging.max_extra_load", hedging.max_extra_load, effect, Severity.LOAD)
    effect = "Envoy ignores Retry-After when it hedges"
    converter.report("hedging.max_hint", hedging.max_hint, effect, Severity.DETAIL)


def _export_cluster(defence: Defence, converter: Converter, *, has_retries: bool) -> dict[str, Any]:
    """Return the settings of the Cluster for the limiter, the budget and the breaker."""
    settings: dict[str, Any] = {}
    threshold: dict[str, Any] = {}
    limit = convert_limiter(defence, converter)
    if limit is not None:
        threshold["max_requests"] = limit
    budget = converter.convert_budget(defence) if has_retries else None
    if budget is not None:
        percent, minimum = budget
        limits = {"budget_percent": {"value": percent}, "min_retry_concurrency": minimum}
        threshold["retry_budget"] = limits
    elif has_retries:
        default = translation.DEFAULT_MIN_RETRIES_IN_FLIGHT
        effect = f"Envoy has at most {default} retries in flight, unless the cluster sets more"
        converter.report("budget", None, effect, Severity.LOAD)
    if threshold:
        settings["circuit_breakers"] = {"thresholds": [threshold]}
    breaker = component_arguments(defence, "breaker")
    if breaker is not None:
        settings["outlier_detection"] = _export_breaker(breaker, converter)
        if defence.hedging is not None:
            effect = (
                "Envoy counts an attempt that is hedged as a failure of its host, so hosts that "
                "are slow now and then are ejected although they are healthy"
            )
            converter.report("breaker.failure_rate", breaker["failure_rate"], effect, Severity.LOAD)
        # By default Envoy uses ejected hosts again when fewer than 50 % are healthy.
        settings["common_lb_config"] = {"healthy_panic_threshold": {"value": 0}}
    return settings


def _export_breaker(breaker: dict[str, Any], converter: Converter) -> dict[str, Any]:
    """Return outlier detection by failure rate and consecutive errors, without other rules."""
    rate, consecutive = breaker["failure_rate"], breaker["consecutive"]
    open_for, percent = breaker["open_for"], 100 * rate
    whole_percent = max(1, ceil(percent - 1e-9))
    if abs(whole_percent - percent) > 1e-9:  # noqa: PLR2004 - rounding error
        effect = f"rounded up to {whole_percent} % for Envoy"
        converter.report("breaker.failure_rate", rate, effect, Severity.DETAIL)
    # Envoy's ejection times always grow; a maximum equal to the base time prevents that.
    longest = open_for if breaker["growth"] == 1 else breaker["max_open"]
    detection: dict[str, Any] = {
        "failure_percentage_threshold": whole_percent,
        "failure_percentage_request_volume": breaker["min_calls"],
        "failure_percentage_minimum_hosts": 1,
        "enforcing_failure_percentage": 100,
        "enforcing_success_rate": 0,
        "enforcing_consecutive_5xx": 0 if consecutive is None else 100,
        "interval": converter.format_rounded("breaker.window", breaker["window"]),
        "base_ejection_time": converter.format_rounded("breaker.open_for", open_for),
        "max_ejection_time": converter.format_rounded("breaker.max_open", longest),
        "max_ejection_percent": 100,
    }
    if consecutive is not None:
        detection["consecutive_5xx"] = consecutive
    if breaker["spread"]:
        jitter = converter.format_rounded("breaker.spread", breaker["spread"] * open_for)
        detection["max_ejection_time_jitter"] = jitter
    if breaker["min_span"] or not breaker["count_retries"]:
        effect = "Envoy counts retries, too, and failures at the same moment can eject a host"
        converter.report("breaker.min_span", breaker["min_span"], effect, Severity.DETAIL)
    report_ejection(breaker, converter)
    if longest > open_for:
        effect = (
            "in Envoy, the n-th ejection of a host lasts n times open_for, up to max_open, and the "
            "random part of the duration does not grow"
        )
        converter.report("breaker.growth", breaker["growth"], effect, Severity.DETAIL)
    return detection
