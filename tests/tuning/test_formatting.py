"""Numbers as people write and read them."""

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
def test_shares(share: float, text: str) -> None:
    """Two digits are enough to decide by."""
    assert text == format_percent(share)


@pytest.mark.parametrize(("number", "text"), [(0, "0 calls"), (1, "1 call"), (1200, "1,200 calls")])
def test_counts(number: int, text: str) -> None:
    """One of a thing is not many."""
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
def test_settings(field: str, value: object, text: str) -> None:
    """Times have a unit, tables are one line."""
    assert text == format_setting(field, value)


@pytest.mark.parametrize(
    ("text", "expected"), [("2s", 2.0), ("500ms", 0.5), ("1.5 min", 90.0), ("1m", 60.0), ("3", 3.0)]
)
def test_times(text: str, expected: float) -> None:
    """A time has a unit; a bare number is seconds."""
    assert expected == parse_duration("--latency-target", text)


@pytest.mark.parametrize("text", ["", "s", "-1s", "2 weeks", "nan", "1e3", "0s", "9" * 400])
def test_what_is_no_time(text: str) -> None:
    """Anything else is refused by the name of the option."""
    with pytest.raises(ConfigurationError, match=r"^--latency-target must be"):
        parse_duration("--latency-target", text)
