"""Import from Istio: retries and timeout of a VirtualService, limits of a DestinationRule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.outcome import GRPC_CODES
from tarry.core.policy import HIGHEST_STATUS, LOWEST_STATUS, Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.imports.document import DocumentTable, apply_call_timeout, hint_loss
from tarry.policyfile.losses import Imported, Loss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KINDS = ("VirtualService", "DestinationRule")
_DEFAULT_ATTEMPTS = 2
_DEFAULT_RETRY_ON = "connect-failure,refused-stream,unavailable,cancelled"
_DEFAULT_BACKOFF_S = 0.025
_CAP_FACTOR = 10
_CONDITION_STATUSES = {
    "5xx": frozenset(range(500, 512)),
    "gateway-error": frozenset({502, 503, 504}),
    "retriable-4xx": frozenset({409}),
}
_EXCEPTION_CONDITIONS = ("connect-failure", "refused-stream", "reset", "reset-before-request")
"""Conditions that are exceptions in tarry: `on=` of the call selects which are retried."""
_UNSUPPORTED_CONDITIONS = ("retriable-headers", "envoy-ratelimited", "http3-post-connect-failure")
_CONDITION_CODES = {name.lower().replace("_", "-"): name for name in GRPC_CODES}
_TOO_EARLY = 425
_RETRIES_KEYS = (
    "attempts",
    "perTryTimeout",
    "retryOn",
    "backoff",
    "retryRemoteLocalities",
    "retryIgnorePreviousHosts",
)
_FIELDS_SET = (
    "max_attempts",
    "initial_delay",
    "max_delay",
    "retryable_statuses",
    "retryable_codes",
)
"""The fields of a policy that the retries of a VirtualService set."""
_ADDRESSES = ("host", "hosts", "gateways", "exportTo", "name", "route")
"""Keys about addresses and routes, which do not affect the policy."""


def from_istio(documents: Sequence[Mapping[str, Any]]) -> Imported:
    """Import the first route of a VirtualService, a DestinationRule, or both."""
    losses: list[Loss] = []
    specs: dict[str, DocumentTable] = {}
    for root in _roots(documents):
        kind = root.text("kind", "")
        if kind not in _KINDS:
            hint = ": --from grpc?" if "methodConfig" in root else ""
            rule = f"must be one of {', '.join(_KINDS)}, got {kind!r}{hint}"
            raise ConfigurationError(root.path_of("kind"), rule)
        spec = root.table("spec")
        if spec is None:
            raise ConfigurationError(root.path_of("spec"), "must be given")
        if kind in specs:
            losses.append(Loss(root.path_of("kind"), kind, "left out: the first one is imported"))
        else:
            specs[kind] = spec
    if not specs:
        msg = "there is nothing to import: pass a VirtualService, a DestinationRule or both"
        raise ConfigurationError(msg)
    policy = Policy()
    if "VirtualService" in specs:
        policy = _policy(specs["VirtualService"], losses)
    else:
        instead = "missing, so the policy is tarry's default"
        losses.append(Loss("kind", "VirtualService", instead))
    destination = specs.get("DestinationRule")
    parts: dict[str, Any] = {} if destination is None else _defence_parts(destination, losses)
    fields_set = _FIELDS_SET if "VirtualService" in specs else ()
    return Imported(Defence(policy, **parts), tuple(losses), fields_set)


def _roots(documents: Sequence[Mapping[str, Any]]) -> list[DocumentTable]:
    """Return the resources, including those in a List, which `kubectl get -o yaml` writes."""
    roots: list[DocumentTable] = []
    for i, document in enumerate(documents):
        root = DocumentTable("" if len(documents) == 1 else f"[{i}]", document)
        roots += root.tables("items") if root.get("kind") == "List" else [root]
    return roots


def _policy(spec: DocumentTable, losses: list[Loss]) -> Policy:
    routes = spec.tables("http")
    if not routes:
        raise ConfigurationError(spec.path_of("http"), "must have at least one route")
    losses += [
        Loss(
            route.path,
            "not read",
            "only the first route is imported; import this route from a file of its own",
        )
        for route in routes[1:]
        if "retries" in route or "timeout" in route
    ]
    route = routes[0]
    timeout = route.seconds("timeout", above=-1.0) or None  # 0s means no timeout
    retries = route.table("retries")
    if retries is None:
        instead = f"Istio's default is imported: {_DEFAULT_ATTEMPTS} retries"
        losses.append(Loss(route.path_of("retries"), None, instead))
        retries = DocumentTable(route.path_of("retries"), {})
        attempts = _DEFAULT_ATTEMPTS
    else:
        retries.check_spelling(_RETRIES_KEYS)
        attempts = retries.count("attempts", 0)  # missing means no retries
    statuses, codes = _conditions(retries, losses)
    first = retries.seconds("backoff") or _DEFAULT_BACKOFF_S
    policy = Policy(
        max_attempts=attempts + 1,
        initial_delay=first,
        max_delay=float(f"{_CAP_FACTOR * first:.12g}"),
        attempt_timeout=retries.seconds("perTryTimeout", above=-1.0) or None,
        retryable_statuses=statuses,
        retryable_codes=codes,
        throttled_delay=first,
    )
    if attempts:
        source = "Istio does not read it"
        losses.append(hint_loss(retries.path, "Retry-After", source, policy.max_hint))
    policy = apply_call_timeout(policy, timeout, route.path_of("timeout"), losses)
    for table in (retries, route, spec):
        losses += table.unread_losses(*_ADDRESSES)
    return policy


def _conditions(retries: DocumentTable, losses: list[Loss]) -> tuple[set[int], set[str]]:
    path = retries.path_of("retryOn")
    statuses: set[int] = set()
    codes: set[str] = set()
    for condition in filter(
        None, map(str.strip, retries.text("retryOn", _DEFAULT_RETRY_ON).split(","))
    ):
        if condition in _CONDITION_STATUSES:
            statuses |= _CONDITION_STATUSES[condition]
            if condition == "5xx":
                losses.append(Loss(path, condition, "imported as 500 to 511"))
        elif condition in _CONDITION_CODES:
            codes.add(_CONDITION_CODES[condition])
        elif condition.isdecimal() and LOWEST_STATUS <= int(condition) <= HIGHEST_STATUS:
            statuses.add(int(condition))
        elif condition in _UNSUPPORTED_CONDITIONS:
            losses.append(Loss(path, condition, "left out: tarry has no such condition"))
        elif condition not in (*_EXCEPTION_CONDITIONS, "retriable-status-codes"):
            raise ConfigurationError(path, "must list conditions of Envoy or statuses", condition)
    if _TOO_EARLY in statuses:
        instead = "Istio retries this status at once, tarry after the usual delay"
        losses.append(Loss(path, _TOO_EARLY, instead))
    return statuses, codes


def _defence_parts(destination: DocumentTable, losses: list[Loss]) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {}
    traffic = destination.table("trafficPolicy") or DocumentTable(
        destination.path_of("trafficPolicy"), {}
    )
    detection = traffic.table("outlierDetection")
    breaker = None if detection is None else _breaker(detection, losses)
    if breaker is not None:
        parts["breaker"] = breaker
    budget = traffic.table("retryBudget")
    if budget is not None:
        parts["budget"] = _budget(budget, losses)
    pool = traffic.table("connectionPool")
    http = None if pool is None else pool.table("http")
    limit = 0 if http is None else http.count("http2MaxRequests", 0)
    if limit:
        parts["limiter"] = {"kind": "in-flight", "limit": limit}
    for table in (http, pool, traffic, destination):
        losses += [] if table is None else table.unread_losses(*_ADDRESSES)
    return parts


def _breaker(detection: DocumentTable, losses: list[Loss]) -> dict[str, Any] | None:
    any_error = detection.count("consecutive5xxErrors", 5)
    gateway_errors = detection.count("consecutiveGatewayErrors", 0)
    detection.get("interval")  # read, but not used: consecutive errors eject at once
    detection.get("maxEjectionPercent")
    open_for = detection.seconds("baseEjectionTime") or 30.0
    losses += detection.unread_losses()
    limits = [limit for limit in (any_error, gateway_errors) if limit]
    if not limits:
        return None
    consecutive = min(limits)
    if consecutive != any_error:
        instead = "imported as consecutive failures of any kind, not only 502, 503 and 504"
        losses.append(Loss(detection.path_of("consecutiveGatewayErrors"), gateway_errors, instead))
    instead = "the breaker opens for the whole dependency, for twice as long each time"
    losses.append(Loss(detection.path, "per host", instead))
    return {
        # With a failure rate of 1, the breaker does not open before `consecutive` failures.
        "failure_rate": 1.0,
        "min_calls": max(20, consecutive),
        "consecutive": consecutive,
        "open_for": open_for,
        "max_open": max(300.0, open_for),
        "spread": 0.0,
    }


def _budget(budget: DocumentTable, losses: list[Loss]) -> dict[str, Any]:
    percent = budget.number("percent", 20.0)
    minimum = budget.count("minRetryConcurrency", 3)
    instead = f"imported as a fraction of the calls in 10 s, plus {minimum} retries per second"
    losses += [Loss(budget.path, f"{percent:g} %, {minimum}", instead), *budget.unread_losses()]
    return {
        "kind": "ratio",
        "ratio": min(1.0, max(0.001, percent / 100)),
        "min_per_second": float(minimum),
    }
