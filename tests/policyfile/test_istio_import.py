"""Tests for the import of a VirtualService and a DestinationRule of Istio."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.policy import PRESETS
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.istio import from_istio, to_istio
from tests.policyfile.builders import difference_text, differing_fields
from tests.policyfile.resources import destination_rule, virtual_service


@pytest.mark.parametrize("preset", ["default", "interactive"])
def test_policy_survives_a_round_trip(preset: str) -> None:
    """Export and import keep the settings that Istio has."""
    policy = PRESETS[preset].replace(attempt_timeout=0.25)
    budget = {"kind": "ratio", "ratio": 0.25, "min_per_second": 2.0}
    limiter = {"kind": "in-flight", "limit": 7}

    result = from_istio(
        to_istio(Defence(policy, budget=budget, limiter=limiter), host="payments").documents
    )

    changed = {
        "max_delay": 10 * policy.initial_delay,
        "throttled_delay": policy.initial_delay,
        # Istio accepts no status without a name, such as 520.
        "retryable_statuses": {408, 425, 429, 500, 502, 503, 504, 507},
    }
    assert policy.replace(**changed) == result.defence.policy
    assert budget == result.defence.budget
    assert limiter == result.defence.limiter
    route = "[0].spec.http[0]"
    timeout = [f"{route}.timeout"] * (policy.total_budget is not None)
    assert [
        f"{route}.retries.retryOn",
        f"{route}.retries",
        *timeout,
        "[1].spec.trafficPolicy.retryBudget",
    ] == differing_fields(result)


def test_missing_retries_are_the_default_of_istio() -> None:
    """A route without retries is imported with Istio's default of 2 retries, and reported."""
    result = from_istio([virtual_service({"timeout": "0s"})])

    policy = result.defence.policy
    assert (3, 0.025, 0.25, None) == (
        policy.max_attempts,
        policy.initial_delay,
        policy.max_delay,
        policy.total_budget,
    )
    assert {"UNAVAILABLE", "CANCELLED"} == policy.retryable_codes
    assert ["spec.http[0].retries"] * 2 == differing_fields(result)


def test_retries_without_attempts_are_no_retries() -> None:
    """A `retries` table without `attempts` is imported as 0 retries, as Istio reads it."""
    assert 1 == from_istio([virtual_service({"retries": {}})]).defence.policy.max_attempts


def test_retry_after_is_reported() -> None:
    """Only tarry reads Retry-After, which is a difference if there are retries."""
    result, without_retries = (
        from_istio([virtual_service({"retries": {"attempts": attempts}})]) for attempts in (2, 0)
    )

    line = "Retry-After: Istio does not read it; tarry waits for up to 2 min, or gives up"
    assert f"spec.http[0].retries = {line}" == difference_text(result, "spec.http[0].retries")
    assert () == without_retries.differences


def test_delay_after_too_early_is_reported() -> None:
    """Istio retries 425 at once and tarry after a delay, which is a difference."""
    result = from_istio([virtual_service({"retries": {"attempts": 1, "retryOn": "425,503"}})])

    line = (
        "spec.http[0].retries.retryOn = 425: Istio retries this status at once, tarry after the "
        "usual delay"
    )
    assert difference_text(result, "spec.http[0].retries.retryOn").startswith(line)


@pytest.mark.parametrize(
    ("retry_on", "statuses", "codes"),
    [
        ("gateway-error, 429", {429, 502, 503, 504}, set()),
        ("5xx", set(range(500, 600)), set()),
        ("retriable-4xx,reset", {409}, set()),
        ("retriable-status-codes,503,deadline-exceeded", {503}, {"DEADLINE_EXCEEDED"}),
        ("retriable-headers,internal", set(), {"INTERNAL"}),
    ],
)
def test_conditions_are_imported(retry_on: str, statuses: set[int], codes: set[str]) -> None:
    """Envoy's retry conditions are imported as statuses and codes."""
    route = {"retries": {"attempts": 1, "retryOn": retry_on}}

    policy = from_istio([virtual_service(route)]).defence.policy

    assert statuses == policy.retryable_statuses
    assert codes == policy.retryable_codes


def test_unread_keys_are_reported() -> None:
    """Other routes and settings that a policy does not have are differences."""
    result = from_istio(
        [
            virtual_service(
                {"retries": {"attempts": 1, "retryOn": "5xx", "retryRemoteLocalities": True}},
                {"timeout": "3s"},
                {"route": []},
            ),
            destination_rule(loadBalancer={"simple": "RANDOM"}, connectionPool={"tcp": {}}),
            destination_rule(),
        ]
    )

    expected = [
        "[2].kind",
        "[0].spec.http[1]",
        "[0].spec.http[0].retries",
        "[0].spec.http[0].retries.retryRemoteLocalities",
        "[1].spec.trafficPolicy.connectionPool.tcp",
        "[1].spec.trafficPolicy.loadBalancer",
    ]
    assert expected == differing_fields(result)


def test_other_settings_of_a_route_are_reported() -> None:
    """Settings besides retries are differences; names, destinations and gateways are not."""
    route = {"name": "main", "route": [], "match": [{}], "fault": {}, "retries": {"attempts": 0}}
    resource = virtual_service(route)
    resource["spec"] |= {"gateways": ["mesh"], "tls": []}

    result = from_istio([resource])

    assert ["spec.http[0].match", "spec.http[0].fault", "spec.tls"] == differing_fields(result)


def test_policy_file_has_only_fields_of_the_route() -> None:
    """`to_dict` has the imported fields and no others, such as jitter."""
    route = {"retries": {"attempts": 3, "retryOn": "503", "backoff": "100ms"}}

    result = from_istio([virtual_service(route)])

    expected = {
        "max_attempts": 4,
        "initial_delay": 0.1,
        "max_delay": 1.0,
        "retryable_statuses": [503],
        "retryable_codes": [],
        "throttled_delay": 0.1,
    }
    assert expected == result.to_dict()
    assert result.defence == Defence.from_dict(result.to_dict())


def test_destination_rule_alone_sets_no_policy_fields() -> None:
    """Without a VirtualService, `to_dict` has no field of a policy."""
    result = from_istio([destination_rule(connectionPool={"http": {"http2MaxRequests": 7}})])

    assert {"limiter": {"kind": "in-flight", "limit": 7}} == result.to_dict()


def test_kubernetes_list_is_imported() -> None:
    """The resources of a Kubernetes List, which `kubectl get` prints, are imported."""
    route = {"retries": {"attempts": 4, "backoff": "1s"}}

    result = from_istio([{"kind": "List", "items": [virtual_service(route)]}])

    assert 5 == result.defence.policy.max_attempts


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "^there is nothing to import"),
        ([{"kind": "Gateway"}], "^kind must be one of VirtualService, DestinationRule, got 'Gat"),
        (
            [{"methodConfig": []}],
            r"^kind must be one of .*, got ''; for a gRPC service config, use --from grpc$",
        ),
        ([{"kind": "VirtualService"}], "^spec must be given"),
        (
            [virtual_service({"retries": {"attempts": 1, "perTryTimeot": "1s"}})],
            r"^spec\.http\[0\]\.retries\.perTryTimeot is not a known key: .*mean 'perTryTimeout'",
        ),
        ([3], "^the document must be an object, got 3"),
        ([virtual_service()], r"^spec\.http must have at least one route"),
        (
            [virtual_service({"retries": {"attempts": "3"}})],
            r"^spec\.http\[0\]\.retries\.attempts must be a number, got '3'",
        ),
        (
            [virtual_service({"retries": {"attempts": -1}})],
            r"^spec\.http\[0\]\.retries\.attempts must be at least 0, got -1",
        ),
        (
            [virtual_service({"retries": {"attempts": 1.5}})],
            r"^spec\.http\[0\]\.retries\.attempts must be a whole number, got 1\.5",
        ),
        (
            [virtual_service({"retries": {"retryOn": "sometimes"}})],
            r"^spec\.http\[0\]\.retries\.retryOn must list retry conditions .* 'sometimes'",
        ),
        (
            [virtual_service({"retries": {"retryOn": 503}})],
            r"^spec\.http\[0\]\.retries\.retryOn must be a string, got 503",
        ),
        (
            [virtual_service({"retries": {"backoff": "0s"}})],
            r"^spec\.http\[0\]\.retries\.backoff must be longer than 0 s, got '0s'",
        ),
        (
            [virtual_service({"timeout": 2})],
            r"^spec\.http\[0\]\.timeout must be a duration such as",
        ),
        (
            [{"kind": "VirtualService", "spec": {"http": {}}}],
            r"^spec\.http must be a list, got \{\}",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_document_is_rejected(documents: Any, message: str) -> None:
    """An invalid document is rejected with the path of the mistake."""
    with pytest.raises(ConfigurationError, match=message):
        from_istio(documents)
