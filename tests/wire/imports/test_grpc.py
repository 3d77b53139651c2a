"""Import of a gRPC service config."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.hedging import Hedging
from tarry.core.policy import PRESETS, Policy
from tarry.errors import ConfigurationError
from tarry.wire.defence import Defence
from tarry.wire.export import to_grpc
from tarry.wire.imports import from_grpc
from tests.wire.export.said import fields

RETRY = {
    "maxAttempts": 3,
    "initialBackoff": "0.5s",
    "maxBackoff": "2s",
    "backoffMultiplier": 1.5,
    "retryableStatusCodes": ["unavailable", 10],
}


def config(**entry: Any) -> dict[str, Any]:
    """Return a service config for all calls."""
    return {"methodConfig": [{"name": [{}], **entry}]}


@pytest.mark.parametrize("preset", ["default", "interactive"])
def test_policy_survives_the_way_there_and_back(preset: str) -> None:
    """What gRPC can say comes back as it was."""
    policy = PRESETS[preset]
    budget = {"kind": "throttle", "max_tokens": 12, "token_ratio": 0.25}

    made = from_grpc(to_grpc(Defence(policy, budget=budget)).documents[0])

    expected = policy.replace(jitter="equal", throttled_delay=policy.initial_delay)
    assert expected == made.defence.policy
    assert budget == made.defence.budget
    assert ["methodConfig[0].retryPolicy"] == fields(made)


def test_hedging_survives_the_way_there_and_back() -> None:
    """A hedging with a fixed delay comes back as it was."""
    hedging = Hedging(after=0.25, max_attempts=3)

    made = from_grpc(to_grpc(Defence(hedging=hedging)).documents[0])

    assert (Defence(hedging=hedging), ()) == made


def test_codes_come_as_names_and_numbers() -> None:
    """Names in any case and numbers are the same codes."""
    made = from_grpc(config(retryPolicy=RETRY, timeout="1.5s"))

    policy = made.defence.policy
    assert {"UNAVAILABLE", "ABORTED"} == policy.retryable_codes
    assert (3, 0.5, 2.0, 1.5, 1.5) == (
        policy.max_attempts,
        policy.initial_delay,
        policy.max_delay,
        policy.multiplier,
        policy.total_budget,
    )


@pytest.mark.parametrize("document", [{}, config(), config(waitForReady=None)], ids=repr)
def test_no_retry_policy_is_one_attempt(document: dict[str, Any]) -> None:
    """Unless it is told to, gRPC does not retry."""
    assert (Defence(Policy(max_attempts=1)), ()) == from_grpc({**document})


def test_limits_are_those_of_grpc() -> None:
    """What gRPC would make of large and odd numbers is what is imported, and told."""
    retry = RETRY | {"maxAttempts": 9, "maxBackoff": "0.1s", "backoffMultiplier": 0.5}

    made = from_grpc(config(retryPolicy=retry))

    policy = made.defence.policy
    assert (5, 0.1, 0.1, 1.0) == (
        policy.max_attempts,
        policy.initial_delay,
        policy.max_delay,
        policy.multiplier,
    )
    path = "methodConfig[0].retryPolicy"
    assert [f"{path}.maxAttempts", f"{path}.backoffMultiplier", path] == fields(made)


def test_what_is_not_read_is_told() -> None:
    """Settings that are no matter of a policy are named by their path."""
    document = config(
        hedgingPolicy={"maxAttempts": 2, "nonFatalStatusCodes": ["INTERNAL"], "odd": 1},
        waitForReady=True,
        timeout="1s",
    )

    made = from_grpc(document | {"loadBalancingConfig": [{"round_robin": {}}]})

    hedging = "methodConfig[0].hedgingPolicy"
    assert Hedging(after=0.0) == made.defence.hedging
    assert [
        f"{hedging}.nonFatalStatusCodes",
        f"{hedging}.odd",
        "methodConfig[0].timeout",
        "methodConfig[0].waitForReady",
        "loadBalancingConfig",
    ] == fields(made)


ENTRIES = {
    "methodConfig": [
        {"name": [{"service": "a.A"}], "timeout": "1s"},
        {"name": [{"service": "a.A", "method": "M"}, {"service": "b.B"}], "timeout": "2s"},
        {"name": [{}], "timeout": "3s"},
    ]
}


@pytest.mark.parametrize(
    ("service", "method", "seconds"),
    [
        ("a.A", None, 1),
        ("a.A", "M", 2),
        ("a.A", "N", 1),
        ("b.B", "M", 2),
        ("c.C", "M", 3),
        (None, None, 3),
    ],
)
def test_entry_is_the_one_that_a_channel_would_use(
    service: str | None, method: str | None, seconds: float
) -> None:
    """The method counts before the service, and the service before the default."""
    made = from_grpc(ENTRIES, service=service, method=method)

    assert seconds == made.defence.policy.total_budget
    assert (2 if service is None else 0) == len(made.losses)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "^the document must be an object"),
        ({"methodConfig": {}}, "^methodConfig must be a list"),
        ({"methodConfig": [1]}, r"^methodConfig\[0\] must be an object, got 1"),
        (config(retryPolicy=[]), r"^methodConfig\[0\]\.retryPolicy must be an object"),
        (
            config(retryPolicy=RETRY, hedgingPolicy={}),
            r"^methodConfig\[0\] must have a retryPolicy or",
        ),
        (config(timeout="1"), r'^methodConfig\[0\]\.timeout must be a duration such as "0\.1s"'),
        (
            {"retryThrottling": {"maxTokens": 1001, "tokenRatio": 1}},
            r"^retryThrottling\.maxTokens must be at most 1000, got 1001",
        ),
        (
            {"retryThrottling": {"maxTokens": 1}},
            r"^retryThrottling\.tokenRatio must be a number, got None",
        ),
        (
            {"methodConfig": [{"name": [{}]}, {"name": [{}]}]},
            r"^methodConfig\[1\]\.name\[0\] names what methodConfig\[0\] names already",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_refused_by_their_path(document: Any, message: str) -> None:
    """A document that gRPC would not take is refused with the place of the mistake."""
    with pytest.raises(ConfigurationError, match=message):
        from_grpc(document)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"maxAttempts": 1}, "maxAttempts must be at least 2, got 1"),
        ({"maxAttempts": "3"}, "maxAttempts must be a number, got '3'"),
        ({"maxAttempts": True}, "maxAttempts must be a number, got True"),
        ({"maxAttempts": 2.5}, "maxAttempts must be a whole number, got 2.5"),
        ({"initialBackoff": None}, "initialBackoff must be given"),
        ({"initialBackoff": "0s"}, "initialBackoff must be longer than 0 s"),
        ({"maxBackoff": 3}, "maxBackoff must be a duration"),
        ({"backoffMultiplier": 0}, "backoffMultiplier must be greater than 0, got 0"),
        ({"backoffMultiplier": -1}, "backoffMultiplier must be at least 0, got -1"),
        ({"retryableStatusCodes": []}, "retryableStatusCodes must name at least one code"),
        ({"retryableStatusCodes": "OK"}, "retryableStatusCodes must be a list, got 'OK'"),
        (
            {"retryableStatusCodes": ["DOWN"]},
            r"retryableStatusCodes\[0\] must be a gRPC status code",
        ),
        (
            {"retryableStatusCodes": [14, 17]},
            r"retryableStatusCodes\[1\] must be a gRPC status code",
        ),
        ({"retryableStatusCodes": [True]}, r"retryableStatusCodes\[0\] must be a gRPC status code"),
    ],
    ids=repr,
)
def test_mistakes_in_a_retry_policy(changes: dict[str, Any], message: str) -> None:
    """Each field of a retry policy is checked and named with its whole path."""
    with pytest.raises(ConfigurationError, match=rf"^methodConfig\[0\]\.retryPolicy\.{message}"):
        from_grpc(config(retryPolicy=RETRY | changes))


def test_service_that_is_not_there_is_refused() -> None:
    """The message has the names that could have been meant."""
    document = {"methodConfig": ENTRIES["methodConfig"][:2]}

    with pytest.raises(
        ConfigurationError, match=r"has no entry for c\.C: name one of a\.A, a\.A/M"
    ):
        from_grpc(document, service="c.C")
    with pytest.raises(ConfigurationError, match="has no entry for all calls"):
        from_grpc(document)
