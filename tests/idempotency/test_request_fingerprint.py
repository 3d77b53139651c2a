"""The names of records and the fingerprints of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.idempotency.request import record_name_and_fingerprint, relevant_headers
from tests.idempotency.asgi_client import make_scope

TEXTS = st.text(st.sampled_from("a',() \\\x00\n\u00e9\udc80"), max_size=4)
BYTES = st.binary(max_size=2) | st.sampled_from([b"')", b"', b'", b"\\", b'"', b"(b'', b'')"])


def record_name(path: str, caller: str, key: str, host: bytes = b"a.example") -> str:
    """Return the name of the record of a request."""
    scope = make_scope(path=path, headers=[(b"host", host)])
    return record_name_and_fingerprint(scope, relevant_headers(scope), caller, key, b"")[0]


def fingerprint(query: bytes, content_type: bytes, body: bytes, key: str = "k") -> str:
    """Return the fingerprint of a request."""
    scope = make_scope(query_string=query, headers=[(b"content-type", content_type)])
    return record_name_and_fingerprint(scope, relevant_headers(scope), "", key, body)[1]


@given(st.tuples(TEXTS, TEXTS, TEXTS), st.tuples(TEXTS, TEXTS, TEXTS))
def test_record_names_are_unambiguous(
    first: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    """Two records have the same name only if path, caller and key are all equal."""
    assert (first == other) == (record_name(*first) == record_name(*other))


@given(st.tuples(BYTES, BYTES, BYTES), st.tuples(BYTES, BYTES, BYTES))
def test_fingerprints_are_unambiguous(
    first: tuple[bytes, bytes, bytes], other: tuple[bytes, bytes, bytes]
) -> None:
    """Two fingerprints are equal only if query, content type and body are all equal."""
    assert (first == other) == (fingerprint(*first) == fingerprint(*other))


def test_record_names_contain_no_secrets() -> None:
    """Record names contain neither the caller nor the key, and all have the same length."""
    names = [record_name("/", caller, "k" * 255) for caller in ("", "Bearer secret" * 100)]

    assert [64, 64] == [len(name) for name in names]
    assert not any("secret" in name or "kk" in name for name in names)


def test_fingerprints_depend_on_the_key() -> None:
    """The fingerprint of a body depends on the key, so a body cannot be guessed without it."""
    assert fingerprint(b"", b"", b"10 EUR", "one") != fingerprint(b"", b"", b"10 EUR", "other")


@pytest.mark.parametrize(
    ("host", "other_host", "same"),
    [
        (b"a.example", b"b.example", False),
        (b"a.example", b"A.Example:8080", True),
        (b"10.0.0.1:8000", b"10.0.0.2:8001", True),
        (b"[::1]:8000", b"127.0.0.1", True),
        (b"127.0.0.1", b"localhost", False),
    ],
)
def test_record_names_depend_on_the_host_name(host: bytes, other_host: bytes, same: bool) -> None:
    """Each host name has its own records; ports are ignored, and all IP addresses are one host."""
    assert same == (record_name("/", "", "k", host) == record_name("/", "", "k", other_host))
