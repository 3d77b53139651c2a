"""Tests for the export to the Gateway API, with the rules of its resource definitions."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarry.core.hedging import Hedging
from tarry.core.policy import PRESETS, Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.documents import parse_duration
from tarry.policyfile.gateway import to_gateway_api
from tests.policyfile.builders import (
    difference_text,
    differing_fields,
    new_defence,
    policy_without_differences,
)

DURATION = re.compile(r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")
COMMON_DIFFERENCES = {"repeatable", "backoff", "max_hint", "retryable_statuses"}
"""The fields with a difference in every policy with retries and the default statuses."""


def export(policy: Policy | None = None, **components: Any) -> Any:
    """Export a defence for a service."""
    return to_gateway_api(Defence(policy, **components), host="payments", port=8080)


def export_rule(policy: Policy) -> dict[str, Any]:
    """Export a policy, check the only rule of its route and return the rule."""
    (rule,) = export(policy).documents[0]["spec"]["rules"]
    check_rule(rule)
    return dict(rule)


def check_rule(rule: dict[str, Any]) -> None:
    """Check that a rule is valid by GEP-1731 and GEP-1742."""
    assert set() == set(rule) - {"backendRefs", "timeouts", "retry"}
    timeouts = rule.get("timeouts", {})
    assert set() == set(timeouts) - {"request", "backendRequest"}
    assert all(map(DURATION.match, timeouts.values()))
    if len(timeouts) > 1:
        assert parse_duration("", timeouts["backendRequest"]) <= parse_duration(
            "", timeouts["request"]
        )
    if "retry" in rule:
        assert {"attempts", "backoff"} <= set(rule["retry"]) <= {"attempts", "backoff", "codes"}
        assert DURATION.match(rule["retry"]["backoff"])
        assert all(400 <= code <= 599 for code in rule["retry"].get("codes", []))


def check_constraint(constraint: dict[str, Any]) -> None:
    """Check that a retry constraint is valid by GEP-3388."""
    assert {"budget", "minRetryRate"} == set(constraint)
    for part in constraint.values():
        assert DURATION.match(part["interval"])
        assert 1 <= parse_duration("", part["interval"]) <= 3600
    assert 0 <= constraint["budget"]["percent"] <= 100
    assert isinstance(constraint["budget"]["percent"], int)
    assert 1 <= constraint["minRetryRate"]["count"] <= 1_000_000


def test_policy_becomes_a_route() -> None:
    """A policy is exported as an HTTPRoute that is attached to the service."""
    policy = Policy(total_budget=90.0, attempt_timeout=0.5, retryable_statuses=[500, 503])
    expected = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "payments"},
        "spec": {
            "parentRefs": [{"group": "", "kind": "Service", "name": "payments", "port": 8080}],
            "rules": [
                {
                    "backendRefs": [{"name": "payments", "port": 8080}],
                    "timeouts": {"request": "1m30s", "backendRequest": "500ms"},
                    "retry": {"codes": [500, 503], "attempts": 3, "backoff": "100ms"},
                }
            ],
        },
    }

    assert (expected,) == export(policy).documents


def test_budget_becomes_a_retry_constraint() -> None:
    """A ratio budget is exported with its ratio, window and minimum rate."""
    result = export(budget={"kind": "ratio", "ratio": 0.25, "window": 20.0})
    expected = {
        "apiVersion": "gateway.networking.x-k8s.io/v1alpha1",
        "kind": "XBackendTrafficPolicy",
        "metadata": {"name": "payments"},
        "spec": {
            "targetRefs": [{"group": "", "kind": "Service", "name": "payments"}],
            "retryConstraint": {
                "budget": {"percent": 25, "interval": "20s"},
                "minRetryRate": {"count": 20, "interval": "20s"},
            },
        },
    }

    assert expected == result.documents[1]
    assert "if the budget is exceeded, the client gets a 503" in difference_text(result, "budget")


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({"kind": "ratio"}, ["budget"]),
        ({"kind": "ratio", "ratio": 0.005}, ["budget", "budget.ratio"]),
        ({"kind": "ratio", "window": 0.5}, ["budget", "budget.window"]),
        ({"kind": "ratio", "window": 9999.0}, ["budget", "budget.window"]),
        ({"kind": "ratio", "min_per_second": 0}, ["budget", "budget.min_per_second"]),
        ({"kind": "token"}, ["budget.kind", "budget"]),
        ({"kind": "throttle", "max_tokens": 1}, ["budget.kind", "budget"]),
    ],
    ids=str,
)
def test_any_budget_is_a_valid_constraint(budget: dict[str, Any], expected: list[str]) -> None:
    """The retry constraint of any budget is valid, and changed arguments are differences."""
    result = to_gateway_api(new_defence(budget=budget), host="payments")

    check_constraint(result.documents[1]["spec"]["retryConstraint"])
    assert expected == [
        field for field in differing_fields(result) if field not in COMMON_DIFFERENCES
    ]


def test_one_attempt_has_no_retry() -> None:
    """A policy with one attempt has no retry, no constraint and no differences."""
    result = export(Policy(max_attempts=1, attempt_timeout=0.5), budget={"kind": "ratio"})

    assert 1 == len(result.documents)
    assert {"request": "500ms"} == result.documents[0]["spec"]["rules"][0]["timeouts"]
    assert () == result.differences


@pytest.mark.parametrize(
    ("changes", "expected_start"),
    [
        (
            {},
            "retryable_statuses = 408, 425, 429, 507, 509, 512-599: an implementation need not ",
        ),
        ({}, "backoff = exponential: 0.1 s is the shortest wait; growth, cap and jitter depend on"),
        ({"retryable_statuses": [304, 503]}, "retryable_statuses = 304: the Gateway API retries"),
        (
            {"retryable_codes": ["UNKNOWN"]},
            "retryable_codes = UNKNOWN: the Gateway API cannot retry",
        ),
        ({"total_budget": 2.0}, "total_budget = 2: the Gateway API stops a running attempt"),
        ({"attempt_timeout": 0.0122}, "attempt_timeout = 0.0122: rounded to whole milliseconds"),
        ({"initial_delay": 0.0122}, "initial_delay = 0.0122: rounded to whole milliseconds: 0.012"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_difference_is_reported(changes: dict[str, Any], expected_start: str) -> None:
    """A difference has the field, the value and the effect in the Gateway API."""
    result = export(policy_without_differences(**changes))

    field = expected_start.partition(" ")[0]
    assert difference_text(result, field).startswith(expected_start)


def test_attempt_timeout_is_capped_at_the_total_budget() -> None:
    """The attempt timeout is capped: backendRequest must not be longer than request."""
    policy = Policy(total_budget=0.2, attempt_timeout=5.0)

    assert {"request": "200ms", "backendRequest": "200ms"} == export_rule(policy)["timeouts"]


def test_no_statuses() -> None:
    """A policy without statuses has no codes in the exported retry."""
    assert {"attempts": 3, "backoff": "100ms"} == export_rule(Policy(retryable_statuses=()))[
        "retry"
    ]


def test_breaker_and_limiter_are_left_out() -> None:
    result = to_gateway_api(
        new_defence(breaker={"consecutive": 5}, limiter={"kind": "in-flight", "limit": 3}), host="a"
    )

    assert (
        "breaker = consecutive 5: left out, because the Gateway API has no breaker"
        == difference_text(result, "breaker")
    )
    assert "limiter.kind = in-flight: left out" in difference_text(result, "limiter.kind")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_are_valid(preset: str) -> None:
    """Each preset is exported as a valid route with its number of retries."""
    assert PRESETS[preset].max_attempts - 1 == export_rule(PRESETS[preset])["retry"]["attempts"]


@given(st.integers(1, 50), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
@settings(max_examples=60)
def test_any_policy_is_valid(attempts: int, initial: float, total: float, timeout: float) -> None:
    """Any policy is exported as a valid route."""
    export_rule(
        Policy(
            max_attempts=attempts,
            initial_delay=initial,
            max_delay=initial,
            total_budget=total,
            attempt_timeout=timeout,
        )
    )


def test_hedging_is_rejected() -> None:
    """Hedging cannot be exported: the Gateway API has no hedging."""
    with pytest.raises(ConfigurationError, match=r"^hedging cannot be exported to gateway-api"):
        export(hedging=Hedging(after=0.1))


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("payments.prod", 80, "^host must be the name of a Service, without"),
        ("Payments", 80, "^host must be 1 to 63 letters a-z, digits and '-'"),
        ("payments", 0, "^port must be at least 1, got 0"),
        ("payments", 70_000, "^port must be at most 65535, got 70000"),
    ],
)
def test_names_are_checked(host: str, port: int, message: str) -> None:
    """A host or port that Kubernetes would reject is an error of the export."""
    with pytest.raises(ConfigurationError, match=message):
        to_gateway_api(Defence(), host=host, port=port)
