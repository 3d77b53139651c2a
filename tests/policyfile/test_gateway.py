"""Export to the Gateway API, by the rules of its resource definitions."""

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
from tests.policyfile.builders import defence, difference_text, fields, plain_policy

DURATION = re.compile(r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")
ALWAYS = {"repeatable", "backoff", "max_hint", "retryable_statuses"}


def exported(policy: Policy | None = None, **parts: Any) -> Any:
    """Export for a service."""
    return to_gateway_api(Defence(policy, **parts), host="payments", port=8080)


def rule(policy: Policy) -> dict[str, Any]:
    """Return the only rule of the route, checked."""
    (found,) = exported(policy).documents[0]["spec"]["rules"]
    check_rule(found)
    return dict(found)


def check_rule(rule: dict[str, Any]) -> None:
    """Hold a rule against GEP-1731 and GEP-1742."""
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
    """Hold a retry constraint against GEP-3388."""
    assert {"budget", "minRetryRate"} == set(constraint)
    for part in constraint.values():
        assert DURATION.match(part["interval"])
        assert 1 <= parse_duration("", part["interval"]) <= 3600
    assert 0 <= constraint["budget"]["percent"] <= 100
    assert isinstance(constraint["budget"]["percent"], int)
    assert 1 <= constraint["minRetryRate"]["count"] <= 1_000_000


def test_policy_becomes_a_route() -> None:
    """The whole document, attached to the service itself."""
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

    assert (expected,) == exported(policy).documents


def test_budget_becomes_a_retry_constraint() -> None:
    """A share of the calls of a window and a floor: this is the target that has both."""
    made = exported(budget={"kind": "ratio", "ratio": 0.25, "window": 20.0})
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

    assert expected == made.documents[1]
    assert "if the budget is exceeded, the client gets a 503" in difference_text(made, "budget")


@pytest.mark.parametrize(
    ("budget", "lost"),
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
def test_budgets_keep_the_rules(budget: dict[str, Any], lost: list[str]) -> None:
    """Whatever the budget, its constraint is one that the API takes, and changes are reported."""
    made = to_gateway_api(defence(budget=budget), host="payments")

    check_constraint(made.documents[1]["spec"]["retryConstraint"])
    assert lost == [field for field in fields(made) if field not in ALWAYS]


def test_one_attempt_has_no_retry() -> None:
    """Without a retry there is neither a stanza nor a budget, and nothing is lost."""
    made = exported(Policy(max_attempts=1, attempt_timeout=0.5), budget={"kind": "ratio"})

    assert 1 == len(made.documents)
    assert {"request": "500ms"} == made.documents[0]["spec"]["rules"][0]["timeouts"]
    assert () == made.differences


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "retryable_statuses = 408, 425, 429: an implementation need not support more than 500,",
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
def test_difference_is_reported(changes: dict[str, Any], line: str) -> None:
    """A difference in the Gateway API is reported with the field and its value."""
    made = exported(plain_policy(**changes))

    assert difference_text(made, line.partition(" ")[0]).startswith(line)


def test_attempt_has_no_more_time_than_the_call() -> None:
    """The API refuses a backendRequest that is longer than the request."""
    policy = Policy(total_budget=0.2, attempt_timeout=5.0)

    assert {"request": "200ms", "backendRequest": "200ms"} == rule(policy)["timeouts"]


def test_no_status_is_no_code() -> None:
    """A policy that retries on errors alone leaves the codes out."""
    assert {"attempts": 3, "backoff": "100ms"} == rule(Policy(retryable_statuses=()))["retry"]


def test_breaker_and_limiter_are_left_out() -> None:
    """There is nothing like them."""
    made = to_gateway_api(
        defence(breaker={"consecutive": 5}, limiter={"kind": "in-flight", "limit": 3}), host="a"
    )

    assert "breaker = consecutive 5: left out: the Gateway API has none" == difference_text(
        made, "breaker"
    )
    assert "limiter.kind = in-flight: left out" in difference_text(made, "limiter.kind")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_keep_the_rules(preset: str) -> None:
    """Each preset is a route that the API takes."""
    assert PRESETS[preset].max_attempts - 1 == rule(PRESETS[preset])["retry"]["attempts"]


@given(st.integers(1, 50), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
@settings(max_examples=60)
def test_any_policy_keeps_the_rules(
    attempts: int, initial: float, total: float, timeout: float
) -> None:
    """Whatever the numbers, the route is one that the API takes."""
    rule(
        Policy(
            max_attempts=attempts,
            initial_delay=initial,
            max_delay=initial,
            total_budget=total,
            attempt_timeout=timeout,
        )
    )


def test_hedging_is_refused() -> None:
    """The API has no hedging, and a hedged call without it is another call."""
    with pytest.raises(ConfigurationError, match=r"^hedging cannot be exported to gateway-api"):
        exported(hedging=Hedging(after=0.1))


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
    """What Kubernetes would refuse is rejected before."""
    with pytest.raises(ConfigurationError, match=message):
        to_gateway_api(Defence(), host=host, port=port)
