"""How the SQL stores apply a `StoredTaskFilter`: which rows to read, and which of them match."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tarry.service.model import Status
from tarry.service.store import StoredTaskFilter

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_SCANNED_ROWS = 2000
"""Maximum number of rows that are read for one page of a filtered list, even if few match."""
MAX_DECODED_ROWS = 500
"""The same, if the filter has functions that decode rows, which takes up to 50 us each."""
AFTER_ALL_ROWS = 1 << 62
"""A limit that is greater than every `seq`."""


def range_status(task_filter: StoredTaskFilter) -> Status | None:
    """Return the status whose index range contains all matching tasks; None: all ranges.

    One range has all live tasks, and another the tasks of each finished status. `Status.PENDING`
    stands for the range of live tasks.
    """
    if task_filter.is_live and task_filter.status is None:
        return Status.PENDING
    return task_filter.status


def max_rows(task_filter: StoredTaskFilter, limit: int) -> int:
    """Return how many rows of the range are read for a page of up to `limit` tasks."""
    if task_filter.matches_attempt is not None or task_filter.matches_content is not None:
        return MAX_DECODED_ROWS
    # The range is selected by tenant and `seq` and, if the wanted status is a finished one, by
    # status. With any other filter, some of its rows do not match.
    status = task_filter.status
    is_live_status = status is not None and not status.is_finished
    is_filtered = is_live_status or task_filter != StoredTaskFilter(
        status=status, is_live=task_filter.is_live
    )
    return max(MAX_SCANNED_ROWS, limit + 1) if is_filtered else limit + 1


class RowFilter(NamedTuple):
    """The part of a `StoredTaskFilter` that is compared with columns, with row ids for names."""

    task_filter: StoredTaskFilter
    lanes: Collection[int] | None
    """The ids of matching lanes; None: all."""
    policy: int | None
    """The id of the matching policy; None: all."""
    reason: str | None
    """The matching reason as it is stored; None: all."""

    def matches(
        self, status: int, lane: int, policy: int, reason: str | None, finished_at: int | None
    ) -> bool:
        """Return whether a row matches, except for its creation time."""
        task_filter, lanes, wanted_policy, wanted_reason = self
        wanted_status = task_filter.status
        return (
            (wanted_status is None or wanted_status == status)
            and (finished_at is None or not task_filter.is_live)
            and (lanes is None or lane in lanes)
            and (wanted_policy is None or wanted_policy == policy)
            and (wanted_reason is None or wanted_reason == reason)
            and is_within(finished_at, task_filter.finished_from, task_filter.finished_until)
        )


def is_within(time: int | None, start: int | None, end: int | None) -> bool:
    """Return whether a time is in a window, including its limits; None: no limit."""
    if time is None:
        return start is None and end is None
    return (start is None or start <= time) and (end is None or time <= end)
