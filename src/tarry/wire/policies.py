"""A policy as the service's API writes it: camelCase, milliseconds, names in capitals.

    {"maxAttempts": 5, "initialDelayMs": 100, "jitterType": "FULL", "totalBudgetMs": 60000}

A field left out has the value of the policy that it is laid over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tarry.core.backoff import BACKOFFS, Schedule
from tarry.core.checks import at_least, count, number, one_of, positive
from tarry.core.jitter import JITTERS
from tarry.core.outcome import GRPC_CODES
from tarry.core.policy import PRESETS, Policy
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DAY = 24 * 3600.0
SCHEDULE = "SCHEDULE"
"""The backoff that is a list, in `scheduleMs`."""

SERVICE_PRESETS: dict[str, Policy] = {
    name: preset.replace(
        attempt_timeout=preset.attempt_timeout or 30.0,
        # Nobody waits for a durable call: what a server asks for is what it gets.
        max_hint=max(preset.max_hint, _DAY),
        **({"max_attempts": 5} if name == "default" else {}),
    )
    for name, preset in PRESETS.items()
}
"""The policies that every tenant has from the start."""


def _names(field: str, known: Mapping[str, object], *more: str) -> Callable[[object], str]:
    def checked(value: object) -> str:
        one_of(field, value, [*map(str.upper, known), *more])
        return cast("str", value).lower()

    return checked


def _ms(field: str, check: Callable[[str, object], float]) -> Callable[[object], float]:
    return lambda value: check(field, value) / 1000


def _ms_or_null(field: str) -> Callable[[object], float | None]:
    return lambda value: None if value is None else positive(field, value) / 1000


def _not_negative(field: str, value: object) -> float:
    return at_least(field, value, 0)


def _list(field: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise ConfigurationTypeError(field, "must be a list", value)
    return cast("list[object]", value)


def _statuses(value: object) -> frozenset[int]:
    field = "retryableStatusCodes"
    statuses = frozenset(
        count(f"{field}[{i}]", one, 100) for i, one in enumerate(_list(field, value))
    )
    if any(status > 599 for status in statuses):  # noqa: PLR2004 - the last class of statuses
        raise ConfigurationError(field, f"must hold statuses from 100 to 599, got {max(statuses)}")
    return statuses


def _codes(value: object) -> frozenset[str]:
    field = "retryableGrpcCodes"
    codes = _list(field, value)
    for i, code in enumerate(codes):
        one_of(f"{field}[{i}]", code, GRPC_CODES)
    return frozenset(cast("list[str]", codes))


def _schedule(value: object) -> Schedule:
    delays = _list("scheduleMs", value)
    if not delays:
        raise ConfigurationError("scheduleMs", "must hold at least one delay, got none")
    return Schedule(
        _not_negative(f"scheduleMs[{i}]", delay) / 1000 for i, delay in enumerate(delays)
    )


FIELDS: dict[str, tuple[str, Callable[[object], Any]]] = {
    "maxAttempts": ("max_attempts", lambda value: count("maxAttempts", value)),
    "initialDelayMs": ("initial_delay", _ms("initialDelayMs", positive)),
    "multiplier": ("multiplier", lambda value: at_least("multiplier", value, 1)),
    "maxDelayMs": ("max_delay", _ms("maxDelayMs", positive)),
    "totalBudgetMs": ("total_budget", _ms_or_null("totalBudgetMs")),
    "attemptTimeoutMs": ("attempt_timeout", _ms("attemptTimeoutMs", positive)),
    "backoffType": ("backoff", _names("backoffType", BACKOFFS, SCHEDULE)),
    "scheduleMs": ("schedule", _schedule),
    "jitterType": ("jitter", _names("jitterType", JITTERS)),
    "retryableStatusCodes": ("retryable_statuses", _statuses),
    "retryableGrpcCodes": ("retryable_codes", _codes),
    "throttledDelayMs": ("throttled_delay", _ms("throttledDelayMs", positive)),
    "maxHintMs": ("max_hint", _ms("maxHintMs", _not_negative)),
}
"""The fields, each with the policy's name for it and the way to read it."""


def policy_from_wire(document: Mapping[str, Any], base: Policy) -> Policy:
    """Lay fields over a policy, or say which one is wrong."""
    changes: dict[str, Any] = {}
    for field, value in document.items():
        if field not in FIELDS:
            msg = f"a policy has no field {short_repr(field)}; it has {', '.join(FIELDS)}"
            raise ConfigurationError(msg)
        name, read = FIELDS[field]
        changes[name] = read(value)
    _merge_schedule(changes, base)
    initial = changes.get("initial_delay", base.initial_delay)
    longest = changes.get("max_delay", base.max_delay)
    if longest < initial:
        if "max_delay" in changes:
            rule = f"must be at least initialDelayMs ({initial * 1000:g}), got {longest * 1000:g}"
            raise ConfigurationError("maxDelayMs", rule)
        changes["max_delay"] = initial
    return base.replace(**changes)


def _merge_schedule(changes: dict[str, Any], base: Policy) -> None:
    schedule = changes.pop("schedule", None)
    backoff = changes.get("backoff")
    if backoff == SCHEDULE.lower():
        if schedule is None:
            if not isinstance(base.backoff, Schedule):
                rule = "SCHEDULE needs the field scheduleMs: a list of delays"
                raise ConfigurationError("backoffType", rule)
            schedule = base.backoff
        changes["backoff"] = schedule
    elif schedule is not None:
        if backoff is not None:
            rule = f"goes with backoffType SCHEDULE, got {backoff.upper()}"
            raise ConfigurationError("scheduleMs", rule)
        changes["backoff"] = schedule


def policy_from_file(plain: Mapping[str, Any]) -> Policy:
    """Build a policy of the service from the fields of a policy file, with the library's names.

    What it leaves out is as in the service's `default`, or in the `preset` that it names.
    """
    fields = dict(plain)
    preset = fields.pop("preset", "default")
    one_of("preset", preset, SERVICE_PRESETS)
    return Policy.from_dict(SERVICE_PRESETS[preset].to_dict() | fields)


def policy_sent(policy: Policy) -> dict[str, Any]:
    """Return the fields of a policy of the library that a service is sent.

    What it leaves open, the service's default policy says: a limit that is None, and a `max_hint`
    that is the library's default, which is meant for a caller who waits.
    """
    policy.to_dict()  # refuses what cannot be written, which is a callable
    if policy.retry_marked:
        rule = "has no form in the service, where no mark arrives: leave it out"
        raise ConfigurationError("retry_marked", rule)
    fields = {name: value for name, value in policy_to_wire(policy).items() if value is not None}
    if policy.max_hint == PRESETS["default"].max_hint:
        del fields["maxHintMs"]
    return fields


def policy_to_wire(policy: Policy) -> dict[str, Any]:
    """Return all fields of a policy."""
    scheduled = isinstance(policy.backoff, Schedule)
    document: dict[str, Any] = {
        "maxAttempts": policy.max_attempts,
        "initialDelayMs": _in_ms(policy.initial_delay),
        "multiplier": policy.multiplier,
        "maxDelayMs": _in_ms(policy.max_delay),
        "totalBudgetMs": _in_ms(policy.total_budget),
        "attemptTimeoutMs": _in_ms(policy.attempt_timeout),
        "backoffType": SCHEDULE if scheduled else str(policy.backoff).upper(),
        "jitterType": str(policy.jitter).upper(),
        "retryableStatusCodes": sorted(policy.retryable_statuses),
        "retryableGrpcCodes": sorted(policy.retryable_codes),
        "throttledDelayMs": _in_ms(policy.throttled_delay),
        "maxHintMs": _in_ms(policy.max_hint),
    }
    if isinstance(policy.backoff, Schedule):
        document["scheduleMs"] = [_in_ms(delay) for delay in policy.backoff.delays]
    return document


def _in_ms(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    ms = number("a time", seconds) * 1000
    return round(ms) if abs(ms - round(ms)) < 1e-6 else ms  # noqa: PLR2004 - 0.1 s is 100 ms
