"""Formatting of shares, counts and settings, and parsing of durations."""

from __future__ import annotations

import pytest

from tarry.errors import ConfigurationError
from tarry.tuning.formatting import format_count, format_percent, format_setting, parse_duration


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (0.00001, "under 0.01 %"),
        (0.002, "0.2 %"),
        (0.041, "4.1 %"),
        (0.0997, "10 %"),
        (0.384, "38 %"),
        (1.0, "100 %"),
        (2.9, "290 %"),
    ],
)
def test_format_percent(share: float, text: str) -> None:
    """Percentages have two significant digits."""
    assert text == format_percent(share)


@pytest.mark.parametrize(("number", "text"), [(0, "0 calls"), (1, "1 call"), (1200, "1,200 calls")])
def test_format_count(number: int, text: str) -> None:
    """A noun is singular for 1 and plural otherwise."""
    assert text == format_count(number, "call")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("attempt_timeout", 0.25, "250 ms"),
        ("max_attempts", 4, "4"),
        ("total_budget", None, "none"),
        ("budget", {"kind": "ratio", "ratio": 0.02}, "ratio 0.02"),
        ("budget", {"kind": "token", "capacity": 50}, "token capacity=50"),
        ("hedging.after", "p95", "p95"),
    ],
)
def test_format_setting(field: str, value: object, text: str) -> None:
    """Durations have a unit, and a table is one line."""
    assert text == format_setting(field, value)


@pytest.mark.parametrize(
    ("text", "expected"), [("2s", 2.0), ("500ms", 0.5), ("1.5 min", 90.0), ("1m", 60.0), ("3", 3.0)]
)
def test_parse_duration(text: str, expected: float) -> None:
    """A duration has a unit; a bare number is seconds."""
    assert expected == parse_duration("--latency-target", text)


@pytest.mark.parametrize("text", ["", "s", "-1s", "2 weeks", "nan", "1e3", "0s", "9" * 400])
def test_invalid_duration_is_rejected(text: str) -> None:
    """The error names the option."""
    with pytest.raises(ConfigurationError, match=r"^--latency-target must be"):
        parse_duration("--latency-target", text)
