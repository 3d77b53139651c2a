"""From Istio: the retries and timeout of a VirtualService, and the policy of a DestinationRule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.outcome import GRPC_CODES
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.imports.document import Table, hinted, within
from tarry.policyfile.losses import Imported, Loss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KINDS = ("VirtualService", "DestinationRule")
_DEFAULT_ATTEMPTS = 2
_DEFAULT_RETRY_ON = "connect-failure,refused-stream,unavailable,cancelled"
_DEFAULT_BACKOFF = 0.025
_CAP = 10
_STATUSES = {
    "5xx": frozenset(range(500, 512)),
    "gateway-error": frozenset({502, 503, 504}),
    "retriable-4xx": frozenset({409}),
}
_ERRORS = ("connect-failure", "refused-stream", "reset", "reset-before-request")
"""Conditions that are exceptions here: which are retried is an argument of the call."""
_NOT_HERE = ("retriable-headers", "envoy-ratelimited", "http3-post-connect-failure")
_CODES = {name.lower().replace("_", "-"): name for name in GRPC_CODES}
_LOWEST_STATUS, _HIGHEST_STATUS = 100, 599
_TOO_EARLY = 425
_RETRIES = (
    "attempts",
    "perTryTimeout",
    "retryOn",
    "backoff",
    "retryRemoteLocalities",
    "retryIgnorePreviousHosts",
)
_READ = ("max_attempts", "initial_delay", "max_delay", "retryable_statuses", "retryable_codes")
"""The fields of a policy that retries speak about."""
_ADDRESSES = ("host", "hosts", "gateways", "exportTo", "name", "route")
"""They say who calls whom, and nothing of how."""


def from_istio(documents: Sequence[Mapping[str, Any]]) -> Imported:
    """Import the first route of a VirtualService, a DestinationRule, or both."""
    losses: list[Loss] = []
    found: dict[str, Table] = {}
    for root in _roots(documents):
        kind = root.text("kind", "")
        if kind not in _KINDS:
            hint = ": --from grpc?" if "methodConfig" in root else ""
            rule = f"must be one of {', '.join(_KINDS)}, got {kind!r}{hint}"
            raise ConfigurationError(root.at("kind"), rule)
        spec = root.table("spec")
        if spec is None:
            raise ConfigurationError(root.at("spec"), "must be given")
        if kind in found:
            losses.append(Loss(root.at("kind"), kind, "left out: the first one is imported"))
        else:
            found[kind] = spec
    if not found:
        msg = "there is nothing to import: give a VirtualService, a DestinationRule or both"
        raise ConfigurationError(msg)
    policy = Policy()
    if "VirtualService" in found:
        policy = _policy(found["VirtualService"], losses)
    else:
        instead = "there is none, so the policy is tarry's default"
        losses.append(Loss("kind", "VirtualService", instead))
    destination = found.get("DestinationRule")
    parts: dict[str, Any] = {} if destination is None else _parts(destination, losses)
    read = _READ if "VirtualService" in found else ()
    return Imported(Defence(policy, **parts), tuple(losses), read)


def _roots(documents: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the resources, those in a List too, as `kubectl get -o yaml` writes them."""
    roots: list[Table] = []
    for i, document in enumerate(documents):
        root = Table("" if len(documents) == 1 else f"[{i}]", document)
        roots += root.tables("items") if root.get("kind") == "List" else [root]
    return roots


def _policy(spec: Table, losses: list[Loss]) -> Policy:
    routes = spec.tables("http")
    if not routes:
        raise ConfigurationError(spec.at("http"), "must have at least one route")
    losses += [
        Loss(route.path, "not read", "the first route is imported; move this one to a file")
        for route in routes[1:]
        if "retries" in route or "timeout" in route
    ]
    route = routes[0]
    timeout = route.seconds("timeout", above=-1.0) or None  # 0s is none
    retries = route.table("retries")
    if retries is None:
        instead = f"Istio's default is imported: {_DEFAULT_ATTEMPTS} retries"
        losses.append(Loss(route.at("retries"), None, instead))
        retries = Table(route.at("retries"), {})
        attempts = _DEFAULT_ATTEMPTS
    else:
        retries.spelled(_RETRIES)
        attempts = retries.count("attempts", 0)  # in a table that is there, none is no retry
    statuses, codes = _conditions(retries, losses)
    first = retries.seconds("backoff") or _DEFAULT_BACKOFF
    policy = Policy(
        max_attempts=attempts + 1,
        initial_delay=first,
        max_delay=float(f"{_CAP * first:.12g}"),
        attempt_timeout=retries.seconds("perTryTimeout", above=-1.0) or None,
        retryable_statuses=statuses,
        retryable_codes=codes,
        throttled_delay=first,
    )
    if attempts:
        source = "Istio does not read it"
        losses.append(hinted(retries.path, "Retry-After", source, policy.max_hint))
    policy = within(policy, timeout, route.at("timeout"), losses)
    for table in (retries, route, spec):
        losses += table.unread(*_ADDRESSES)
    return policy


def _conditions(retries: Table, losses: list[Loss]) -> tuple[set[int], set[str]]:
    path = retries.at("retryOn")
    statuses: set[int] = set()
    codes: set[str] = set()
    for word in filter(None, map(str.strip, retries.text("retryOn", _DEFAULT_RETRY_ON).split(","))):
        if word in _STATUSES:
            statuses |= _STATUSES[word]
            if word == "5xx":
                losses.append(Loss(path, word, "imported as 500 to 511"))
        elif word in _CODES:
            codes.add(_CODES[word])
        elif word.isdecimal() and _LOWEST_STATUS <= int(word) <= _HIGHEST_STATUS:
            statuses.add(int(word))
        elif word in _NOT_HERE:
            losses.append(Loss(path, word, "left out: tarry has no such condition"))
        elif word not in (*_ERRORS, "retriable-status-codes"):
            raise ConfigurationError(path, "must list conditions of Envoy or statuses", word)
    if _TOO_EARLY in statuses:
        instead = "Istio retries it at once, tarry after a delay as any other"
        losses.append(Loss(path, _TOO_EARLY, instead))
    return statuses, codes


def _parts(rule: Table, losses: list[Loss]) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {}
    traffic = rule.table("trafficPolicy") or Table(rule.at("trafficPolicy"), {})
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
    for table in (http, pool, traffic, rule):
        losses += [] if table is None else table.unread(*_ADDRESSES)
    return parts


def _breaker(detection: Table, losses: list[Loss]) -> dict[str, Any] | None:
    any_error = detection.count("consecutive5xxErrors", 5)
    gateway_errors = detection.count("consecutiveGatewayErrors", 0)
    detection.get("interval")  # of the sweep; errors in a row eject at once
    detection.get("maxEjectionPercent")
    open_for = detection.seconds("baseEjectionTime") or 30.0
    losses += detection.unread()
    rows = [row for row in (any_error, gateway_errors) if row]
    if not rows:
        return None
    consecutive = min(rows)
    if consecutive != any_error:
        instead = "imported as failures of any kind in a row, not of 502, 503 and 504 alone"
        losses.append(Loss(detection.at("consecutiveGatewayErrors"), gateway_errors, instead))
    instead = "the breaker opens for the whole dependency, and twice as long each time"
    losses.append(Loss(detection.path, "per host", instead))
    return {
        # Nothing opens by rate that has not opened by errors in a row before.
        "failure_rate": 1.0,
        "min_calls": max(20, consecutive),
        "consecutive": consecutive,
        "open_for": open_for,
        "max_open": max(300.0, open_for),
        "spread": 0.0,
    }


def _budget(budget: Table, losses: list[Loss]) -> dict[str, Any]:
    percent = budget.number("percent", 20.0)
    least = budget.count("minRetryConcurrency", 3)
    instead = "imported as a share of the calls of 10 s, and as many retries a second"
    losses += [Loss(budget.path, f"{percent:g} %, {least}", instead), *budget.unread()]
    return {
        "kind": "ratio",
        "ratio": min(1.0, max(0.001, percent / 100)),
        "min_per_second": float(least),
    }
