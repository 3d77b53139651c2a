"""What servers ask of clients that retry: the `Hint`, and how HTTP header fields are read into it.

Rules of this module and of its sibling for gRPC, `tarry.core.grpc_hints`:

* Pure functions from text or bytes to values. No clock: `now` (epoch seconds) is an argument and
  serves only to turn dates into waits.
* Whatever a server sends, nothing here raises. A malformed hint is no hint; the one exception is
  a gRPC pushback, which means "never" when it cannot be read (gRFC A6).
* A hint is never shortened and never infinite: `MAX_WAIT_S` stands for everything beyond it, so
  that a bound on hints ends the call.
* What to do with a hint is decided elsewhere.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, cast

from tarry.core.http_date import parse_http_date

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_WAIT_S = 1e15
"""The longest wait in seconds, some 30 million years; in milliseconds it still fits 64 bits."""

OWS = " \t"
"""The white space that may stand around a value."""

_RETRY_AFTER = "retry-after"
_RATE_LIMIT = "ratelimit"
_AGE = "age"
# In the order in which they are believed: the most precise first, and Retry-After before RateLimit
# by section 6 of that draft. The first three are in milliseconds.
_WAITS = ("retry-after-ms", "x-ms-retry-after-ms", "x-amz-retry-after", _RETRY_AFTER, _RATE_LIMIT)
_VERDICTS = ("x-should-retry", "stripe-should-retry")
_FIELDS = frozenset({*_WAITS, *_VERDICTS, _AGE})


class Hint(NamedTuple):
    """What the server asked of us."""

    delay: float | None = None
    """Seconds to wait at least, counted from now."""
    should_retry: bool | None = None
    """The server's own verdict, which overrides the table of statuses."""
    exact: bool = False
    """Wait exactly `delay`, after which backoff starts over (gRPC pushback)."""
    source: str = ""
    """The field or fields that said so, for logs."""


def parse_retry_after(value: str, now: float) -> float | None:
    """Return the seconds to wait that a `Retry-After` asks for, or None when it is malformed.

    `value` is a number of seconds or one of the three HTTP dates, by the letter of RFC 9110
    sections 10.2.3 and 5.6.7; `now` is in epoch seconds. A date in the past gives 0.0. More than
    `MAX_WAIT_S` seconds, however many digits, give `MAX_WAIT_S`. A wrong weekday is forgiven.
    """
    value = value.strip(OWS)
    if is_digits(value):
        # float, not int: int refuses more than 4,300 digits, and is slow before that.
        return min(float(value), MAX_WAIT_S)
    date = parse_http_date(value, now)
    return None if date is None else min(max(0.0, float(date - now)), MAX_WAIT_S)


def hint_from_headers(
    headers: Mapping[str, str] | Iterable[tuple[str, str]], now: float
) -> Hint | None:
    """Read what an HTTP response asks for, or None when it asks for nothing.

    `headers` is anything with `items()`, or pairs; names in any case. The wait is that of the first
    valid field among `retry-after-ms`, `x-ms-retry-after-ms`, `x-amz-retry-after`, `Retry-After`
    and `RateLimit`; `x-should-retry` and `stripe-should-retry` are read beside it.

    None of these but `RateLimit` may occur twice (RFC 9110 section 5.3). If one does, the cautious
    reading holds: the longest valid wait, and "do not retry" over "retry". So pass pairs if the
    client has them: a mapping that joins repeated lines with commas makes them malformed.
    """
    items = getattr(headers, "items", None)
    pairs = headers if items is None else items()
    said: dict[str, list[str]] = {}
    for field, value in select_fields(cast("Iterable[tuple[object, object]]", pairs), _FIELDS):
        if isinstance(value, str):
            said.setdefault(field, []).append(value.strip(OWS))
    if not said:
        return None
    delay, waiter = _wait(said, now)
    should_retry, judge = _verdict(said)
    if should_retry is None:
        return None if delay is None else Hint(delay, source=waiter)
    source = judge if delay is None else f"{waiter}, {judge}"
    return Hint(delay, should_retry, source=source)


def select_fields(
    pairs: Iterable[tuple[object, object]], fields: frozenset[str]
) -> list[tuple[str, str | bytes]]:
    """Return the pairs whose name is in `fields`, in lower case; strange types are left out."""
    return [
        (field, value)
        for name, value in pairs
        if isinstance(name, str)
        and (field := name.lower()) in fields
        and isinstance(value, (str, bytes))
    ]


def is_digits(text: str) -> bool:
    """Say whether the text is a row of ASCII digits."""
    # isdigit alone would let in the digits of every script.
    return text.isascii() and text.isdigit()


def max_or_none(waits: Iterable[float | None]) -> float | None:
    """Return the longest of the waits that are there, or None when there is none."""
    return max([wait for wait in waits if wait is not None], default=None)


def _wait(said: Mapping[str, list[str]], now: float) -> tuple[float | None, str]:
    for field in _WAITS:
        if field in said:
            delay = max_or_none(_waits(field, said, now))
            if delay is not None:
                return delay, field
    return None, ""


def _waits(field: str, said: Mapping[str, list[str]], now: float) -> Iterable[float | None]:
    values = said[field]
    if field == _RETRY_AFTER:
        return [parse_retry_after(value, now) for value in values]
    if field == _RATE_LIMIT:
        # A response with an Age was stored by a cache, and its quota is history (RFC 9111 section
        # 5.1, RateLimit draft section 7). Several lines of a List are one (RFC 9651 section 4.2).
        return () if _AGE in said else parse_rate_limit(", ".join(values))
    return [_milliseconds(value) for value in values]


def _milliseconds(value: str) -> float | None:
    """Return the seconds in "1500" or "1500.5" milliseconds, or None when it is malformed."""
    whole, point, fraction = value.partition(".")
    if not is_digits(whole) or (point and not is_digits(fraction)):
        return None
    return min(float(value) / 1000, MAX_WAIT_S)


def _verdict(said: Mapping[str, list[str]]) -> tuple[bool | None, str]:
    told: tuple[bool | None, str] = (None, "")
    for field in _VERDICTS:
        values = [value.lower() for value in said.get(field, ())]
        if "false" in values:
            return False, field
        if "true" in values and told[0] is None:
            told = (True, field)
    return told


# Structured fields (RFC 9651 section 4.2): a List of Strings with parameters. At each place one
# character decides how to go on, so that the time is linear in the length. (Possessive quantifiers
# would say so, but are faulty in Python 3.11: python/cpython issues 101955 and 106052.) They are
# compiled on first use, not on import.
_STRING = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
_BARE_ITEM = (
    r"(?:-?[0-9]{1,12}\.[0-9]{1,3}|@?-?[0-9]{1,15}"  # Decimal; Integer and Date
    rf"|{_STRING}|:[A-Za-z0-9+/=]*:|\?[01]"  # String; Byte Sequence; Boolean
    r'|%"(?:[ !#$&-~]|%[0-9a-f]{2})*"'  # Display String
    r"|[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]*)"  # Token
)
_PARAMETER = rf";\x20*([a-z*][a-z0-9_.*-]*)(?:=({_BARE_ITEM}))?"
_MEMBER = rf"{_STRING}((?:{_PARAMETER})*)"
_LIST = rf"{_MEMBER}(?:[ \t]*,[ \t]*{_MEMBER})*"


def parse_rate_limit(text: str) -> list[float]:
    """Return the `t` of each exhausted quota of a `RateLimit`; nothing when it is malformed.

    Only an exhausted quota asks for a wait: r > 0 promises nothing, but forbids nothing either.
    """
    if not re.fullmatch(_LIST, text):
        return []
    resets: list[float] = []
    for member in re.finditer(_MEMBER, text):
        # The last of two equal parameters wins (RFC 9651 section 4.2.3.2).
        given = {found[1]: found[2] for found in re.finditer(_PARAMETER, member[1])}
        remaining, reset = given.get("r"), given.get("t", "0")
        # An Integer is all digits here: every other type has a point, a quote or a letter.
        if not (remaining and remaining.isdigit() and reset and reset.isdigit()):
            return []
        if "t" in given and int(remaining) == 0:
            resets.append(float(reset))
    return resets
