"""Tests for the export to a gRPC service config, with the rules of gRFC A6."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarry.core.backoff import Schedule
from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.documents import parse_duration
from tarry.policyfile.grpc import to_grpc
from tests.policyfile.builders import (
    difference_text,
    differing_fields,
    new_defence,
    policy_without_differences,
)

COMMON_DIFFERENCES = ["jitter", "max_hint"]
"""The fields with a difference in every policy with retries."""


def export(policy: Policy | None = None, **components: Any) -> Any:
    """Export a defence for all calls."""
    return to_grpc(Defence(policy, **components))


def method_config(policy: Policy | None = None, **components: Any) -> dict[str, Any]:
    """Export a defence and return the only entry of methodConfig."""
    (entry,) = export(policy, **components).documents[0]["methodConfig"]
    return dict(entry)


def test_policy_becomes_a_retry_policy() -> None:
    """A policy and a throttle budget are exported for one method."""
    result = to_grpc(
        Defence(Policy(total_budget=2.0), budget={"kind": "throttle", "max_tokens": 20}),
        service="shop.Payments",
        method="Charge",
    )
    expected = {
        "methodConfig": [
            {
                "name": [{"service": "shop.Payments", "method": "Charge"}],
                "timeout": "2s",
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "30s",
                    "backoffMultiplier": 2.0,
                    "retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 20, "tokenRatio": 0.1},
    }

    assert (expected,) == result.documents


def test_throttle_budget_has_no_difference() -> None:
    """A throttle budget is gRPC's own kind of budget, so no difference is added."""
    assert COMMON_DIFFERENCES == differing_fields(to_grpc(new_defence(budget={"kind": "throttle"})))


def test_export_without_a_service_is_for_all_calls() -> None:
    """Without a service, the entry has the empty name, which matches all calls of a channel."""
    assert [{}] == method_config()["name"]


def test_method_needs_its_service() -> None:
    """A method without its service is rejected."""
    with pytest.raises(ConfigurationError, match=r"^method requires service: give the service of"):
        to_grpc(Defence(), method="Charge")


def test_one_attempt_has_no_retry_policy() -> None:
    """A policy with one attempt has only the timeout of the attempt, and no differences."""
    result = export(Policy(max_attempts=1, attempt_timeout=0.5), budget={"kind": "token"})

    assert ({"methodConfig": [{"name": [{}], "timeout": "0.5s"}]},) == result.documents
    assert () == result.differences


@pytest.mark.parametrize(("timeout", "reported"), [(0.5, True), (2.0, False), (9.0, False)])
def test_attempt_timeout_is_reported_if_it_is_shorter(timeout: float, reported: bool) -> None:
    """The attempt timeout is a difference only if it is shorter than the total budget."""
    result = export(policy_without_differences(total_budget=2.0, attempt_timeout=timeout))

    assert reported == ("attempt_timeout" in differing_fields(result))


def test_policy_without_codes_that_grpc_retries_has_no_retry_policy() -> None:
    """OK is never retried; if it is the only code, there is no retry policy, which is reported."""
    result = export(Policy(retryable_codes=["OK"]))

    assert [{"name": [{}]}] == result.documents[0]["methodConfig"]
    assert "retryable_codes = nothing: gRPC requires at least one code" in difference_text(
        result, "retryable_codes"
    )


@pytest.mark.parametrize(
    ("changes", "multiplier", "max_backoff"),
    [
        ({"backoff": "fixed"}, 1.0, "0.1s"),
        ({"multiplier": 1.5}, 1.5, "30s"),
        ({"backoff": Schedule((1.0, 3.0, 9.0))}, 3.0, "9s"),
        ({"backoff": "linear", "max_attempts": 3}, 2.0, "30s"),
        ({"backoff": Schedule((7.0,)), "max_attempts": 2}, 1.0, "7s"),
    ],
    ids=repr,
)
def test_backoff_with_the_same_delays(
    changes: dict[str, Any], multiplier: float, max_backoff: str
) -> None:
    """A backoff with the same maximum delays as gRPC's exponential backoff is no difference."""
    result = export(policy_without_differences(**changes))

    retry = result.documents[0]["methodConfig"][0]["retryPolicy"]
    assert (multiplier, max_backoff) == (retry["backoffMultiplier"], retry["maxBackoff"])
    assert COMMON_DIFFERENCES == differing_fields(result)


@pytest.mark.parametrize(
    ("changes", "expected_start"),
    [
        ({"max_attempts": 9}, "max_attempts = 9: gRPC makes at most 5"),
        ({"backoff": "linear"}, "backoff = linear: gRPC waits up to 100 ms, 173 ms, 300 ms, where"),
        (
            {"initial_delay": 0.001, "throttled_delay": 0.001},
            "initial_delay = 0.001: gRPC waits up to 5 ms, 10 ms, 20 ms, where tarry has 1 ms,",
        ),
        ({"jitter": "none"}, "jitter = none: gRPC waits 0.8 to 1.2 times the ceiling"),
        ({"jitter": "full"}, "jitter = full: gRPC waits 0.8 to 1.2 times the ceiling: on average"),
        ({"jitter": lambda c, _p, _u: c}, "jitter = a function: gRPC waits 0.8 to 1.2"),
        ({"attempt_timeout": 0.5}, "attempt_timeout = 0.5: gRPC has no timeout for one attempt"),
        ({"total_budget": 2.0}, "total_budget = 2: gRPC stops a running attempt"),
        ({"throttled_delay": 1.0}, "throttled_delay = 1: gRPC does not wait longer after RESOURCE"),
        (
            {"ignore_retried_below": False},
            "ignore_retried_below = false: gRPC also retries calls that a layer below",
        ),
        ({"retryable_statuses": [503]}, "retryable_statuses = 503: gRPC has no HTTP statuses"),
        (
            {"max_hint": 9},
            "max_hint = 9: gRPC follows a pushback of any length, and ignores RetryInfo",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_difference_is_reported(changes: dict[str, Any], expected_start: str) -> None:
    """A difference has the field, the value and the effect in gRPC."""
    result = export(policy_without_differences(**changes))

    field = expected_start.partition(" ")[0]
    assert difference_text(result, field).startswith(expected_start)
    assert len(set(differing_fields(result)) - {*COMMON_DIFFERENCES}) <= 1


@pytest.mark.parametrize(
    ("budget", "tokens", "ratio"),
    [
        ({"kind": "ratio"}, 20, 0.1),
        ({"kind": "ratio", "min_per_second": 0}, 1, 0.1),
        ({"kind": "token"}, 200, 1.0),
        ({"kind": "token", "preset": "aws-2026"}, 71, 0.071),
        ({"kind": "token", "capacity": 1e6}, 1000, 1.0),
    ],
    ids=str,
)
def test_other_budgets_become_a_similar_throttle(
    budget: dict[str, Any], tokens: int, ratio: float
) -> None:
    """Other budgets are exported as a throttle that allows about as many retries."""
    result = to_grpc(new_defence(budget=budget))

    expected = {"maxTokens": tokens, "tokenRatio": ratio}
    assert expected == result.documents[0]["retryThrottling"]
    assert f"throttle: {tokens} tokens" in difference_text(result, "budget.kind")


def test_breaker_and_limiter_are_left_out() -> None:
    result = to_grpc(new_defence(breaker={}, limiter={"kind": "aimd"}))

    assert ["breaker", "limiter.kind", *COMMON_DIFFERENCES] == differing_fields(result)
    assert (
        "breaker = default values: left out, because a service config has no breaker"
        == difference_text(result, "breaker")
    )


def test_hedging_becomes_a_hedging_policy() -> None:
    """Hedging is exported with its delay and at most five attempts."""
    result = export(hedging=Hedging(after=0.25, max_attempts=7, max_extra_load=0.1))

    expected = {
        "maxAttempts": 5,
        "hedgingDelay": "0.25s",
        "nonFatalStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"],
    }
    assert expected == result.documents[0]["methodConfig"][0]["hedgingPolicy"]
    assert [
        "hedging",
        "hedging.max_extra_load",
        "hedging.max_attempts",
        "hedging.max_hint",
    ] == differing_fields(result)


@pytest.mark.parametrize("hedging", [Hedging(after="p95"), Hedging(max_extra_load=0.05)], ids=repr)
def test_percentile_delay_is_rejected(hedging: Hedging) -> None:
    """A percentile is rejected: without a delay, gRPC would start all attempts at once."""
    with pytest.raises(ConfigurationError, match=r"^hedging\.after must be set in seconds .* grpc"):
        export(hedging=hedging)


@given(
    st.integers(2, 50),
    st.floats(1e-6, 1e5),
    st.floats(1, 1e3),
    st.sampled_from(["fixed", "linear", "exponential", Schedule((0.0, 3.0, 1.0))]),
)
@settings(max_examples=60)
def test_exported_retry_policy_is_valid(
    attempts: int, initial: float, growth: float, backoff: Any
) -> None:
    """The exported `retryPolicy` is valid by gRFC A6, for any policy."""
    policy = Policy(
        max_attempts=attempts, initial_delay=initial, max_delay=initial * growth, backoff=backoff
    )

    retry = json.loads(json.dumps(method_config(policy)))["retryPolicy"]

    assert 2 <= retry["maxAttempts"] <= 5
    assert (
        0.005
        <= parse_duration("", retry["initialBackoff"])
        <= parse_duration("", retry["maxBackoff"])
    )
    assert 0 < retry["backoffMultiplier"]
