"""Tests for the duration formats of other systems."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.errors import ConfigurationError
from tarry.policyfile.documents import (
    format_gateway_duration,
    format_proto_duration,
    parse_duration,
    parse_proto_duration,
    round_to_ms,
)

GATEWAY_DURATION = re.compile(r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.1, "0.1s"), (30.0, "30s"), (1.5, "1.5s"), (0.0, "0s"), (1e-9, "0.000000001s")],
)
def test_format_proto_duration(seconds: float, expected: str) -> None:
    """A duration in proto3 JSON is a number of seconds without trailing zeros."""
    assert expected == format_proto_duration("field", seconds)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.1, "100ms"), (90.0, "1m30s"), (3661.001, "1h1m1s1ms"), (0.0, "0s"), (7200.0, "2h")],
)
def test_format_gateway_duration(seconds: float, expected: str) -> None:
    """A duration of the Gateway API has whole numbers of units, the largest unit first."""
    assert expected == format_gateway_duration("field", seconds)


@given(st.integers(0, 10**11))
def test_gateway_duration_is_valid_and_round_trips(ms: int) -> None:
    """Whole milliseconds are formatted as the Gateway API requires, and parsed unchanged."""
    text = format_gateway_duration("field", ms / 1000)

    assert GATEWAY_DURATION.fullmatch(text)
    assert pytest.approx(ms / 1000) == parse_duration("field", text)


@given(st.floats(1e-9, 1e9))
def test_proto_duration_round_trips(seconds: float) -> None:
    """A duration in proto3 JSON is parsed to the same value, to a nanosecond."""
    text = format_proto_duration("field", seconds)

    assert pytest.approx(seconds, rel=1e-11, abs=1e-9) == parse_proto_duration("field", text)


@pytest.mark.parametrize(
    ("text", "correction"),
    [("50ms", "0.05s"), ("1m", "60s"), ("1h30m", "5400s"), ("3us", "0.000003s")],
)
def test_proto_duration_accepts_seconds_only(text: str, correction: str) -> None:
    """A duration that Go reads and proto3 JSON does not is rejected with a correction."""
    with pytest.raises(
        ConfigurationError, match=rf'^a\.b must be .* got {text!r}: write "{correction}"'
    ):
        parse_proto_duration("a.b", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("100ms", 0.1), ("1h30m", 5400.0), ("1.5h", 5400.0), (".5s", 0.5), ("3us", 3e-6), ("0s", 0.0)],
)
def test_go_durations_are_parsed(text: str, expected: float) -> None:
    """`parse_duration` reads durations in the format of Go, which Istio accepts."""
    assert expected == parse_duration("field", text)


@pytest.mark.parametrize("text", ["", "1", "s", "-1s", "1 s", "1d", "1s ", "1s,", None, 3, 1.5])
def test_invalid_duration_is_rejected(text: Any) -> None:
    """The error has the path, an example of the format, and the value."""
    with pytest.raises(ConfigurationError, match=r'^a\.b must be a duration such as "0\.1s", got'):
        parse_duration("a.b", text)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.1, 0.1), (0.0001, 0.001), (0.0014, 0.001), (1.0016, 1.002)]
)
def test_round_to_ms(seconds: float, expected: float) -> None:
    """Seconds are rounded to whole milliseconds, at least 1 ms."""
    assert expected == round_to_ms(seconds)


def test_too_long_duration_is_rejected() -> None:
    """A duration beyond the limit of its format is rejected with the name of the field."""
    with pytest.raises(ConfigurationError, match=r"^max_delay must be at most 315,576,000,000 s"):
        format_proto_duration("max_delay", 1e12)
    with pytest.raises(ConfigurationError, match=r"^total_budget must be less than 100,000 h"):
        format_gateway_duration("total_budget", 4e8)
