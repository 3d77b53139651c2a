"""Server hints: whether and when to retry, parsed from HTTP header fields into a `Hint`.

Rules of this module and of `tarry.core.grpc_hints`:

* The functions are pure. `now` (epoch seconds) is an argument, used only to turn dates into waits.
* No function raises, whatever a server sends. A malformed hint is ignored, except that a malformed
  gRPC pushback means "do not retry" (gRFC A6).
* A wait of more than `MAX_WAIT_S`, even an infinite one, becomes `MAX_WAIT_S`. It still exceeds any
  `max_hint`, and so ends the call. Shorter waits are not changed.
* `tarry.core.decide` decides what a hint means for a call.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, cast

from tarry.core.http_date import parse_http_date

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_WAIT_S = 1e15
"""About 30 million years; in milliseconds it still fits into 64 bits."""

OWS = " \t"
"""Optional white space around a header value (RFC 9110 section 5.6.3)."""

_RETRY_AFTER = "retry-after"
_RATE_LIMIT = "ratelimit"
_AGE = "age"
# The first valid field in this order is used. The most precise fields come first, and Retry-After
# precedes RateLimit as section 6 of the RateLimit draft says. The first three are in milliseconds.
_WAIT_FIELDS = (
    "retry-after-ms",
    "x-ms-retry-after-ms",
    "x-amz-retry-after",
    _RETRY_AFTER,
    _RATE_LIMIT,
)
_SHOULD_RETRY_FIELDS = ("x-should-retry", "stripe-should-retry")
_ALL_FIELDS = frozenset({*_WAIT_FIELDS, *_SHOULD_RETRY_FIELDS, _AGE})

# The grammar of `RateLimit` (draft-ietf-httpapi-ratelimit-headers) is a List of Strings with
# parameters in the sense of structured fields (RFC 9651 section 4.2). At each position one
# character decides which alternative matches, so that matching takes linear time. Possessive
# quantifiers would guarantee that, but are faulty in Python 3.11 (python/cpython issues 101955 and
# 106052). The patterns are compiled on first use, not on import.
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


class Hint(NamedTuple):
    """The request of a server to its clients about retries."""

    delay: float | None = None
    """The shortest wait in seconds from now."""
    should_retry: bool | None = None
    """Whether to retry, according to the server; overrides the list of retryable statuses."""
    exact: bool = False
    """Whether to wait exactly `delay` and then start backoff over (gRPC pushback)."""
    source: str = ""
    """The names of the header fields, for logs."""


def parse_retry_after(value: str, now: float) -> float | None:
    """Return the seconds to wait for a `Retry-After` value, or None when it is malformed.

    `value` is a number of seconds or one of the three HTTP date formats (RFC 9110 sections 10.2.3
    and 5.6.7); `now` is in epoch seconds. A date in the past gives 0.0. More than `MAX_WAIT_S`
    seconds give `MAX_WAIT_S`. A wrong weekday in a date is ignored.
    """
    value = value.strip(OWS)
    if is_digits(value):
        # float, because int rejects more than 4,300 digits and is slow for fewer digits.
        return min(float(value), MAX_WAIT_S)
    date = parse_http_date(value, now)
    return None if date is None else min(max(0.0, float(date - now)), MAX_WAIT_S)


def hint_from_headers(
    headers: Mapping[str, str] | Iterable[tuple[str, str]], now: float
) -> Hint | None:
    """Return the hint in the headers of an HTTP response, or None when there is none.

    `headers` is a mapping or an iterable of pairs; the case of names does not matter. The wait
    comes from the first valid field among `retry-after-ms`, `x-ms-retry-after-ms`,
    `x-amz-retry-after`, `Retry-After` and `RateLimit`. `x-should-retry` and `stripe-should-retry`
    are read in addition.

    Only `RateLimit` may occur twice (RFC 9110 section 5.3). When another field occurs twice, the
    longest valid wait and "do not retry" win. Pass pairs when the HTTP client has them, because a
    mapping that joins repeated fields with commas makes them malformed.
    """
    items = getattr(headers, "items", None)
    pairs = headers if items is None else items()
    values_by_field: dict[str, list[str]] = {}
    for field, value in select_fields(cast("Iterable[tuple[object, object]]", pairs), _ALL_FIELDS):
        if isinstance(value, str):
            values_by_field.setdefault(field, []).append(value.strip(OWS))
    if not values_by_field:
        return None
    delay, delay_field = _find_delay(values_by_field, now)
    should_retry, should_retry_field = _find_should_retry(values_by_field)
    if should_retry is None:
        return None if delay is None else Hint(delay, source=delay_field)
    source = should_retry_field if delay is None else f"{delay_field}, {should_retry_field}"
    return Hint(delay, should_retry, source=source)


def select_fields(
    pairs: Iterable[tuple[object, object]], fields: frozenset[str]
) -> list[tuple[str, str | bytes]]:
    """Return the pairs of strings or bytes whose lower-case name is in `fields`."""
    return [
        (field, value)
        for name, value in pairs
        if isinstance(name, str)
        and (field := name.lower()) in fields
        and isinstance(value, (str, bytes))
    ]


def is_digits(text: str) -> bool:
    """Return whether the text consists of ASCII digits."""
    # isdigit alone accepts the digits of every script.
    return text.isascii() and text.isdigit()


def max_or_none(waits: Iterable[float | None]) -> float | None:
    """Return the longest wait, or None when there is none."""
    return max([wait for wait in waits if wait is not None], default=None)


def _find_delay(values_by_field: Mapping[str, list[str]], now: float) -> tuple[float | None, str]:
    """Return the longest wait of the first field with a valid value, and the field."""
    for field in _WAIT_FIELDS:
        if field in values_by_field:
            delay = max_or_none(_parse_waits(field, values_by_field, now))
            if delay is not None:
                return delay, field
    return None, ""


def _parse_waits(
    field: str, values_by_field: Mapping[str, list[str]], now: float
) -> Iterable[float | None]:
    values = values_by_field[field]
    if field == _RETRY_AFTER:
        return [parse_retry_after(value, now) for value in values]
    if field == _RATE_LIMIT:
        # A response with an Age comes from a cache, and its quota is outdated (RFC 9111 section
        # 5.1, RateLimit draft section 7). Repeated List fields are joined (RFC 9651 section 4.2).
        return () if _AGE in values_by_field else parse_rate_limit(", ".join(values))
    return [_parse_milliseconds(value) for value in values]


def _parse_milliseconds(value: str) -> float | None:
    """Return the seconds for "1500" or "1500.5" milliseconds, or None when it is malformed."""
    whole, point, fraction = value.partition(".")
    if not is_digits(whole) or (point and not is_digits(fraction)):
        return None
    return min(float(value) / 1000, MAX_WAIT_S)


def _find_should_retry(values_by_field: Mapping[str, list[str]]) -> tuple[bool | None, str]:
    """Return whether the server wants a retry, and the field that says so; False wins."""
    result: tuple[bool | None, str] = (None, "")
    for field in _SHOULD_RETRY_FIELDS:
        values = [value.lower() for value in values_by_field.get(field, ())]
        if "false" in values:
            return False, field
        if "true" in values and result[0] is None:
            result = (True, field)
    return result


def parse_rate_limit(text: str) -> list[float]:
    """Return the reset time `t` of each exhausted quota of a `RateLimit` value, in seconds.

    A malformed value gives an empty list. A quota with remaining requests (r > 0) requires no wait.
    """
    if not re.fullmatch(_LIST, text):
        return []
    resets: list[float] = []
    for member in re.finditer(_MEMBER, text):
        # The last of two equal parameters wins (RFC 9651 section 4.2.3.2).
        parameters = {match[1]: match[2] for match in re.finditer(_PARAMETER, member[1])}
        remaining, reset = parameters.get("r"), parameters.get("t", "0")
        # Only an Integer consists of digits: other types have a point, a quote or a letter.
        if not (remaining and remaining.isdigit() and reset and reset.isdigit()):
            return []
        if "t" in parameters and int(remaining) == 0:
            resets.append(float(reset))
    return resets
