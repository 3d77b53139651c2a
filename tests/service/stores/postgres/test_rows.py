"""Conversion of values for PostgreSQL."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tarry.service.model import LOST
from tarry.service.stores.postgres.rows import (
    decode_attempt,
    decode_text,
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
        attempt.number,
        attempt.scheduled_at,
        attempt.started_at,
        attempt.outcome,
        attempt.worker,
    )
