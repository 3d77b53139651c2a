"""Import of a VirtualService and a DestinationRule of Istio."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.policy import PRESETS
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.istio import from_istio, to_istio
from tests.policyfile.builders import difference_text, fields
from tests.policyfile.resources import destination_rule, virtual_service


@pytest.mark.parametrize("preset", ["default", "interactive"])
def test_policy_survives_the_way_there_and_back(preset: str) -> None:
    """What Istio can say comes back as it was."""
    policy = PRESETS[preset].replace(attempt_timeout=0.25)
    budget = {"kind": "ratio", "ratio": 0.25, "min_per_second": 2.0}
    limiter = {"kind": "in-flight", "limit": 7}

    made = from_istio(
        to_istio(Defence(policy, budget=budget, limiter=limiter), host="payments").documents
    )

    lost = {"max_delay": 10 * policy.initial_delay, "throttled_delay": policy.initial_delay}
    assert policy.replace(**lost) == made.defence.policy
    assert budget == made.defence.budget
    assert limiter == made.defence.limiter
    route = "[0].spec.http[0]"
    timeout = [f"{route}.timeout"] * (policy.total_budget is not None)
    assert [
        f"{route}.retries.retryOn",
        f"{route}.retries",
        *timeout,
        "[1].spec.trafficPolicy.retryBudget",
    ] == fields(made)


def test_retries_left_out_are_those_of_istio() -> None:
    """Istio retries twice by default, and the import says so."""
    made = from_istio([virtual_service({"timeout": "0s"})])

    policy = made.defence.policy
    assert (3, 0.025, 0.25, None) == (
        policy.max_attempts,
        policy.initial_delay,
        policy.max_delay,
        policy.total_budget,
    )
    assert {"UNAVAILABLE", "CANCELLED"} == policy.retryable_codes
    assert ["spec.http[0].retries"] * 2 == fields(made)


def test_retries_without_attempts_are_none() -> None:
    """Istio reads a table that names no number as the number 0."""
    assert 1 == from_istio([virtual_service({"retries": {}})]).defence.policy.max_attempts


def test_retry_after_is_read_here_alone() -> None:
    """What a server asks for holds in tarry and not in Istio; without a retry, in neither."""
    made, once = (
        from_istio([virtual_service({"retries": {"attempts": attempts}})]) for attempts in (2, 0)
    )

    line = "Retry-After: Istio does not read it; tarry waits for up to 2 min, or gives up"
    assert f"spec.http[0].retries = {line}" == difference_text(made, "spec.http[0].retries")
    assert () == once.differences


def test_too_early_waits_here_alone() -> None:
    """The Envoys of Istio do not back off from a 425."""
    made = from_istio([virtual_service({"retries": {"attempts": 1, "retryOn": "425,503"}})])

    line = (
        "spec.http[0].retries.retryOn = 425: Istio retries this status at once, tarry after the "
        "usual delay"
    )
    assert difference_text(made, "spec.http[0].retries.retryOn").startswith(line)


@pytest.mark.parametrize(
    ("retry_on", "statuses", "codes"),
    [
        ("gateway-error, 429", {429, 502, 503, 504}, set()),
        ("5xx", set(range(500, 512)), set()),
        ("retriable-4xx,reset", {409}, set()),
        ("retriable-status-codes,503,deadline-exceeded", {503}, {"DEADLINE_EXCEEDED"}),
        ("retriable-headers,internal", set(), {"INTERNAL"}),
    ],
)
def test_conditions_are_imported(retry_on: str, statuses: set[int], codes: set[str]) -> None:
    """Envoy's names stand for statuses and codes."""
    route = {"retries": {"attempts": 1, "retryOn": retry_on}}

    policy = from_istio([virtual_service(route)]).defence.policy

    assert statuses == policy.retryable_statuses
    assert codes == policy.retryable_codes


def test_unread_keys_are_reported() -> None:
    """Other routes and unknown settings are named by their path."""
    made = from_istio(
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
        "[0].spec.http[0].retries.retryOn",
        "[0].spec.http[0].retries",
        "[0].spec.http[0].retries.retryRemoteLocalities",
        "[1].spec.trafficPolicy.connectionPool.tcp",
        "[1].spec.trafficPolicy.loadBalancer",
    ]
    assert expected == fields(made)


def test_other_parts_of_a_route_are_reported() -> None:
    """What the route and its resource say besides retries is named; who is called is not."""
    route = {"name": "main", "route": [], "match": [{}], "fault": {}, "retries": {"attempts": 0}}
    resource = virtual_service(route)
    resource["spec"] |= {"gateways": ["mesh"], "tls": []}

    made = from_istio([resource])

    assert ["spec.http[0].match", "spec.http[0].fault", "spec.tls"] == fields(made)


def test_what_istio_does_not_speak_about_is_left_out() -> None:
    """Conditions and delays are written; jitter, hints and the like are not."""
    route = {"retries": {"attempts": 3, "retryOn": "503", "backoff": "100ms"}}

    made = from_istio([virtual_service(route)])

    expected = {
        "max_attempts": 4,
        "initial_delay": 0.1,
        "max_delay": 1.0,
        "retryable_statuses": [503],
        "retryable_codes": [],
        "throttled_delay": 0.1,
    }
    assert expected == made.to_dict()
    assert made.defence == Defence.from_dict(made.to_dict())


def test_rule_alone_says_nothing_of_the_policy() -> None:
    """Without a VirtualService there is no field of a policy to write."""
    made = from_istio([destination_rule(connectionPool={"http": {"http2MaxRequests": 7}})])

    assert {"limiter": {"kind": "in-flight", "limit": 7}} == made.to_dict()


def test_a_list_of_resources_is_opened() -> None:
    """What `kubectl get` prints is a List with the resources in it."""
    route = {"retries": {"attempts": 4, "backoff": "1s"}}

    made = from_istio([{"kind": "List", "items": [virtual_service(route)]}])

    assert 5 == made.defence.policy.max_attempts


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
def test_mistakes_are_refused_by_their_path(documents: Any, message: str) -> None:
    """A document that Istio would not take is rejected with the place of the mistake."""
    with pytest.raises(ConfigurationError, match=message):
        from_istio(documents)
