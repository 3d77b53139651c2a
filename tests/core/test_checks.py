"""Tests for the argument checks: accepted values, returned types and error messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from math import inf, isfinite, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.checks import (
    check_at_least,
    check_count,
    check_instance,
    check_number,
    check_one_of,
    check_positive,
    check_ratio,
    reject_unknown_arguments,
)
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr

HUGE = 10**400
"""An int that is too large for a float."""
TOO_LONG_TO_PRINT = 10**5_000
"""An int with more digits than `str` converts by default (4,300)."""

Check = Callable[[str, Any], object]

NUMBER_CHECKS: list[Check] = [
    check_number,
    check_positive,
    check_ratio,
    lambda field, value: check_at_least(field, value, 0),
]
CHECK_NAMES = ["number", "positive", "ratio", "at_least"]


@pytest.mark.parametrize("check", NUMBER_CHECKS, ids=CHECK_NAMES)
@pytest.mark.parametrize("value", [1, 1.0, 0.5])
def test_numbers_are_returned_as_floats(check: Check, value: float) -> None:
    """A valid number is returned as an equal float."""
    actual = check("field", value)
    assert (float, value) == (type(actual), actual)


@pytest.mark.parametrize("check", NUMBER_CHECKS, ids=CHECK_NAMES)
@pytest.mark.parametrize("value", [True, False, "1", b"1", None, 1j, [1], Fraction(1)], ids=repr)
def test_values_that_are_not_numbers(check: Check, value: object) -> None:
    """A bool, a string or any other type raises an error that is a TypeError and a ValueError."""
    with pytest.raises(ConfigurationTypeError) as caught:
        check("field", value)
    assert f"field must be a number, got {value!r}" == str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("check", NUMBER_CHECKS, ids=CHECK_NAMES)
@pytest.mark.parametrize("value", [nan, inf, -inf, HUGE, -HUGE], ids=str)
def test_numbers_that_are_not_finite(check: Check, value: float) -> None:
    """NaN, infinity and an int that is too large for a float are rejected."""
    with pytest.raises(ConfigurationError) as caught:
        check("field", value)
    assert f"field must be finite, got {short_repr(value)}" == str(caught.value)


@pytest.mark.parametrize("value", [TOO_LONG_TO_PRINT, -TOO_LONG_TO_PRINT], ids=["above", "below"])
@pytest.mark.parametrize(
    "check", [*NUMBER_CHECKS[:-1], lambda field, value: check_count(field, -abs(value))]
)
def test_numbers_too_long_to_print(check: Check, value: int) -> None:
    """The message names the field even if Python does not convert the number to a string."""
    with pytest.raises(ConfigurationError, match=r"^field must be "):
        check("field", value)


@given(st.floats() | st.integers())
def test_check_number_accepts_finite_numbers(value: float) -> None:
    """check_number() accepts exactly the values that are finite as floats."""
    try:
        finite = isfinite(float(value))
    except OverflowError:
        finite = False
    if finite:
        assert float(value) == check_number("field", value)
    else:
        with pytest.raises(ConfigurationError, match=r"^field must be finite"):
            check_number("field", value)


@pytest.mark.parametrize("value", [sys.float_info.min, 5e-324, 1e-9, 1, sys.float_info.max])
def test_positive(value: float) -> None:
    """check_positive() accepts every number above 0."""
    assert value == check_positive("field", value)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, -5e-324, -1], ids=repr)
def test_not_positive(value: float) -> None:
    """check_positive() rejects 0 and negative numbers."""
    with pytest.raises(ConfigurationError) as caught:
        check_positive("field", value)
    assert f"field must be greater than 0, got {value!r}" == str(caught.value)


@pytest.mark.parametrize(("minimum", "value"), [(0, 0), (0, -0.0), (1, 1), (1.5, 1.5), (1, 7)])
def test_at_least(minimum: float, value: float) -> None:
    """check_at_least() accepts the minimum and larger numbers."""
    assert value == check_at_least("field", value, minimum)


@pytest.mark.parametrize(
    ("minimum", "value", "formatted"), [(0, -1e-9, "0"), (1, 0, "1"), (1.5, 1, "1.5")]
)
def test_not_at_least(minimum: float, value: float, formatted: str) -> None:
    """A number below the minimum is rejected, and the message names the minimum."""
    with pytest.raises(ConfigurationError) as caught:
        check_at_least("field", value, minimum)
    assert f"field must be at least {formatted}, got {value!r}" == str(caught.value)


@pytest.mark.parametrize("value", [5e-324, 0.5, 1, 1.0])
def test_ratio(value: float) -> None:
    """check_ratio() accepts numbers above 0 and at most 1."""
    assert value == check_ratio("field", value)


@pytest.mark.parametrize(("value", "minimum"), [(1, 1), (0, 0), (10_000, 1), (HUGE, 1)], ids=str)
def test_count(value: int, minimum: int) -> None:
    """check_count() accepts every int from the minimum on, without an upper bound."""
    assert value == check_count("field", value, minimum)


def test_count_starts_at_one() -> None:
    """The default minimum of check_count() is 1."""
    with pytest.raises(ConfigurationError, match=r"^field must be at least 1, got 0$"):
        check_count("field", 0)


@pytest.mark.parametrize(("value", "minimum"), [(0, 1), (-1, 0), (-HUGE, 1)], ids=str)
def test_too_small_a_count(value: int, minimum: int) -> None:
    """An int below the minimum is rejected."""
    with pytest.raises(ConfigurationError) as caught:
        check_count("field", value, minimum)
    assert f"field must be at least {minimum}, got {short_repr(value)}" == str(caught.value)


@pytest.mark.parametrize("value", [True, 1.0, nan, inf, "1", None, (1,)], ids=str)
def test_values_that_are_not_counts(value: object) -> None:
    """check_count() rejects bools, strings and floats, even a float without a fraction."""
    with pytest.raises(ConfigurationTypeError) as caught:
        check_count("field", value)
    assert f"field must be a whole number, got {value!r}" == str(caught.value)


@pytest.mark.parametrize("value", ["c", "A", "", None, 1, [], nan], ids=str)
def test_not_one_of(value: object) -> None:
    """Any other value is rejected, and the message lists the choices in alphabetical order."""
    with pytest.raises(ConfigurationError) as caught:
        check_one_of("field", value, ["b", "a"])
    assert f"field must be one of a, b, got {value!r}" == str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("x" * 58, f"'{'x' * 58}'"),
        ("x" * 59, f"'{'x' * 59}..."),
        (TOO_LONG_TO_PRINT, "a number of thousands of digits"),
        ("postgresql//u:s3cret@h/db", "'[redacted]@h/db'"),
        (["//s3cret@h"], "[[redacted]@h']"),
        ("http://[redacted]@h", "'http://[redacted]@h'"),
        ("a@b.example", "'a@b.example'"),
    ],
    ids=["short", "cut", "too-long-to-print", "url", "list", "redacted", "mail"],
)
def test_short_repr(value: object, expected: str) -> None:
    """short_repr() cuts a repr, redacts a password, and describes a number it cannot print."""
    assert expected == short_repr(value)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("tries", "use max_attempts="),
        ("delays", "did you mean 'delay'?; see the docs"),
    ],
)
def test_reject_unknown_arguments(name: str, advice: str) -> None:
    """The error has the name that tarry uses, or else the most similar name and a hint."""
    known, other_names = ("delay", "max_attempts"), {"tries": "max_attempts"}
    with pytest.raises(ConfigurationTypeError) as caught:
        reject_unknown_arguments("f()", {name: 1}, known, other_names, hint="; see the docs")
    assert f"f() has no argument {name}=; {advice}" == str(caught.value)


def test_check_instance() -> None:
    """None and an instance are accepted; the error for another value describes the type."""
    check_instance("name", None, str, "a string")
    check_instance("name", "a", str, "a string")

    with pytest.raises(ConfigurationTypeError, match=r"^name must be a string, got 1$"):
        check_instance("name", 1, str, "a string")
