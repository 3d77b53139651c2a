"""Conversion of values for PostgreSQL."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.errors import ConfigurationError
from tarry.service.model import LOST
from tarry.service.stores.postgres.rows import (
    decode_attempt,
    decode_text,
    encode_text,
    is_task_id,
    parse_cursor,
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


@pytest.mark.parametrize("task_id", ["", "x", "0195D000-0000-7000-8000-000000000001", "a" * 36])
def test_a_malformed_id_is_recognised(task_id: str) -> None:
    """Only ids in the usual form of a UUID reach the database."""
    assert not is_task_id(task_id)
    assert is_task_id("0195d000-0000-7000-8000-000000000001")


@pytest.mark.parametrize("cursor", ["", "x", "-1", "1" * 19, "²"])
def test_a_malformed_cursor_is_an_error(cursor: str) -> None:
    """A cursor is a number of up to 18 digits."""
    with pytest.raises(ConfigurationError, match="cursor must be the cursor of an earlier page"):
        parse_cursor(cursor)
