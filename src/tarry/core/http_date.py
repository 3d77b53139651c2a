"""The three date forms of HTTP (RFC 9110 section 5.6.7), as seconds since the Unix epoch.

Rules of this module:

* One pure function of a string and `now`. It never reads a clock: `now` serves only the two-digit
  years of the RFC 850 form.
* Whole numbers throughout, and no calendar module: `datetime` refuses second 60 and year 0, which
  the grammar allows, and costs more to import than this file.
* The grammar is kept to the letter: case, single spaces, digit counts, "GMT". What it does not
  allow is None, never an exception.
"""

from __future__ import annotations

_MONTH_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAY_NAMES = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_MONTHS = {name: number for number, name in enumerate(_MONTH_NAMES, start=1)}

# The names of the days tell the forms apart: "Sun," is IMF-fixdate, "Sunday," is RFC 850 and "Sun"
# is asctime.
_IMF_DAYS = frozenset(f"{name[:3]}," for name in _DAY_NAMES)
_RFC850_DAYS = frozenset(f"{name}," for name in _DAY_NAMES)
_ASCTIME_DAYS = frozenset(name[:3] for name in _DAY_NAMES)

_DAY = 86_400
_MEAN_YEAR = 31_556_952
"""Seconds in a year of the Gregorian calendar, on the average of 400 years."""
_HORIZON = 50
"""Years ahead after which a two-digit year means the past (RFC 9110 section 5.6.7)."""


def parse_http_date(text: str, now: float) -> int | None:
    """Return the epoch seconds that `text` names, or None when it is not an HTTP date.

    A name of a weekday must be there, but it need not be the right one: the RFC asks recipients to
    be robust, the date says all there is to know, and a server that counts its weekdays wrongly
    still means the moment it wrote. A day that does not exist (30 Feb) means nothing and is None.
    """
    try:
        # Split at single spaces: an extra space or a tab leaves a part that matches nothing.
        match text.split(" "):
            case [name, day, month, year, clock, "GMT"] if name in _IMF_DAYS:
                return _moment(_number(year, 4), _MONTHS[month], _number(day, 2), _clock(clock))
            case [name, date, clock, "GMT"] if name in _RFC850_DAYS:
                day, month, year = date.split("-")
                return _rfc850(
                    _number(year, 2), _MONTHS[month], _number(day, 2), _clock(clock), now
                )
            # asctime pads a short day with a space, which leaves an empty part here.
            case [name, month, "", day, clock, year] if name in _ASCTIME_DAYS:
                return _moment(_number(year, 4), _MONTHS[month], _number(day, 1), _clock(clock))
            case [name, month, day, clock, year] if name in _ASCTIME_DAYS:
                return _moment(_number(year, 4), _MONTHS[month], _number(day, 2), _clock(clock))
            case _:
                return None
    except (KeyError, ValueError):
        return None


def _rfc850(two_digits: int, month: int, day: int, clock: int, now: float) -> int:
    """Return the latest moment with these two digits that is at most 50 years after `now`."""
    # The mean year is off by one at most around New Year, hence one year more than the horizon.
    latest = 1970 + int(now // _MEAN_YEAR) + _HORIZON + 1
    year = latest - (latest - two_digits) % 100
    if _days(year - _HORIZON, month, day) * _DAY + clock > now:
        year -= 100
    return _moment(year, month, day, clock)


def _moment(year: int, month: int, day: int, clock: int) -> int:
    first = _days(year, month, 1)
    following = _days(year + month // 12, month % 12 + 1, 1)
    if day not in range(1, following - first + 1):
        raise ValueError(day)
    return (first + day - 1) * _DAY + clock


def _days(year: int, month: int, day: int) -> int:
    """Return the days from 1 January 1970; years begin in March, so that leap days come last."""
    if month in {1, 2}:
        year -= 1
    leap_days = year // 4 - year // 100 + year // 400
    # 153 days make five months from March on: 31, 30, 31, 30, 31.
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return 365 * year + leap_days + day_of_year - 719_468


def _clock(text: str) -> int:
    """Return the seconds since midnight of "08:49:37".

    Second 60 is a leap second; Unix time has none, so it is the first second after it.
    """
    hour, minute, second = (_number(part, 2) for part in text.split(":"))
    if hour not in range(24) or minute not in range(60) or second not in range(61):
        raise ValueError(text)
    return (hour * 60 + minute) * 60 + second


def _number(text: str, width: int) -> int:
    # isdigit alone would let in the digits of every script, int alone signs and underscores.
    if len(text) != width or not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)
