"""Conversion of values for PostgreSQL."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tarry.service.model import LOST
from tarry.service.stores.postgres.rows import (
    decode_attempt,
    decode_text,
    encode_ids,
    encode_numbers,
    encode_optionals,
    encode_text,
)


@given(st.text(st.sampled_from("a01\0\x1aé")))
def test_a_text_is_stored_without_nul_characters(text: str) -> None:
    """PostgreSQL cannot store NUL characters; the stored text is decoded to the original."""
    stored = encode_text(text)

    assert "\0" not in stored
    assert text == decode_text(stored)


def test_usual_texts_are_stored_unchanged() -> None:
    """A stored text is readable in psql."""
    assert "acme/https:ü.example:443" == encode_text("acme/https:ü.example:443")


def test_a_lost_attempt_has_no_stored_entry() -> None:
    """The columns of a lost attempt are its due time and worker."""
    attempt = decode_attempt(3, 17, "worker", None)

    assert (3, 17, 17, LOST, "worker") == (
        attempt.attempt_number,
        attempt.scheduled_at,
        attempt.started_at,
        attempt.outcome,
        attempt.worker,
    )


def test_numbers_and_ids_are_sent_as_the_text_of_an_array() -> None:
    """Numbers, booleans and NULLs are written as PostgreSQL reads them."""
    assert "{1, NULL, -2.5}" == encode_numbers([1, None, -2.5])
    assert "{True, False}" == encode_numbers([True, False])
    assert "{a,b}" == encode_ids(["a", "b"])


def test_arrays_without_values_are_not_sent() -> None:
    """An array of NULLs only is sent as NULL."""
    assert encode_numbers([None, None]) is None
    assert encode_optionals([None]) is None
    assert ["a", None] == encode_optionals(["a", None])
