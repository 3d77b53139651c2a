"""Tests for "did you mean" suggestions."""

from __future__ import annotations

import pytest

from tarry.core.text import did_you_mean, suggest

FIELDS = ["max_attempts", "max_delay", "multiplier"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("max_atempts", "max_attempts"), ("multiplyer", "multiplier"), ("colour", None)],
)
def test_suggest(word: str, expected: str | None) -> None:
    """suggest() returns the most similar candidate, or None if no candidate is similar."""
    assert expected == suggest(word, FIELDS)


def test_similarity_threshold() -> None:
    """A higher similarity threshold rejects a candidate that the default accepts."""
    assert "max_delay" == suggest("max_dly_s", FIELDS)
    assert None is suggest("max_dly_s", FIELDS, similarity=0.9)


def test_did_you_mean() -> None:
    """did_you_mean() returns text with the suggestion, or with all candidates."""
    assert "did you mean 'max_delay'?" == did_you_mean("max_dely", iter(FIELDS))
    assert "it has max_attempts, max_delay, multiplier" == did_you_mean("colour", iter(FIELDS))
