"""Tests for hints in well-formed, malformed and hostile gRPC metadata."""

from __future__ import annotations

from math import isfinite
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.hints import Hint, hint_from_grpc
from tests.core.header_strategies import texts

# --- pushback ------------------------------------------------------------------------------------

PUSHBACK = "grpc-retry-pushback-ms"
DO_NOT_RETRY = Hint(should_retry=False, source=PUSHBACK)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(("0", 0.0), ("-0", 0.0), ("1", 0.001), ("1500", 1.5), ("00010", 0.01), (" 10 ", 0.01)),
        ("2147483647", 2_147_483.647),
    ],
)
def test_pushback(value: str, expected: float) -> None:
    """A number that is not negative, as str or as bytes, is an exact delay."""
    hint = Hint(expected, exact=True, source=PUSHBACK)
    assert [hint] * 2 == [hint_from_grpc([(PUSHBACK, data)]) for data in (value, value.encode())]


@pytest.mark.parametrize(
    "value",
    [
        *("-1", "-2147483648", "2147483648", "", " ", "-", "--1"),
        *("+5", "1.5", "1e3", "1_000", "0x10", "soon", "inf", "nan", "5ms", "1 0", "\u0661", "5\n"),
    ],
)
def test_pushback_that_forbids_a_retry(value: str) -> None:
    """A negative, too large or malformed pushback means that the call is not retried (gRFC A6)."""
    hints = [hint_from_grpc([(PUSHBACK, data)]) for data in (value, value.encode())]
    assert [DO_NOT_RETRY] * 2 == hints


def test_pushback_of_any_length() -> None:
    """A number with more digits than int() accepts is out of range."""
    values = ["9" * 400, "9" * 5_000, "-" + "9" * 5_000]
    assert [DO_NOT_RETRY] * 3 == [hint_from_grpc([(PUSHBACK, value)]) for value in values]


def test_pushback_twice() -> None:
    """Two pushbacks mean that the call is not retried, even if they are equal."""
    assert DO_NOT_RETRY == hint_from_grpc([(PUSHBACK, "5"), (PUSHBACK, "5")])


def test_metadata_without_a_hint() -> None:
    """Metadata with other keys or other types gives None."""
    other_types: list[tuple[object, object]] = [(PUSHBACK, None), (None, "5"), (b"x", b"y")]
    assert None is hint_from_grpc([])
    assert None is hint_from_grpc([("grpc-status", "14"), ("grpc-previous-rpc-attempts", "1")])
    assert None is hint_from_grpc(cast("list[tuple[str, str]]", other_types))


def test_metadata_keys_in_any_case() -> None:
    expected = Hint(0.005, exact=True, source=PUSHBACK)
    assert expected == hint_from_grpc([("Grpc-Retry-Pushback-Ms", "5")])


# --- google.rpc.RetryInfo ------------------------------------------------------------------------

RETRY_INFO = "google.rpc.retryinfo-bin"
DETAILS = "grpc-status-details-bin"
TYPE_URL = b"type.googleapis.com/google.rpc.RetryInfo"
MINUS_ONE = 2**64 - 1


def encode_varint(number: int) -> bytes:
    """Encode a number in groups of seven bits, the lowest first."""
    low, high = number & 0x7F, number >> 7
    return bytes([low]) if high == 0 else bytes([low | 0x80]) + encode_varint(high)


def encode_number_field(field: int, number: int) -> bytes:
    """Encode a field of wire type 0."""
    return encode_varint(field << 3) + encode_varint(number)


def encode_bytes_field(field: int, data: bytes) -> bytes:
    """Encode a field of wire type 2."""
    return encode_varint(field << 3 | 2) + encode_varint(len(data)) + data


def encode_duration(seconds: int = 0, nanos: int = 0) -> bytes:
    """Encode a google.protobuf.Duration, without fields that are 0."""
    fields = [(1, seconds), (2, nanos)]
    return b"".join(encode_number_field(field, number) for field, number in fields if number)


def encode_retry_info(seconds: int = 0, nanos: int = 0) -> bytes:
    """Encode a google.rpc.RetryInfo."""
    return encode_bytes_field(1, encode_duration(seconds, nanos))


def encode_any(message: bytes, type_url: bytes = TYPE_URL) -> bytes:
    """Encode a google.protobuf.Any."""
    return encode_bytes_field(1, type_url) + encode_bytes_field(2, message)


def encode_status(*details: bytes) -> bytes:
    """Encode a google.rpc.Status with code 14 and details."""
    head = encode_number_field(1, 14) + encode_bytes_field(2, b"try later")
    return head + b"".join(encode_bytes_field(3, detail) for detail in details)


def delay_from(key: str, data: bytes) -> float | None:
    """Return the delay in binary metadata."""
    hint = hint_from_grpc([(key, data)])
    assert hint is None or hint == Hint(hint.delay, source=key)
    return None if hint is None else hint.delay


def test_literal_bytes() -> None:
    """The encoded bytes of a Status with code 14 and a RetryInfo of 1.5 s give a delay of 1.5 s."""
    data = (
        b"\x08\x0e"  # Status.code = 14
        b"\x1a\x36"  # Status.details[0], 54 bytes
        b"\x0a\x28type.googleapis.com/google.rpc.RetryInfo"  # Any.type_url, 40 bytes
        b"\x12\x0a"  # Any.value, 10 bytes
        b"\x0a\x08"  # RetryInfo.retry_delay, 8 bytes
        b"\x08\x01"  # Duration.seconds = 1
        b"\x10\x80\xca\xb5\xee\x01"  # Duration.nanos = 500,000,000
    )
    assert 1.5 == delay_from(DETAILS, data)


@pytest.mark.parametrize(
    ("seconds", "nanos", "expected"),
    [
        *(
            (0, 0, 0.0),
            (1, 0, 1.0),
            (0, 1, 1e-9),
            (30, 500_000_000, 30.5),
            (0, 999_999_999, 1 - 1e-9),
        ),
        (315_576_000_000, 0, 315_576_000_000.0),
    ],
)
def test_retry_info(seconds: int, nanos: int, expected: float) -> None:
    """The delay is read from its own key and from the details of the status."""
    message = encode_retry_info(seconds, nanos)
    assert expected == delay_from(RETRY_INFO, message)
    assert expected == delay_from(DETAILS, encode_status(encode_any(message)))


@given(st.integers(0, 315_576_000_000), st.integers(0, 999_999_999))
def test_retry_info_round_trip(seconds: int, nanos: int) -> None:
    """Every duration that protobuf allows is decoded exactly."""
    data = encode_status(
        encode_any(b"\x08\x01", b"x/google.rpc.ErrorInfo"),
        encode_any(encode_retry_info(seconds, nanos)),
    )
    assert seconds + nanos / 1e9 == delay_from(DETAILS, data)


@pytest.mark.parametrize(
    "message",
    [
        encode_retry_info(MINUS_ONE),
        encode_retry_info(0, MINUS_ONE),
        encode_retry_info(1, MINUS_ONE),
        encode_retry_info(315_576_000_001),
        encode_retry_info(0, 1_000_000_000),
        encode_retry_info(2**63),
        b"",  # no delay was set
        encode_number_field(1, 5),  # retry_delay as a number instead of a message
        b"\x09" + b"\x00" * 8,  # retry_delay as a fixed 64-bit field
    ],
)
def test_invalid_durations(message: bytes) -> None:
    """A RetryInfo whose delay is negative, out of range or absent is ignored."""
    assert None is delay_from(RETRY_INFO, message)
    assert None is delay_from(DETAILS, encode_status(encode_any(message)))
    assert 5.0 == delay_from(
        DETAILS, encode_status(encode_any(message), encode_any(encode_retry_info(5)))
    )


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",  # no length
        b"\x0a\x05\x08",  # shorter than its length
        b"\x08",  # no number
        b"\x80",  # an unterminated tag
        b"\x08" + b"\xff" * 10 + b"\x01",  # a number of eleven bytes
        b"\x0a" + b"\xff" * 9 + b"\x01",  # a length of 2**64 - 1
        b"\x0a\xff\xff\xff\xff\x07",  # a length of 2 GiB
        b"\x09\x00\x00",  # fixed 64 bits, truncated
        b"\x0d\x00",  # fixed 32 bits, truncated
        b"\x0b\x0c",  # a group
        b"\x0e\x00",  # wire type 6
        b"\x0f\x00",  # wire type 7
        b"\x02\x00",  # field 0
        b"\x00\x00",
    ],
)
def test_malformed_bytes(data: bytes) -> None:
    """Malformed bytes at any depth invalidate the message that contains them."""
    valid = encode_retry_info(5)
    assert None is delay_from(RETRY_INFO, data)
    assert None is delay_from(RETRY_INFO, valid + data)
    assert None is delay_from(RETRY_INFO, encode_bytes_field(1, encode_duration(5) + data))
    assert None is delay_from(DETAILS, encode_status(encode_any(valid)) + data)
    assert None is delay_from(DETAILS, encode_status(encode_any(valid) + data))
    assert None is delay_from(DETAILS, encode_status(encode_any(valid + data)))
    assert 3.0 == delay_from(
        DETAILS, encode_status(encode_any(valid + data), encode_any(encode_retry_info(3)))
    )


def test_unknown_fields_are_skipped() -> None:
    """Unknown fields of every wire type are skipped."""
    unknown = (
        encode_number_field(99, 7)
        + encode_bytes_field(98, b"?")
        + b"\x79"
        + b"\x01" * 8
        + b"\x7d"
        + b"\x01" * 4
    )
    message = unknown + encode_bytes_field(1, unknown + encode_duration(5) + unknown) + unknown
    assert 5.0 == delay_from(RETRY_INFO, message)
    assert 5.0 == delay_from(
        DETAILS, unknown + encode_status(unknown + encode_any(message) + unknown)
    )


@pytest.mark.parametrize(
    ("type_url", "expected"),
    [
        (TYPE_URL, 5.0),
        (b"example.com/types/google.rpc.RetryInfo", 5.0),
        (b"/google.rpc.RetryInfo", 5.0),
        (b"google.rpc.RetryInfo", None),
        (b"type.googleapis.com/google.rpc.ErrorInfo", None),
        (b"type.googleapis.com/google.rpc.RetryInfoX", None),
        (b"type.googleapis.com/mygoogle.rpc.RetryInfo", None),
        (b"", None),
    ],
)
def test_type_urls(type_url: bytes, expected: float | None) -> None:
    """The type is the part after the last slash; details of other types are ignored."""
    assert expected == delay_from(
        DETAILS, encode_status(encode_any(encode_retry_info(5), type_url))
    )


def test_repeated_fields() -> None:
    """Repeated messages are merged and the last of two values wins, as protobuf specifies."""
    merged = encode_bytes_field(1, encode_duration(9, 500_000_000)) + encode_bytes_field(
        1, encode_duration(5)
    )
    assert 5.5 == delay_from(RETRY_INFO, merged)
    twice = encode_any(encode_retry_info(9), b"x/y") + encode_any(encode_retry_info(5))
    assert 5.0 == delay_from(DETAILS, encode_status(twice))


def test_the_longest_retry_info_counts() -> None:
    """The hint has the longest of several delays and the key of that delay as its source."""
    several = encode_status(
        encode_any(encode_retry_info(3)),
        encode_any(encode_retry_info(7)),
        encode_any(encode_retry_info(5)),
    )
    assert 7.0 == delay_from(DETAILS, several)
    both = [(DETAILS, several), (RETRY_INFO, encode_retry_info(8))]
    assert Hint(8.0, source=RETRY_INFO) == hint_from_grpc(both)
    assert Hint(8.0, source=RETRY_INFO) == hint_from_grpc(both[::-1])


@pytest.mark.parametrize("pushback", ["5", "-1"])
def test_pushback_wins_over_retry_info(pushback: str) -> None:
    """A pushback takes precedence over a RetryInfo in any order of the metadata."""
    metadata: list[tuple[str, str | bytes]] = [
        (RETRY_INFO, encode_retry_info(9)),
        (PUSHBACK, pushback),
    ]
    expected = hint_from_grpc([(PUSHBACK, pushback)])
    assert [expected] * 2 == [hint_from_grpc(order) for order in (metadata, metadata[::-1])]


def test_size_is_bounded() -> None:
    """Metadata of more than 64 KiB is not parsed."""
    header_size = 5  # bytes of the tag and length of the padding
    padding = encode_bytes_field(99, b"\x00" * (65_536 - header_size - len(encode_retry_info(5))))
    assert 65_536 == len(padding + encode_retry_info(5))
    assert 5.0 == delay_from(RETRY_INFO, padding + encode_retry_info(5))
    too_long = padding + encode_retry_info(5) + encode_number_field(99, 0)
    assert None is delay_from(RETRY_INFO, too_long)


def test_binary_metadata_as_text_is_ignored() -> None:
    """A `-bin` value of type str is ignored, because gRPC libraries return them as bytes."""
    assert None is hint_from_grpc([(RETRY_INFO, encode_retry_info(5).decode("latin-1"))])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([PUSHBACK, RETRY_INFO, DETAILS, "grpc-status"]),
            st.one_of(
                texts,
                st.binary(max_size=64),
                st.binary(max_size=16).map(lambda data: encode_status(encode_any(data))),
                st.binary(max_size=16).map(
                    lambda data: encode_status(encode_any(encode_retry_info(5)) + data)
                ),
            ),
        ),
        max_size=4,
    )
)
def test_metadata_never_raises(metadata: list[tuple[str, str | bytes]]) -> None:
    """Any metadata gives None or a hint with either a valid delay or should_retry=False."""
    hint = hint_from_grpc(metadata)
    if hint is not None:
        assert (hint.delay is None) == (hint.should_retry is False)
        assert hint.delay is None or (isfinite(hint.delay) and hint.delay >= 0)
        assert hint.exact == (hint.source == PUSHBACK and hint.delay is not None)


@given(st.binary(max_size=8), st.integers(0, 80), st.integers(0, 255))
def test_a_changed_byte_never_raises(tail: bytes, index: int, byte: int) -> None:
    """A valid message with one changed byte gives None or a finite delay."""
    data = bytearray(encode_status(encode_any(encode_retry_info(5, 7))) + tail)
    data[index % len(data)] = byte
    delay = delay_from(DETAILS, bytes(data))
    assert delay is None or (isfinite(delay) and delay >= 0)
