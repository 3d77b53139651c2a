"""Tests for the formatting of durations and counts."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.text import format_count, format_duration, format_ranges, suggest


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 ms"),
        (0.0001, "0.1 ms"),
        (0.1, "100 ms"),
        (0.1234567, "123 ms"),
        (0.999, "999 ms"),
        (1, "1 s"),
        (2.5, "2.5 s"),
        (90, "90 s"),
        (119, "119 s"),
        (120, "2 min"),
        (180, "3 min"),
        (7_199, "120 min"),
        (7_200, "2 h"),
        (128, "2.13 min"),
        (512, "8.53 min"),
        (75.5 * 3600, "75.5 h"),
        (1234 * 3600, "1234 h"),
        (inf, "inf h"),
    ],
)
def test_duration(seconds: float, expected: str) -> None:
    """A duration is formatted in ms, s, min or h, rounded to three digits or to the unit."""
    assert expected == format_duration(seconds)


@given(st.floats(1e-3, 999 * 3600))
def test_durations_have_no_exponent(seconds: float) -> None:
    """From 1 ms to 999 h a duration has no exponent and a relative error of at most 0.6 %."""
    number, unit = format_duration(seconds).split()
    assert "e" not in number
    seconds_per_unit = {"ms": 0.001, "s": 1, "min": 60, "h": 3600}[unit]
    assert pytest.approx(seconds, rel=0.006) == float(number) * seconds_per_unit


@pytest.mark.parametrize(("number", "text"), [(0, "0 calls"), (1, "1 call"), (1200, "1,200 calls")])
def test_format_count(number: int, text: str) -> None:
    """A noun is singular for 1 and plural otherwise."""
    assert text == format_count(number, "call")


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("targetURL", "targetUrl"),
        ("url", "targetUrl"),
        ("key", "idempotencyKey"),
        ("ey", None),
        ("port", None),
    ],
    ids=["similar", "last word", "first of two", "too short", "unlike all"],
)
def test_suggest(word: str, suggestion: str | None) -> None:
    """A misspelt name suggests the most similar one, or the first one that ends with it."""
    assert suggestion == suggest(word, ["targetUrl", "idempotencyKey", "callbackUrl", "laneKey"])


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([429], "429"), ([503, 502], "502, 503"), ([504, 502, 503, 9], "9, 502-504")],
)
def test_format_ranges(numbers: list[int], text: str) -> None:
    """Numbers are sorted; three or more in a row are a range."""
    assert text == format_ranges(numbers)
