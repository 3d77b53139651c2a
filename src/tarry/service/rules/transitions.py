"""The counters that change when a task is added, changes its status, or is deleted.

A lane, a tenant and a policy count their tasks. `COUNTER_CHANGES` is the table of the changes. Each
engine counts by it: SQLite reads the table, PostgreSQL and Redis get the SQL and the Lua that this
module makes of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from tarry.service.model import TRANSITIONS, Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OptionalStatus: TypeAlias = int | None
"""The status of a task; None: the task is not stored, because it is added or deleted."""

COUNTERS = tuple(status.name.lower() for status in Status)
"""The counter of the tasks in each status, by the number of the status."""
LIVE_STATUSES = tuple(int(status) for status in Status if not status.is_finished)


class CounterChange(NamedTuple):
    """What one task adds to the counters."""

    by_status: tuple[int, ...]
    """The changes of `COUNTERS`."""
    live: int
    """The change of the number of tasks that are PENDING or IN_FLIGHT."""
    tasks: int
    """The change of the number of tasks in any status."""


def _change(old: OptionalStatus, new: OptionalStatus) -> CounterChange:
    by_status = tuple((new == status) - (old == status) for status in Status)
    live = sum(by_status[status] for status in LIVE_STATUSES)
    return CounterChange(by_status, live, sum(by_status))


_ADDED = [(None, int(status)) for status in Status]
"""Added tasks are PENDING or IN_FLIGHT; tasks of another store are imported in any status."""
_DELETED = [(int(status), None) for status in Status]
"""Redis also removes live tasks, if a key of theirs was lost."""
_CHANGED = [(int(old), int(new)) for old, after in TRANSITIONS.items() for new in after]
_KEPT = [(status, status) for status in LIVE_STATUSES]
"""A lease is renewed or given to another worker; a PENDING task gets another time."""
COUNTER_CHANGES: Mapping[tuple[OptionalStatus, OptionalStatus], CounterChange] = {
    (old, new): _change(old, new) for old, new in (*_ADDED, *_DELETED, *_CHANGED, *_KEPT)
}
"""The table: old and new status -> changes of the counters. No task changes in another way."""


def sql_counts(
    old: Sequence[OptionalStatus], new: Sequence[OptionalStatus], column: str | None = None
) -> str:
    """Return SQL columns with the changes of `COUNTERS` by a group of tasks.

    There is one old or one new status. `column` has the status of the other side, if that varies.
    """
    changes = {
        (after if len(old) == 1 else before): COUNTER_CHANGES[before, after].by_status
        for before in old
        for after in new
    }
    return ", ".join(
        f"{_sql_count({status: change[number] for status, change in changes.items()}, column)} "
        f"AS {counter}"
        for number, counter in enumerate(COUNTERS)
    )


def _sql_count(changes: Mapping[OptionalStatus, int], column: str | None) -> str:
    """Return the sum of the changes (all 0 or 1, or all 0 or -1) of a group of tasks."""
    counted = [status for status, change in changes.items() if change]
    if not counted:
        return "0"
    sign = "-" if changes[counted[0]] < 0 else ""
    if len(counted) == len(changes):
        return f"{sign}count(*)::integer"
    statuses = ", ".join(map(str, counted))
    return f"{sign}count(*) FILTER (WHERE {column} IN ({statuses}))::integer"


def sql_values(old: OptionalStatus, new: OptionalStatus) -> str:
    """Return the changes of `COUNTERS` by one task, as values of a row."""
    return ", ".join(map(str, COUNTER_CHANGES[old, new].by_status))


def sql_assignments(old: OptionalStatus, new: OptionalStatus, alias: str, count: str) -> str:
    """Return assignments of SQL that count `count` tasks in the row `alias`."""
    changes = zip(COUNTERS, COUNTER_CHANGES[old, new].by_status, strict=True)
    return ", ".join(
        f"{counter} = {alias}.{counter} {'+' if change > 0 else '-'} {count}"
        for counter, change in changes
        if change
    )


def lua_constants() -> str:
    """Return the number of each status, the counters, and the live statuses, as Lua."""
    names = ", ".join(status.name for status in Status)
    numbers = ", ".join(str(int(status)) for status in Status)
    counters = ", ".join(f"'{counter}'" for counter in COUNTERS)
    live = ", ".join(str(int(status in LIVE_STATUSES)) for status in Status)
    return (
        f"local {names} = {numbers}\n"
        f"local COUNTERS = {{[0] = {counters}}}\n"
        f"local LIVE_COUNT = {{[0] = {live}}}\n"
    )
