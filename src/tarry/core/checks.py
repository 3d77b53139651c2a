"""Checks for arguments and optional packages, and the base class of immutable values.

A check that fails raises ConfigurationError with the field, the rule and the value.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Union

from tarry.core.text import did_you_mean
from tarry.errors import ConfigurationError, ConfigurationTypeError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping
    from datetime import timedelta

# Not a string: `tarry.Seconds | None` must work in annotations that a program evaluates.
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


@contextmanager
def require_extra(need: str, extra: str) -> Generator[None]:
    """Raise MissingExtra if an import in the `with` block fails.

    The message consists of `need`, such as "RedisStore needs redis", and the pip command for the
    `extra` of tarry.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtra(f"{need}: pip install 'tarry[{extra}]'") from error


class ImmutableValue:
    """Base class of immutable values, which are compared, hashed and printed by their fields.

    A subclass lists its fields in `_fields` and stores them in `__init__`. This class is used
    instead of `dataclasses`, whose import would add 10 ms to `import tarry`.
    """

    __slots__ = ()

    _fields: ClassVar[tuple[str, ...]]
    """The names of the arguments of `__init__`; each is stored in the attribute of that name."""

    def _set(self, **values: object) -> None:
        """Store attributes by name, such as values that are computed from the fields."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _set_fields(self, *values: object) -> None:
        """Store the values of all fields, in the order of `_fields`."""
        set_attribute = object.__setattr__  # a local name is faster, and this runs for each failure
        for name, value in zip(self._fields, values, strict=True):
            set_attribute(self, name, value)

    def _asdict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed; create a new one")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._asdict() == other._asdict()

    def __hash__(self) -> int:
        return hash((type(self), *self._asdict().values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
        return f"{type(self).__name__}({fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._asdict()), ()
