"""Invalid values for arguments, and the text that the error must contain."""

from __future__ import annotations

from math import inf, nan
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.mark import ParameterSet

_NOT_A_NUMBER: list[tuple[object, str]] = [
    (True, "must be a number"),
    ("1", "must be a number"),
    (nan, "must be finite"),
    (inf, "must be finite"),
    (-inf, "must be finite"),
    (10**400, "must be finite"),
]
_NOT_A_COUNT: list[tuple[object, str]] = [
    (True, "must be a whole number"),
    ("3", "must be a whole number"),
    (3.0, "must be a whole number"),
    (nan, "must be a whole number"),
    (inf, "must be a whole number"),
    (-1, "must be at least"),
]
_RULES: dict[str, list[tuple[object, str]]] = {
    "positive": [*_NOT_A_NUMBER, (0, "must be greater than 0"), (-1, "must be greater than 0")],
    "ratio": [*_NOT_A_NUMBER, (0, "greater than 0"), (-0.5, "greater than 0"), (1.5, "at most 1")],
    "at least 0": [*_NOT_A_NUMBER, (-0.1, "must be at least 0")],
    "at least 1": [*_NOT_A_NUMBER, (0, "must be at least 1"), (0.9, "must be at least 1")],
    "count": [*_NOT_A_COUNT, (0, "must be at least 1")],
    "count from 2": [*_NOT_A_COUNT, (1, "must be at least 2")],
}


def invalid_values(**rules: str) -> list[ParameterSet]:
    """Return cases `(field, value, pattern)` of invalid values for each field and its rule.

    The pattern starts with the field name, so that a message without that name does not match.
    """
    return list(_cases(rules))


def _cases(rules: dict[str, str]) -> Iterator[ParameterSet]:
    for field, rule in rules.items():
        for value, message in _RULES[rule]:
            yield pytest.param(field, value, f"^{field} .*{message}", id=f"{field}={value!r:.9}")


def keyword(field: str, value: object) -> dict[str, Any]:
    """Return one keyword argument, typed as Any, for a call that must raise."""
    return {field: value}
