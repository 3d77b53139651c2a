from __future__ import annotations

from random import Random
from typing import Any, cast

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
    """The default lasts 24 hours. All presets have an attempt timeout and hints of up to a day."""
    vendor_policies = {"qstash", "cloud-tasks"}
    assert PRESETS.keys() | vendor_policies == SERVICE_PRESETS.keys()
    for name, preset in SERVICE_PRESETS.items():
        assert (30.0, 86_400.0) == (preset.attempt_timeout, preset.max_hint)
        if name not in {"default", *vendor_policies}:
            service_fields = {"attempt_timeout": 30.0, "max_hint": 86_400.0}
            assert PRESETS[name].replace(**service_fields) == preset
    assert (1.0, 2.0, 3600.0, 86_400.0, "full") == (
        SERVICE_DEFAULT.initial_delay,
        SERVICE_DEFAULT.multiplier,
        SERVICE_DEFAULT.max_delay,
        SERVICE_DEFAULT.total_budget,
        SERVICE_DEFAULT.jitter,
    )


@pytest.mark.parametrize("seed", range(20))
def test_only_the_total_budget_ends_the_default(seed: int) -> None:
    """The delays of a task that always fails add up to 24 hours long before `max_attempts`."""
    random, waited_s, retries = Random(seed), 0.0, 0
    while waited_s < SERVICE_DEFAULT.total_budget:  # type: ignore[operator]  # it is not None
        retries += 1
        waited_s += SERVICE_DEFAULT.delay(SERVICE_DEFAULT.ceiling(retries), None, random.random())
    assert 40 < retries < 100 < SERVICE_DEFAULT.max_attempts


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
    quick = SERVICE_PRESETS["quick"]
    assert 60.0 == policy_from_json({"initialDelayMs": 60_000}, quick).max_delay


@pytest.mark.parametrize("document", [{}, {"initialDelayMs": 800}])
def test_max_delay_limits_the_initial_delay(document: dict[str, Any]) -> None:
    """A `maxDelayMs` shorter than the initial delay is the delay of all retries."""
    policy = policy_from_json({**document, "maxDelayMs": 500}, SERVICE_DEFAULT)
    assert (0.5, 0.5) == (policy.initial_delay, policy.max_delay)


def test_max_delay_does_not_limit_a_fixed_backoff() -> None:
    """A fixed delay that is longer than `max_delay` is the same in the service."""
    fixed = Policy(backoff="fixed", initial_delay=60)
    received = policy_from_json(policy_to_request_json(fixed), SERVICE_DEFAULT)
    assert (60, 30) == (received.initial_delay, received.max_delay)
    shortened = policy_from_json({"backoffType": "FIXED", "maxDelayMs": 500}, SERVICE_DEFAULT)
    assert 0.5 == shortened.initial_delay


def test_max_delay_in_a_file_limits_the_initial_delay_of_the_service() -> None:
    """A file that is valid for the library is valid for the service."""
    policy = service_policy_from_file({"max_delay": 0.5})
    assert (0.5, 0.5) == (policy.initial_delay, policy.max_delay)


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
        ({"initialDelayMs": 0}, ["initialDelayMs must be greater than 0", "0"]),
        ({"initialDelayMs": "5"}, ["initialDelayMs must be a number"]),
        ({"multiplier": 0}, ["multiplier must be greater than 0"]),
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
        (
            {"retryableStatusCodes": ["503"]},
            ["retryableStatusCodes[0] must be a whole number"],
        ),
        ({"retryableStatusCodes": ["2xx"]}, ["retryableStatusCodes[0]", "got '2xx'"]),
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
def test_file_and_json_give_the_same_policy(fields: dict[str, Any]) -> None:
    """A file and JSON give the same policy with the service's defaults."""
    json_names = {"max_attempts": "maxAttempts", "jitter": "jitterType"}
    document = {
        json_names[name]: value.upper() if name == "jitter" else value
        for name, value in fields.items()
    }

    from_json = policy_from_json(document, SERVICE_DEFAULT)

    assert from_json == service_policy_from_file(fields)
    assert (SERVICE_DEFAULT.initial_delay, 86_400.0) == (
        from_json.initial_delay,
        from_json.max_hint,
    )


def test_policies_of_vendors() -> None:
    """They have the documented delays of QStash and Cloud Tasks, and retry all except 2xx."""
    qstash, cloud_tasks = SERVICE_PRESETS["qstash"], SERVICE_PRESETS["cloud-tasks"]
    seconds = [round(cast("Schedule", qstash.backoff)(retry)) for retry in range(1, 7)]

    assert [12, 148, 1808, 22_026, 86_400, 86_400] == seconds
    assert (4, 100) == (qstash.max_attempts, cloud_tasks.max_attempts)
    assert (0.1, 2.0, 3600.0) == (
        cloud_tasks.initial_delay,
        cloud_tasks.multiplier,
        cloud_tasks.max_delay,
    )
    for policy in (qstash, cloud_tasks):
        assert policy.total_budget is None
        assert {301, 404, 500, 599} < policy.retryable_statuses
        assert min(policy.retryable_statuses) >= 300
    assert 489 not in qstash.retryable_statuses


@pytest.mark.parametrize("name", PRESETS)
def test_library_policy_keeps_its_values_in_the_service(name: str) -> None:
    """The service adds only an attempt timeout and the longest hint, but no total budget."""
    library_policy = PRESETS[name]
    stored = policy_from_json(policy_to_request_json(library_policy), SERVICE_DEFAULT)

    max_hint = max(library_policy.max_hint, 86_400.0) if name != "patient" else 6 * 3600.0
    assert library_policy.replace(attempt_timeout=30.0, max_hint=max_hint) == stored


def test_library_defaults_in_a_file_override_those_of_the_service() -> None:
    """Fields of a file are kept even when they have the library's default value."""
    policy = service_policy_from_file({"max_attempts": 4, "max_hint": 120.0})

    assert (4, 120.0) == (policy.max_attempts, policy.max_hint)
    assert 60_000 == policy_to_request_json(Policy(max_hint=60.0))["maxHintMs"]


@pytest.mark.parametrize("name", SERVICE_PRESETS)
def test_preset_in_a_file(name: str) -> None:
    assert SERVICE_PRESETS[name] == service_policy_from_file({"preset": name})


def test_settings_that_the_service_does_not_support() -> None:
    with pytest.raises(
        ConfigurationError, match="ignore_retried_below cannot be sent to the service"
    ):
        policy_to_request_json(Policy(ignore_retried_below=True))
    with pytest.raises(ConfigurationError, match="backoff is a callable"):
        policy_to_request_json(Policy(backoff=float))
