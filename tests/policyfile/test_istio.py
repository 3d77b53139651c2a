"""Tests for the export to Istio, with the fields of Istio's reference."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.backoff import Schedule
from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.istio import to_istio
from tests.policyfile.builders import (
    difference_text,
    differing_fields,
    new_defence,
    policy_without_differences,
)

HOST = "payments.prod.svc.cluster.local"
COMMON_DIFFERENCES = ["repeatable", "max_hint", "retryable_statuses"]
"""The fields with a difference in every policy with retries."""
ROUTE_FIELDS = {"route", "timeout", "retries"}
RETRY_FIELDS = {"attempts", "perTryTimeout", "retryOn", "backoff"}


def export(policy: Policy | None = None, **components: Any) -> Any:
    """Export a defence for a host."""
    return to_istio(Defence(policy, **components), host=HOST)


def export_retries(policy: Policy) -> dict[str, Any]:
    """Export a policy and return the retries of the only route."""
    (route,) = export(policy).documents[0]["spec"]["http"]
    assert set() == set(route) - ROUTE_FIELDS
    assert set() == set(route["retries"]) - RETRY_FIELDS
    retries: dict[str, Any] = route["retries"]
    return retries


def test_policy_becomes_a_virtual_service() -> None:
    """A policy is exported as a VirtualService with timeout and retries."""
    policy = Policy(total_budget=2.0, attempt_timeout=0.5)
    expected = {
        "apiVersion": "networking.istio.io/v1",
        "kind": "VirtualService",
        "metadata": {"name": "payments"},
        "spec": {
            "hosts": [HOST],
            "http": [
                {
                    "route": [{"destination": {"host": HOST}}],
                    "timeout": "2s",
                    "retries": {
                        "attempts": 3,
                        "perTryTimeout": "0.5s",
                        "retryOn": (
                            "408,425,429,500,502,503,504,507,connect-failure,refused-stream,"
                            "reset,resource-exhausted,unavailable"
                        ),
                        "backoff": "0.1s",
                    },
                }
            ],
        },
    }

    assert (expected,) == export(policy).documents


def test_components_become_a_destination_rule() -> None:
    """Breaker, budget and in-flight limit are exported to a traffic policy."""
    result = export(
        breaker={"consecutive": 5, "open_for": 10.0},
        budget={"kind": "ratio", "ratio": 0.25},
        limiter={"kind": "in-flight", "limit": 7},
    )
    expected = {
        "apiVersion": "networking.istio.io/v1",
        "kind": "DestinationRule",
        "metadata": {"name": "payments"},
        "spec": {
            "host": HOST,
            "trafficPolicy": {
                "connectionPool": {"http": {"http2MaxRequests": 7}},
                "retryBudget": {"percent": 25.0, "minRetryConcurrency": 1},
                "outlierDetection": {
                    "consecutive5xxErrors": 5,
                    "baseEjectionTime": "10s",
                    "maxEjectionPercent": 100,
                },
            },
        },
    }

    assert expected == result.documents[1]


def test_default_backoff_has_no_difference() -> None:
    """Exponential backoff with full jitter is Istio's too, so no difference is added."""
    assert COMMON_DIFFERENCES == differing_fields(to_istio(new_defence(), host=HOST))


def test_one_attempt_is_zero_retries() -> None:
    """One attempt is exported as 0 retries, because Istio's default is 2, and without budget."""
    result = export(Policy(max_attempts=1, attempt_timeout=0.5), budget={"kind": "token"})

    assert {"attempts": 0} == export_retries(Policy(max_attempts=1))
    assert "0.5s" == result.documents[0]["spec"]["http"][0]["timeout"]
    assert () == result.differences


@pytest.mark.parametrize(
    ("changes", "expected_start"),
    [
        ({"max_attempts": 9}, "max_delay = 30: Istio waits up to 100 ms, 200 ms, 400 ms, 800 ms"),
        ({"multiplier": 3.0}, "multiplier = 3: Istio waits up to 100 ms, 200 ms, 400 ms, where"),
        ({"backoff": "fixed"}, "backoff = fixed: Istio waits up to 100 ms, 200 ms, 400 ms, where"),
        ({"backoff": Schedule((5, 9))}, "backoff = 5, 9: Istio waits up to 5 s, 10 s, 20 s, where"),
        ({"jitter": "none"}, "jitter = none: Istio chooses every delay from 0 to the ceiling"),
        ({"total_budget": 2.0}, "total_budget = 2: Istio stops a running attempt"),
        ({"throttled_delay": 2.0}, "throttled_delay = 2: Istio does not wait longer after thr"),
        (
            {"ignore_retried_below": False},
            "ignore_retried_below = false: Istio also retries calls that a layer below",
        ),
        ({"retryable_codes": ["UNKNOWN"]}, "retryable_codes = UNKNOWN: Istio cannot retry on"),
        (
            {"idempotency_key_header": "X-Key"},
            "idempotency_key_header = X-Key: Istio adds no idempotency keys to requests",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_difference_is_reported(changes: dict[str, Any], expected_start: str) -> None:
    """A difference has the field, the value and the effect in Istio."""
    result = export(policy_without_differences(**changes))

    field = expected_start.partition(" ")[0]
    assert difference_text(result, field).startswith(expected_start)
    assert 1 == len(set(differing_fields(result)) - {*COMMON_DIFFERENCES})


def test_too_early_is_retried_without_delay() -> None:
    """Istio uses Envoy, which retries 425 at once; that is a difference."""
    result = export(Policy(retryable_statuses=[425, 503]))

    assert (
        "retryable_statuses = 425: Istio retries this status at once, without delay"
        == difference_text(result, "retryable_statuses")
    )


def test_statuses_without_a_name_are_left_out() -> None:
    """Istio rejects a route with a status that Go has no text for; leaving it out is reported."""
    policy = Policy(retryable_statuses=[418, 503, 520, 529])

    assert export_retries(policy)["retryOn"].startswith("418,503,connect-failure,")
    assert (
        "retryable_statuses = 520, 529: Istio accepts only statuses that have a name in Go, so "
        "these are not retried" == difference_text(export(policy), "retryable_statuses")
    )


def test_all_server_errors_are_one_condition() -> None:
    """A policy that retries each status 5xx is exported with Envoy's condition of that name."""
    policy = Policy(retryable_statuses=[429, "5xx"])

    assert export_retries(policy)["retryOn"].startswith("5xx,429,connect-failure,")
    assert "retryable_statuses" not in differing_fields(export(policy))


def test_breaker_by_rate_is_left_out() -> None:
    """A breaker without `consecutive` is left out, because Istio counts consecutive errors only."""
    result = to_istio(new_defence(breaker={}), host=HOST)

    assert 1 == len(result.documents)
    assert "so set breaker.consecutive" in difference_text(result, "breaker.failure_rate")


def test_differences_of_a_breaker() -> None:
    """The failure rate, the probes and the growth of a breaker are differences."""
    result = to_istio(
        new_defence(breaker={"consecutive": 3, "open_for": 400, "max_open": 400}), host=HOST
    )

    expected = [
        "repeatable",
        "breaker.failure_rate",
        "breaker.probes",
        "max_hint",
        "retryable_statuses",
        "breaker.growth",
    ]
    assert expected == differing_fields(result)
    effect = "lasts 400 s times the number of ejections of the host, at most 400 s"
    assert effect in difference_text(result, "breaker.growth")


def test_other_limiters_are_left_out() -> None:
    """A limiter that adapts its limit is left out, which is a difference."""
    result = to_istio(new_defence(limiter={"kind": "adaptive"}), host=HOST)

    assert (
        "limiter.kind = adaptive: left out, because Istio has no such limiter"
        == difference_text(result, "limiter.kind")
    )


def test_hedging_is_rejected() -> None:
    """Hedging cannot be exported: Istio has no hedging."""
    with pytest.raises(ConfigurationError, match=r"^hedging cannot be exported to istio"):
        export(hedging=Hedging(after=0.1))


@pytest.mark.parametrize(
    ("host", "name", "message"),
    [
        ("", None, "^host must name the service"),
        ("Payments", None, "^name must be 1 to 63 letters a-z, digits and '-', with"),
        ("payments", "a_b", "^name must be 1 to 63"),
        ("payments", "a-", "^name must be 1 to 63 .* with a letter or digit at both ends"),
        ("payments", "a" * 64, "^name must be 1 to 63"),
    ],
)
def test_names_are_checked(host: str, name: str | None, message: str) -> None:
    """A host or name that Kubernetes would reject is an error of the export."""
    with pytest.raises(ConfigurationError, match=message):
        to_istio(Defence(), host=host, name=name)
