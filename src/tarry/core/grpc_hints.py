"""Server hints in the trailing metadata of a gRPC call: pushback (gRFC A6), google.rpc.RetryInfo.

The rules of `tarry.core.hints` apply. The protobuf decoder reads only what these messages need.
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
"""Larger binary metadata, in bytes, is ignored; gRPC itself allows 16 KiB for all metadata."""
_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}
"""The wire types of protobuf; for types of fixed size, type and number of bytes."""
_CONTINUATION_BIT = 0x80
_DURATION_MAX = 315_576_000_000
"""The limit of google.protobuf.Duration in seconds: 10,000 years."""
_NANOS = 1_000_000_000


def hint_from_grpc(metadata: Iterable[tuple[str, str | bytes]]) -> Hint | None:
    """Return the hint in the trailing metadata of a gRPC call, or None when there is none.

    A pushback wins over google.rpc.RetryInfo. Of several RetryInfo the longest delay is used.
    """
    entries = select_fields(metadata, _METADATA)
    pushbacks = [value for field, value in entries if field == _PUSHBACK]
    if pushbacks:
        return _parse_pushback(pushbacks)
    delays = [
        (delay, field)
        for field, value in entries
        if isinstance(value, bytes) and (delay := _retry_delay(field, value)) is not None
    ]
    if not delays:
        return None
    delay, source = max(delays)
    return Hint(delay, source=source)


def _parse_pushback(values: list[str | bytes]) -> Hint:
    """Return the hint of a pushback: a signed 32-bit number of milliseconds.

    Anything else means "do not retry", and so do two values, as in grpc-go.
    """
    value = values[0]
    text = (value.decode("latin-1") if isinstance(value, bytes) else value).strip(OWS)
    digits = text.removeprefix("-")
    if len(values) == 1 and is_digits(digits):
        # float, because int refuses more than 4,300 digits; it is exact in this range.
        milliseconds = float(text)
        if 0 <= milliseconds <= _PUSHBACK_MAX:
            return Hint(abs(milliseconds) / 1000, exact=True, source=_PUSHBACK)
    return Hint(should_retry=False, source=_PUSHBACK)


def _retry_delay(field: str, data: bytes) -> float | None:
    """Return the longest delay of the RetryInfo messages in `data`, or None without a valid one.

    google.rpc.Status has its details in field 3, each an Any with a type URL and a value.
    """
    if len(data) > _MESSAGE_MAX:
        return None
    if field == _RETRY_INFO:
        return _duration(data)
    try:
        details = [_decode(detail)[1] for detail in _decode(data)[1].get(3, ())]
    except (LookupError, ValueError):
        return None
    # The host before the slash can be anything (any.proto); the last of two values wins.
    return max_or_none(
        _duration(packed.get(2, [b""])[-1])
        for packed in details
        if packed.get(1, [b""])[-1].endswith(_RETRY_INFO_TYPE)
    )


def _duration(data: bytes) -> float | None:
    """Return the seconds of RetryInfo.retry_delay, or None when it is missing or out of range."""
    try:
        # Repeated parts of one message are merged, which protobuf defines as joining their bytes.
        numbers = _decode(b"".join(_decode(data)[1][1]))[0]
    except (LookupError, ValueError):
        return None
    seconds, nanos = numbers.get(1, 0), numbers.get(2, 0)
    # Negative numbers have bit 64 set, so they are out of range here as well.
    if seconds > _DURATION_MAX or nanos >= _NANOS:
        return None
    return seconds + nanos / _NANOS


def _decode(data: bytes) -> tuple[dict[int, int], dict[int, list[bytes]]]:
    """Return the varints and the length-delimited fields of a protobuf message, by number.

    Fixed-size fields are skipped, because none of the messages here has one. Groups, which proto3
    does not have, and lengths beyond the end of `data` raise ValueError or LookupError.
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
    """Return the varint at offset `at`, of at most 10 bytes, and the offset after it."""
    value = 0
    for index in range(10):
        byte = data[at + index]
        value |= (byte % _CONTINUATION_BIT) << (7 * index)
        if byte < _CONTINUATION_BIT:
            return value, at + index + 1
    raise ValueError(at)
