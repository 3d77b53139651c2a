"""Server hints: whether and when to retry, parsed from HTTP headers or gRPC metadata into a `Hint`.

* No public function raises, whatever a server sends. A malformed hint is ignored, except that a
  malformed gRPC pushback means "do not retry" (gRFC A6).
* A delay above `MAX_DELAY_S`, even an infinite one, becomes `MAX_DELAY_S`. That still exceeds any
  usual `max_hint` (the longest delay that a policy accepts from a server), so the call ends.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from tarry.core.checks import check_at_least, to_seconds
from tarry.core.values import ImmutableValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tarry.core.checks import Seconds

MAX_DELAY_S = 1e15
"""About 30 million years; in milliseconds it still fits into 64 bits."""

OWS = " \t"
"""Optional white space around a header value (RFC 9110 section 5.6.3)."""

_RETRY_AFTER = "retry-after"
_RATE_LIMIT = "ratelimit"
_AGE = "age"
# The first valid field in this order is used. The most precise fields come first, and Retry-After
# precedes RateLimit as section 6 of the RateLimit draft says.
_MILLISECOND_FIELDS = ("retry-after-ms", "x-ms-retry-after-ms", "x-amz-retry-after")
# The older fields for quotas: each has the time at which its quota is reset, and a field with the
# number of requests that are left. Symfony sends X-RateLimit-Retry-After instead of a reset.
_REMAINING_FIELDS = {
    "x-ratelimit-retry-after": "x-ratelimit-remaining",
    "ratelimit-reset": "ratelimit-remaining",
    "x-ratelimit-reset": "x-ratelimit-remaining",
    "x-rate-limit-reset": "x-rate-limit-remaining",
}
_DELAY_FIELDS = (*_MILLISECOND_FIELDS, _RETRY_AFTER, _RATE_LIMIT, *_REMAINING_FIELDS)
_SHOULD_RETRY_FIELDS = ("x-should-retry", "stripe-should-retry")
_HTTP_FIELDS = frozenset({
    *_DELAY_FIELDS, *_REMAINING_FIELDS.values(), *_SHOULD_RETRY_FIELDS, _AGE,
})  # fmt: skip
_MIN_EPOCH_S = 1e8
"""The smallest reset time in epoch seconds: 3 March 1973. A smaller number is a delay in seconds.
No quota has a delay of this length, which is three years."""
_MIN_EPOCH_MS = 1e11
"""The smallest reset time in epoch milliseconds: also 3 March 1973. As epoch seconds, the number
would be in the year 5138."""

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


class Hint(ImmutableValue):
    """Whether and when the server wants the next attempt, from Retry-After, gRPC pushback etc."""

    __match_args__ = _fields = ("delay", "should_retry", "exact", "source")
    __slots__ = _fields

    delay: float | None
    """The shortest delay in seconds; None when the server asks for no delay."""
    should_retry: bool | None
    """Whether to retry at all, whatever the status is; None when the server does not say."""
    exact: bool
    """Whether to wait exactly `delay` and then start backoff over (gRPC pushback)."""
    source: str
    """The names of the header or metadata fields that contain the hint, for logs."""

    def __init__(
        self,
        delay: Seconds | None = None,
        should_retry: bool | None = None,  # noqa: FBT001
        exact: bool = False,  # noqa: FBT001, FBT002
        source: str = "",
    ) -> None:
        checked = None if delay is None else check_at_least("delay", to_seconds(delay), 0)
        self._set_fields(checked, should_retry, exact, source)


def parse_retry_after(value: str, now: float) -> float | None:
    """Return the delay in seconds of a `Retry-After` value, or None when it is malformed.

    `value` is a number of seconds or one of the three HTTP date formats (RFC 9110 sections 10.2.3
    and 5.6.7); `now` is in epoch seconds. A date in the past gives 0.0. More than `MAX_DELAY_S`
    seconds give `MAX_DELAY_S`. A number may have a decimal fraction, which the RFC does not allow
    but Shopify sends. In a date, UTC and +0000 mean the same as GMT, the day may have one
    digit, and a wrong weekday is ignored.
    """
    value = value.strip(OWS)
    seconds = _parse_decimal(value)
    if seconds is not None:
        return min(seconds, MAX_DELAY_S)
    date = parse_http_date(value, now)
    return None if date is None else min(max(0.0, float(date - now)), MAX_DELAY_S)


def hint_from_headers(
    headers: Mapping[str, str] | Iterable[tuple[str, str]], now: float
) -> Hint | None:
    """Return the hint in the headers of an HTTP response, or None when there is none.

    `headers` is a mapping or an iterable of pairs; the case of names does not matter. The delay
    comes from the first valid field among `retry-after-ms`, `x-ms-retry-after-ms`,
    `x-amz-retry-after`, `Retry-After`, `RateLimit`, `X-RateLimit-Retry-After`, `RateLimit-Reset`,
    `X-RateLimit-Reset` and `X-Rate-Limit-Reset`. The last four are ignored if the corresponding
    field `...-Remaining` says that requests are left. `x-should-retry` and `stripe-should-retry`
    are read in addition.

    Only `RateLimit` may occur twice (RFC 9110 section 5.3). When another field occurs twice, the
    longest valid delay and "do not retry" win. Pass pairs when the HTTP client has them, because a
    mapping that joins repeated fields with commas makes them malformed.
    """
    items = getattr(headers, "items", None)
    pairs = headers if items is None else items()
    values_by_field: dict[str, list[str]] = {}
    for field, value in select_fields(cast("Iterable[tuple[object, object]]", pairs), _HTTP_FIELDS):
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
    """Return (lower-case name, value) for each name in `fields` whose value is text or bytes."""
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


def max_or_none(delays: Iterable[float | None]) -> float | None:
    """Return the longest delay that is not None, or None when there is none."""
    return max([delay for delay in delays if delay is not None], default=None)


def _find_delay(values_by_field: Mapping[str, list[str]], now: float) -> tuple[float | None, str]:
    """Return the longest delay of the first field with a valid value, and the field's name."""
    for field in _DELAY_FIELDS:
        values = values_by_field.get(field, ())
        delays: Iterable[float | None] = ()
        if field == _RETRY_AFTER:
            delays = [parse_retry_after(value, now) for value in values]
        elif field in _MILLISECOND_FIELDS:
            delays = map(_parse_milliseconds, values)
        elif _AGE in values_by_field:
            # A response with an Age comes from a cache, and its quota is outdated (RFC 9111 section
            # 5.1, RateLimit draft section 7).
            continue
        elif field == _RATE_LIMIT:
            # Repeated List fields are joined (RFC 9651 section 4.2).
            delays = parse_rate_limit(", ".join(values))
        else:
            remaining = values_by_field.get(_REMAINING_FIELDS[field])
            # Many APIs send these fields with every response. As long as requests are left, the
            # reset says nothing about a failure such as a 503.
            if not remaining or not all(map(_parse_decimal, remaining)):
                delays = [_parse_reset(value, now) for value in values]
        delay = max_or_none(delays)
        if delay is not None:
            return delay, field
    return None, ""


def _parse_decimal(value: str) -> float | None:
    """Return the number for "1500" or "1500.5", or None when it is malformed."""
    whole, point, fraction = value.partition(".")
    if not is_digits(whole) or (point and not is_digits(fraction)):
        return None
    # float, because int rejects more than 4,300 digits and is slow for fewer digits.
    return float(value)


def _parse_milliseconds(value: str) -> float | None:
    """Return the seconds for "1500" or "1500.5" milliseconds, or None when it is malformed."""
    number = _parse_decimal(value)
    return None if number is None else min(number / 1000, MAX_DELAY_S)


def _parse_reset(value: str, now: float) -> float | None:
    """Return the delay in seconds until a quota is reset, or None when the value is malformed.

    APIs send a delay in seconds (Reddit), epoch seconds (GitHub, GitLab, Okta, Symfony) or epoch
    milliseconds (OpenRouter). The size of the number shows which of them it is.
    """
    number = _parse_decimal(value)
    if number is None:
        return None
    if number >= _MIN_EPOCH_S:
        number = number / 1000 - now if number >= _MIN_EPOCH_MS else number - now
    return min(max(0.0, number), MAX_DELAY_S)


def _find_should_retry(values_by_field: Mapping[str, list[str]]) -> tuple[bool | None, str]:
    """Return whether the server wants a retry, and the field that says so; "false" wins."""
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

    A malformed value gives an empty list. A quota with requests left (r > 0) requires no delay.
    """
    if not re.fullmatch(_LIST, text):
        return []
    resets: list[float] = []
    for member in re.finditer(_MEMBER, text):
        # The last of two equal parameters wins (RFC 9651 section 4.2.3.2).
        parameters = {match[1]: match[2] for match in re.finditer(_PARAMETER, member[1])}
        remaining, reset = parameters.get("r"), parameters.get("t", "0")
        # Only an Integer consists of digits alone; each other type has some other character.
        if not (remaining and remaining.isdigit() and reset and reset.isdigit()):
            return []
        if "t" in parameters and int(remaining) == 0:
            resets.append(float(reset))
    return resets


# HTTP dates have three formats (RFC 9110 section 5.6.7).
# The parser applies the grammar strictly: case, single spaces, number of digits. Exceptions
# are "UTC" or "+0000" for "GMT", and a day with one digit, which some servers send. `datetime` is
# not used, because it rejects second 60 and year 0, which the grammar allows, and takes longer to
# import than this module.
_MONTH_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTHS = {name: number for number, name in enumerate(_MONTH_NAMES, start=1)}
_DAY_NAMES = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# The name of the day identifies the format: "Sun," is IMF-fixdate, "Sunday," RFC 850, "Sun" asctime
_IMF_DAYS = frozenset(f"{name[:3]}," for name in _DAY_NAMES)
_RFC850_DAYS = frozenset(f"{name}," for name in _DAY_NAMES)
_ASCTIME_DAYS = frozenset(name[:3] for name in _DAY_NAMES)
_DAY_S = 86_400
_MEAN_YEAR_S = 31_556_952
"""Seconds in a Gregorian year, averaged over 400 years."""
_MAX_YEARS_AHEAD = 50
"""A date with a two-digit year that would be further ahead is in the past (RFC 9110, 5.6.7)."""


def parse_http_date(text: str, now: float) -> int | None:
    """Return the epoch seconds of an HTTP date, or None when `text` is not one.

    The weekday must be present but may be wrong: the RFC asks recipients to be robust, and the date
    itself is complete without it. A day that does not exist (30 Feb) gives None.
    """
    try:
        # With an extra space or a tab the parts match no case.
        match text.split(" "):
            case [name, day, month, year, clock, "GMT" | "UTC" | "+0000"] if name in _IMF_DAYS:
                year_digits, day_digits = 4, 1 if len(day) == 1 else 2
            case [name, date, clock, "GMT" | "UTC" | "+0000"] if name in _RFC850_DAYS:
                day, month, year = date.split("-")
                year_digits, day_digits = 2, 1 if len(day) == 1 else 2
            # asctime pads a short day with a space, which leaves an empty part here.
            case [name, month, "", day, clock, year] if name in _ASCTIME_DAYS:
                year_digits, day_digits = 4, 1
            case [name, month, day, clock, year] if name in _ASCTIME_DAYS:
                year_digits, day_digits = 4, 2
            case _:
                return None
        month_day_second = _MONTHS[month], _parse_digits(day, day_digits), _parse_time_of_day(clock)
        year_number = _parse_digits(year, year_digits)
        if year_digits == 2:  # noqa: PLR2004 - as in RFC 850
            year_number = _full_year(year_number, *month_day_second, now)
        return _epoch_seconds(year_number, *month_day_second)
    except (KeyError, ValueError):
        return None


def _full_year(two_digits: int, month: int, day: int, second_of_day: int, now: float) -> int:
    """Return the latest year with these digits in which the date is at most 50 years ahead."""
    # The year computed from the mean length can be one too low around New Year, so 1 is added.
    latest = 1970 + int(now // _MEAN_YEAR_S) + _MAX_YEARS_AHEAD + 1
    year = latest - (latest - two_digits) % 100
    day_50_years_before = _days_since_1970(year - _MAX_YEARS_AHEAD, month, day)
    is_too_late = day_50_years_before * _DAY_S + second_of_day > now
    return year - 100 if is_too_late else year


def _epoch_seconds(year: int, month: int, day: int, second_of_day: int) -> int:
    month_start = _days_since_1970(year, month, 1)
    next_month_start = _days_since_1970(year + month // 12, month % 12 + 1, 1)
    if day not in range(1, next_month_start - month_start + 1):
        raise ValueError(day)
    return (month_start + day - 1) * _DAY_S + second_of_day


def _days_since_1970(year: int, month: int, day: int) -> int:
    """Return the days since 1 January 1970."""
    # Years start on 1 March here, so that a leap day is the last day of its year.
    if month in {1, 2}:
        year -= 1
    leap_days = year // 4 - year // 100 + year // 400
    # Five months from March on have 153 days: 31, 30, 31, 30, 31.
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return 365 * year + leap_days + day_of_year - 719_468  # days from 1 March 0000 to 1970


def _parse_time_of_day(text: str) -> int:
    """Return the seconds since midnight for "08:49:37".

    Second 60 is a leap second. Unix time has none, so it counts as the following second.
    """
    hour, minute, second = (_parse_digits(part, 2) for part in text.split(":"))
    if hour not in range(24) or minute not in range(60) or second not in range(61):
        raise ValueError(text)
    return (hour * 60 + minute) * 60 + second


def _parse_digits(text: str, width: int) -> int:
    if len(text) != width or not is_digits(text):  # int alone accepts signs and underscores
        raise ValueError(text)
    return int(text)


# Metadata of gRPC: pushback (gRFC A6) and google.rpc.RetryInfo
_PUSHBACK = "grpc-retry-pushback-ms"
_MAX_PUSHBACK_MS = 2**31 - 1
_RETRY_INFO = "google.rpc.retryinfo-bin"
_STATUS_DETAILS = "grpc-status-details-bin"
_GRPC_FIELDS = frozenset({_PUSHBACK, _RETRY_INFO, _STATUS_DETAILS})
_RETRY_INFO_TYPE = b"/google.rpc.RetryInfo"
_MAX_MESSAGE_BYTES = 65_536
"""Larger binary metadata is ignored; gRPC itself allows 16 KiB for all metadata."""
_VARINT, _LENGTH_DELIMITED, _FIXED_SIZES = 0, 2, {1: 8, 5: 4}
"""The wire types of protobuf; `_FIXED_SIZES` maps types of fixed size to numbers of bytes."""
_CONTINUATION_BIT = 0x80
_MAX_DURATION_S = 315_576_000_000
"""The limit of google.protobuf.Duration in seconds: 10,000 years."""
_NANOS_PER_S = 1_000_000_000


def hint_from_grpc(metadata: Iterable[tuple[str, str | bytes]]) -> Hint | None:
    """Return the hint in the trailing metadata of a gRPC call, or None when there is none.

    A pushback wins over google.rpc.RetryInfo. Of several RetryInfo, the longest delay is used.
    """
    entries = select_fields(metadata, _GRPC_FIELDS)
    pushbacks = [value for field, value in entries if field == _PUSHBACK]
    if pushbacks:
        return _parse_pushback(pushbacks)
    delays = [
        (delay, field)
        for field, value in entries
        if isinstance(value, bytes) and (delay := _longest_retry_delay(field, value)) is not None
    ]
    if not delays:
        return None
    delay, source = max(delays)
    return Hint(delay, source=source)


def _parse_pushback(values: list[str | bytes]) -> Hint:
    """Return the hint of a pushback, which is a signed 32-bit number of milliseconds.

    A negative number, any other text, or two values mean "do not retry", as in grpc-go.
    """
    value = values[0]
    text = (value.decode("latin-1") if isinstance(value, bytes) else value).strip(OWS)
    digits = text.removeprefix("-")
    if len(values) == 1 and is_digits(digits):
        # float, because int rejects more than 4,300 digits; a float is exact in this range.
        milliseconds = float(text)
        if 0 <= milliseconds <= _MAX_PUSHBACK_MS:
            # abs, because "-0" gives -0.0.
            return Hint(abs(milliseconds) / 1000, exact=True, source=_PUSHBACK)
    return Hint(should_retry=False, source=_PUSHBACK)


def _longest_retry_delay(field: str, data: bytes) -> float | None:
    """Return the longest delay of the RetryInfo messages in `data`, or None if none is valid.

    google.rpc.Status has its details in field 3, each an Any with a type URL and a value.
    """
    if len(data) > _MAX_MESSAGE_BYTES:
        return None
    if field == _RETRY_INFO:
        return _decode_retry_info(data)
    try:
        details = [_decode(detail)[1] for detail in _decode(data)[1].get(3, ())]
    except (LookupError, ValueError):
        return None
    # The host in a type URL can be anything (any.proto). The last value of a field wins.
    return max_or_none(
        _decode_retry_info(detail.get(2, [b""])[-1])
        for detail in details
        if detail.get(1, [b""])[-1].endswith(_RETRY_INFO_TYPE)
    )


def _decode_retry_info(data: bytes) -> float | None:
    """Return the seconds of RetryInfo.retry_delay, or None when it is missing or out of range."""
    try:
        # Protobuf merges a message that occurs twice, which is the same as joining the bytes.
        numbers = _decode(b"".join(_decode(data)[1][1]))[0]
    except (LookupError, ValueError):
        return None
    seconds, nanos = numbers.get(1, 0), numbers.get(2, 0)
    # Negative numbers have the highest of 64 bits set, so they are out of range here as well.
    if seconds > _MAX_DURATION_S or nanos >= _NANOS_PER_S:
        return None
    return seconds + nanos / _NANOS_PER_S


def _decode(data: bytes) -> tuple[dict[int, int], dict[int, list[bytes]]]:
    """Return two dicts by field number: the varints and the length-delimited fields of a message.

    Fixed-size fields are skipped, because none of the messages here has one. Groups, which proto3
    does not have, and lengths beyond the end of `data` raise ValueError or LookupError.
    """
    numbers: dict[int, int] = {}
    blobs: dict[int, list[bytes]] = {}
    offset = 0
    while offset < len(data):
        tag, offset = _decode_varint(data, offset)
        field, wire_type = divmod(tag, 8)
        if field == 0:
            raise ValueError(tag)
        if wire_type == _VARINT:
            numbers[field], offset = _decode_varint(data, offset)
            continue
        size, offset = (
            _decode_varint(data, offset)
            if wire_type == _LENGTH_DELIMITED
            else (_FIXED_SIZES[wire_type], offset)
        )
        if size > len(data) - offset:
            raise ValueError(tag)
        if wire_type == _LENGTH_DELIMITED:
            blobs.setdefault(field, []).append(data[offset : offset + size])
        offset += size
    return numbers, blobs


def _decode_varint(data: bytes, offset: int) -> tuple[int, int]:
    """Return the varint of at most 10 bytes at `offset`, and the offset after it."""
    value = 0
    for index in range(10):
        byte = data[offset + index]
        value |= (byte % _CONTINUATION_BIT) << (7 * index)
        if byte < _CONTINUATION_BIT:
            return value, offset + index + 1
    raise ValueError(offset)
