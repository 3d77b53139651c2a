"""The encoding of stored responses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tarry.idempotency.store import StoredResponse, decode_response, encode_headers


@given(st.lists(st.tuples(st.binary(), st.binary())).map(tuple))
def test_encoded_headers_can_be_decoded(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    """Decoding restores header names and values of any bytes, in order and with repetitions."""
    response = StoredResponse(201, headers, b"body")

    assert response == decode_response(201, encode_headers(headers), b"body")
    assert response == decode_response(201, encode_headers(headers).encode(), b"body")


def test_running_record_has_no_response() -> None:
    """Empty response columns, which a running request has, are decoded as None."""
    assert decode_response(None, None, None) is None
