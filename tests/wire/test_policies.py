from __future__ import annotations

from typing import Any

import pytest

from tarry.core.backoff import Schedule
from tarry.core.policy import PRESETS, Policy
from tarry.errors import ConfigurationError
from tarry.wire.policies import (
    JSON_FIELDS,
    SERVICE_PRESETS,
    policy_from_json,
    policy_to_json,
    policy_to_request_json,
    service_policy_from_file,
)

SERVICE_DEFAULT = SERVICE_PRESETS["default"]


def test_fields_are_applied_to_a_policy() -> None:
    """Milliseconds become seconds, names become lower case, and missing fields do not change."""
    policy = policy_from_json(
        {"maxAttempts": 7, "initialDelayMs": 250, "jitterType": "EQUAL", "totalBudgetMs": 60_000},
        SERVICE_DEFAULT,
    )

    assert (7, 0.25, "equal", 60.0) == (
        policy.max_attempts,
        policy.initial_delay,
        policy.jitter,
        policy.total_budget,
    )
    assert SERVICE_DEFAULT.max_delay == policy.max_delay


@pytest.mark.parametrize("name", SERVICE_PRESETS)
def test_preset_round_trip(name: str) -> None:
    """A preset that is converted to JSON and back is the same policy."""
    preset = SERVICE_PRESETS[name]
    document = policy_to_json(preset)

    assert preset == policy_from_json(document, SERVICE_DEFAULT)
    assert set(document) <= set(JSON_FIELDS)


def test_presets_of_the_service() -> None:
    """The service's default has five attempts, an attempt timeout and hints of up to a day."""
    assert (5, 30.0, 86_400.0) == (
        SERVICE_DEFAULT.max_attempts,
        SERVICE_DEFAULT.attempt_timeout,
        SERVICE_DEFAULT.max_hint,
    )
    assert PRESETS["webhook"].max_attempts == SERVICE_PRESETS["webhook"].max_attempts


def test_schedule_is_a_list_of_milliseconds() -> None:
    """A schedule can be set with or without backoffType, and changes only with backoffType."""
    schedule_ms = [5000, 300_000]
    policy = policy_from_json({"scheduleMs": schedule_ms}, SERVICE_DEFAULT)
    with_type = policy_from_json(
        {"backoffType": "SCHEDULE", "scheduleMs": schedule_ms}, SERVICE_DEFAULT
    )

    assert Schedule((5.0, 300.0)) == policy.backoff == with_type.backoff
    assert policy.backoff == policy_from_json({"backoffType": "SCHEDULE"}, policy).backoff
    assert "fixed" == policy_from_json({"backoffType": "FIXED"}, policy).backoff


def test_total_budget_can_be_removed() -> None:
    """A totalBudgetMs of null removes the limit."""
    limited = policy_from_json({"totalBudgetMs": 1}, SERVICE_DEFAULT)

    assert policy_from_json({"totalBudgetMs": None}, limited).total_budget is None


def test_longer_initial_delay_raises_max_delay() -> None:
    """An initial delay longer than max_delay raises max_delay unless the document sets it."""
    assert 60.0 == policy_from_json({"initialDelayMs": 60_000}, SERVICE_DEFAULT).max_delay


def test_fractions_of_a_millisecond_are_kept() -> None:
    """A delay of half a millisecond is 0.5 in JSON, and a whole number of them is an int."""
    document = policy_to_json(Policy(initial_delay=0.0005))

    assert (0.5, 30_000) == (document["initialDelayMs"], document["maxDelayMs"])


@pytest.mark.parametrize(
    ("document", "parts"),
    [
        ({"maxAttempts": 0}, ["maxAttempts must be at least 1", "0"]),
        ({"maxAttempts": 1.5}, ["maxAttempts must be a whole number"]),
        ({"initialDelayMs": -5}, ["initialDelayMs must be greater than 0", "-5"]),
        ({"initialDelayMs": "5"}, ["initialDelayMs must be a number"]),
        ({"maxDelayMs": 10}, ["maxDelayMs must be at least initialDelayMs (100), got 10"]),
        ({"multiplier": 0.5}, ["multiplier must be at least 1"]),
        ({"totalBudgetMs": 0}, ["totalBudgetMs must be greater than 0"]),
        ({"attemptTimeoutMs": None}, ["attemptTimeoutMs must be a number"]),
        ({"backoffType": "exponential"}, ["backoffType must be one of", "EXPONENTIAL"]),
        ({"backoffType": 3}, ["backoffType must be one of"]),
        ({"backoffType": "SCHEDULE"}, ["needs the field scheduleMs"]),
        ({"scheduleMs": []}, ["scheduleMs must contain at least one delay"]),
        ({"scheduleMs": [1, -1]}, ["scheduleMs[1] must be at least 0"]),
        ({"scheduleMs": 5}, ["scheduleMs must be a list"]),
        ({"scheduleMs": [5], "backoffType": "FIXED"}, ["requires backoffType SCHEDULE", "FIXED"]),
        ({"jitterType": "SOME"}, ["jitterType must be one of", "DECORRELATED"]),
        ({"retryableStatusCodes": 503}, ["retryableStatusCodes must be a list"]),
        ({"retryableStatusCodes": ["503"]}, ["retryableStatusCodes[0] must be a whole number"]),
        ({"retryableStatusCodes": [700]}, ["from 100 to 599", "700"]),
        ({"retryableGrpcCodes": ["AWAY"]}, ["retryableGrpcCodes[0] must be one of"]),
        ({"maxHintMs": -1}, ["maxHintMs must be at least 0"]),
        ({"attempts": 3}, ["no field 'attempts'", "maxAttempts"]),
    ],
)
def test_errors_have_json_names_and_units(document: dict[str, Any], parts: list[str]) -> None:
    """An error names the field and the value as they are in the JSON document."""
    with pytest.raises(ConfigurationError) as caught:
        policy_from_json(document, SERVICE_DEFAULT)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize("fields", [{"max_attempts": 3}, {"max_attempts": 3, "jitter": "equal"}])
def test_file_library_and_json_give_the_same_policy(fields: dict[str, Any]) -> None:
    """A file, a library policy and JSON give the same policy with the service's defaults."""
    json_names = {"max_attempts": "maxAttempts", "jitter": "jitterType"}
    document = {
        json_names[name]: value.upper() if name == "jitter" else value
        for name, value in fields.items()
    }

    from_json = policy_from_json(document, SERVICE_DEFAULT)

    assert (
        from_json
        == service_policy_from_file(fields)
        == policy_from_json(policy_to_request_json(Policy(**fields)), SERVICE_DEFAULT)
    )
    assert 86_400.0 == from_json.max_hint


def test_library_defaults_in_a_file_override_those_of_the_service() -> None:
    """Fields of a file are kept even when they have the library's default value."""
    policy = service_policy_from_file({"max_attempts": 4, "max_hint": 120.0})

    assert (4, 120.0) == (policy.max_attempts, policy.max_hint)
    assert 60_000 == policy_to_request_json(Policy(max_hint=60.0))["maxHintMs"]


@pytest.mark.parametrize("name", SERVICE_PRESETS)
def test_preset_in_a_file(name: str) -> None:
    """A preset in a file is the preset of the service."""
    assert SERVICE_PRESETS[name] == service_policy_from_file({"preset": name})


def test_settings_that_the_service_does_not_support() -> None:
    """Settings that the service does not support raise an error."""
    with pytest.raises(
        ConfigurationError, match="ignore_retried_below cannot be sent to the service"
    ):
        policy_to_request_json(Policy(ignore_retried_below=True))
    with pytest.raises(ConfigurationError, match="backoff is a callable"):
        policy_to_request_json(Policy(backoff=float))
