"""Tests for the three date formats of RFC 9110 section 5.6.7, compared with `datetime`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tarry.core.hints import parse_http_date

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOW = 1_790_000_000.0  # 21 September 2026
RFC_EXAMPLE = 784_111_777  # 6 November 1994, 08:49:37

MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

# The grammar of section 5.6.7, with UTC and +0000 for GMT, and days with one digit, as a regular
# expression, which the parser does not use.
GRAMMAR = re.compile(
    rf"(?:{'|'.join(day[:3] for day in DAYS)}), [0-9]{{1,2}} (?:{'|'.join(MONTHS)}) [0-9]{{4}} "
    r"[0-9]{2}:[0-9]{2}:[0-9]{2} (?:GMT|UTC|\+0000)"
    rf"|(?:{'|'.join(DAYS)}), [0-9]{{1,2}}-(?:{'|'.join(MONTHS)})-[0-9]{{2}} "
    r"[0-9]{2}:[0-9]{2}:[0-9]{2} (?:GMT|UTC|\+0000)"
    rf"|(?:{'|'.join(day[:3] for day in DAYS)}) (?:{'|'.join(MONTHS)}) (?: [0-9]|[0-9]{{2}}) "
    r"[0-9]{2}:[0-9]{2}:[0-9]{2} [0-9]{4}"
)

moments = st.datetimes(
    min_value=datetime(1970, 1, 1),  # noqa: DTZ001 - hypothesis wants naive bounds
    max_value=datetime(9999, 12, 31, 23, 59, 59),  # noqa: DTZ001
    timezones=st.just(UTC),
).map(lambda moment: moment.replace(microsecond=0))


def epoch_seconds(moment: datetime) -> int:
    """Return the epoch seconds of `moment`, computed with integers."""
    return (moment - EPOCH) // timedelta(seconds=1)


def format_imf_fixdate(moment: datetime) -> str:
    """Format `moment` as an IMF-fixdate."""
    day, month = DAYS[moment.weekday()][:3], MONTHS[moment.month - 1]
    return f"{day}, {moment.day:02} {month} {moment.year:04} {moment:%H:%M:%S} GMT"


def format_rfc850(moment: datetime) -> str:
    """Format `moment` as in RFC 850, with two digits of the year."""
    day, month = DAYS[moment.weekday()], MONTHS[moment.month - 1]
    return f"{day}, {moment.day:02}-{month}-{moment.year % 100:02} {moment:%H:%M:%S} GMT"


def format_asctime(moment: datetime) -> str:
    """Format `moment` like asctime() in C."""
    day, month = DAYS[moment.weekday()][:3], MONTHS[moment.month - 1]
    return f"{day} {month} {moment.day:2} {moment:%H:%M:%S} {moment.year:04}"


@pytest.mark.parametrize(
    "text",
    [
        "Sun, 06 Nov 1994 08:49:37 GMT",
        "Sunday, 06-Nov-94 08:49:37 GMT",
        "Sun Nov  6 08:49:37 1994",
        "Sun Nov 06 08:49:37 1994",
    ],
)
def test_examples_of_the_rfc(text: str) -> None:
    """The example of the RFC is parsed in each format, also with a two-digit day in asctime."""
    assert RFC_EXAMPLE == parse_http_date(text, NOW)


@pytest.mark.parametrize(
    "text", ["Sun, 06 Nov 1994 08:49:37 UTC", "Sunday, 06-Nov-94 08:49:37 UTC"]
)
def test_utc_means_gmt(text: str) -> None:
    """UTC is accepted in the place of GMT, because some servers send it."""
    assert RFC_EXAMPLE == parse_http_date(text, NOW)


@pytest.mark.parametrize(
    "text",
    [
        "Sun, 6 Nov 1994 08:49:37 GMT",
        "Sunday, 6-Nov-94 08:49:37 GMT",
        "Sun, 06 Nov 1994 08:49:37 +0000",
        "Sun, 6 Nov 1994 08:49:37 +0000",
    ],
)
def test_common_deviations(text: str) -> None:
    """A day with one digit, and +0000 in the place of GMT, are accepted."""
    assert RFC_EXAMPLE == parse_http_date(text, NOW)


@given(moments)
@example(datetime(2000, 2, 29, tzinfo=UTC))
@example(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
def test_imf_fixdate_round_trip(moment: datetime) -> None:
    """Every second from 1970 to 9999 is parsed from its IMF-fixdate."""
    assert epoch_seconds(moment) == parse_http_date(format_imf_fixdate(moment), NOW)


@given(moments)
def test_asctime_round_trip(moment: datetime) -> None:
    """Every second from 1970 to 9999 is parsed from its asctime format."""
    assert epoch_seconds(moment) == parse_http_date(format_asctime(moment), NOW)


@given(moments, st.integers(-49 * 365, 49 * 365))
def test_rfc850_round_trip(moment: datetime, days: int) -> None:
    """A date less than 50 years before or after now is parsed from its two-digit year."""
    try:
        now = moment + timedelta(days=days)
    except OverflowError:
        now = moment
    assert epoch_seconds(moment) == parse_http_date(
        format_rfc850(moment), float(epoch_seconds(now))
    )


def utc(year: int, month: int = 1, day: int = 1, second: int = 0) -> int:
    """Return the epoch seconds of a UTC day, plus `second`."""
    return epoch_seconds(datetime(year, month, day, tzinfo=UTC)) + second


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        # Exactly 50 years ahead is not more than 50 years ahead; a second later is.
        ("Friday, 01-Jan-76 00:00:00 GMT", utc(2026), utc(2076)),
        ("Friday, 01-Jan-76 00:00:01 GMT", utc(2026), utc(1976, second=1)),
        ("Friday, 01-Jan-76 00:00:01 GMT", utc(2026, second=1), utc(2076, second=1)),
        ("Friday, 31-Dec-76 00:00:00 GMT", utc(2026, 12, 30), utc(1976, 12, 31)),
        ("Friday, 31-Dec-76 00:00:00 GMT", utc(2026, 12, 31), utc(2076, 12, 31)),
        # Other parsers change the century at 69 in any year.
        ("Friday, 01-Jan-69 00:00:00 GMT", utc(2026), utc(2069)),
        ("Friday, 01-Jan-68 00:00:00 GMT", utc(2017), utc(1968)),
        ("Friday, 01-Jan-99 00:00:00 GMT", utc(2026), utc(1999)),
        # Years near the turn of a century.
        ("Friday, 01-Jan-00 00:00:00 GMT", utc(1999, 12, 31), utc(2000)),
        ("Friday, 01-Jan-05 00:00:00 GMT", utc(2099), utc(2105)),
        ("Friday, 31-Dec-99 00:00:00 GMT", utc(2100), utc(2099, 12, 31)),
        # A leap day 50 years after a year without one.
        ("Saturday, 29-Feb-76 00:00:00 GMT", utc(2026, 2, 28), utc(1976, 2, 29)),
        ("Saturday, 29-Feb-76 00:00:00 GMT", utc(2026, 3, 1), utc(2076, 2, 29)),
        # A time before the epoch.
        ("Friday, 01-Jan-60 00:00:00 GMT", utc(1950), utc(1960)),
    ],
)
def test_two_digit_years(text: str, now: int, expected: int) -> None:
    """A two-digit year is the latest year with these digits at most 50 years ahead."""
    assert expected == parse_http_date(text, float(now))


@given(moments, st.integers(0, 10**11))
def test_two_digit_years_stay_within_50_years(moment: datetime, now: int) -> None:
    """A date with a two-digit year is at most 50 years and two days before or after now."""
    parsed = parse_http_date(format_rfc850(moment), float(now))
    if parsed is not None:  # 29 February may not exist in the chosen century
        year = 31_556_952
        assert now - 50 * year - 2 * 86_400 <= parsed <= now + 50 * year + 2 * 86_400


@pytest.mark.parametrize("now", [float("nan"), float("inf"), float("-inf")])
def test_two_digit_year_with_a_now_that_is_not_finite(now: float) -> None:
    assert None is parse_http_date("Sunday, 06-Nov-94 08:49:37 GMT", now)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Sat, 31 Dec 2016 23:59:60 GMT", utc(2017)),
        ("Saturday, 31-Dec-16 23:59:60 GMT", utc(2017)),
        ("Sat Dec 31 23:59:60 2016", utc(2017)),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("Wed, 31 Dec 1969 23:59:59 GMT", -1),
        ("Sat, 01 Jan 0000 00:00:00 GMT", -62_167_219_200),
        ("Tue, 29 Feb 0000 00:00:00 GMT", -62_167_219_200 + 59 * 86_400),
        ("Thu, 29 Feb 1996 00:00:00 GMT", utc(1996, 2, 29)),
    ],
)
def test_leap_seconds_and_early_years(text: str, expected: int) -> None:
    """A leap second is parsed as the second after it, and years from 0 on are valid."""
    assert expected == parse_http_date(text, NOW)


@pytest.mark.parametrize(
    "text",
    [
        "Mon, 06 Nov 1994 08:49:37 GMT",
        "Monday, 06-Nov-94 08:49:37 GMT",
        "Mon Nov  6 08:49:37 1994",
    ],
)
def test_a_wrong_weekday_is_ignored(text: str) -> None:
    """The weekday must be a valid name, but it need not match the date."""
    assert RFC_EXAMPLE == parse_http_date(text, NOW)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GMT",
        # case and names
        "sun, 06 Nov 1994 08:49:37 GMT",
        "Sun, 06 nov 1994 08:49:37 GMT",
        "SUN, 06 NOV 1994 08:49:37 GMT",
        "Sun, 06 Nov 1994 08:49:37 gmt",
        "Sunday, 06 Nov 1994 08:49:37 GMT",
        "Sun, 06-Nov-94 08:49:37 GMT",
        "Sunday Nov  6 08:49:37 1994",
        "Xyz, 06 Nov 1994 08:49:37 GMT",
        "06 Nov 1994 08:49:37 GMT",
        # zones
        "Sun, 06 Nov 1994 08:49:37 utc",
        "Sun, 06 Nov 1994 08:49:37 UT",
        "Sun, 06 Nov 1994 08:49:37 GMT UTC",
        "Sun Nov  6 08:49:37 1994 UTC",
        "Sun, 06 Nov 1994 08:49:37",
        "Sun Nov  6 08:49:37 1994 GMT",
        "Sunday, 06-Nov-94 08:49:37",
        # spaces
        "Sun,06 Nov 1994 08:49:37 GMT",
        "Sun,  06 Nov 1994 08:49:37 GMT",
        "Sun, 06 Nov 1994  08:49:37 GMT",
        "Sun, 06\tNov 1994 08:49:37 GMT",
        "Sun, 06 Nov 1994 08:49:37 GMT ",
        "Sun Nov 6 08:49:37 1994",
        "Sun Nov  06 08:49:37 1994",
        "Sun Nov   6 08:49:37 1994",
        "Sun Nov  6 08:49:37 1994\n",
        # widths
        "Sun, 006 Nov 1994 08:49:37 GMT",
        "Sun, 06 Nov 94 08:49:37 GMT",
        "Sun, 06 Nov 01994 08:49:37 GMT",
        "Sunday, 06-Nov-1994 08:49:37 GMT",
        "Sunday, 06-Nov 08:49:37 GMT",
        "Sunday, 06-Nov-94-1 08:49:37 GMT",
        "Sun Nov  6 08:49:37 94",
        "Sun, 06 Nov 1994 8:49:37 GMT",
        "Sun, 06 Nov 1994 08:49 GMT",
        "Sun, 06 Nov 1994 08:49:37:00 GMT",
        "Sun, 06 Nov 1994 08:49:37.5 GMT",
        # digits that int() accepts but the grammar does not
        "Sun, +6 Nov 1994 08:49:37 GMT",
        "Sun, 06 Nov 1_94 08:49:37 GMT",
        "Sun, 06 Nov -994 08:49:37 GMT",
        "Sun, \u0660\u0666 Nov 1994 08:49:37 GMT",
        "Sun, 06 Nov 199\u00b2 08:49:37 GMT",
        # dates and times that do not exist
        "Sun, 00 Nov 1994 08:49:37 GMT",
        "Sun, 31 Nov 1994 08:49:37 GMT",
        "Sun, 32 Dec 1994 08:49:37 GMT",
        "Sun, 29 Feb 1995 08:49:37 GMT",
        "Sun, 29 Feb 1900 08:49:37 GMT",
        "Sun, 30 Feb 2000 08:49:37 GMT",
        "Wednesday, 29-Feb-95 08:49:37 GMT",
        "Sun Feb 29 08:49:37 1995",
        "Sun Nov  0 08:49:37 1994",
        "Sun, 06 Nov 1994 24:00:00 GMT",
        "Sun, 06 Nov 1994 08:60:00 GMT",
        "Sun, 06 Nov 1994 08:49:61 GMT",
        # other formats
        "1994-11-06T08:49:37Z",
        "784111777",
    ],
)
def test_not_an_http_date(text: str) -> None:
    """Text outside the grammar and dates that do not exist give None."""
    assert None is parse_http_date(text, NOW)


near_dates = st.lists(
    st.sampled_from(
        [
            *("Sun", "Sun,", "Sunday,", "Nov", "Feb", "GMT", "", "06", "6", "29", "31", "1994"),
            *("06-Nov-94", "29-Feb-00", "--", "08:49:37", "23:59:60", "::", "0000", "\u0661\u0662"),
        ]
    ),
    max_size=8,
).map(" ".join)


def replace_character(text: str, index: int, character: str) -> str:
    """Return `text` with the character at `index` replaced."""
    return text[:index] + character + text[index + 1 :]


mutated_dates = st.builds(
    replace_character,
    st.one_of(
        moments.map(format_imf_fixdate), moments.map(format_rfc850), moments.map(format_asctime)
    ),
    st.integers(0, 40),
    st.one_of(st.characters(), st.sampled_from("0123456789 :-,")),
)


@given(st.one_of(st.text(), near_dates, mutated_dates), st.floats())
def test_never_raises_and_follows_the_grammar(text: str, now: float) -> None:
    """Any text and any `now` give None or, if the text matches the grammar, a date."""
    parsed = parse_http_date(text, now)
    assert parsed is None or GRAMMAR.fullmatch(text)
