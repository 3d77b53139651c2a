"""Which rows the SQL stores read for a filter, and which of them match."""

from __future__ import annotations

import pytest

from tarry.service.model import Status
from tarry.service.store import StoredTaskFilter
from tarry.service.stores.task_filters import (
    MAX_DECODED_ROWS,
    MAX_SCANNED_ROWS,
    RowFilter,
    max_rows,
    range_status,
)

ROW = (int(Status.EXHAUSTED), 7, 9, "attempts", 1000)
"""Status, lane, policy, reason and time of completion of a dead letter."""


@pytest.mark.parametrize(
    ("task_filter", "expected"),
    [
        (StoredTaskFilter(), None),
        (StoredTaskFilter(is_live=True), Status.PENDING),
        (StoredTaskFilter(is_live=True, status=Status.IN_FLIGHT), Status.IN_FLIGHT),
        (StoredTaskFilter(status=Status.SUCCEEDED), Status.SUCCEEDED),
    ],
)
def test_the_range_of_a_filter(task_filter: StoredTaskFilter, expected: Status | None) -> None:
    """Live tasks are in the range of PENDING tasks."""
    assert expected is range_status(task_filter)


@pytest.mark.parametrize(
    ("task_filter", "expected"),
    [
        (StoredTaskFilter(), 11),
        (StoredTaskFilter(status=Status.EXHAUSTED), 11),
        (StoredTaskFilter(is_live=True), 11),
        (StoredTaskFilter(status=Status.PENDING), MAX_SCANNED_ROWS),
        (StoredTaskFilter(lane="acme/a"), MAX_SCANNED_ROWS),
        (StoredTaskFilter(matches_content=lambda _: True), MAX_DECODED_ROWS),
    ],
)
def test_the_number_of_rows_for_a_page_of_ten(task_filter: StoredTaskFilter, expected: int) -> None:
    """One row more than the page if all rows of the range match, else a bounded number."""
    assert expected == max_rows(task_filter, 10)


@pytest.mark.parametrize(
    ("row_filter", "expected"),
    [
        (RowFilter(StoredTaskFilter(), None, None, None), True),
        (RowFilter(StoredTaskFilter(status=Status.EXHAUSTED), {7}, 9, "attempts"), True),
        (RowFilter(StoredTaskFilter(status=Status.SUCCEEDED), None, None, None), False),
        (RowFilter(StoredTaskFilter(is_live=True), None, None, None), False),
        (RowFilter(StoredTaskFilter(), {8}, None, None), False),
        (RowFilter(StoredTaskFilter(), None, 8, None), False),
        (RowFilter(StoredTaskFilter(), None, None, "permanent"), False),
        (
            RowFilter(StoredTaskFilter(finished_from=1000, finished_until=1000), None, None, None),
            True,
        ),
        (RowFilter(StoredTaskFilter(finished_from=1001), None, None, None), False),
        (RowFilter(StoredTaskFilter(finished_until=999), None, None, None), False),
    ],
)
def test_a_row_matches_if_all_its_columns_match(row_filter: RowFilter, expected: bool) -> None:
    """Each field of a filter that is set is compared with its column."""
    assert expected is row_filter.matches(*ROW)


def test_a_live_task_has_no_time_of_completion() -> None:
    """A live task matches a window of completion times only if the window has no limits."""
    row = (int(Status.PENDING), 7, 9, None, None)

    assert RowFilter(StoredTaskFilter(), None, None, None).matches(*row)
    assert not RowFilter(StoredTaskFilter(finished_until=1000), None, None, None).matches(*row)
