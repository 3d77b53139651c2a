"""The digests: what a key belongs to, and what was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.idempotency.fingerprint import record_name_and_fingerprint, relevant_headers
from tests.idempotency.asking import scope_of

SHORT = st.text(st.sampled_from("a',() \\\x00\n\u00e9\udc80"), max_size=4)
BYTES = st.binary(max_size=2) | st.sampled_from([b"')", b"', b'", b"\\", b'"', b"(b'', b'')"])


def named(path: str, identity: str, key: str, host: bytes = b"a.example") -> str:
    """The name of a record."""
    scope = scope_of(path=path, headers=[(b"host", host)])
    return record_name_and_fingerprint(scope, relevant_headers(scope), identity, key, b"")[0]


def asked(query: bytes, kind: bytes, body: bytes, key: str = "k") -> str:
    """The fingerprint of a request."""
    scope = scope_of(query_string=query, headers=[(b"content-type", kind)])
    return record_name_and_fingerprint(scope, relevant_headers(scope), "", key, body)[1]


@given(st.tuples(SHORT, SHORT, SHORT), st.tuples(SHORT, SHORT, SHORT))
def test_records_are_named_apart(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    """No text can be moved from path to caller to key without giving another name."""
    assert (one == other) == (named(*one) == named(*other))


@given(st.tuples(BYTES, BYTES, BYTES), st.tuples(BYTES, BYTES, BYTES))
def test_payloads_are_told_apart(
    one: tuple[bytes, bytes, bytes], other: tuple[bytes, bytes, bytes]
) -> None:
    """No byte can be moved from query to content type to body without being noticed."""
    assert (one == other) == (asked(*one) == asked(*other))


def test_digests_hide_what_they_are_made_of() -> None:
    """A store sees neither credentials nor keys, and the names have one length."""
    names = [named("/", identity, "k" * 255) for identity in ("", "Bearer secret" * 100)]

    assert [64, 64] == [len(name) for name in names]
    assert not any("secret" in name or "kk" in name for name in names)


def test_fingerprints_cannot_be_tried_out() -> None:
    """Who does not know the key cannot find out a body by guessing it."""
    assert asked(b"", b"", b"10 EUR", "one") != asked(b"", b"", b"10 EUR", "other")


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
def test_records_belong_to_a_name_of_a_host(one: bytes, other: bytes, same: bool) -> None:
    """Hosts are told apart by name; a port or an address only says which process was reached."""
    assert same == (named("/", "", "k", one) == named("/", "", "k", other))
