"""Export to Envoy, read back by its own protobufs."""

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
from tests.policyfile.builders import defence, difference_text, fields, plain_policy
from tests.policyfile.protos import clusters, parsed, routes

ALWAYS = ["repeatable", "budget", "max_hint"]
"""What no policy can say to Envoy."""


def exported(policy: Policy | None = None, **parts: Any) -> Any:
    """Export for a host."""
    return to_envoy(Defence(policy, **parts), host="payments.example")


def action(policy: Policy | None = None, **parts: Any) -> dict[str, Any]:
    """Return the action of the route."""
    document = exported(policy, **parts).documents[0]
    parsed(routes.VirtualHost, document)
    route: dict[str, Any] = document["routes"][0]["route"]
    return route


def test_policy_becomes_a_retry_policy() -> None:
    """Attempts, delays, timeouts, statuses and codes have their fields."""
    policy = Policy(total_budget=2.0, attempt_timeout=0.5, retryable_statuses=(503, 429))

    host = parsed(routes.VirtualHost, exported(policy).documents[0])

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


def test_nothing_more_is_lost_than_must_be() -> None:
    """Doubling with full jitter is Envoy's own way, so only the usual lines remain."""
    made = to_envoy(defence(), host="payments")

    assert 1 == len(made.documents)
    assert ALWAYS == fields(made)


def test_call_without_budget_has_no_timeout() -> None:
    """Left out, Envoy would end the call after 15 s; zero is without end."""
    assert "0s" == action()["timeout"]


def test_one_attempt_has_no_retry_policy() -> None:
    """Without a retry there is nothing to say, and nothing is lost."""
    made = exported(Policy(max_attempts=1), budget={"kind": "ratio"})

    assert {"cluster": "payments", "timeout": "0s"} == made.documents[0]["routes"][0]["route"]
    assert () == made.differences


@pytest.mark.parametrize(("total", "expected"), [(None, "0.5s"), (2.0, "0.5s"), (0.2, "0.2s")])
def test_only_attempt_has_the_timeout_of_the_route(total: float | None, expected: str) -> None:
    """The shorter of both is the one that ends the call."""
    policy = Policy(max_attempts=1, attempt_timeout=0.5, total_budget=total)

    assert expected == action(policy)["timeout"]


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
def test_other_backoffs_that_come_to_the_same(
    changes: dict[str, Any], expected: tuple[str, str]
) -> None:
    """A backoff whose ceilings Envoy has too is no difference, whatever it is called."""
    made = exported(plain_policy(**changes))

    back_off = made.documents[0]["routes"][0]["route"]["retry_policy"]["retry_back_off"]
    assert expected == (back_off["base_interval"], back_off["max_interval"])
    assert ALWAYS == fields(made)


@pytest.mark.parametrize(
    ("changes", "line"),
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
            "max_delay = 30: Envoy waits up to 1 ms, 2 ms, 4 ms, where tarry has 0.4 ms,",
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
def test_difference_is_reported(changes: dict[str, Any], line: str) -> None:
    """A difference in Envoy is reported with the field and its value."""
    made = exported(plain_policy(**changes))

    assert difference_text(made, line.partition(" ")[0]).startswith(line)
    assert len(set(fields(made)) - {*ALWAYS}) <= 1


def test_slower_delay_after_throttling_matters_only_where_that_is_retried() -> None:
    """Without 429 and RESOURCE_EXHAUSTED there is nothing to wait longer after."""
    policy = plain_policy(
        throttled_delay=1.0, retryable_statuses=[503], retryable_codes=["UNAVAILABLE"]
    )

    assert ALWAYS == fields(exported(policy))


@pytest.mark.parametrize(
    ("delays", "slower"), [((0.2, 0.2), True), ((2.0, 0.2), True), ((2.0, 4.0), False)]
)
def test_slower_delay_is_that_of_the_policy(
    delays: tuple[float, ...],
    slower: bool,
) -> None:
    """A schedule that waits for longer than `throttled_delay` anyway is no slower after it."""
    policy = plain_policy(max_attempts=3, backoff=Schedule(delays), throttled_delay=1.0)

    assert slower == ("throttled_delay" in fields(exported(policy)))


def test_too_early_is_retried_without_delay() -> None:
    """Envoy does not back off from a 425; no difference is reported for the default statuses."""
    line = "retryable_statuses = 425: Envoy retries this status at once, without delay"

    assert line == difference_text(exported(Policy(retryable_statuses=[425])), "retryable_statuses")
    for policy in (Policy(), Policy(retryable_statuses=[503])):
        assert "retryable_statuses" not in fields(exported(policy))


def test_no_status_is_no_condition() -> None:
    """A policy that retries on errors alone names no statuses."""
    retry = action(Policy(retryable_statuses=(), retryable_codes=()))["retry_policy"]

    assert "connect-failure,refused-stream,reset" == retry["retry_on"]
    assert "retriable_status_codes" not in retry


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_are_valid(preset: str) -> None:
    """Each preset keeps the rules of Envoy's protobufs."""
    parsed(routes.VirtualHost, exported(PRESETS[preset]).documents[0])


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
    """Whatever the numbers, the documents keep the rules of Envoy's protobufs."""
    policy = Policy(
        max_attempts=attempts,
        initial_delay=initial,
        max_delay=initial * growth,
        backoff=backoff,
        max_hint=initial,
        attempt_timeout=initial,
    )
    host, behind = exported(policy, breaker=breaker, budget={"kind": "token"}).documents

    retry = parsed(routes.VirtualHost, host).routes[0].route.retry_policy.retry_back_off
    parsed(clusters.Cluster, behind)
    assert retry.base_interval.ToTimedelta() <= retry.max_interval.ToTimedelta()


def test_host_must_be_given() -> None:
    """A virtual host without a domain is rejected by the name of the argument."""
    with pytest.raises(ConfigurationError, match=r"^host must name the domain"):
        to_envoy(Defence(), host="")
