"""The rules for arguments: what they let through, in which form, and how they refuse."""

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
    check_number,
    check_one_of,
    check_positive,
    check_ratio,
)
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr

HUGE = 10**400
"""A whole number that no float can hold."""
UNPRINTABLE = 10**5_000
"""A whole number that Python refuses to write in decimal."""

Rule = Callable[[str, Any], object]

NUMBERS: list[Rule] = [
    check_number,
    check_positive,
    check_ratio,
    lambda field, value: check_at_least(field, value, 0),
]
NAMES = ["number", "positive", "share", "at_least"]


@pytest.mark.parametrize("rule", NUMBERS, ids=NAMES)
@pytest.mark.parametrize("value", [1, 1.0, 0.5])
def test_numbers_come_back_as_floats(rule: Rule, value: float) -> None:
    """A number that keeps the rule comes back as the float it is equal to."""
    actual = rule("field", value)
    assert (float, value) == (type(actual), actual)


@pytest.mark.parametrize("rule", NUMBERS, ids=NAMES)
@pytest.mark.parametrize("value", [True, False, "1", b"1", None, 1j, [1], Fraction(1)], ids=repr)
def test_what_is_no_number(rule: Rule, value: object) -> None:
    """A bool, a text and every other type is rejected by name, as a TypeError and a ValueError."""
    with pytest.raises(ConfigurationTypeError) as caught:
        rule("field", value)
    assert f"field must be a number, got {value!r}" == str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("rule", NUMBERS, ids=NAMES)
@pytest.mark.parametrize("value", [nan, inf, -inf, HUGE, -HUGE], ids=str)
def test_what_is_not_finite(rule: Rule, value: float) -> None:
    """NaN, infinity and a whole number beyond every float are rejected."""
    with pytest.raises(ConfigurationError) as caught:
        rule("field", value)
    assert f"field must be finite, got {short_repr(value)}" == str(caught.value)


@pytest.mark.parametrize("value", [UNPRINTABLE, -UNPRINTABLE], ids=["above", "below"])
@pytest.mark.parametrize("rule", [*NUMBERS[:-1], lambda f, v: check_count(f, -abs(v))])
def test_numbers_too_long_to_print(rule: Rule, value: int) -> None:
    """A refusal names its field also where Python will not write the number down."""
    with pytest.raises(ConfigurationError, match=r"^field must be "):
        rule("field", value)


@given(st.floats() | st.integers())
def test_number_takes_what_is_finite(value: float) -> None:
    """Exactly the values that are finite as floats are numbers."""
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
    """Everything above zero is positive, however small."""
    assert value == check_positive("field", value)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, -5e-324, -1], ids=repr)
def test_not_positive(value: float) -> None:
    """Zero and what lies below are not positive."""
    with pytest.raises(ConfigurationError) as caught:
        check_positive("field", value)
    assert f"field must be greater than 0, got {value!r}" == str(caught.value)


@pytest.mark.parametrize(("floor", "value"), [(0, 0), (0, -0.0), (1, 1), (1.5, 1.5), (1, 7)])
def test_at_least(floor: float, value: float) -> None:
    """The floor itself and all above it are let through."""
    assert value == check_at_least("field", value, floor)


@pytest.mark.parametrize(
    ("floor", "value", "shown"), [(0, -1e-9, "0"), (1, 0, "1"), (1.5, 1, "1.5")]
)
def test_not_at_least(floor: float, value: float, shown: str) -> None:
    """What lies below the floor is rejected, and the message names the floor."""
    with pytest.raises(ConfigurationError) as caught:
        check_at_least("field", value, floor)
    assert f"field must be at least {shown}, got {value!r}" == str(caught.value)


@pytest.mark.parametrize("value", [5e-324, 0.5, 1, 1.0])
def test_share(value: float) -> None:
    """A share is above 0 and at most 1."""
    assert value == check_ratio("field", value)


@pytest.mark.parametrize("value", [0, -0.5, 1.0000001, 50])
def test_not_a_share(value: float) -> None:
    """Nothing, less than nothing and more than all are no shares."""
    with pytest.raises(ConfigurationError) as caught:
        check_ratio("field", value)
    assert f"field must be greater than 0 and at most 1, got {value!r}" == str(caught.value)


@pytest.mark.parametrize(("value", "floor"), [(1, 1), (0, 0), (10_000, 1), (HUGE, 1)], ids=str)
def test_count(value: int, floor: int) -> None:
    """A whole number from the floor on is a count; there is no upper bound."""
    assert value == check_count("field", value, floor)


def test_count_begins_at_one() -> None:
    """Without a floor a count is 1 or more."""
    with pytest.raises(ConfigurationError, match=r"^field must be at least 1, got 0$"):
        check_count("field", 0)


@pytest.mark.parametrize(("value", "floor"), [(0, 1), (-1, 0), (-HUGE, 1)], ids=str)
def test_too_small_a_count(value: int, floor: int) -> None:
    """A count below its floor is rejected."""
    with pytest.raises(ConfigurationError) as caught:
        check_count("field", value, floor)
    assert f"field must be at least {floor}, got {short_repr(value)}" == str(caught.value)


@pytest.mark.parametrize("value", [True, 1.0, nan, inf, "1", None, (1,)], ids=str)
def test_what_is_no_count(value: object) -> None:
    """Floats, also whole ones, bools and texts are not counted with."""
    with pytest.raises(ConfigurationTypeError) as caught:
        check_count("field", value)
    assert f"field must be a whole number, got {value!r}" == str(caught.value)


def test_one_of() -> None:
    """A name from the list passes."""
    for name in ("b", "a"):
        check_one_of("field", name, {"a": 1, "b": 2})


@pytest.mark.parametrize("value", ["c", "A", "", None, 1, [], nan], ids=str)
def test_not_one_of(value: object) -> None:
    """Every other value is rejected with the names that are known, in order."""
    with pytest.raises(ConfigurationError) as caught:
        check_one_of("field", value, ["b", "a"])
    assert f"field must be one of a, b, got {value!r}" == str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("x" * 58, f"'{'x' * 58}'"),
        ("x" * 59, f"'{'x' * 59}..."),
        (UNPRINTABLE, "a number of thousands of digits"),
    ],
    ids=["fits", "cut", "unprintable"],
)
def test_value_from_outside_fits_into_a_message(value: object, expected: str) -> None:
    """Sixty characters tell which one was meant."""
    assert expected == short_repr(value)
