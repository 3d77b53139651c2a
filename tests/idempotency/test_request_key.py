"""Parsing of the `Idempotency-Key` header: quoted, unquoted and malformed keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.idempotency.request import MAX_KEY_LENGTH, MalformedKey, parse_key

PRINTABLE_KEYS = st.text(
    st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255
)
UUID = "8e03978e-40d5-43dd-bc93-6894a57f9324"


def quote_key(key: str) -> bytes:
    """Return a key as a quoted string of RFC 9651."""
    escaped = key.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'.encode()


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (b'"foo bar"', "foo bar"),
        (b'"   "', "   "),
        (b'  "a"  ', "a"),
        (rb'"b \"quoted\" \\ slash"', r'b "quoted" \ slash'),
        (b'"a,b;c"', "a,b;c"),
        (b'"a";x', "a"),
        (b'"a";x=1;y=-1.5;z="t;\\"";w=to/ken:;v=:aGk=:;u=?1;t=@-17;*s=%"f%c3%bc"', "a"),
        (b'"a";  x', "a"),
        (b'"a";x=1;x=2', "a"),
        (f'"{UUID}"'.encode(), UUID),
        (UUID.encode(), UUID),
        (b" 01ARZ3NDEKTSV4RRFFQ69G5FAV ", "01ARZ3NDEKTSV4RRFFQ69G5FAV"),
        (b"KG5LxwFBepaKHyUD+/=", "KG5LxwFBepaKHyUD+/="),
        (b"order:42/charge~1.0_a", "order:42/charge~1.0_a"),
        (b"42", "42"),
        (b'"' + b"a" * MAX_KEY_LENGTH + b'"', "a" * MAX_KEY_LENGTH),
        (b"a" * MAX_KEY_LENGTH, "a" * MAX_KEY_LENGTH),
        (b"two words", "two words"),
        (b"order_7", "order_7"),
        (b"-1", "-1"),
        (b"'single'", "'single'"),
        (b'"a,b;x=1"', "a,b;x=1"),
        (b"a;x=1", "a;x=1"),
    ],
)
def test_valid_key_is_parsed(header: bytes, key: str) -> None:
    """A quoted key, with or without parameters, and an unquoted key are parsed."""
    assert key == parse_key([header])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "1 to 255 characters, not 0"),
        (b"  ", "1 to 255 characters, not 0"),
        (b'""', "1 to 255 characters, not 0"),
        (b"a" * 256, "1 to 255 characters, not 256"),
        (b'"' + b"a" * 256 + b'"', "1 to 255 characters, not 256"),
        ("füü".encode(), "must be visible ASCII"),
        ('"füü"'.encode(), "must be visible ASCII"),
        (b'"a\xff"', "must be visible ASCII"),
        (b'"a\tb"', "is not allowed in quotes"),
        (b'"a\nb"', "is not allowed in quotes"),
        (b'"a\x00"', "is not allowed in quotes"),
        (b'"a\x7f"', "is not allowed in quotes"),
        (b'"unbalanced', "no closing quote"),
        (b'"', "no closing quote"),
        (rb'"foo \,"', "is not allowed in quotes"),
        (rb'"foo \"', "no closing quote"),
        (b'"foo \\', "no closing quote"),
        (b"a\tb", "must be visible ASCII"),
        (b"a\x7f", "must be visible ASCII"),
        (b'\t"a"', "must be visible ASCII"),
        (b'"a"\t', "only parameters may follow"),
        (b'"a", "b"', "only parameters may follow"),
        (b"a, b", "without quotes must not have ','"),
        (b"a,b", "without quotes must not have ','"),
        (b"a, a", "without quotes must not have ','"),
        (b'a, "b"', "without quotes must not have ','"),
        (b'key"', "without quotes must not have '\"'"),
        (b'k"ey', "without quotes must not have '\"'"),
        (b'("key")', r"without quotes must not have '\('"),
        (b"(key)", r"without quotes must not have '\('"),
        (b"[key]", r"without quotes must not have '\['"),
        (b"{key}", r"without quotes must not have '\{'"),
        (b"key)", r"without quotes must not have '\)'"),
        (rb" {a\"b} ", r"without quotes must not have '\{'"),
        (b'"a" "b"', "only parameters may follow"),
        (b'"a"b', "only parameters may follow"),
        (b'"a" ;x', "only parameters may follow"),
        (b'"a";', "only parameters may follow"),
        (b'"a";X', "only parameters may follow"),
        (b'"a";1', "only parameters may follow"),
        (b'"a";\tx', "only parameters may follow"),
        (b'"a";x=', "only parameters may follow"),
        (b'"a";x=1.', "only parameters may follow"),
        (b'"a";x=1.2345', "only parameters may follow"),
        (b'"a";x=1234567890123456', "only parameters may follow"),
        (b'"a";x=?2', "only parameters may follow"),
        (b'"a";x=:a', "only parameters may follow"),
        (b'"a";x=@1.5', "only parameters may follow"),
        (b'"a";x=%"%C3"', "only parameters may follow"),
        (b'"a";x=%"%ff"', "only parameters may follow"),
        (b'"a";x="', "only parameters may follow"),
    ],
)
def test_malformed_key_raises(header: bytes, message: str) -> None:
    """A malformed key raises an error that describes the mistake in a sentence."""
    with pytest.raises(MalformedKey, match=message) as caught:
        parse_key([header])

    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("headers", [[b'"a"', b'"b"'], [b'"a"', b'"a"'], [b"a"] * 3])
def test_several_headers_raise(headers: list[bytes]) -> None:
    """More than one header raises, even if the headers are equal."""
    with pytest.raises(MalformedKey, match=f"not {len(headers)} times"):
        parse_key(headers)


@given(PRINTABLE_KEYS)
def test_every_printable_key_can_be_quoted(key: str) -> None:
    """Parsing a quoted key returns the key."""
    assert key == parse_key([quote_key(key)])


@given(PRINTABLE_KEYS.filter(lambda key: key == key.strip() and not set('",()[]{}') & set(key)))
def test_unquoted_and_quoted_are_the_same_key(key: str) -> None:
    assert parse_key([key.encode()]) == parse_key([quote_key(key)])


@given(st.binary(max_size=300) | st.text('a1"\\; =,%@:?.-*', max_size=40).map(str.encode))
def test_any_bytes_return_a_key_or_raise_malformed_key(header: bytes) -> None:
    """The parser returns a key of printable ASCII or raises `MalformedKey`."""
    try:
        key = parse_key([header])
    except MalformedKey:
        return
    assert 1 <= len(key) <= MAX_KEY_LENGTH
    assert key.isascii()
    assert key.isprintable()


def test_parsing_takes_linear_time() -> None:
    """A header with a megabyte of escapes is rejected without quadratic parsing time."""
    with pytest.raises(MalformedKey):
        parse_key([b'"' + rb"\\" * 500_000])
