"""Tests for the HTTP methods, origins and headers that retries use."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.errors import ConfigurationError
from tarry.wire import http


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "PUT", "DELETE"])
def test_idempotent_methods(method: str) -> None:
    """An idempotent method, in upper or lower case, is repeatable without a key."""
    assert http.is_repeatable(method, has_key=False)
    assert http.is_repeatable(method.lower(), has_key=False)


@pytest.mark.parametrize("method", ["POST", "PATCH", "CONNECT", "BREW"])
def test_other_methods_need_a_key(method: str) -> None:
    """Any other method is repeatable only with an idempotency key."""
    assert (False, True) == tuple(
        http.is_repeatable(method, has_key=has_key) for has_key in (False, True)
    )


def test_put_and_delete_are_not_safe() -> None:
    assert {"PUT", "DELETE"} == http.IDEMPOTENT_METHODS - http.SAFE_METHODS


@pytest.mark.parametrize(
    ("parts", "origin"),
    [
        (("http", "example.test", None), "http://example.test"),
        (("http", "example.test", 80), "http://example.test"),
        (("https", "example.test", 443), "https://example.test"),
        (("http", "example.test", 443), "http://example.test:443"),
        (("https", "example.test", 8443), "https://example.test:8443"),
        (("http", "::1", 8080), "http://[::1]:8080"),
        (("unix", "socket", None), "unix://socket"),
    ],
)
def test_origin(parts: tuple[str, str, int | None], origin: str) -> None:
    """An origin consists of scheme, host and port; the default port is omitted."""
    assert origin == http.origin_of(*parts)


@pytest.mark.parametrize(
    ("key", "quoted"),
    [
        ("8e03", '"8e03"'),
        ("a b", '"a b"'),
        ('a"b', '"a\\"b"'),
        ("a\\b", '"a\\\\b"'),
        ('"a', '"\\"a"'),
        ('"a\\"', '"\\"a\\\\\\""'),
        ('"8e03"', '"8e03"'),
        ('"a\\"b"', '"a\\"b"'),
    ],
)
def test_format_idempotency_key(key: str, quoted: str) -> None:
    """A key is sent as it is, or as a structured-field string; it is never quoted twice."""
    assert key == http.format_idempotency_key(http.check_idempotency_key(key), "plain")
    assert quoted == http.format_idempotency_key(key, "quoted")


@pytest.mark.parametrize("key", ["", " ", "a ", " a", "für", "a\nb", "\x7f", 7, None, b"8e03"])
def test_invalid_idempotency_keys(key: Any) -> None:
    """A key that is not visible ASCII with spaces only inside is rejected."""
    with pytest.raises(ConfigurationError, match=r"^an idempotency key must be .*, got "):
        http.check_idempotency_key(key)


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.0, "2000"), (0.0019, "1"), (0.0, "0"), (-1.0, "0"), (3600, "3600000")]
)
def test_deadline_is_rounded_down(seconds: float, text: str) -> None:
    """The time left is formatted as whole milliseconds, rounded down."""
    assert text == http.format_deadline_ms(seconds)


@given(st.floats(0, 1e9))
def test_deadline_round_trip(seconds: float) -> None:
    """A formatted deadline is parsed with a precision of a millisecond."""
    assert pytest.approx(seconds, abs=1e-3) == http.parse_deadline_header(
        http.format_deadline_ms(seconds)
    )


@pytest.mark.parametrize("text", [" 250 ", "250\t"])
def test_deadline_with_space_around_it(text: str) -> None:
    """White space around the number is ignored."""
    assert 0.25 == http.parse_deadline_header(text)


@pytest.mark.parametrize(
    "text", ["", "soon", "-1", "1.5", "1e3", "+5", "0x10", "٣", "9" * 16, "1_0"]
)
def test_invalid_deadline_is_ignored(text: str) -> None:
    """Text that is not a whole number of milliseconds gives None."""
    assert None is http.parse_deadline_header(text)
