"""What the trailing metadata of a gRPC call asks for: pushback (gRFC A6) and google.rpc.RetryInfo.

The rules of `tarry.core.hints` hold here too. Of protobuf, as much is read as these messages need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.hints import OWS, Hint, is_digits, max_or_none, select_fields

if TYPE_CHECKING:
    from collections.abc import Iterable

_PUSHBACK = "grpc-retry-pushback-ms"
_PUSHBACK_MAX = 2**31 - 1
_RETRY_INFO = "google.rpc.retryinfo-bin"
_STATUS_DETAILS = "grpc-status-details-bin"
_METADATA = frozenset({_PUSHBACK, _RETRY_INFO, _STATUS_DETAILS})
_RETRY_INFO_TYPE = b"/google.rpc.RetryInfo"
_MESSAGE_MAX = 65_536
"""Bytes of binary metadata that are looked at; gRPC itself allows 16 KiB for all of it."""
_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}
"""The wire types of protobuf; those of fixed size with their bytes."""
_CONTINUES = 0x80
_DURATION_MAX = 315_576_000_000
"""Seconds in the 10,000 years that google.protobuf.Duration allows."""
_NANOS = 1_000_000_000


def hint_from_grpc(metadata: Iterable[tuple[str, str | bytes]]) -> Hint | None:
    """Read what the trailing metadata of a gRPC call asks for, or None when it asks for nothing.

    A pushback wins over google.rpc.RetryInfo. Of several RetryInfo the longest delay counts.
    """
    picked = select_fields(metadata, _METADATA)
    pushbacks = [value for field, value in picked if field == _PUSHBACK]
    if pushbacks:
        return _pushback(pushbacks)
    delays = [
        (delay, field)
        for field, value in picked
        if isinstance(value, bytes) and (delay := _retry_delay(field, value)) is not None
    ]
    if not delays:
        return None
    delay, source = max(delays)
    return Hint(delay, source=source)


def _pushback(values: list[str | bytes]) -> Hint:
    """Obey to the letter: a signed 32-bit number of milliseconds, and anything else means never.

    Two values mean never as well: the server has not said one thing (grpc-go reads it so too).
    """
    value = values[0]
    text = (value.decode("latin-1") if isinstance(value, bytes) else value).strip(OWS)
    digits = text.removeprefix("-")
    if len(values) == 1 and is_digits(digits):
        # float, not int, which refuses more than 4,300 digits; it is exact in this range.
        milliseconds = float(text)
        if 0 <= milliseconds <= _PUSHBACK_MAX:
            return Hint(abs(milliseconds) / 1000, exact=True, source=_PUSHBACK)
    return Hint(should_retry=False, source=_PUSHBACK)


def _retry_delay(field: str, data: bytes) -> float | None:
    """Return the longest delay of the RetryInfo in `data`, or None when there is none to be read.

    google.rpc.Status holds its details as Any in field 3; Any has a type URL and a value.
    """
    if len(data) > _MESSAGE_MAX:
        return None
    if field == _RETRY_INFO:
        return _duration(data)
    try:
        details = [_decode(detail)[1] for detail in _decode(data)[1].get(3, ())]
    except (LookupError, ValueError):
        return None
    # The host before the slash is free (any.proto); the last of two values wins.
    return max_or_none(
        _duration(packed.get(2, [b""])[-1])
        for packed in details
        if packed.get(1, [b""])[-1].endswith(_RETRY_INFO_TYPE)
    )


def _duration(data: bytes) -> float | None:
    """Return the seconds of RetryInfo.retry_delay, or None when it has none within the range."""
    try:
        # Parts of one message merge, and joining their bytes is how protobuf defines that.
        numbers = _decode(b"".join(_decode(data)[1][1]))[0]
    except (LookupError, ValueError):
        return None
    seconds, nanos = numbers.get(1, 0), numbers.get(2, 0)
    # Negative numbers have their 64th bit set, so that they are out of range here as well.
    if seconds > _DURATION_MAX or nanos >= _NANOS:
        return None
    return seconds + nanos / _NANOS


def _decode(data: bytes) -> tuple[dict[int, int], dict[int, list[bytes]]]:
    """Return the varints and the length-delimited fields of a protobuf message, by number.

    Fixed-size fields are skipped: none of the messages here has one. Groups, which proto3 does not
    have, and whatever leaves the bounds of `data` raise ValueError or LookupError.
    """
    numbers: dict[int, int] = {}
    blobs: dict[int, list[bytes]] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        field, wire_type = divmod(tag, 8)
        if field == 0:
            raise ValueError(tag)
        if wire_type == _VARINT:
            numbers[field], at = _varint(data, at)
            continue
        size, at = _varint(data, at) if wire_type == _BYTES else (_FIXED[wire_type], at)
        if size > len(data) - at:
            raise ValueError(tag)
        if wire_type == _BYTES:
            blobs.setdefault(field, []).append(data[at : at + size])
        at += size
    return numbers, blobs


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, of 10 bytes at most, and the place after it."""
    value = 0
    for index in range(10):
        byte = data[at + index]
        value |= (byte % _CONTINUES) << (7 * index)
        if byte < _CONTINUES:
            return value, at + index + 1
    raise ValueError(at)
