from __future__ import annotations

import pytest

from tarry.service.api.context import ApiLimits
from tarry.service.api.problems import ApiError
from tarry.service.api.task_validation import check_headers, lower_header_names


def test_the_names_are_told_in_lower_case() -> None:
    """In the order in which they were given."""
    given = {"X-One": "1", "content-type": "text/plain", "ETag": ""}
    assert ("x-one", "content-type", "etag") == check_headers(given, ApiLimits())


def test_names_that_are_refused_are_not_remembered() -> None:
    """A caller cannot fill the memory with long names."""
    before = lower_header_names.cache_info().currsize
    for i in range(10):
        with pytest.raises(ApiError, match="1 to 256 characters"):
            check_headers({f"x{i}" + "y" * 5000: ""}, ApiLimits())
    assert before == lower_header_names.cache_info().currsize


@pytest.mark.parametrize("value", ["", "a", "a b", "a\tb  c", "~!"])
def test_blanks_may_stand_between_visible_characters(value: str) -> None:
    """And a value may be empty."""
    assert ("x",) == check_headers({"x": value}, ApiLimits())


@pytest.mark.parametrize("value", [" ", " a", "a ", "a\t", "a\nb", "a\r\nb: c", "a\n", "ä", "\x7f"])
def test_a_value_of_anything_else_is_refused(value: str) -> None:
    """No other line can be smuggled in."""
    with pytest.raises(ApiError, match="x must be visible ASCII"):
        check_headers({"x": value}, ApiLimits())
