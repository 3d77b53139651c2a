"""Server hints in the trailing metadata of a gRPC call: pushback (gRFC A6), google.rpc.RetryInfo.

The rules of `tarry.core.hints` apply. The protobuf decoder reads only what these messages need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.hints import OWS, Hint, is_digits, max_or_none, select_fields

if TYPE_CHECKING:
    from collections.abc import Iterable

_PUSHBACK = "grpc-retry-pushback-ms"
_MAX_PUSHBACK_MS = 2**31 - 1
_RETRY_INFO = "google.rpc.retryinfo-bin"
_STATUS_DETAILS = "grpc-status-details-bin"
_HINT_FIELDS = frozenset({_PUSHBACK, _RETRY_INFO, _STATUS_DETAILS})
_RETRY_INFO_TYPE = b"/google.rpc.RetryInfo"
_MAX_MESSAGE_BYTES = 65_536
"""Larger binary metadata, in bytes, is ignored; gRPC itself allows 16 KiB for all metadata."""
_VARINT, _LENGTH_DELIMITED, _FIXED_SIZES = 0, 2, {1: 8, 5: 4}
"""The wire types of protobuf; `_FIXED_SIZES` maps types of fixed size to numbers of bytes."""
_CONTINUATION_BIT = 0x80
_MAX_DURATION_S = 315_576_000_000
"""The limit of google.protobuf.Duration in seconds: 10,000 years."""
_NANOS_PER_S = 1_000_000_000


def hint_from_grpc(metadata: Iterable[tuple[str, str | bytes]]) -> Hint | None:
    """Return the hint in the trailing metadata of a gRPC call, or None when there is none.

    A pushback wins over google.rpc.RetryInfo. The longest delay of several RetryInfo is used.
    """
    entries = select_fields(metadata, _HINT_FIELDS)
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
    # The host before the slash can be anything (any.proto). The last value of a field wins.
    return max_or_none(
        _decode_retry_info(packed.get(2, [b""])[-1])
        for packed in details
        if packed.get(1, [b""])[-1].endswith(_RETRY_INFO_TYPE)
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
