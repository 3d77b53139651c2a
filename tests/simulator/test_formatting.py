from __future__ import annotations

from math import inf, nan

import pytest

from tarry.simulator.formatting import format_value, scale_value


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.0, "", "0"),
        (12345.0, "", "12,345"),
        (1234.5, "", "1,234"),
        (3.14159, "", "3.14"),
        (9.996, "", "10"),
        (0.5, "", "0.5"),
        (100.0, "", "100"),
        (0.0301, "s", "0.0301 s"),
        (75.25, "s", "75.2 s"),
        (0.0, "s", "0 s"),
        (0.25, "ms", "250 ms"),
        (0.0000525, "ms", "0.0525 ms"),
        (0.992, "%", "99.2 %"),
        (1.0, "%", "100 %"),
        (0.0, "%", "0 %"),
        (4.0, "x", "4x"),
        (1.125, "x", "1.12x"),
        (-2.5, "s", "-2.5 s"),
    ],
)
def test_format_value(value: float, unit: str, expected: str) -> None:
    """A value has three significant digits, no trailing zeros, and its unit."""
    assert expected == format_value(value, unit)


def test_almost_100_percent_is_not_100_percent() -> None:
    """One failure in ten thousand calls is not shown as 100 %."""
    assert ">99.9 %" == format_value(0.9999, "%")


def test_tiny_value_is_not_zero() -> None:
    """A value that is too small to write is not shown as zero."""
    assert ("<0.001", "<0.001 %", ">-0.001") == (
        format_value(1e-9),
        format_value(1e-9, "%"),
        format_value(-1e-9),
    )


@pytest.mark.parametrize("unit", ["s", "ms"])
def test_infinite_time_is_never(unit: str) -> None:
    assert "never" == format_value(inf, unit)


def test_other_infinite_values_are_infinity_signs() -> None:
    """Infinite values that are not times are shown as ∞, without a unit."""
    assert ("∞", "-∞", "∞") == (format_value(inf), format_value(-inf), format_value(inf, "x"))


@pytest.mark.parametrize("unit", ["", "s", "ms", "%", "x"])
def test_missing_value_is_a_dash(unit: str) -> None:
    assert "-" == format_value(nan, unit)


def test_scale_value() -> None:
    """A scaled value is the number in front of the unit: milliseconds, percent or a factor."""
    assert (250.0, 50.0, 3.0) == (
        scale_value(0.25, "ms"),
        scale_value(0.5, "%"),
        scale_value(3.0, "x"),
    )
