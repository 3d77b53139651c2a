"""Functions that check arguments.

A check that fails raises ConfigurationError with the field, the rule and the value.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING, TypeAlias, Union

from tarry.core.text import did_you_mean
from tarry.errors import ConfigurationError, ConfigurationTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import timedelta

# `Union[...]`, not a quoted alias: programs evaluate annotations such as `tarry.Seconds | None` at
# run time.
Seconds: TypeAlias = Union[float, "timedelta"]
"""A duration that a user passes, as a number of seconds or a `timedelta`."""


def to_seconds(value: object) -> object:
    """Return the seconds of a `timedelta`; return any other value unchanged, to be checked."""
    # Not `isinstance`, because `datetime` is slow to import.
    total_seconds: Callable[[], float] | None = getattr(value, "total_seconds", None)
    return value if total_seconds is None else total_seconds()


def check_number(field: str, value: object) -> float:
    """Return a finite number as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationTypeError(field, "must be a number", value)
    try:
        result = float(value)
    except OverflowError:
        result = inf
    if not isfinite(result):
        raise ConfigurationError(field, "must be finite", value)
    return result


def check_positive(field: str, value: object) -> float:
    """Return a finite number greater than 0."""
    result = check_number(field, value)
    if result <= 0:
        raise ConfigurationError(field, "must be greater than 0", value)
    return result


def check_at_least(field: str, value: object, minimum: float) -> float:
    """Return a finite number that is at least `minimum`."""
    result = check_number(field, value)
    if result < minimum:
        raise ConfigurationError(field, f"must be at least {minimum:g}", value)
    return result


def check_ratio(field: str, value: object) -> float:
    """Return a ratio that is greater than 0 and at most 1."""
    result = check_number(field, value)
    if not 0 < result <= 1:
        raise ConfigurationError(field, "must be greater than 0 and at most 1", value)
    return result


def check_count(field: str, value: object, minimum: int = 1) -> int:
    """Return a whole number that is at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationTypeError(field, "must be a whole number", value)
    if value < minimum:
        raise ConfigurationError(field, f"must be at least {minimum}", value)
    return value


def check_flag(field: str, value: object) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise ConfigurationTypeError(field, "must be True or False", value)
    return value


def check_instance(field: str, value: object, expected: type, description: str) -> None:
    """Raise unless `value` is None or an instance of `expected`."""
    if value is not None and not isinstance(value, expected):
        raise ConfigurationTypeError(field, f"must be {description}", value)


def check_one_of(field: str, value: object, choices: Iterable[str]) -> None:
    """Raise ConfigurationError unless the value is one of `choices`."""
    names = sorted(choices)
    if value not in names:
        raise ConfigurationError(field, f"must be one of {', '.join(names)}", value)


def reject_unknown_arguments(
    owner: str,
    unknown: Mapping[str, object],
    known: Iterable[str],
    other_names: Mapping[str, str],
    *,
    hint: str = "",
) -> None:
    """Raise if a public class or function got arguments that it does not have.

    Its parameter `**unknown: Never` collects them, so type checkers report them too. `other_names`
    has names of other libraries, with the names of these arguments in tarry. For any other name,
    `hint` is appended to the error.
    """
    for name in unknown:
        other_name = other_names.get(name)
        advice = f"use {other_name}=" if other_name else did_you_mean(name, known) + hint
        raise ConfigurationTypeError(f"{owner} has no argument {name}=; {advice}")
