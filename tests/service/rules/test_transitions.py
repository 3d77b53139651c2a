"""The counters that a change of a task's status changes: the table, and the form of each engine."""

from __future__ import annotations

import re
import sqlite3
from importlib.resources import files

import msgspec
import pytest

from tarry.service.model import TRANSITIONS, Status
from tarry.service.rules.transitions import (
    COUNTER_CHANGES,
    COUNTERS,
    LIVE_STATUSES,
    OptionalStatus,
    sql_assignments,
    sql_counts,
    sql_values,
)
from tarry.service.stores.sqlite.transaction import TENANT_COUNTERS, LaneRow, WriteTransaction

PAIRS = sorted(COUNTER_CHANGES, key=repr)
"""All changes of a status: old and new."""


def count(status: OptionalStatus) -> dict[str, int]:
    """Return the counters of a lane that has one task, or none."""
    tasks = [] if status is None else [status]
    counters = {name: tasks.count(number) for number, name in enumerate(COUNTERS)}
    live = sum(task in {Status.PENDING, Status.IN_FLIGHT} for task in tasks)
    return {**counters, "live": live, "tasks": len(tasks)}


def expected_changes(old: OptionalStatus, new: OptionalStatus) -> dict[str, int]:
    """Return the difference of the counters after and before the change."""
    before, after = count(old), count(new)
    return {name: after[name] - before[name] for name in before}


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_changes_are_the_difference_of_the_counters(
    old: OptionalStatus, new: OptionalStatus
) -> None:
    """A change of the table is what one task less in the old and one more in the new status is."""
    change = COUNTER_CHANGES[old, new]
    counters = dict(zip(COUNTERS, change.by_status, strict=True))

    assert {**counters, "live": change.live, "tasks": change.tasks} == expected_changes(old, new)


def test_the_table_has_the_transitions_of_the_model() -> None:
    """A task that is stored before and after changes as the model says, or keeps a live status."""
    changed = {(old, new) for old, new in COUNTER_CHANGES if None not in {old, new} and old != new}
    kept = {old for old, new in COUNTER_CHANGES if old == new}

    assert {(old, new) for old, after in TRANSITIONS.items() for new in after} == changed
    assert set(LIVE_STATUSES) == kept


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_sqlite_counts_by_the_table(old: OptionalStatus, new: OptionalStatus) -> None:
    """The counters of a lane, a tenant and a policy get the changes of the table, for each task."""

    class Connection:
        """Fails if the transaction reads or writes the file."""

        execute = executemany = None

    transaction = WriteTransaction(Connection(), None, 0, None)  # type: ignore[arg-type]
    values = {"name": "acme/lane", "parked_until": None, "schedule_changed": False}
    lane = msgspec.convert([values.get(name, 5) for name in LaneRow.__struct_fields__], LaneRow)

    transaction.count_transition(1, lane, 1, old, new, 2)

    expected = expected_changes(old, new)
    counted = dict(zip(TENANT_COUNTERS, transaction._counter_changes[1], strict=True))
    assert {**{name: 2 * expected[name] for name in COUNTERS}, "superseded": 0} == counted
    assert transaction._policy_changes.get(1, [0, 0]) == [
        2 * expected["live"],
        2 * expected["tasks"],
    ]
    for name in ("pending", "in_flight", "exhausted", "tasks"):
        assert 5 + 2 * expected[name] == getattr(lane, name)


def run_sql(columns: str, **statuses: OptionalStatus) -> tuple[int, ...]:
    """Return the columns for three equal rows, as PostgreSQL and SQLite compute them."""
    values = ", ".join(
        f"{'NULL' if status is None else status} AS {name}" for name, status in statuses.items()
    )
    query = f"SELECT {columns} FROM ({' UNION ALL '.join([f'SELECT {values}'] * 3)}) AS i"  # noqa: S608
    row: tuple[int, ...] = (
        sqlite3.connect(":memory:").execute(query.replace("::integer", "")).fetchone()
    )
    return row


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_columns_of_a_group_count_by_the_table(old: OptionalStatus, new: OptionalStatus) -> None:
    """The columns count each task of a group, whichever of its statuses varies."""
    expected = tuple(3 * change for change in COUNTER_CHANGES[old, new].by_status)
    from_old = [after for before, after in PAIRS if before == old and after is not None]
    to_new = [before for before, after in PAIRS if after == new and before is not None]

    forms = [sql_counts([old], [new])]
    if new is not None:
        forms.append(sql_counts([old], from_old, "i.new_status"))
    if old is not None:
        forms.append(sql_counts(to_new, [new], "i.status"))
    for columns in forms:
        assert re.findall(r" AS (\w+)", columns) == list(COUNTERS)
        assert expected == run_sql(columns, status=old, new_status=new)


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_values_and_assignments_are_those_of_the_table(
    old: OptionalStatus, new: OptionalStatus
) -> None:
    """The values of one task, and assignments for several tasks, are the changes of the table."""
    changes = COUNTER_CHANGES[old, new].by_status
    row = dict.fromkeys(COUNTERS, 10)
    for assignment in filter(None, sql_assignments(old, new, "l", "3").split(", ")):
        name, expression = assignment.split(" = ")
        row[name] = eval(expression.replace("l.", ""), {}, row)  # noqa: S307

    assert list(changes) == [int(value) for value in sql_values(old, new).split(",")]
    assert row == {name: 10 + 3 * change for name, change in zip(COUNTERS, changes, strict=True)}


def test_changes_in_postgres_have_the_order_of_the_counters() -> None:
    """Rows of counts are converted to `change_1` by position."""
    text = (files("tarry.service.stores.postgres") / "sql" / "types.sql").read_text("utf-8")
    body = text.partition("CREATE TYPE tarry.change_1 AS (")[2].partition(")")[0]
    names = re.findall(r"^    (\w+) ", body, re.MULTILINE)

    assert ["tenant", "lane", "policy", *COUNTERS, "superseded", "new_lanes"] == names[:-2]
