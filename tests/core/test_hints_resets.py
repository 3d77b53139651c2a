"""Tests for the fields with the time at which a quota is reset, such as `X-RateLimit-Reset`."""

from __future__ import annotations

import pytest

from tarry.core.hints import MAX_DELAY_S, Hint, hint_from_headers

NOW = 1_790_000_000.0  # 21 September 2026

RESET_FIELDS = [
    "ratelimit-reset",
    "x-ratelimit-reset",
    "x-rate-limit-reset",
    "x-ratelimit-retry-after",
]
REMAINING_FIELDS = [
    ("ratelimit-reset", "RateLimit-Remaining"),
    ("x-ratelimit-reset", "X-RateLimit-Remaining"),
    ("x-rate-limit-reset", "X-Rate-Limit-Remaining"),
    ("x-ratelimit-retry-after", "X-RateLimit-Remaining"),
]


@pytest.mark.parametrize("field", RESET_FIELDS)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 0.0),
        ("30", 30.0),
        ("240.5", 240.5),
        (" 30\t", 30.0),
        ("99999999", 99_999_999.0),
        ("1790000030", 30.0),
        ("1790000030.5", 30.5),
        ("1790000030500", 30.5),
        ("1789999990", 0.0),  # in the past
        ("100000000", 0.0),
        ("9" * 5_000, MAX_DELAY_S),
    ],
)
def test_reset(field: str, value: str, expected: float) -> None:
    """A reset is a delay in seconds, or a time in epoch seconds or epoch milliseconds."""
    assert Hint(expected, source=field) == hint_from_headers({field: value}, NOW)


@pytest.mark.parametrize("field", RESET_FIELDS)
@pytest.mark.parametrize(
    "value",
    [
        *("", "-1", "+1", "1e3", "inf", "nan", "1.", ".5", "30s", "1,5", "1_0", "\u0661", "soon"),
        *("2026-09-21T14:13:50Z", "30, 60"),
    ],
)
def test_malformed_reset(field: str, value: str) -> None:
    """A reset that is not a plain decimal is ignored, and the next valid field is used."""
    assert None is hint_from_headers({field: value}, NOW)
    other_field = "x-rate-limit-reset" if field != "x-rate-limit-reset" else "ratelimit-reset"
    headers = {field: value, other_field: "7"}
    assert Hint(7.0, source=other_field) == hint_from_headers(headers, NOW)


@pytest.mark.parametrize(("field", "remaining_field"), REMAINING_FIELDS)
@pytest.mark.parametrize("remaining", ["0", "0.0", "", "-1", "none", "\u0661"])
def test_no_requests_left(field: str, remaining_field: str, remaining: str) -> None:
    """The reset is a hint if no requests are left, or if their number is malformed."""
    hint = hint_from_headers({field: "30", remaining_field: remaining}, NOW)
    assert Hint(30.0, source=field) == hint


def test_requests_left_of_another_quota() -> None:
    """The number of requests left belongs to the reset with the same prefix."""
    headers = {
        "RateLimit-Reset": "30",
        "RateLimit-Remaining": "5",
        "X-Rate-Limit-Reset": "60",
        "X-Rate-Limit-Remaining": "0",
    }
    assert Hint(60.0, source="x-rate-limit-reset") == hint_from_headers(headers, NOW)


def test_requests_left_twice() -> None:
    """If one of two quotas is exhausted, the reset is a hint."""
    pairs = [
        ("X-RateLimit-Remaining", "5"),
        ("X-RateLimit-Reset", "30"),
        ("X-RateLimit-Remaining", "0"),
    ]
    assert Hint(30.0, source="x-ratelimit-reset") == hint_from_headers(pairs, NOW)


def test_a_reset_twice() -> None:
    """If a reset occurs twice, the longest valid delay counts."""
    pairs = [("X-RateLimit-Reset", value) for value in ("5", "1790000030", "soon")]
    assert Hint(30.0, source="x-ratelimit-reset") == hint_from_headers(pairs, NOW)


@pytest.mark.parametrize("field", RESET_FIELDS)
def test_a_reset_from_a_cache(field: str) -> None:
    """The reset of a response from a cache is outdated and ignored."""
    assert None is hint_from_headers({field: "30", "Age": "5"}, NOW)
