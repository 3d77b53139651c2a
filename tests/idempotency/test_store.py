"""Records: how to answer the next request with their key, and how headers are encoded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.idempotency.store import (
    FingerprintMismatch,
    InProgress,
    Record,
    StoredResponse,
    decode_headers,
    encode_headers,
    evaluate_record,
)

RESPONSE = StoredResponse(201, ((b"a", b"b"),), b"body")


@pytest.mark.parametrize("response", [None, RESPONSE])
def test_other_fingerprint_is_a_mismatch(response: StoredResponse | None) -> None:
    """The same key must not be used for a different request, running or finished."""
    assert FingerprintMismatch() == evaluate_record(Record("print", 10.0, response), "other", 0.0)


def test_finished_record_returns_its_response() -> None:
    """A repeated request gets the stored response."""
    assert RESPONSE == evaluate_record(Record("print", 10.0, RESPONSE), "print", 0.0)


@pytest.mark.parametrize(("now", "left"), [(0.0, 10.0), (9.5, 0.5), (10.0, 0.0), (11.0, 0.0)])
def test_running_record_is_in_progress(now: float, left: float) -> None:
    """While the first request runs, the others get the remaining time of its lease, at least 0."""
    assert InProgress(left) == evaluate_record(Record("print", 10.0, None), "print", now)


@given(st.lists(st.tuples(st.binary(), st.binary())).map(tuple))
def test_encoded_headers_can_be_decoded(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    """Names and values of any bytes, repeated and in order, are restored."""
    assert headers == decode_headers(encode_headers(headers))
    assert headers == decode_headers(encode_headers(headers).encode())
