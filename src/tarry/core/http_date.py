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
"""A two-digit year that would be further ahead is taken as past (RFC 9110 section 5.6.7)."""


def parse_http_date(text: str, now: float) -> int | None:
    """Return the epoch seconds of an HTTP date, or None when `text` is not one.

    The weekday must be present but may be wrong: the RFC asks recipients to be robust, and the date
    itself is complete without it. A day that does not exist (30 Feb) gives None.
    """
    try:
        # With an extra space or a tab the parts match no case.
        match text.split(" "):
            case [name, day, month, year, clock, "GMT"] if name in _IMF_DAYS:
                return _epoch_seconds(
                    _parse_digits(year, 4),
                    _MONTHS[month],
                    _parse_digits(day, 2),
                    _parse_clock(clock),
                )
            case [name, date, clock, "GMT"] if name in _RFC850_DAYS:
                day, month, year = date.split("-")
                return _epoch_seconds_rfc850(
                    _parse_digits(year, 2),
                    _MONTHS[month],
                    _parse_digits(day, 2),
                    _parse_clock(clock),
                    now,
                )
            # asctime pads a short day with a space, which leaves an empty part here.
            case [name, month, "", day, clock, year] if name in _ASCTIME_DAYS:
                return _epoch_seconds(
                    _parse_digits(year, 4),
                    _MONTHS[month],
                    _parse_digits(day, 1),
                    _parse_clock(clock),
                )
            case [name, month, day, clock, year] if name in _ASCTIME_DAYS:
                return _epoch_seconds(
                    _parse_digits(year, 4),
                    _MONTHS[month],
                    _parse_digits(day, 2),
                    _parse_clock(clock),
                )
            case _:
                return None
    except (KeyError, ValueError):
        return None


def _epoch_seconds_rfc850(two_digits: int, month: int, day: int, clock: int, now: float) -> int:
    """Return the latest time with this two-digit year that is at most 50 years after `now`."""
    # The mean year can be off by one around New Year, so one year is added here.
    latest = 1970 + int(now // _MEAN_YEAR_S) + _MAX_YEARS_AHEAD + 1
    year = latest - (latest - two_digits) % 100
    if _days_since_1970(year - _MAX_YEARS_AHEAD, month, day) * _DAY_S + clock > now:
        year -= 100
    return _epoch_seconds(year, month, day, clock)


def _epoch_seconds(year: int, month: int, day: int, clock: int) -> int:
    this_first = _days_since_1970(year, month, 1)
    next_first = _days_since_1970(year + month // 12, month % 12 + 1, 1)
    if day not in range(1, next_first - this_first + 1):
        raise ValueError(day)
    return (this_first + day - 1) * _DAY_S + clock


def _days_since_1970(year: int, month: int, day: int) -> int:
    """Return the days since 1 January 1970, counted in years that end with the leap day."""
    if month in {1, 2}:
        year -= 1
    leap_days = year // 4 - year // 100 + year // 400
    # Five months from March on have 153 days: 31, 30, 31, 30, 31.
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return 365 * year + leap_days + day_of_year - 719_468


def _parse_clock(text: str) -> int:
    """Return the seconds since midnight for "08:49:37".

    Second 60 is a leap second. Unix time has none, so it counts as the following second.
    """
    hour, minute, second = (_parse_digits(part, 2) for part in text.split(":"))
    if hour not in range(24) or minute not in range(60) or second not in range(61):
        raise ValueError(text)
    return (hour * 60 + minute) * 60 + second


def _parse_digits(text: str, width: int) -> int:
    # isdigit alone would accept the digits of every script, int alone signs and underscores.
    if len(text) != width or not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)
