"""Tests for the parser of durations in options."""

from __future__ import annotations

import pytest

from tarry.cli.options import parse_duration
from tarry.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "expected"), [("2s", 2.0), ("500ms", 0.5), ("1.5 min", 90.0), ("1m", 60.0), ("3", 3.0)]
)
def test_parse_duration(text: str, expected: float) -> None:
    """A duration is a number with a unit; a number without a unit is in seconds."""
    assert expected == parse_duration("--latency-target", text)


@pytest.mark.parametrize("text", ["", "s", "-1s", "2 weeks", "nan", "1e3", "0s", "9" * 400])
def test_invalid_duration_is_rejected(text: str) -> None:
    """The error for an invalid duration names the option."""
    with pytest.raises(ConfigurationError, match=r"^--latency-target must be"):
        parse_duration("--latency-target", text)
