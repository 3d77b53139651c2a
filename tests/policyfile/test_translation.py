"""Tests for the order and the text of differences."""

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
def test_text_of_a_difference(value: object, expected: str) -> None:
    """The text of a difference is one short line: field, formatted value and effect."""
    assert f"field = {expected}: it differs" == str(Difference("field", value, "it differs"))


def test_most_severe_differences_come_first() -> None:
    """Differences are sorted by severity; those of one severity stay in their order."""
    severities = [
        Severity.DETAIL,
        Severity.TIMING,
        Severity.LOAD,
        Severity.TIMING,
        Severity.CRITICAL,
    ]
    converter = Converter("another system")
    for i, severity in enumerate(severities):
        converter.report(str(i), None, "", severity)

    assert ["4", "2", "1", "3", "0"] == [each.field for each in converter.sorted_differences()]
