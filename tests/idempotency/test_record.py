"""The pure states: what a record means for the next request with its key."""

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
def test_another_payload_is_a_mismatch(response: StoredResponse | None) -> None:
    """The same key may not ask for something else, whether the first request runs or is done."""
    assert FingerprintMismatch() == evaluate_record(Record("print", 10.0, response), "other", 0.0)


def test_a_finished_request_is_replayed() -> None:
    """The same request again is answered as it was."""
    assert RESPONSE == evaluate_record(Record("print", 10.0, RESPONSE), "print", 0.0)


@pytest.mark.parametrize(("now", "left"), [(0.0, 10.0), (9.5, 0.5), (10.0, 0.0), (11.0, 0.0)])
def test_a_running_request_is_a_conflict(now: float, left: float) -> None:
    """While the first runs the others are told how long its lease lasts, never less than 0."""
    assert InProgress(left) == evaluate_record(Record("print", 10.0, None), "print", now)


@given(st.lists(st.tuples(st.binary(), st.binary())).map(tuple))
def test_packed_headers_come_back(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    """Names and values of any bytes, repeated and in order, survive the form that stores keep."""
    assert headers == decode_headers(encode_headers(headers))
    assert headers == decode_headers(encode_headers(headers).encode())
