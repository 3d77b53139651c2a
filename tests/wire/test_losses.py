"""What cannot be said elsewhere, in words."""

from __future__ import annotations

import pytest

from tarry.wire.losses import Loss


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
    """A loss is one short line: the field, its value and what happens instead."""
    assert f"field = {expected}: it differs" == str(Loss("field", value, "it differs"))
