"""A parser for the three date formats of HTTP (RFC 9110 section 5.6.7).

* `now` is an argument, needed only for the two-digit years of the RFC 850 format.
* `datetime` is not used: it rejects second 60 and year 0, which the grammar allows, and takes
  longer to import than this module.
* The grammar is applied strictly: case, single spaces, number of digits, "GMT". Any other text
  gives None, never an exception.
"""

from __future__ import annotations

_MONTH_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAY_NAMES = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_MONTHS = {name: number for number, name in enumerate(_MONTH_NAMES, start=1)}

# The name of the day identifies the format: "Sun," is IMF-fixdate, "Sunday," is RFC 850 and "Sun"
# is asctime.
_IMF_DAYS = frozenset(f"{name[:3]}," for name in _DAY_NAMES)
_RFC850_DAYS = frozenset(f"{name}," for name in _DAY_NAMES)
_ASCTIME_DAYS = frozenset(name[:3] for name in _DAY_NAMES)

_DAY_S = 86_400
_MEAN_YEAR_S = 31_556_952
"""Seconds in a Gregorian year, averaged over 400 years."""
_MAX_YEARS_AHEAD = 50
"""A two-digit year further ahead than this is in the past (RFC 9110 section 5.6.7)."""


def parse_http_date(text: str, now: float) -> int | None:
    """Return the epoch seconds of an HTTP date, or None when `text` is not one.

    The weekday must be present but may be wrong: the RFC asks recipients to be robust, and the date
    itself is complete without it. A day that does not exist (30 Feb) gives None.
    """
    try:
        # An extra space or a tab leaves a part that matches no case.
        match text.split(" "):
            case [name, day, month, year, clock, "GMT"] if name in _IMF_DAYS:
                return _epoch_seconds(
                    _number(year, 4), _MONTHS[month], _number(day, 2), _seconds_of_day(clock)
                )
            case [name, date, clock, "GMT"] if name in _RFC850_DAYS:
                day, month, year = date.split("-")
                return _rfc850(
                    _number(year, 2), _MONTHS[month], _number(day, 2), _seconds_of_day(clock), now
                )
            # asctime pads a short day with a space, which leaves an empty part here.
            case [name, month, "", day, clock, year] if name in _ASCTIME_DAYS:
                return _epoch_seconds(
                    _number(year, 4), _MONTHS[month], _number(day, 1), _seconds_of_day(clock)
                )
            case [name, month, day, clock, year] if name in _ASCTIME_DAYS:
                return _epoch_seconds(
                    _number(year, 4), _MONTHS[month], _number(day, 2), _seconds_of_day(clock)
                )
            case _:
                return None
    except (KeyError, ValueError):
        return None


def _rfc850(two_digits: int, month: int, day: int, clock: int, now: float) -> int:
    """Return the latest time with this two-digit year that is at most 50 years after `now`."""
    # Around New Year the mean year can be off by one, hence one year more than the limit.
    latest = 1970 + int(now // _MEAN_YEAR_S) + _MAX_YEARS_AHEAD + 1
    year = latest - (latest - two_digits) % 100
    if _days(year - _MAX_YEARS_AHEAD, month, day) * _DAY_S + clock > now:
        year -= 100
    return _epoch_seconds(year, month, day, clock)


def _epoch_seconds(year: int, month: int, day: int, clock: int) -> int:
    first = _days(year, month, 1)
    following = _days(year + month // 12, month % 12 + 1, 1)
    if day not in range(1, following - first + 1):
        raise ValueError(day)
    return (first + day - 1) * _DAY_S + clock


def _days(year: int, month: int, day: int) -> int:
    """Return the days since 1 January 1970; years start in March, so that leap days are last."""
    if month in {1, 2}:
        year -= 1
    leap_days = year // 4 - year // 100 + year // 400
    # Five months from March on have 153 days: 31, 30, 31, 30, 31.
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return 365 * year + leap_days + day_of_year - 719_468


def _seconds_of_day(text: str) -> int:
    """Return the seconds since midnight for "08:49:37".

    Second 60 is a leap second. Unix time has none, so it counts as the following second.
    """
    hour, minute, second = (_number(part, 2) for part in text.split(":"))
    if hour not in range(24) or minute not in range(60) or second not in range(61):
        raise ValueError(text)
    return (hour * 60 + minute) * 60 + second


def _number(text: str, width: int) -> int:
    # isdigit alone accepts the digits of every script, int alone signs and underscores.
    if len(text) != width or not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)
