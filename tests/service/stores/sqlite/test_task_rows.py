"""Values on their way into the file: cheap to write, and the same when they come back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tarry.service.store import NewTask
from tarry.service.stores.sqlite import add, finish, queries
from tarry.service.stores.sqlite.task_rows import pack_id, pack_ids
from tarry.service.stores.sqlite.transaction import Transaction
from tests.service.stores.harness import (
    LEASE,
    START_MS,
    dead_result,
    retry_result,
    success_result,
    task,
    task_id,
)
from tests.service.stores.sqlite.test_multirow import File


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    """An empty file."""
    made = File(tmp_path / "tasks.db")
    yield made
    made.database.close()


@pytest.mark.parametrize(
    ("number", "ref", "reason"), [(None, None, None), (0, "", ""), (7, "0", "0")]
)
def test_what_is_missing_differs_from_what_is_empty(
    file: File, number: int | None, ref: str | None, reason: str | None
) -> None:
    """None, nothing and zero come back as they were written: what stands for None is neither."""
    batch = [
        NewTask(
            task(n, policy_version=number, body_ref=ref), direct=n == 1, delay=None if n == 1 else 5
        )
        for n in (1, 2)
    ]
    held, waiting = (added.task for added in file.add(batch))
    delay = None if number is None else float(number)

    file.finish([replace(dead_result(held, previous_delay=delay), reason=reason)])

    ended, kept = file.run(
        *(partial(queries.get_task, tenant="acme", task_id=task_id(n)) for n in (1, 2))
    )
    assert (number, ref) == (ended.policy_version, ended.body_ref)
    assert (reason, delay) == (ended.reason, ended.previous_delay)
    assert waiting == kept


def test_no_value_asks_how_it_wants_to_be_written(file: File) -> None:
    """Each one that is neither int, float, str nor bytearray costs as much as ten that are."""
    kinds: set[type] = set()

    def live(tx: Transaction) -> None:
        execute = tx.execute

        def note(statement: str, values: list[Any]) -> Any:
            kinds.update(map(type, values))
            return execute(statement, values)

        tx.execute = note
        batch = [NewTask(task(n), direct=n > 1) for n in range(4)]
        answers = add.add(tx, batch, LEASE, None)
        held = [added.task for added in add.to_add_results(batch, LEASE, answers) if added.leased]
        ends = [success_result(held[0]), retry_result(held[1], START_MS + 5, keep=LEASE)]
        finish.finish(tx, [finish.pack_result(end) for end in ends])
        tx.flush()

    file.add([NewTask(task(9))])
    file.run(live)

    assert {int, str, bytearray} == kinds


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [task_id(1)],
        [task_id(1), task_id(2), task_id(1)],
        [task_id(1), "none", ""],
        [task_id(10).upper(), task_id(2)],
        [task_id(1) + "\n" + task_id(2)],
        [task_id(1) + "\n" + task_id(2), ""],
        [task_id(1) + "\n", task_id(2)[:-1]],
        [task_id(1)[:-1] + " ", task_id(2)],
        [task_id(1).replace("-", "0")],
    ],
)
def test_ids_are_found_together_as_one_by_one(ids: list[str]) -> None:
    """One that is malformed harms no other, and none is taken for two."""
    assert [pack_id(one) for one in ids] == pack_ids(ids)
