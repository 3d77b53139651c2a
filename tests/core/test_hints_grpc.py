"""Tests for hints in gRPC metadata: well-formed, malformed and hostile."""

from __future__ import annotations

from math import isfinite
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.hints import Hint, hint_from_grpc
from tests.core.header_strategies import texts

# --- Pushback ------------------------------------------------------------------------------------

PUSHBACK = "grpc-retry-pushback-ms"
NEVER = Hint(should_retry=False, source=PUSHBACK)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(("0", 0.0), ("-0", 0.0), ("1", 0.001), ("1500", 1.5), ("00010", 0.01), (" 10 ", 0.01)),
        ("2147483647", 2_147_483.647),
    ],
)
def test_pushback(value: str, expected: float) -> None:
    """A number that is not negative is an exact wait, as text or as bytes."""
    hint = Hint(expected, exact=True, source=PUSHBACK)
    assert [hint] * 2 == [hint_from_grpc([(PUSHBACK, data)]) for data in (value, value.encode())]


@pytest.mark.parametrize(
    "value",
    [
        *("-1", "-2147483648", "2147483648", "", " ", "-", "--1"),
        *("+5", "1.5", "1e3", "1_000", "0x10", "soon", "inf", "nan", "5ms", "1 0", "\u0661", "5\n"),
    ],
)
def test_pushback_that_means_never(value: str) -> None:
    """Negative, out of range or unreadable: do not retry (gRFC A6)."""
    found = [hint_from_grpc([(PUSHBACK, data)]) for data in (value, value.encode())]
    assert [NEVER] * 2 == found


def test_pushback_of_any_length() -> None:
    """More digits than int() takes are out of range like any others."""
    values = ["9" * 400, "9" * 5_000, "-" + "9" * 5_000]
    assert [NEVER] * 3 == [hint_from_grpc([(PUSHBACK, value)]) for value in values]


def test_pushback_twice() -> None:
    """Two pushbacks are not one number, even if they agree."""
    assert NEVER == hint_from_grpc([(PUSHBACK, "5"), (PUSHBACK, "5")])


def test_metadata_without_a_hint() -> None:
    """Other metadata and strange types give None."""
    strange: list[tuple[object, object]] = [(PUSHBACK, None), (None, "5"), (b"x", b"y")]
    assert None is hint_from_grpc([])
    assert None is hint_from_grpc([("grpc-status", "14"), ("grpc-previous-rpc-attempts", "1")])
    assert None is hint_from_grpc(cast("list[tuple[str, str]]", strange))


def test_metadata_keys_in_any_case() -> None:
    """A proxy that changed the case of a key has not changed its meaning."""
    expected = Hint(0.005, exact=True, source=PUSHBACK)
    assert expected == hint_from_grpc([("Grpc-Retry-Pushback-Ms", "5")])


# --- google.rpc.RetryInfo ------------------------------------------------------------------------

RETRY_INFO = "google.rpc.retryinfo-bin"
DETAILS = "grpc-status-details-bin"
TYPE_URL = b"type.googleapis.com/google.rpc.RetryInfo"
MINUS_ONE = 2**64 - 1


def varint(number: int) -> bytes:
    """Write a number in groups of seven bits, the lowest first."""
    low, high = number & 0x7F, number >> 7
    return bytes([low]) if high == 0 else bytes([low | 0x80]) + varint(high)


def number_field(field: int, number: int) -> bytes:
    """Write a field of wire type 0."""
    return varint(field << 3) + varint(number)


def bytes_field(field: int, data: bytes) -> bytes:
    """Write a field of wire type 2."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def duration(seconds: int = 0, nanos: int = 0) -> bytes:
    """Write a google.protobuf.Duration, without fields that are 0."""
    fields = [(1, seconds), (2, nanos)]
    return b"".join(number_field(field, number) for field, number in fields if number)


def retry_info(seconds: int = 0, nanos: int = 0) -> bytes:
    """Write a google.rpc.RetryInfo."""
    return bytes_field(1, duration(seconds, nanos))


def packed(message: bytes, type_url: bytes = TYPE_URL) -> bytes:
    """Write a google.protobuf.Any."""
    return bytes_field(1, type_url) + bytes_field(2, message)


def status(*details: bytes) -> bytes:
    """Write a google.rpc.Status of code 14 with details."""
    head = number_field(1, 14) + bytes_field(2, b"try later")
    return head + b"".join(bytes_field(3, detail) for detail in details)


def delay_from(key: str, data: bytes) -> float | None:
    """Return the wait that binary metadata asks for."""
    hint = hint_from_grpc([(key, data)])
    assert hint is None or hint == Hint(hint.delay, source=key)
    return hint and hint.delay


def test_bytes_written_by_hand() -> None:
    """A status of 14 with a RetryInfo of 1.5 s, byte by byte from the protobuf encoding guide."""
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
    message = retry_info(seconds, nanos)
    assert expected == delay_from(RETRY_INFO, message)
    assert expected == delay_from(DETAILS, status(packed(message)))


@given(st.integers(0, 315_576_000_000), st.integers(0, 999_999_999))
def test_retry_info_round_trip(seconds: int, nanos: int) -> None:
    """Every duration that protobuf allows is read back."""
    data = status(
        packed(b"\x08\x01", b"x/google.rpc.ErrorInfo"), packed(retry_info(seconds, nanos))
    )
    assert seconds + nanos / 1e9 == delay_from(DETAILS, data)


@pytest.mark.parametrize(
    "message",
    [
        retry_info(MINUS_ONE),
        retry_info(0, MINUS_ONE),
        retry_info(1, MINUS_ONE),
        retry_info(315_576_000_001),
        retry_info(0, 1_000_000_000),
        retry_info(2**63),
        b"",  # no delay was set
        number_field(1, 5),  # a delay that is a number and not a message
        b"\x09" + b"\x00" * 8,  # the same as a fixed 64-bit field
    ],
)
def test_durations_that_are_none(message: bytes) -> None:
    """A delay that is negative, out of range or absent is ignored."""
    assert None is delay_from(RETRY_INFO, message)
    assert None is delay_from(DETAILS, status(packed(message)))
    assert 5.0 == delay_from(DETAILS, status(packed(message), packed(retry_info(5))))


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",  # no length
        b"\x0a\x05\x08",  # shorter than it says
        b"\x08",  # no number
        b"\x80",  # a tag without an end
        b"\x08" + b"\xff" * 10 + b"\x01",  # a number of eleven bytes
        b"\x0a" + b"\xff" * 9 + b"\x01",  # a length of 2**64 - 1
        b"\x0a\xff\xff\xff\xff\x07",  # a length of 2 GiB
        b"\x09\x00\x00",  # fixed 64 bits, cut
        b"\x0d\x00",  # fixed 32 bits, cut
        b"\x0b\x0c",  # a group
        b"\x0e\x00",  # wire type 6
        b"\x0f\x00",  # wire type 7
        b"\x02\x00",  # field 0
        b"\x00\x00",
    ],
)
def test_malformed_bytes(data: bytes) -> None:
    """Bytes that are no message void the message they stand in, at every depth."""
    sound = retry_info(5)
    assert None is delay_from(RETRY_INFO, data)
    assert None is delay_from(RETRY_INFO, sound + data)
    assert None is delay_from(RETRY_INFO, bytes_field(1, duration(5) + data))
    assert None is delay_from(DETAILS, status(packed(sound)) + data)
    assert None is delay_from(DETAILS, status(packed(sound) + data))
    assert None is delay_from(DETAILS, status(packed(sound + data)))
    assert 3.0 == delay_from(DETAILS, status(packed(sound + data), packed(retry_info(3))))


def test_unknown_fields_are_skipped() -> None:
    """Fields of every wire type that the messages do not have change nothing."""
    unknown = (
        number_field(99, 7) + bytes_field(98, b"?") + b"\x79" + b"\x01" * 8 + b"\x7d" + b"\x01" * 4
    )
    message = unknown + bytes_field(1, unknown + duration(5) + unknown) + unknown
    assert 5.0 == delay_from(RETRY_INFO, message)
    assert 5.0 == delay_from(DETAILS, unknown + status(unknown + packed(message) + unknown))


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
    """What stands after the last slash is the type; a detail of another type is not looked into."""
    assert expected == delay_from(DETAILS, status(packed(retry_info(5), type_url)))


def test_details_without_fields() -> None:
    """A detail without a type is none, and a RetryInfo without a value has no delay."""
    assert None is delay_from(DETAILS, status(b""))
    assert None is delay_from(DETAILS, status(bytes_field(1, TYPE_URL)))
    assert None is delay_from(DETAILS, status())


def test_repeated_fields() -> None:
    """Parts of a message merge and the last of two values wins, as protobuf has it."""
    merged = bytes_field(1, duration(9, 500_000_000)) + bytes_field(1, duration(5))
    assert 5.5 == delay_from(RETRY_INFO, merged)
    twice = packed(retry_info(9), b"x/y") + packed(retry_info(5))
    assert 5.0 == delay_from(DETAILS, status(twice))


def test_the_longest_retry_info_counts() -> None:
    """Of several delays the longest is the floor, and the log names where it stood."""
    several = status(packed(retry_info(3)), packed(retry_info(7)), packed(retry_info(5)))
    assert 7.0 == delay_from(DETAILS, several)
    both = [(DETAILS, several), (RETRY_INFO, retry_info(8))]
    assert Hint(8.0, source=RETRY_INFO) == hint_from_grpc(both)
    assert Hint(8.0, source=RETRY_INFO) == hint_from_grpc(both[::-1])


@pytest.mark.parametrize("pushback", ["5", "-1"])
def test_pushback_wins_over_retry_info(pushback: str) -> None:
    """A pushback counts alone, in whatever order the metadata comes."""
    metadata: list[tuple[str, str | bytes]] = [(RETRY_INFO, retry_info(9)), (PUSHBACK, pushback)]
    expected = hint_from_grpc([(PUSHBACK, pushback)])
    assert [expected] * 2 == [hint_from_grpc(order) for order in (metadata, metadata[::-1])]


def test_size_is_bounded() -> None:
    """Metadata beyond 64 KiB is not looked into."""
    head = 5  # bytes of the tag and length of the filling
    filling = bytes_field(99, b"\x00" * (65_536 - head - len(retry_info(5))))
    assert 65_536 == len(filling + retry_info(5))
    assert 5.0 == delay_from(RETRY_INFO, filling + retry_info(5))
    assert None is delay_from(RETRY_INFO, filling + retry_info(5) + number_field(99, 0))


def test_binary_metadata_as_text_is_ignored() -> None:
    """Libraries hand out `-bin` values as bytes; text under such a key is no message."""
    assert None is hint_from_grpc([(RETRY_INFO, retry_info(5).decode("latin-1"))])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([PUSHBACK, RETRY_INFO, DETAILS, "grpc-status"]),
            st.one_of(
                texts,
                st.binary(max_size=64),
                st.binary(max_size=16).map(lambda data: status(packed(data))),
                st.binary(max_size=16).map(lambda data: status(packed(retry_info(5)) + data)),
            ),
        ),
        max_size=4,
    )
)
def test_metadata_never_raises(metadata: list[tuple[str, str | bytes]]) -> None:
    """Any metadata gives None or a hint that says something, with a finite wait if any."""
    hint = hint_from_grpc(metadata)
    if hint is not None:
        assert (hint.delay is None) == (hint.should_retry is False)
        assert hint.delay is None or (isfinite(hint.delay) and hint.delay >= 0)
        assert hint.exact == (hint.source == PUSHBACK and hint.delay is not None)


@given(st.binary(max_size=8), st.integers(0, 80), st.integers(0, 255))
def test_a_changed_byte_never_raises(tail: bytes, place: int, byte: int) -> None:
    """A sound message with one byte changed gives a finite wait or none."""
    data = bytearray(status(packed(retry_info(5, 7))) + tail)
    data[place % len(data)] = byte
    wait = delay_from(DETAILS, bytes(data))
    assert wait is None or (isfinite(wait) and wait >= 0)
