"""Tests for differences and their texts."""

from __future__ import annotations

import pytest

from tarry.policyfile.translation import Converter, Difference, Severity


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "none"),
        (False, "false"),
        (True, "true"),
        (0.1, "0.1"),
        (120.0, "120"),
        ("full", "full"),
        (frozenset({504, 408}), "408, 504"),
        ((5.0, 300.0), "5, 300"),
        ([], "nothing"),
        (tuple(range(10)), "0, 1, 2, 3, 4, 5, 6, 7, and 2 more"),
        ({"consecutive": 5, "deep": {"a": 1}}, "consecutive 5, deep {...}"),
        (len, "a function"),
    ],
    ids=repr,
)
def test_value_is_shown_as_a_person_would(value: object, expected: str) -> None:
    """A difference is one short line: the field, its value and what happens instead."""
    assert f"field = {expected}: it differs" == str(Difference("field", value, "it differs"))


def test_what_matters_most_is_first() -> None:
    """Differences are sorted by their rank, and equals stay in their order."""
    ranks = [Severity.DETAIL, Severity.TIMING, Severity.LOAD, Severity.TIMING, Severity.CRITICAL]
    converter = Converter("another system")
    for i, rank in enumerate(ranks):
        converter.report(str(i), None, "", rank)

    assert ["4", "2", "1", "3", "0"] == [each.field for each in converter.sorted_differences()]
