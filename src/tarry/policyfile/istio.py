"""Exports a defence to Istio (a VirtualService and a DestinationRule), and imports it from there.

A defence is a policy or hedging, with its breaker, budget and limiter. Istio has no hedging. Istio
configures Envoy, but with fewer settings. It sets the base of the backoff but not the cap, which is
10 x the base. Its outlier detection (the ejection of hosts) counts consecutive errors only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.outcome import GRPC_CODES, RETRYABLE_STATUSES
from tarry.core.policy import HIGHEST_STATUS, LOWEST_STATUS, STATUS_CLASSES, Policy
from tarry.errors import ConfigurationError
from tarry.policyfile import envoy, translation
from tarry.policyfile.defence import Defence, component_arguments
from tarry.policyfile.documents import DocumentTable, check_resource_name, k8s_resource, round_to_ms
from tarry.policyfile.translation import Converter, Exported, Imported, Severity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CAP_FACTOR = 10
"""Envoy's default cap of the backoff is this multiple of the base."""
_DEFAULT_EJECTION_S, _DEFAULT_MAX_EJECTION_S = 30.0, 300.0
_API_VERSION = "networking.istio.io/v1"
_RESOURCE_KINDS = ("VirtualService", "DestinationRule")
_DEFAULT_RETRY_COUNT = 2
_DEFAULT_RETRY_ON = "connect-failure,refused-stream,unavailable,cancelled"
_DEFAULT_BACKOFF_S = 0.025
_CONDITION_STATUSES = {
    "5xx": frozenset(STATUS_CLASSES["5xx"]),
    "gateway-error": frozenset({502, 503, 504}),
    "retriable-4xx": frozenset({409}),
}
_NAMED_STATUSES = frozenset({
    *range(100, 104), *range(200, 209), 226, *range(300, 306), 307, 308, *range(400, 419),
    *range(421, 427), 428, 429, 431, 451, *range(500, 509), 510, 511,
})  # fmt: skip
"""The statuses that have a text in Go's net/http. Istio rejects a route with another one."""
_EXCEPTION_CONDITIONS = ("connect-failure", "refused-stream", "reset", "reset-before-request")
"""Failures that are exceptions in tarry; the argument `on` of `tarry.retry` selects exceptions."""
_UNSUPPORTED_CONDITIONS = ("retriable-headers", "envoy-ratelimited", "http3-post-connect-failure")
_CONDITION_CODES = {name.lower().replace("_", "-"): name for name in GRPC_CODES}
_TOO_EARLY_STATUS = 425
_HOST_CHOICE_KEYS = ("retryRemoteLocalities", "retryIgnorePreviousHosts")
_RETRIES_KEYS = ("attempts", "perTryTimeout", "retryOn", "backoff", *_HOST_CHOICE_KEYS)
_FIELDS = ("max_attempts", "initial_delay", "max_delay", "retryable_statuses", "retryable_codes")
"""The fields of a policy that a VirtualService sets."""
_ADDRESS_KEYS = ("host", "hosts", "gateways", "exportTo", "name", "route")
"""Keys about addresses and routes, which do not affect the policy."""


def to_istio(defence: Defence, *, host: str, name: str | None = None) -> Exported:
    """Export for the service with this host, such as payments.prod.svc.cluster.local."""
    translation.reject_hedging(defence, "istio")
    if not host:
        raise ConfigurationError("host", "must name the service that is called, got nothing")
    name = check_resource_name("name", name or host.partition(".")[0])
    converter = Converter("Istio")
    route: dict[str, Any] = {"route": [{"destination": {"host": host}}]}
    timeout = converter.convert_call_timeout(defence.policy)
    if timeout is not None:
        route["timeout"] = converter.format_rounded("total_budget", timeout)
    route["retries"] = _export_retries(defence.policy, converter)
    spec = {"hosts": [host], "http": [route]}
    documents = [k8s_resource(_API_VERSION, "VirtualService", name, spec)]
    traffic = _export_traffic_policy(defence, converter)
    if traffic:
        spec = {"host": host, "trafficPolicy": traffic}
        documents.append(k8s_resource(_API_VERSION, "DestinationRule", name, spec))
    return Exported(tuple(documents), converter.sorted_differences())


def _export_retries(policy: Policy, converter: Converter) -> dict[str, Any]:
    if policy.max_attempts == 1:
        return {"attempts": 0}  # explicit, because the default is 2
    base = round_to_ms(translation.delay_bounds(policy)[0])
    conditions = [
        *_status_conditions(policy.retryable_statuses, converter),
        *envoy.retry_conditions(policy, converter),
    ]
    retries: dict[str, Any] = {"attempts": policy.max_attempts - 1}
    if policy.attempt_timeout is not None:
        timeout = converter.format_rounded("attempt_timeout", policy.attempt_timeout)
        retries["perTryTimeout"] = timeout
    retries["retryOn"] = ",".join(conditions)
    retries["backoff"] = converter.format_rounded("initial_delay", base)
    envoy.report_backoff(policy, converter, base, _CAP_FACTOR * base)
    converter.report("max_hint", policy.max_hint, "Istio does not read Retry-After")
    converter.report_proxy_behaviour(policy)
    return retries


def _status_conditions(statuses: frozenset[int], converter: Converter) -> list[str]:
    """Return the retry conditions for HTTP statuses, and report those that Istio rejects."""
    severity = Severity.DETAIL if statuses == RETRYABLE_STATUSES else Severity.LOAD
    conditions: list[str] = []
    if statuses.issuperset(_CONDITION_STATUSES["5xx"]):
        conditions.append("5xx")
        statuses -= _CONDITION_STATUSES["5xx"]
    unsupported = statuses - _NAMED_STATUSES
    if unsupported:
        effect = "Istio accepts only statuses that have a name in Go, so these are not retried"
        converter.report("retryable_statuses", unsupported, effect, severity)
    return [*conditions, *map(str, sorted(statuses & _NAMED_STATUSES))]


def _export_traffic_policy(defence: Defence, converter: Converter) -> dict[str, Any]:
    traffic: dict[str, Any] = {}
    limit = envoy.convert_limiter(defence, converter)
    if limit is not None:
        traffic["connectionPool"] = {"http": {"http2MaxRequests": limit}}
    budget = converter.convert_budget(defence) if defence.policy.max_attempts > 1 else None
    if budget is not None:
        percent, minimum = budget
        traffic["retryBudget"] = {"percent": percent, "minRetryConcurrency": minimum}
    breaker = component_arguments(defence, "breaker")
    detection = None if breaker is None else _export_breaker(breaker, converter)
    if detection is not None:
        traffic["outlierDetection"] = detection
    return traffic


def _export_breaker(breaker: dict[str, Any], converter: Converter) -> dict[str, Any] | None:
    rate, consecutive = breaker["failure_rate"], breaker["consecutive"]
    effect = "Istio ejects hosts by errors in a row only"
    if consecutive is None:
        effect = f"left out, because {effect}, so set breaker.consecutive"
    converter.report("breaker.failure_rate", rate, effect, Severity.LOAD)
    if consecutive is None:
        return None
    envoy.report_ejection(breaker, converter)
    open_for = breaker["open_for"]
    longest = max(_DEFAULT_MAX_EJECTION_S, open_for)  # Envoy uses the larger one
    effect = (
        f"in Istio, an ejection lasts {open_for:g} s times the number of ejections of the host, at "
        f"most {longest:g} s, without a random part"
    )
    converter.report("breaker.growth", breaker["growth"], effect, Severity.DETAIL)
    return {
        "consecutive5xxErrors": consecutive,
        "baseEjectionTime": converter.format_rounded("breaker.open_for", open_for),
        "maxEjectionPercent": 100,
    }


def from_istio(documents: Sequence[Mapping[str, Any]]) -> Imported:
    """Import a VirtualService (its first route), a DestinationRule, or both."""
    converter = Converter("Istio")
    specs: dict[str, DocumentTable] = {}
    for resource in _list_resources(documents):
        kind = resource.text("kind", "")
        if kind not in _RESOURCE_KINDS:
            is_grpc = "methodConfig" in resource
            suggestion = "; for a gRPC service config, use --from grpc" if is_grpc else ""
            rule = f"must be one of {', '.join(_RESOURCE_KINDS)}, got {kind!r}{suggestion}"
            raise ConfigurationError(resource.path_of("kind"), rule)
        spec = resource.table("spec")
        if spec is None:
            raise ConfigurationError(resource.path_of("spec"), "must be given")
        if kind in specs:
            effect = f"left out, because only the first {kind} is imported"
            converter.report(resource.path_of("kind"), kind, effect)
        else:
            specs[kind] = spec
    if not specs:
        msg = "there is nothing to import: pass a VirtualService, a DestinationRule or both"
        raise ConfigurationError(msg)
    policy = Policy()
    imported_fields: tuple[str, ...] = ()
    if "VirtualService" in specs:
        policy, imported_fields = _import_policy(specs["VirtualService"], converter), _FIELDS
    else:
        converter.report("kind", "VirtualService", "missing, so the policy is tarry's default")
    components: dict[str, Any] = {}
    if "DestinationRule" in specs:
        components = _import_components(specs["DestinationRule"], converter)
    return Imported(Defence(policy, **components), tuple(converter.differences), imported_fields)


def _list_resources(documents: Sequence[Mapping[str, Any]]) -> list[DocumentTable]:
    """Return the resources, including the items of a List, which `kubectl get -o yaml` writes."""
    resources: list[DocumentTable] = []
    for i, document in enumerate(documents):
        root = DocumentTable("" if len(documents) == 1 else f"[{i}]", document)
        resources += root.tables("items") if root.get("kind") == "List" else [root]
    return resources


def _import_policy(spec: DocumentTable, converter: Converter) -> Policy:
    routes = spec.tables("http")
    if not routes:
        raise ConfigurationError(spec.path_of("http"), "must have at least one route")
    for route in routes[1:]:
        if "retries" in route or "timeout" in route:
            effect = "only the first route is imported; import this route from a file of its own"
            converter.report(route.path, "another route", effect)
    route = routes[0]
    timeout = route.seconds("timeout", allow_zero=True) or None  # 0s means no timeout
    retries = route.table_or_empty("retries")
    retries.reject_typos(_RETRIES_KEYS)
    retry_count = retries.count("attempts", 0)  # `retries` without `attempts` means no retries
    if "retries" not in route:
        retry_count = _DEFAULT_RETRY_COUNT
        effect = f"Istio's default is imported: {_DEFAULT_RETRY_COUNT} retries"
        converter.report(retries.path, None, effect)
    statuses, codes = _import_conditions(retries, converter)
    initial_delay = retries.seconds("backoff") or _DEFAULT_BACKOFF_S
    policy = Policy(
        max_attempts=retry_count + 1,
        initial_delay=initial_delay,
        max_delay=float(f"{_CAP_FACTOR * initial_delay:.12g}"),
        attempt_timeout=retries.seconds("perTryTimeout", allow_zero=True) or None,
        retryable_statuses=statuses,
        retryable_codes=codes,
        throttled_delay=initial_delay,
    )
    if retry_count:
        behaviour = "Istio does not read it"
        converter.report_hint(retries.path, "Retry-After", behaviour, policy.max_hint)
    policy = converter.apply_call_timeout(policy, timeout, route.path_of("timeout"))
    for table in (retries, route, spec):
        converter.report_unread(table, ignore=_ADDRESS_KEYS)
    return policy


def _import_conditions(retries: DocumentTable, converter: Converter) -> tuple[set[int], set[str]]:
    path = retries.path_of("retryOn")
    statuses: set[int] = set()
    codes: set[str] = set()
    conditions = retries.text("retryOn", _DEFAULT_RETRY_ON).split(",")
    for condition in filter(None, map(str.strip, conditions)):
        if condition in _CONDITION_STATUSES:
            statuses |= _CONDITION_STATUSES[condition]
        elif condition in _CONDITION_CODES:
            codes.add(_CONDITION_CODES[condition])
        elif condition.isdecimal() and LOWEST_STATUS <= int(condition) <= HIGHEST_STATUS:
            statuses.add(int(condition))
        elif condition in _UNSUPPORTED_CONDITIONS:
            converter.report(path, condition, "left out, because tarry has no such condition")
        elif condition not in (*_EXCEPTION_CONDITIONS, "retriable-status-codes"):
            rule = "must list retry conditions of Envoy or HTTP statuses"
            raise ConfigurationError(path, rule, condition)
    if _TOO_EARLY_STATUS in statuses:
        effect = "Istio retries this status at once, tarry after the usual delay"
        converter.report(path, _TOO_EARLY_STATUS, effect)
    return statuses, codes


def _import_components(spec: DocumentTable, converter: Converter) -> dict[str, dict[str, Any]]:
    """Return the arguments of the breaker, budget and limiter of a DestinationRule."""
    components: dict[str, dict[str, Any]] = {}
    traffic = spec.table_or_empty("trafficPolicy")
    detection = traffic.table("outlierDetection")
    breaker = None if detection is None else _import_breaker(detection, converter)
    if breaker is not None:
        components["breaker"] = breaker
    budget = traffic.table("retryBudget")
    if budget is not None:
        components["budget"] = _import_budget(budget, converter)
    pool = traffic.table_or_empty("connectionPool")
    http = pool.table_or_empty("http")
    limit = http.count("http2MaxRequests", 0)
    if limit:
        components["limiter"] = {"kind": "in-flight", "limit": limit}
    for table in (http, pool, traffic, spec):
        converter.report_unread(table, ignore=_ADDRESS_KEYS)
    return components


def _import_breaker(detection: DocumentTable, converter: Converter) -> dict[str, Any] | None:
    consecutive_5xx = detection.count("consecutive5xxErrors", 5)
    gateway_errors = detection.count("consecutiveGatewayErrors", 0)
    open_for = detection.seconds("baseEjectionTime") or _DEFAULT_EJECTION_S
    # Consecutive errors eject a host at once, at any interval. The percentage is about hosts only.
    converter.report_unread(detection, ignore=("interval", "maxEjectionPercent"))
    limits = [limit for limit in (consecutive_5xx, gateway_errors) if limit]
    if not limits:
        return None
    consecutive = min(limits)
    if consecutive != consecutive_5xx:
        effect = "imported as consecutive failures of any kind, not only 502, 503 and 504"
        converter.report(detection.path_of("consecutiveGatewayErrors"), gateway_errors, effect)
    effect = "tarry's breaker opens for the whole dependency, each time for twice as long"
    converter.report(detection.path, "per host", effect)
    return {
        # With this rate and min_calls, the breaker does not open before `consecutive` failures.
        "failure_rate": 1.0,
        "min_calls": max(20, consecutive),
        "consecutive": consecutive,
        "open_for": open_for,
        "max_open": max(_DEFAULT_MAX_EJECTION_S, open_for),
        "spread": 0.0,
    }


def _import_budget(budget: DocumentTable, converter: Converter) -> dict[str, Any]:
    percent = budget.number("percent", 20.0)
    minimum = budget.count("minRetryConcurrency", 3)
    effect = f"imported as a fraction of the calls in 10 s, plus {minimum} retries per second"
    converter.report(budget.path, f"{percent:g} %, {minimum}", effect)
    converter.report_unread(budget)
    return {
        "kind": "ratio",
        "ratio": min(1.0, max(0.001, percent / 100)),
        "min_per_second": float(minimum),
    }
