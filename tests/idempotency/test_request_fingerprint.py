"""The name of a record and the fingerprint of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.idempotency.request import record_name_and_fingerprint, relevant_headers
from tests.idempotency.asgi_client import make_scope

SHORT = st.text(st.sampled_from("a',() \\\x00\n\u00e9\udc80"), max_size=4)
BYTES = st.binary(max_size=2) | st.sampled_from([b"')", b"', b'", b"\\", b'"', b"(b'', b'')"])


def record_name(path: str, identity: str, key: str, host: bytes = b"a.example") -> str:
    """Return the name of a record."""
    scope = make_scope(path=path, headers=[(b"host", host)])
    return record_name_and_fingerprint(scope, relevant_headers(scope), identity, key, b"")[0]


def fingerprint(query: bytes, content_type: bytes, body: bytes, key: str = "k") -> str:
    """Return the fingerprint of a request."""
    scope = make_scope(query_string=query, headers=[(b"content-type", content_type)])
    return record_name_and_fingerprint(scope, relevant_headers(scope), "", key, body)[1]


@given(st.tuples(SHORT, SHORT, SHORT), st.tuples(SHORT, SHORT, SHORT))
def test_record_names_are_unambiguous(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    """Text that moves between path, caller and key gives another name."""
    assert (one == other) == (record_name(*one) == record_name(*other))


@given(st.tuples(BYTES, BYTES, BYTES), st.tuples(BYTES, BYTES, BYTES))
def test_fingerprints_are_unambiguous(
    one: tuple[bytes, bytes, bytes], other: tuple[bytes, bytes, bytes]
) -> None:
    """Bytes that move between query, content type and body give another fingerprint."""
    assert (one == other) == (fingerprint(*one) == fingerprint(*other))


def test_names_contain_no_secrets() -> None:
    """A name contains neither credentials nor keys, and all names have the same length."""
    names = [record_name("/", identity, "k" * 255) for identity in ("", "Bearer secret" * 100)]

    assert [64, 64] == [len(name) for name in names]
    assert not any("secret" in name or "kk" in name for name in names)


def test_fingerprints_depend_on_the_key() -> None:
    """Without the key, a body cannot be found by trying."""
    assert fingerprint(b"", b"", b"10 EUR", "one") != fingerprint(b"", b"", b"10 EUR", "other")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b"a.example", b"b.example", False),
        (b"a.example", b"A.Example:8080", True),
        (b"10.0.0.1:8000", b"10.0.0.2:8001", True),
        (b"[::1]:8000", b"127.0.0.1", True),
        (b"127.0.0.1", b"localhost", False),
    ],
)
def test_records_belong_to_a_host_name(one: bytes, other: bytes, same: bool) -> None:
    """The host name counts. A port or an address only identifies a process."""
    assert same == (record_name("/", "", "k", one) == record_name("/", "", "k", other))
