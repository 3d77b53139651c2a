"""Tests for hints in well-formed, malformed and hostile header fields."""

from __future__ import annotations

import pickle
from datetime import timedelta
from email.message import Message
from math import inf, isfinite, nan
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.decide import decide
from tarry.core.hints import MAX_DELAY_S, Hint, hint_from_headers, parse_retry_after
from tarry.core.outcome import outcome_of_status
from tarry.core.policy import Policy
from tarry.core.verdict import Progress, Wait
from tarry.errors import ConfigurationError
from tests.core.header_strategies import NOW, texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tarry.core.backoff import JitterName

# --- Hint ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delay", "message"),
    [
        (-5, "delay must be at least 0, got -5"),
        (-0.1, "delay must be at least 0"),
        (nan, "delay must be finite"),
        (inf, "delay must be finite"),
        ("5", "delay must be a number"),
        (True, "delay must be a number"),
    ],
)
def test_invalid_delay_is_rejected(delay: Any, message: str) -> None:
    """The delay of a hint must be a finite number that is not negative."""
    with pytest.raises(ConfigurationError, match=message):
        Hint(delay)


def test_fields_of_a_hint() -> None:
    """A hint has the delay as a float, also for a `timedelta`, and can be compared and copied."""
    hint = Hint(timedelta(minutes=1), exact=True)

    assert (60.0, None, True, "") == (hint.delay, hint.should_retry, hint.exact, hint.source)
    assert hint == Hint(60, exact=True) == pickle.loads(pickle.dumps(hint))  # noqa: S301
    assert Hint() != hint


# --- Retry-After ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", 0.0),
        ("120", 120.0),
        ("00120", 120.0),
        (" \t120\t ", 120.0),
        ("1700000000", 1_700_000_000.0),  # a Unix time, which GitHub sends, is parsed as seconds
        ("999999999999999", 999_999_999_999_999.0),
        ("2.0", 2.0),  # as Shopify sends it
        ("1.5", 1.5),
        ("0.5", 0.5),
    ],
)
def test_delay_seconds(value: str, expected: float) -> None:
    """ASCII digits, with an optional fraction and white space around, are seconds."""
    assert expected == parse_retry_after(value, NOW)


@pytest.mark.parametrize(
    "value",
    [
        "Sun, 06 Nov 1994 08:51:37 GMT",
        "Sunday, 06-Nov-94 08:51:37 GMT",
        "Sun Nov  6 08:51:37 1994",
        "\tSun, 06 Nov 1994 08:51:37 GMT ",
        "Sun, 06 Nov 1994 08:51:37 UTC",
    ],
)
def test_dates(value: str) -> None:
    """A date in each of the three formats gives the time from now until the date."""
    assert 120.0 == parse_retry_after(value, NOW)


def test_dates_keep_the_fraction_of_now() -> None:
    """A fraction of a second in `now` is subtracted exactly."""
    assert 0.75 == parse_retry_after("Sun, 06 Nov 1994 08:49:38 GMT", NOW + 0.25)


@pytest.mark.parametrize(
    "value",
    [
        "Sun, 06 Nov 1994 08:49:37 GMT",
        "Sun, 06 Nov 1994 08:49:36 GMT",
        "Sunday, 06-Nov-60 08:49:37 GMT",
        "Thu Jan  1 00:00:00 1970",
        "Sat, 01 Jan 0000 00:00:00 GMT",
    ],
)
def test_a_date_that_has_passed(value: str) -> None:
    """The delay for a date that is now or in the past is 0."""
    assert 0.0 == parse_retry_after(value, NOW)


@pytest.mark.parametrize(
    ("value", "now", "expected"),
    [
        ("Sun, 06 Nov 1994 08:49:37 GMT", inf, 0.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", nan, 0.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", -inf, MAX_DELAY_S),
    ],
)
def test_now_that_is_not_finite(value: str, now: float, expected: float) -> None:
    """A `now` that is not finite still gives a valid delay."""
    assert expected == parse_retry_after(value, now)


def test_the_delay_is_a_float() -> None:
    """The delay is a float even if `now` is an int."""
    delays = [parse_retry_after(value, 0) for value in ("5", "Thu, 01 Jan 1970 00:00:05 GMT")]
    assert [(5.0, float), (5.0, float)] == [(delay, type(delay)) for delay in delays]


@pytest.mark.parametrize(
    "value",
    [
        *("", " ", "-1", "-0", "+5", "-1.5", "5.", ".5", "1.5.", "1e2"),
        *("inf", "nan", "Infinity", "0x10"),
        *("1_000", "1 000", "1,000", "120, 120", "120;a=b", '"120"', "120s", "120 seconds", "soon"),
        *("\u0661\u0662\u0663", "\uff11\uff12", "\u00b2", "\u2460", "12\u0663"),
        *("120\n", "\n120", "120\r\n", "\u00a0120", "\x00120", "120\x0b", "\ud800"),
        "Sun, 06 Nov 1994 08:51:37 CET",
        "sun, 06 nov 1994 08:51:37 gmt",
        "Sun, 31 Nov 1994 08:51:37 GMT",
        "1994-11-06T08:51:37Z",
    ],
)
def test_malformed_retry_after(value: str) -> None:
    """Values outside the grammar give None, even if int(), float() or a date parser takes them."""
    assert None is parse_retry_after(value, NOW)


@pytest.mark.parametrize("digits", [16, 17, 309, 310, 4_300, 4_301, 1_000_000])
def test_many_digits(digits: int) -> None:
    """A number of 16 or more digits gives the longest delay."""
    assert MAX_DELAY_S == parse_retry_after("9" * digits, NOW)


@given(texts, st.floats())
def test_retry_after_never_raises(value: str, now: float) -> None:
    """Any text and any `now` give None or a finite delay that is not negative."""
    delay = parse_retry_after(value, now)
    assert delay is None or (isfinite(delay) and delay >= 0)


@given(st.integers(0, 10**18), st.integers(0, 10**18))
def test_more_seconds_never_shorten_the_delay(one: int, other: int) -> None:
    """Delays are in the same order as the numbers of seconds."""
    delays = [parse_retry_after(str(number), NOW) or 0.0 for number in sorted((one, other))]
    assert sorted(delays) == delays


@given(st.floats(0, 2e9), st.floats(0, 2e9))
def test_a_later_now_never_lengthens_the_delay(one: float, other: float) -> None:
    """The nearer the date, the shorter the delay."""
    early, late = sorted((one, other))
    value = "Wed, 21 Oct 2026 07:28:00 GMT"
    delays = [parse_retry_after(value, now) or 0.0 for now in (late, early)]
    assert sorted(delays) == delays


# --- header fields -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Retry-After", "retry-after", "RETRY-AFTER", "rEtRy-aFtEr"])
def test_names_in_any_case(name: str) -> None:
    """The names of fields are case-insensitive."""
    assert Hint(5.0, source="retry-after") == hint_from_headers({name: "5"}, NOW)


def test_types_of_headers() -> None:
    """Mappings, sequences and iterators of pairs, and email messages give the same hint."""
    pairs = [("Content-Type", "text/plain"), ("Retry-After", "5"), ("Via", "1.1 proxy")]
    message = Message()
    for name, value in pairs:
        message[name] = value
    headers_by_type: list[Mapping[str, str] | Iterable[tuple[str, str]]] = [
        dict(pairs),
        MappingProxyType(dict(pairs)),
        pairs,
        tuple(pairs),
        iter(pairs),
        cast("Mapping[str, str]", message),
    ]
    hints = [hint_from_headers(headers, NOW) for headers in headers_by_type]
    assert [Hint(5.0, source="retry-after")] * 6 == hints


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Retry-After": "soon"},
        {"Retry-After": ""},
        {"Retry": "5", "After": "5", "Retry-After-": "5", " Retry-After": "5"},
        {"Age": "5"},
        {"RateLimit-Remaining": "0", "X-RateLimit-Limit": "60"},
    ],
)
def test_headers_without_a_hint(headers: dict[str, str]) -> None:
    """Headers without a valid hint give None."""
    assert None is hint_from_headers(headers, NOW)


@pytest.mark.parametrize(
    "value",
    [None, b"5", 5, 5.0, ["5"], object()],
    ids=["None", "bytes", "int", "float", "list", "object"],
)
def test_other_types_are_ignored(value: object) -> None:
    """Names and values that are not strings are ignored; other fields still count."""
    pairs: list[tuple[object, object]] = [
        ("retry-after-ms", value),
        (value, "5"),
        ("x-should-retry", value),
        ("ratelimit", value),
        ("Retry-After", "7"),
    ]
    hint = hint_from_headers(cast("list[tuple[str, str]]", pairs), NOW)
    assert Hint(7.0, source="retry-after") == hint


@pytest.mark.parametrize("name", ["retry-after-ms", "x-ms-retry-after-ms", "x-amz-retry-after"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [("1500", 1.5), ("1500.5", 1.5005), ("0", 0.0), ("0.0", 0.0), (" 250\t", 0.25), ("007", 0.007)],
)
def test_milliseconds(name: str, value: str, expected: float) -> None:
    """Three fields contain milliseconds, with a fraction or without."""
    assert Hint(expected, source=name) == hint_from_headers({name: value}, NOW)


@pytest.mark.parametrize("name", ["retry-after-ms", "x-ms-retry-after-ms", "x-amz-retry-after"])
@pytest.mark.parametrize(
    "value",
    [
        *("", "-1", "+1", "1e3", "inf", "nan", "1.", ".5", "1.5.5", "1,5", "1_0", "1. 5", "1.-5"),
        *("\u0661", "1.\u0661", "5ms", "Sun, 06 Nov 1994 08:51:37 GMT"),
    ],
)
def test_malformed_milliseconds(name: str, value: str) -> None:
    """Milliseconds that are not plain decimals are ignored, and Retry-After is used instead."""
    assert None is hint_from_headers({name: value}, NOW)
    headers = {name: value, "Retry-After": "2"}
    assert Hint(2.0, source="retry-after") == hint_from_headers(headers, NOW)


def test_milliseconds_too_large_for_a_float() -> None:
    """A number that is too large for a float gives the longest delay."""
    values = ["9" * 400, "9" * 5_000, "9" * 5_000 + ".5"]
    hints = [hint_from_headers({"retry-after-ms": value}, NOW) for value in values]
    assert [Hint(MAX_DELAY_S, source="retry-after-ms")] * 3 == hints


def test_precedence() -> None:
    """Milliseconds precede Retry-After, RateLimit and the reset fields, in any order of lines."""
    fields = [
        ("X-Rate-Limit-Reset", "90"),
        ("X-RateLimit-Reset", "80"),
        ("RateLimit-Reset", "70"),
        ("X-RateLimit-Retry-After", "60"),
        ("RateLimit", '"default";r=0;t=50'),
        ("Retry-After", "40"),
        ("X-Amz-Retry-After", "30000"),
        ("X-Ms-Retry-After-Ms", "20000"),
        ("Retry-After-Ms", "10000"),
    ]
    delays: list[float | None] = []
    for count in range(1, len(fields) + 1):
        hints = [hint_from_headers(order, NOW) for order in (fields[:count], fields[:count][::-1])]
        assert hints[0] == hints[1]
        delays.append(None if hints[0] is None else hints[0].delay)
    assert [90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 20.0, 10.0] == delays


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["5", "7"], 7.0),
        (["7", "5"], 7.0),
        (["5", "5"], 5.0),
        (["soon", "5"], 5.0),
        (["5", "soon"], 5.0),
        (["60", "Sun, 06 Nov 1994 08:51:37 GMT"], 120.0),
    ],
)
def test_a_field_twice(values: list[str], expected: float) -> None:
    """If a field occurs twice, the longest valid delay counts."""
    pairs = [("Retry-After", value) for value in values]
    assert Hint(expected, source="retry-after") == hint_from_headers(pairs, NOW)


def test_lines_joined_by_a_mapping() -> None:
    """Two values that a mapping has joined with a comma are not a valid Retry-After."""
    assert None is hint_from_headers({"Retry-After": "5, 7"}, NOW)


@pytest.mark.parametrize("name", ["x-should-retry", "stripe-should-retry"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [("true", True), ("false", False), (" True ", True), ("\tFALSE", False)],
)
def test_should_retry(name: str, value: str, expected: bool) -> None:
    """should_retry is read from either field."""
    assert Hint(should_retry=expected, source=name) == hint_from_headers({name: value}, NOW)


@pytest.mark.parametrize("value", ["", "1", "0", "yes", "?1", "?0", "true, true", "tru"])
def test_invalid_should_retry(value: str) -> None:
    """Values other than true and false are ignored."""
    assert None is hint_from_headers({"x-should-retry": value}, NOW)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([("x-should-retry", "true"), ("x-should-retry", "false")], "x-should-retry"),
        ([("x-should-retry", "true"), ("stripe-should-retry", "false")], "stripe-should-retry"),
        ([("stripe-should-retry", "true"), ("x-should-retry", "false")], "x-should-retry"),
    ],
)
def test_conflicting_should_retry(pairs: list[tuple[str, str]], expected: str) -> None:
    """If the fields differ, false wins."""
    assert Hint(should_retry=False, source=expected) == hint_from_headers(pairs, NOW)


def test_source_of_equal_should_retry() -> None:
    """If the fields agree, x-should-retry is the source."""
    headers = {"stripe-should-retry": "true", "x-should-retry": "true"}
    assert Hint(should_retry=True, source="x-should-retry") == hint_from_headers(headers, NOW)


def test_delay_and_should_retry() -> None:
    """A delay and should_retry make one hint with both fields as its source."""
    expected = Hint(5.0, should_retry=True, source="retry-after, x-should-retry")
    assert expected == hint_from_headers({"x-should-retry": "true", "Retry-After": "5"}, NOW)


# --- arbitrary headers ---------------------------------------------------------------------------

names = st.sampled_from(
    [
        *("Retry-After", "retry-after-ms", "x-ms-retry-after-ms", "x-amz-retry-after", "RateLimit"),
        *("X-RateLimit-Retry-After", "RateLimit-Reset", "X-RateLimit-Reset", "X-Rate-Limit-Reset"),
        *("RateLimit-Remaining", "X-RateLimit-Remaining", "x-should-retry", "Stripe-Should-Retry"),
        *("Age", "Date", ""),
    ]
)
values = st.one_of(texts, st.sampled_from(["true", "false", "5", '"a";r=0;t=5', '"b";r=0']))


@given(st.lists(st.tuples(names, values), max_size=6), st.floats())
def test_headers_never_raise(pairs: list[tuple[str, str]], now: float) -> None:
    """Any headers give None or a hint that has a valid delay, a should_retry or both."""
    hint = hint_from_headers(pairs, now)
    if hint is not None:
        assert hint.delay is not None or hint.should_retry is not None
        assert hint.delay is None or (isfinite(hint.delay) and hint.delay >= 0)
        assert hint.source
        assert not hint.exact


@given(
    pairs=st.lists(st.tuples(names, values), max_size=6),
    status=st.sampled_from([429, 503]),
    jitter=st.sampled_from(["full", "equal", "decorrelated", "none"]),
    random_number=st.floats(0, 1, exclude_max=True),
)
def test_a_hint_never_shortens_the_delay(
    pairs: list[tuple[str, str]], status: int, jitter: JitterName, random_number: float
) -> None:
    """No header, valid or malformed, makes a client retry sooner than it would without it."""
    policy, progress = Policy(jitter=jitter), Progress(attempts=1, started=NOW)
    without_hint, with_hint = (
        decide(policy, progress, outcome, now=NOW, random_number=random_number)
        for outcome in (
            outcome_of_status(status, now=NOW),
            outcome_of_status(status, pairs, now=NOW),
        )
    )
    assert isinstance(without_hint, Wait)
    if isinstance(with_hint, Wait):
        assert with_hint.delay >= without_hint.delay
