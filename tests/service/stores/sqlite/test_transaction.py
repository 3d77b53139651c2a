"""The number of statements of a transaction, and the types of their parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from tarry.service.store import NewTask
from tarry.service.stores.sqlite import add, finish, queries
from tarry.service.stores.sqlite.transaction import WriteTransaction
from tests.service.stores.harness import (
    HOUR_MS,
    LEASE,
    START_MS,
    exhausted_result,
    retry_result,
    success_result,
    task,
    task_id,
)
from tests.service.stores.sqlite.harness import DatabaseFile


def test_the_number_of_statements_does_not_grow_with_lanes(
    two_database_files: list[DatabaseFile],
) -> None:
    """Tasks of 48 lanes need as many statements as tasks of one lane."""
    statements: list[list[str]] = []
    for database_file, lanes in zip(two_database_files, (1, 48), strict=True):
        database_file.add([NewTask(task(1000 + n, f"h{n}")) for n in range(lanes)])
        statements.append([])
        database_file.database.open()[0].set_trace_callback(statements[-1].append)
        batch = [NewTask(task(n, f"h{n % lanes}"), lease_on_add=True) for n in range(48)]
        database_file.finish(
            [retry_result(added.task, START_MS + HOUR_MS) for added in database_file.add(batch)]
        )

    assert len(statements[0]) == len(statements[1])


@pytest.mark.parametrize(
    ("number", "ref", "reason"), [(None, None, None), (0, "", ""), (7, "0", "0")]
)
def test_none_differs_from_empty_and_zero(
    database_file: DatabaseFile, number: int | None, ref: str | None, reason: str | None
) -> None:
    """None, empty strings and zero are read as they were written."""
    batch = [
        NewTask(
            task(n, policy_version=number, owned_body_ref=ref),
            lease_on_add=n == 1,
            delay_ms=None if n == 1 else 5,
        )
        for n in (1, 2)
    ]
    leased, waiting = (added.task for added in database_file.add(batch))
    delay = None if number is None else float(number)

    database_file.finish([replace(exhausted_result(leased, previous_delay=delay), reason=reason)])

    finished, pending = database_file.run(
        *(partial(queries.get_task, tenant="acme", task_id=task_id(n)) for n in (1, 2))
    )
    assert (number, ref) == (finished.policy_version, finished.owned_body_ref)
    assert (reason, delay) == (finished.reason, finished.previous_delay)
    assert waiting == pending


def test_no_parameter_needs_an_adapter(database_file: DatabaseFile) -> None:
    """Parameters are int, str or bytearray: binding other types takes ten times as long."""
    parameter_types: set[type] = set()

    def add_and_finish(tx: WriteTransaction) -> None:
        execute = tx.execute

        def record_types(statement: str, values: list[Any]) -> Any:
            parameter_types.update(map(type, values))
            return execute(statement, values)

        tx.execute = record_types
        batch = [NewTask(task(n), lease_on_add=n > 1) for n in range(4)]
        results = add.add(tx, batch, LEASE, None)
        leased = [added.task for added in add.to_add_results(batch, results, LEASE) if added.leased]
        task_results = [
            success_result(leased[0]),
            retry_result(leased[1], START_MS + 5, renewed_lease=LEASE),
        ]
        finish.finish(tx, [finish.pack_result(result) for result in task_results])
        tx.flush()

    database_file.add([NewTask(task(9))])
    database_file.run(add_and_finish)

    assert {int, str, bytearray} == parameter_types
