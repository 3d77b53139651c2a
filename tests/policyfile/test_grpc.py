"""Export to a gRPC service config, by the rules of gRFC A6."""

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
from tests.policyfile.builders import defence, difference_text, fields, plain_policy

ALWAYS = ["jitter", "max_hint"]


def exported(policy: Policy | None = None, **parts: Any) -> Any:
    """Export for all calls."""
    return to_grpc(Defence(policy, **parts))


def method_config(policy: Policy | None = None, **parts: Any) -> dict[str, Any]:
    """Return the only entry."""
    (found,) = exported(policy, **parts).documents[0]["methodConfig"]
    return dict(found)


def test_policy_becomes_a_retry_policy() -> None:
    """The whole document, for one method."""
    made = to_grpc(
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

    assert (expected,) == made.documents


def test_nothing_more_is_lost_than_must_be() -> None:
    """The throttle is gRPC's own, so only the usual lines remain."""
    assert ALWAYS == fields(to_grpc(defence(budget={"kind": "throttle"})))


def test_without_a_name_it_is_for_all_calls() -> None:
    """An empty name is the default of the channel."""
    assert [{}] == method_config()["name"]


def test_method_needs_its_service() -> None:
    """A method alone is nothing that gRPC takes."""
    with pytest.raises(ConfigurationError, match=r"^method needs service: name the service of"):
        to_grpc(Defence(), method="Charge")


def test_one_attempt_has_no_retry_policy() -> None:
    """Without retries nothing is lost; the timeout is that of the attempt."""
    made = exported(Policy(max_attempts=1, attempt_timeout=0.5), budget={"kind": "token"})

    assert ({"methodConfig": [{"name": [{}], "timeout": "0.5s"}]},) == made.documents
    assert () == made.differences


@pytest.mark.parametrize(("timeout", "lost"), [(0.5, True), (2.0, False), (9.0, False)])
def test_attempt_as_long_as_the_call_is_no_difference(timeout: float, lost: bool) -> None:
    """Where the deadline of the call comes first, no timeout of an attempt is missed."""
    made = exported(plain_policy(total_budget=2.0, attempt_timeout=timeout))

    assert lost == ("attempt_timeout" in fields(made))


def test_no_code_is_no_retry_policy() -> None:
    """Without codes gRPC takes no retry policy, so there is none, and the line says so."""
    made = exported(Policy(retryable_codes=["OK"]))

    assert [{"name": [{}]}] == made.documents[0]["methodConfig"]
    assert "retryable_codes = nothing: gRPC requires at least one code" in difference_text(
        made, "retryable_codes"
    )


@pytest.mark.parametrize(
    ("changes", "multiplier", "longest"),
    [
        ({"backoff": "fixed"}, 1.0, "0.1s"),
        ({"multiplier": 1.5}, 1.5, "30s"),
        ({"backoff": Schedule((1.0, 3.0, 9.0))}, 3.0, "9s"),
        ({"backoff": "linear", "max_attempts": 3}, 2.0, "30s"),
        ({"backoff": Schedule((7.0,)), "max_attempts": 2}, 1.0, "7s"),
    ],
    ids=repr,
)
def test_backoffs_that_come_to_the_same(
    changes: dict[str, Any], multiplier: float, longest: str
) -> None:
    """A backoff whose ceilings gRPC has too is no difference, whatever it is called."""
    made = exported(plain_policy(**changes))

    retry = made.documents[0]["methodConfig"][0]["retryPolicy"]
    assert (multiplier, longest) == (retry["backoffMultiplier"], retry["maxBackoff"])
    assert ALWAYS == fields(made)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"max_attempts": 9}, "max_attempts = 9: gRPC makes at most 5"),
        ({"backoff": "linear"}, "backoff = linear: gRPC waits up to 100 ms, 173 ms, 300 ms, where"),
        (
            {"initial_delay": 0.001, "throttled_delay": 0.001},
            "max_delay = 30: gRPC waits up to 5 ms, 10 ms, 20 ms, where tarry has 1 ms, 2 ms, 4 ms",
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
def test_difference_is_reported(changes: dict[str, Any], line: str) -> None:
    """A difference in gRPC is reported with the field and its value."""
    made = exported(plain_policy(**changes))

    assert difference_text(made, line.partition(" ")[0]).startswith(line)
    assert len(set(fields(made)) - {*ALWAYS}) <= 1


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
def test_other_budgets_become_the_nearest_throttle(
    budget: dict[str, Any], tokens: int, ratio: float
) -> None:
    """As many retries without a success, and as many for each success; the line has the numbers."""
    made = to_grpc(defence(budget=budget))

    expected = {"maxTokens": tokens, "tokenRatio": ratio}
    assert expected == made.documents[0]["retryThrottling"]
    assert f"throttle: {tokens} tokens" in difference_text(made, "budget.kind")


def test_breaker_and_limiter_are_left_out() -> None:
    """A service config has nothing like them."""
    made = to_grpc(defence(breaker={}, limiter={"kind": "aimd"}))

    assert ["breaker", "limiter.kind", *ALWAYS] == fields(made)
    assert "breaker = its defaults: left out: a service config has none" == difference_text(
        made, "breaker"
    )


def test_hedging_becomes_a_hedging_policy() -> None:
    """A fixed delay has its field; attempts beyond five do not."""
    made = exported(hedging=Hedging(after=0.25, max_attempts=7, max_extra_load=0.1))

    expected = {
        "maxAttempts": 5,
        "hedgingDelay": "0.25s",
        "nonFatalStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"],
    }
    assert expected == made.documents[0]["methodConfig"][0]["hedgingPolicy"]
    parts = ["", "max_extra_load", "max_attempts", "max_hint"]
    assert [".".join(filter(None, ("hedging", part))) for part in parts] == fields(made)


@pytest.mark.parametrize("hedging", [Hedging(after="p95"), Hedging(max_extra_load=0.05)], ids=repr)
def test_live_percentile_is_refused(hedging: Hedging) -> None:
    """No delay would start all attempts at once, so a percentile is rejected and not left out."""
    with pytest.raises(ConfigurationError, match=r"^hedging\.after must be set in seconds .* grpc"):
        exported(hedging=hedging)


@given(
    st.integers(2, 50),
    st.floats(1e-6, 1e5),
    st.floats(1, 1e3),
    st.sampled_from(["fixed", "linear", "exponential", Schedule((0.0, 3.0, 1.0))]),
)
@settings(max_examples=60)
def test_any_policy_keeps_the_rules(
    attempts: int, initial: float, growth: float, backoff: Any
) -> None:
    """Whatever the numbers, the retry policy keeps the rules of gRFC A6."""
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
