"""Policies in the JSON of the service's API: camelCase, milliseconds, choices in capitals.

    {"maxAttempts": 5, "initialDelayMs": 100, "jitterType": "FULL", "totalBudgetMs": 60000}

A JSON document is applied to a base policy, which supplies the missing fields.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, Any, cast

from tarry.core.backoff import Schedule
from tarry.core.checks import check_number, check_one_of, check_positive
from tarry.core.outcome import FAILURE_STATUSES
from tarry.core.policy import POLICY_FIELDS, PRESETS, Policy, PolicyField, uses_max_delay
from tarry.core.text import did_you_mean
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr
from tarry.wire.http import (
    HOP_BY_HOP_HEADERS,
    IDEMPOTENCY_KEY_HEADER,
    SERVICE_HEADER_PREFIXES,
    SERVICE_HEADERS,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_DAY_S = 24 * 3600.0
MIN_DURATION_MS = 0.001
"""The shortest duration of a field for which 0 is not allowed."""
MAX_DURATION_MS = 3_155_760_000_000
"""A hundred years."""
MAX_NUMBER = 2**53
"""The largest whole number that every JSON parser reads exactly."""
MAX_ENTRIES = 1_000
"""Largest number of entries in a list of delays, statuses or codes."""
SCHEDULE = "SCHEDULE"
"""The `backoffType` for a list of delays in `scheduleMs`."""

MAX_ATTEMPTS = 100_000
"""Largest `max_attempts` of a policy in the service, and that of its default policy: far more
attempts than its total budget allows (50 to 75 in 24 hours), so that only the total budget ends a
task."""

SERVICE_PRESETS: dict[str, Policy] = {
    name: preset.replace(
        attempt_timeout=preset.attempt_timeout or 30.0,
        # No caller waits for a task, so a task may wait for a day if the server asks for it.
        max_hint=max(preset.max_hint, _DAY_S),
    )
    for name, preset in PRESETS.items()
}
"""The presets of the service, which every tenant can use."""
# A task must outlast a restart or an outage of its target, because no caller waits for it.
SERVICE_PRESETS["default"] = SERVICE_PRESETS["patient"].replace(max_attempts=MAX_ATTEMPTS)

QSTASH_POLICY, CLOUD_TASKS_POLICY = "qstash", "cloud-tasks"
"""The policies of tasks that are created through the APIs of QStash and Cloud Tasks: the delays and
the numbers of attempts of these vendors, which retry after every response except 2xx."""
_NOT_RETRIED_BY_QSTASH = 489
SERVICE_PRESETS[QSTASH_POLICY] = SERVICE_PRESETS["webhook"].replace(
    max_attempts=4,
    initial_delay=round(exp(2.5), 3),
    # e**(2.5 * n) seconds before retry n, and at most a day
    backoff=Schedule((*(round(exp(2.5 * retry), 3) for retry in range(1, 5)), _DAY_S)),
    jitter="equal",
    retryable_statuses=FAILURE_STATUSES - {_NOT_RETRIED_BY_QSTASH},
)
SERVICE_PRESETS[CLOUD_TASKS_POLICY] = SERVICE_PRESETS["patient"].replace(
    max_attempts=100, initial_delay=0.1, total_budget=None, retryable_statuses=FAILURE_STATUSES
)


_SCHEDULE_HELP = "The delays of backoffType SCHEDULE in order; the last one repeats."
SCHEDULE_FIELD = PolicyField(
    "schedule", "scheduleMs", "seconds", None, _SCHEDULE_HELP, minimum=0, is_minimum_allowed=True
)
"""A field of the JSON only: in `Policy` a `Schedule` is the value of `backoff`."""

JSON_FIELDS: dict[str, PolicyField] = {
    field.json_name: field for field in (*POLICY_FIELDS, SCHEDULE_FIELD) if field.json_name
}
"""The policy fields by their JSON names."""
_VERSION_FIELDS = ("policyId", "version", "createdAt")
"""Fields of a stored policy that are not settings."""


def policy_from_json(document: Mapping[str, Any], base: Policy) -> Policy:
    """Return `base` with the fields of a JSON document applied.

    `maxDelayMs` also limits the initial delay, except an `initialDelayMs` of a backoff that does
    not use `max_delay`. Without `maxDelayMs`, a longer `initialDelayMs` raises `max_delay`. Errors
    use the JSON names. Numbers outside the limits of `check_limits` are replaced by the limit,
    because older versions of the service stored policies without it.
    """
    changes: dict[str, Any] = {}
    for name, value in document.items():
        field = JSON_FIELDS.get(name)
        if field is None:
            suggestion = did_you_mean(name, JSON_FIELDS)
            raise ConfigurationError(f"a policy has no field {short_repr(name)}; {suggestion}")
        changes[field.name] = _from_json_value(field, name, value)
    _move_schedule_to_backoff(changes, base)
    initial_delay = changes.get("initial_delay", base.initial_delay)
    if "max_delay" not in changes:
        changes["max_delay"] = max(base.max_delay, initial_delay)
    elif "initial_delay" not in changes or uses_max_delay(
        changes.get("backoff", base.backoff), changes.get("jitter", base.jitter)
    ):
        changes["initial_delay"] = min(initial_delay, changes["max_delay"])
    return base.replace(**changes)


def check_limits(document: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for a number that the policy of a new request must not have."""
    for name, value in document.items():
        field = JSON_FIELDS[name]
        _check_size(name, value, json_maximum(field))
        is_positive = field.type in {"seconds", "number"} and not field.is_json_minimum_allowed
        if is_positive and isinstance(value, float) and 0 < value < MIN_DURATION_MS:
            raise ConfigurationError(name, f"must be at least {MIN_DURATION_MS}", value)
        if field.type == "statuses" and isinstance(value, (list, tuple)):
            for number, status in enumerate(cast("list[object]", value)):
                if isinstance(status, (int, float)) and 200 <= status < 300:  # noqa: PLR2004 - 2xx
                    rule = "must not be 2xx: the service never repeats a call that has succeeded"
                    raise ConfigurationError(f"{name}[{number}]", rule, status)


def _from_json_value(field: PolicyField, name: str, value: object) -> Any:
    """Check a JSON value and return the value for `Policy`."""
    _check_size(name, value, MAX_DURATION_MS if field.type == "seconds" else MAX_NUMBER)
    if field is SCHEDULE_FIELD:
        delays = _check_list(name, value)
        if not delays:
            raise ConfigurationError(name, "must contain at least one delay, got none")
        return Schedule(field.check(delay, f"{name}[{i}]") / 1000 for i, delay in enumerate(delays))
    if field.type == "choice":
        check_one_of(name, value, json_choices(field))
        return cast("str", value).lower()
    if field.type in {"statuses", "codes"}:
        value = [_to_int(entry) for entry in _check_list(name, value)]
    elif field.type == "count":
        value = _to_int(value)
    if value is None and field.service_rejects_null:
        raise ConfigurationTypeError(name, "must be a number", value)
    if field.service_rejects_zero:
        check_positive(name, value)
    checked = field.check(value, name)
    if field.type == "header":
        _check_header(name, checked)
    if field.type == "count":
        return min(checked, MAX_ATTEMPTS)
    if field.type != "seconds" or checked is None:
        return checked
    return (checked if field.is_json_minimum_allowed else max(checked, MIN_DURATION_MS)) / 1000


def json_maximum(field: PolicyField) -> int:
    """Return the largest number that a field may have in the JSON of a new request."""
    return {"seconds": MAX_DURATION_MS, "count": MAX_ATTEMPTS}.get(field.type, MAX_NUMBER)


def _check_header(name: str, header: str) -> None:
    """Reject a header that HTTP or the service sets itself, except the default."""
    hyphenated = header.lower().replace("_", "-")  # many servers do not distinguish `_` and `-`
    reserved = (HOP_BY_HOP_HEADERS | SERVICE_HEADERS) - {IDEMPOTENCY_KEY_HEADER.lower()}
    if hyphenated in reserved or hyphenated.startswith(SERVICE_HEADER_PREFIXES):
        raise ConfigurationError(name, "must not be a header that the service sets itself", header)


def json_choices(field: PolicyField) -> list[str]:
    """Return the JSON names of the choices: in capitals, and for a backoff also SCHEDULE."""
    choices = [choice.upper() for choice in field.choices]
    return [*choices, SCHEDULE] if field.name == "backoff" else choices


def _to_int(value: object) -> object:
    """Return a whole number in the form of a float, such as 5.0 or 5e3, as an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_list(name: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise ConfigurationTypeError(name, "must be a list", value)
    return cast("list[object]", value)


def _check_size(name: str, value: object, maximum: int) -> None:
    """Reject a list with too many entries, and a number above `maximum`, alone or in a list."""
    if isinstance(value, list):
        entries = cast("list[object]", value)
        if len(entries) > MAX_ENTRIES:
            rule = f"must have at most {MAX_ENTRIES:,} entries"
            raise ConfigurationError(name, rule, len(entries))
        for entry in entries:
            _check_size(name, entry, maximum)
    elif isinstance(value, (int, float)) and abs(value) > maximum:
        raise ConfigurationError(name, f"must be at most {maximum}", value)


def _move_schedule_to_backoff(changes: dict[str, Any], base: Policy) -> None:
    """Replace `schedule` in `changes` by a `backoff`, as `Policy` expects it."""
    schedule = changes.pop("schedule", None)
    backoff = changes.get("backoff", SCHEDULE.lower() if schedule else None)
    if backoff == SCHEDULE.lower():
        changes["backoff"] = schedule or base.backoff
        if not isinstance(changes["backoff"], Schedule):
            rule = "SCHEDULE needs the field scheduleMs: a list of delays"
            raise ConfigurationError("backoffType", rule)
    elif schedule is not None:
        rule = f"requires backoffType SCHEDULE, got {str(backoff).upper()}"
        raise ConfigurationError("scheduleMs", rule)


def to_file_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a policy file with the field names and units of `Policy`.

    A policy file may use the JSON names, with the values of the JSON. A policy that the service
    returned can therefore be used as a file: the fields that identify it are dropped.
    """
    json_fields = {
        name: value
        for name, value in document.items()
        if name in JSON_FIELDS and name != JSON_FIELDS[name].name
    }
    if not json_fields:
        return dict(document)
    dropped = {*json_fields, *_VERSION_FIELDS}
    file_fields = {name: value for name, value in document.items() if name not in dropped}
    policy_fields = policy_from_json(json_fields, Policy()).to_dict()
    for json_name in json_fields:
        name = _file_name(json_name)
        if name in document:
            raise ConfigurationError(json_name, f"is the same field as {name}: leave one out")
        file_fields[name] = policy_fields.get(name)
    return file_fields


def _file_name(json_name: str) -> str:
    field = JSON_FIELDS[json_name]
    return "backoff" if field is SCHEDULE_FIELD else field.name


def service_policy_from_file(file_fields: Mapping[str, Any]) -> Policy:
    """Return a policy for the service from the fields of a policy file.

    Missing fields are taken from the `preset` that the file names, or from the service's `default`.
    """
    fields = dict(file_fields)
    preset = fields.pop("preset", "default")
    check_one_of("preset", preset, SERVICE_PRESETS)
    policy_fields = SERVICE_PRESETS[preset].to_dict() | fields
    if "initial_delay" not in fields:  # as in `policy_from_json`
        policy_fields["initial_delay"] = min(
            policy_fields["initial_delay"], policy_fields["max_delay"]
        )
    return Policy.from_dict(policy_fields)


def policy_to_request_json(policy: Policy) -> dict[str, Any]:
    """Return the JSON fields of a library policy for a request to the service.

    The service's default policy supplies an attempt timeout if the policy has none, and `max_hint`
    if it is the library's default, because that default is for callers that wait.
    """
    policy.to_dict()  # raises when the policy has a callable
    if policy.ignore_retried_below:  # retry although a layer below the call has already retried
        rule = "cannot be sent to the service, which calls the target directly: leave it out"
        raise ConfigurationError("ignore_retried_below", rule)
    fields = policy_to_json(policy)  # with a `totalBudgetMs` of null if there is no total budget
    if policy.attempt_timeout is None:
        del fields["attemptTimeoutMs"]
    if policy.max_hint == PRESETS["default"].max_hint:
        del fields["maxHintMs"]
    return fields


def policy_to_json(policy: Policy) -> dict[str, Any]:
    """Return all fields of a policy as a JSON document."""
    document: dict[str, Any] = {}
    for field in POLICY_FIELDS:
        value = getattr(policy, field.name)
        if field.type == "seconds":
            value = _to_ms(value)
        elif field.type == "choice":
            value = SCHEDULE if isinstance(value, Schedule) else str(value).upper()
        elif field.type in {"statuses", "codes"}:
            value = sorted(value)
        if field.json_name:
            document[field.json_name] = value
    if isinstance(policy.backoff, Schedule):
        document["scheduleMs"] = [_to_ms(delay) for delay in policy.backoff.delays]
    return document


def _to_ms(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    ms = check_number("a duration", seconds) * 1000
    return round(ms) if abs(ms - round(ms)) < 1e-6 else ms  # noqa: PLR2004 - float errors
