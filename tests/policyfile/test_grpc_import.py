"""Tests for the import of a gRPC service config."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.hedging import Hedging
from tarry.core.policy import PRESETS, Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.policyfile.grpc import from_grpc, to_grpc
from tests.policyfile.builders import differing_fields

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
def test_policy_survives_a_round_trip(preset: str) -> None:
    """Export and import keep the fields of a policy that gRPC has."""
    policy = PRESETS[preset]
    budget = {"kind": "throttle", "max_tokens": 12, "token_ratio": 0.25}

    result = from_grpc(to_grpc(Defence(policy, budget=budget)).documents[0])

    changed = {"throttled_delay": policy.initial_delay, "attempt_timeout": policy.total_budget}
    assert policy.replace(jitter="equal", **changed) == result.defence.policy
    assert budget == result.defence.budget
    reported = ["methodConfig[0].retryPolicy"] * 2
    assert reported + ["methodConfig[0].timeout"] * (
        policy.total_budget is not None
    ) == differing_fields(result)


def test_hedging_survives_a_round_trip() -> None:
    """Export and import keep hedging with a fixed delay."""
    hedging = Hedging(after=0.25, max_attempts=3)

    result = from_grpc(to_grpc(Defence(hedging=hedging)).documents[0])

    assert hedging == result.defence.hedging
    assert ["methodConfig[0].hedgingPolicy"] == differing_fields(result)


@pytest.mark.parametrize(
    ("name", "policy"), [("retryPolicy", RETRY), ("hedgingPolicy", {"maxAttempts": 2})]
)
def test_limit_of_a_pushback_is_reported(name: str, policy: dict[str, Any]) -> None:
    """The longest wait of tarry is a difference, because gRPC has no limit."""
    reported = [str(difference) for difference in from_grpc(config(**{name: policy})).differences]

    line = (
        "pushback: gRPC follows a pushback of any length; tarry waits for up to 2 min, or gives up"
    )
    assert f"methodConfig[0].{name} = {line}" in reported


def test_codes_come_as_names_and_numbers() -> None:
    """Codes can be names in any case, or numbers."""
    result = from_grpc(config(retryPolicy=RETRY, timeout="1.5s"))

    policy = result.defence.policy
    assert {"UNAVAILABLE", "ABORTED"} == policy.retryable_codes
    assert (3, 0.5, 2.0, 1.5, 1.5) == (
        policy.max_attempts,
        policy.initial_delay,
        policy.max_delay,
        policy.multiplier,
        policy.total_budget,
    )


@pytest.mark.parametrize(
    "document",
    [config(), config(waitForReady=None), {"methodConfig": []}, {"retryThrottling": None}],
    ids=repr,
)
def test_no_retry_policy_is_one_attempt(document: dict[str, Any]) -> None:
    """A config without a retryPolicy is imported as one attempt, because gRPC does not retry."""
    result = from_grpc(document)

    assert (Defence(Policy(max_attempts=1)), ()) == (result.defence, result.differences)
    assert {"max_attempts": 1} == result.to_dict()


def test_limits_of_grpc_are_applied() -> None:
    """Numbers beyond gRPC's limits are imported as gRPC uses them, and are differences."""
    retry = RETRY | {"maxAttempts": 9, "maxBackoff": "0.1s", "backoffMultiplier": "0.5"}

    result = from_grpc(config(retryPolicy=retry))

    policy = result.defence.policy
    assert (5, 0.1, 0.1, 0.5) == (
        policy.max_attempts,
        policy.initial_delay,
        policy.max_delay,
        policy.multiplier,
    )
    path = "methodConfig[0].retryPolicy"
    assert [f"{path}.maxAttempts", path, path] == differing_fields(result)


def test_unread_keys_are_reported() -> None:
    """Settings that a policy does not have are differences, with their paths."""
    document = config(
        hedgingPolicy={"maxAttempts": 2, "nonFatalStatusCodes": ["INTERNAL"], "odd": 1},
        waitForReady=True,
        timeout="1s",
    )

    result = from_grpc(document | {"loadBalancingConfig": [{"round_robin": {}}]})

    hedging = "methodConfig[0].hedgingPolicy"
    assert Hedging(after=0.0) == result.defence.hedging
    assert [
        f"{hedging}.nonFatalStatusCodes",
        f"{hedging}.odd",
        hedging,
        "methodConfig[0].timeout",
        "methodConfig[0].waitForReady",
        "loadBalancingConfig",
    ] == differing_fields(result)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "^the document must be an object"),
        ({}, "^this is not a gRPC service config: it has nothing, and no methodConfig$"),
        (
            {"apiVersion": "v1", "kind": "VirtualService", "spec": {}},
            r"^this is not a gRPC .* kind, spec, and no methodConfig; for Istio, use --from istio$",
        ),
        ({"methodConfigs": []}, "^methodConfigs is not a known key: .*did you mean 'methodConfig'"),
        (
            {"methodConfig": [{"name": [{"servce": "a.A"}]}]},
            r"^methodConfig\[0\]\.name\[0\]\.servce is not a known key: .*did you mean 'service'",
        ),
        (config(timeOut="1s"), r"^methodConfig\[0\]\.timeOut is not a known key: .*mean 'timeout'"),
        (
            config(hedgingPolicy={"maxAttempts": 2, "hedgeDelay": "1s"}),
            r"^methodConfig\[0\]\.hedgingPolicy\.hedgeDelay is not a known .*mean 'hedgingDelay'",
        ),
        (
            {"retryThrottling": {"maxToken": 1}},
            r"^retryThrottling\.maxToken is not a known key: did you mean 'maxTokens'",
        ),
        (config(timeout="1500ms"), r"^methodConfig\[0\]\.timeout .* '1500ms': write \"1\.5s\""),
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
            r"^methodConfig\[1\]\.name\[0\] has the same name as methodConfig\[0\]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_document_is_rejected(document: Any, message: str) -> None:
    """An invalid document is rejected with the path of the mistake."""
    with pytest.raises(ConfigurationError, match=message):
        from_grpc(document)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"maxAttempts": 1}, "maxAttempts must be at least 2, got 1"),
        ({"maxAtempts": 4}, "maxAtempts is not a known key: did you mean 'maxAttempts'"),
        ({"max_attempts": 4}, "max_attempts is not a known key: did you mean 'maxAttempts'"),
        (
            {"initialBackoff": "50ms"},
            "initialBackoff must be a duration .* '50ms': write \"0.05s\"",
        ),
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
def test_invalid_retry_policy_is_rejected(changes: dict[str, Any], message: str) -> None:
    """Each field of a retry policy is validated; the error has the full path."""
    with pytest.raises(ConfigurationError, match=rf"^methodConfig\[0\]\.retryPolicy\.{message}"):
        from_grpc(config(retryPolicy=RETRY | changes))


def test_policy_file_has_only_fields_of_the_config() -> None:
    """`to_dict` has the imported fields, also with default values, and no other fields."""
    retry = RETRY | {"maxAttempts": 4, "retryableStatusCodes": ["UNAVAILABLE"]}

    result = from_grpc(config(retryPolicy=retry))

    expected = {
        "max_attempts": 4,
        "initial_delay": 0.5,
        "multiplier": 1.5,
        "max_delay": 2.0,
        "jitter": "equal",
        "retryable_codes": ["UNAVAILABLE"],
        "throttled_delay": 0.5,
    }
    assert expected == result.to_dict()
    assert result.defence == Defence.from_dict(result.to_dict())


def test_durations_of_proto3_json() -> None:
    """A duration without digits before the point is read; one of over 10,000 years is an error."""
    retry = RETRY | {"initialBackoff": ".050s"}
    assert 0.05 == from_grpc(config(retryPolicy=retry)).defence.policy.initial_delay
    with pytest.raises(ConfigurationError, match="maxBackoff must be at most 315576000000 s"):
        from_grpc(config(retryPolicy=RETRY | {"maxBackoff": "315576000001s"}))
