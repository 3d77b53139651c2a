"""Tests for the export to Envoy; Envoy's protobufs check the documents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarry.core.backoff import Schedule
from tarry.core.policy import PRESETS, Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.envoy import to_envoy
from tests.policyfile.builders import (
    difference_text,
    differing_fields,
    new_defence,
    policy_without_differences,
)
from tests.policyfile.protos import clusters, parse_valid, routes

COMMON_DIFFERENCES = ["repeatable", "budget", "max_hint"]
"""The fields with a difference in every policy with retries and without a budget."""


def export(policy: Policy | None = None, **components: Any) -> Any:
    """Export a defence for a host."""
    return to_envoy(Defence(policy, **components), host="payments.example")


def route_action(policy: Policy | None = None, **components: Any) -> dict[str, Any]:
    """Return the action of the exported route."""
    document = export(policy, **components).documents[0]
    parse_valid(routes.VirtualHost, document)
    route: dict[str, Any] = document["routes"][0]["route"]
    return route


def test_policy_becomes_a_retry_policy() -> None:
    """Attempts, delays, timeouts, statuses and codes are exported to their fields."""
    policy = Policy(total_budget=2.0, attempt_timeout=0.5, retryable_statuses=(503, 429))

    host = parse_valid(routes.VirtualHost, export(policy).documents[0])

    route = host.routes[0].route
    retry = route.retry_policy
    assert ("payments", ["payments.example"]) == (host.name, list(host.domains))
    assert ("payments", 2.0) == (route.cluster, route.timeout.ToTimedelta().total_seconds())
    assert 3 == retry.num_retries.value
    assert [429, 503] == list(retry.retriable_status_codes)
    assert (
        "connect-failure,refused-stream,reset,resource-exhausted,unavailable,retriable-status-codes"
        == retry.retry_on
    )
    assert 500 == retry.per_try_timeout.ToMilliseconds()
    assert 100 == retry.retry_back_off.base_interval.ToMilliseconds()
    assert 30_000 == retry.retry_back_off.max_interval.ToMilliseconds()
    assert "Retry-After" == retry.rate_limited_retry_back_off.reset_headers[0].name
    assert 120_000 == retry.rate_limited_retry_back_off.max_interval.ToMilliseconds()


def test_default_backoff_has_no_difference() -> None:
    """Exponential backoff with full jitter is Envoy's too, so no difference is added."""
    result = to_envoy(new_defence(), host="payments")

    assert 1 == len(result.documents)
    assert COMMON_DIFFERENCES == differing_fields(result)


def test_policy_without_total_budget_has_no_timeout() -> None:
    """The timeout is exported as 0 s (no limit), because Envoy's default is 15 s."""
    assert "0s" == route_action()["timeout"]


def test_one_attempt_has_no_retry_policy() -> None:
    result = export(Policy(max_attempts=1), budget={"kind": "ratio"})

    assert {"cluster": "payments", "timeout": "0s"} == result.documents[0]["routes"][0]["route"]
    assert () == result.differences


@pytest.mark.parametrize(("total", "expected"), [(None, "0.5s"), (2.0, "0.5s"), (0.2, "0.2s")])
def test_timeout_of_the_only_attempt(total: float | None, expected: str) -> None:
    """With one attempt, the route has the shorter of attempt timeout and total budget."""
    policy = Policy(max_attempts=1, attempt_timeout=0.5, total_budget=total)

    assert expected == route_action(policy)["timeout"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"backoff": "fixed"}, ("0.1s", "0.1s")),
        ({"multiplier": 1.0}, ("0.1s", "0.1s")),
        ({"max_attempts": 2, "multiplier": 7.0}, ("0.1s", "0.1s")),
        ({"max_attempts": 2, "backoff": Schedule((5.0, 7.0))}, ("5s", "5s")),
        ({"backoff": Schedule((1.0, 2.0, 4.0))}, ("1s", "4s")),
        ({"max_attempts": 3, "backoff": "linear"}, ("0.1s", "30s")),
    ],
    ids=repr,
)
def test_backoff_with_the_same_delays(changes: dict[str, Any], expected: tuple[str, str]) -> None:
    """A backoff with the same maximum delays as Envoy's backoff is no difference."""
    result = export(policy_without_differences(**changes))

    back_off = result.documents[0]["routes"][0]["route"]["retry_policy"]["retry_back_off"]
    assert expected == (back_off["base_interval"], back_off["max_interval"])
    assert COMMON_DIFFERENCES == differing_fields(result)


@pytest.mark.parametrize(
    ("changes", "expected_start"),
    [
        (
            {"multiplier": 3.0},
            (
                "multiplier = 3: Envoy waits up to 100 ms, 200 ms, 400 ms, where tarry has "
                "100 ms, 300 ms, 900 ms"
            ),
        ),
        (
            {"backoff": "linear", "max_attempts": 6},
            (
                "backoff = linear: Envoy waits up to 100 ms, 200 ms, 400 ms, 800 ms, ..., "
                "where tarry has 100 ms, 200 ms, 300 ms, 400 ms, ..."
            ),
        ),
        (
            {"backoff": Schedule((5.0, 30.0))},
            ("backoff = 5, 30: Envoy waits up to 5 s, 10 s, 20 s, where tarry has 5 s, 30 s, 30 s"),
        ),
        (
            {"backoff": lambda k: 0.0 * k, "retryable_statuses": [503]},
            (
                "backoff = a function: Envoy waits up to 1 ms, 1 ms, 1 ms, where tarry has "
                "0 ms, 0 ms, 0 ms"
            ),
        ),
        (
            {"jitter": "equal"},
            "jitter = equal: Envoy chooses every delay from 0 to the ceiling (full jitter)",
        ),
        ({"jitter": "decorrelated"}, "jitter = decorrelated: Envoy chooses every delay from 0"),
        (
            {"initial_delay": 0.0004, "throttled_delay": 0.0004},
            "initial_delay = 0.0004: Envoy waits up to 1 ms, 2 ms, 4 ms, where tarry has 0.4 ms,",
        ),
        (
            {"attempt_timeout": 0.1234},
            "attempt_timeout = 0.1234: rounded to whole milliseconds: 0.123",
        ),
        ({"total_budget": 2.0}, "total_budget = 2: Envoy stops a running attempt"),
        ({"throttled_delay": 1.0}, "throttled_delay = 1: Envoy does not wait longer after thr"),
        (
            {"ignore_retried_below": False},
            "ignore_retried_below = false: Envoy also retries calls that a layer below",
        ),
        ({"retryable_codes": ["ABORTED", "INTERNAL"]}, "retryable_codes = ABORTED: Envoy cannot"),
        ({"max_hint": 0}, "max_hint = 0: Envoy ignores Retry-After; tarry gives up instead"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_difference_is_reported(changes: dict[str, Any], expected_start: str) -> None:
    """A difference has the field, the value and the effect in Envoy."""
    result = export(policy_without_differences(**changes))

    field = expected_start.partition(" ")[0]
    assert difference_text(result, field).startswith(expected_start)
    assert len(set(differing_fields(result)) - {*COMMON_DIFFERENCES}) <= 1


def test_throttled_delay_matters_only_if_throttling_is_retried() -> None:
    """`throttled_delay` is no difference if 429 and RESOURCE_EXHAUSTED are not retried."""
    policy = policy_without_differences(
        throttled_delay=1.0, retryable_statuses=[503], retryable_codes=["UNAVAILABLE"]
    )

    assert COMMON_DIFFERENCES == differing_fields(export(policy))


@pytest.mark.parametrize(
    ("delays", "reported"), [((0.2, 0.2), True), ((2.0, 0.2), True), ((2.0, 4.0), False)]
)
def test_throttled_delay_is_reported_if_a_delay_is_shorter(
    delays: tuple[float, ...],
    reported: bool,
) -> None:
    policy = policy_without_differences(
        max_attempts=3, backoff=Schedule(delays), throttled_delay=1.0
    )

    assert reported == ("throttled_delay" in differing_fields(export(policy)))


def test_too_early_is_retried_without_delay() -> None:
    """Envoy retries 425 at once, which is a difference unless the statuses are the default."""
    expected = "retryable_statuses = 425: Envoy retries this status at once, without delay"

    assert expected == difference_text(
        export(Policy(retryable_statuses=[425])), "retryable_statuses"
    )
    for policy in (Policy(), Policy(retryable_statuses=[503])):
        assert "retryable_statuses" not in differing_fields(export(policy))


def test_no_statuses_and_codes() -> None:
    """A policy without statuses and codes retries connection errors only."""
    retry = route_action(Policy(retryable_statuses=(), retryable_codes=()))["retry_policy"]

    assert "connect-failure,refused-stream,reset" == retry["retry_on"]
    assert "retriable_status_codes" not in retry


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_are_valid(preset: str) -> None:
    """The export of each preset is valid by Envoy's protobufs."""
    parse_valid(routes.VirtualHost, export(PRESETS[preset]).documents[0])


@given(
    st.integers(1, 50),
    st.floats(1e-6, 1e5),
    st.floats(1, 1e3),
    st.sampled_from(["fixed", "linear", "exponential", Schedule((0.0, 3.0, 1.0))]),
    st.sampled_from([{}, {"open_for": 1e-5, "max_open": 1e6, "failure_rate": 1e-6}]),
)
@settings(max_examples=60)
def test_any_policy_is_valid(
    attempts: int, initial: float, growth: float, backoff: Any, breaker: dict[str, Any]
) -> None:
    """The export of any policy is valid by Envoy's protobufs."""
    policy = Policy(
        max_attempts=attempts,
        initial_delay=initial,
        max_delay=initial * growth,
        backoff=backoff,
        max_hint=initial,
        attempt_timeout=initial,
    )
    virtual_host, cluster = export(policy, breaker=breaker, budget={"kind": "token"}).documents

    back_off = (
        parse_valid(routes.VirtualHost, virtual_host).routes[0].route.retry_policy.retry_back_off
    )
    parse_valid(clusters.Cluster, cluster)
    assert back_off.base_interval.ToTimedelta() <= back_off.max_interval.ToTimedelta()


def test_empty_host_is_rejected() -> None:
    """An empty host is rejected with the name of the argument."""
    with pytest.raises(ConfigurationError, match=r"^host must name the domain"):
        to_envoy(Defence(), host="")
