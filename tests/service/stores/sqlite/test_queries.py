"""Queries: conformance, bounded pages, and packed task ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from tarry.service.model import MAX_ATTEMPT_NUMBER
from tarry.service.store import NewTask, StoredTaskFilter
from tarry.service.stores.sqlite.queries import attempt_row_id, pack_id, pack_ids
from tests.service.stores.conformance import queries as query_cases
from tests.service.stores.conformance.suite import Case, case_name
from tests.service.stores.harness import task, task_id, task_numbers
from tests.service.stores.sqlite.harness import cases_of, open_store, run_case


@pytest.mark.parametrize("case", cases_of(query_cases), ids=case_name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    """The store passes this part of the conformance suite."""
    run_case(case, tmp_path)


async def test_pages_of_a_selective_filter_are_short(tmp_path: Path) -> None:
    """A page reads a bounded number of rows, and its cursor continues after them."""
    async with open_store(tmp_path / "tasks.db") as store:
        await store.add([NewTask(task(0, "rare"))])
        await store.add([NewTask(task(number)) for number in range(1, 4001)])
        query = StoredTaskFilter(lane="acme/https:rare.example:443")

        pages = [await store.list_tasks("acme", query, limit=10)]
        while pages[-1].cursor is not None:
            pages.append(await store.list_tasks("acme", query, cursor=pages[-1].cursor, limit=10))

        assert [[], [], [0]] == [task_numbers(page.items) for page in pages]


async def test_pages_with_decoded_tasks_are_shorter(tmp_path: Path) -> None:
    """A page decodes at most 500 tasks, and reads the content only if it is compared."""
    statements: list[str] = []
    decoded: list[bytes] = []

    def is_rare(content: bytes) -> bool:
        decoded.append(content)
        return content == b"rare"

    async with open_store(tmp_path / "tasks.db") as store:
        await store.add([NewTask(task(0, packed_content=b"rare"))])
        await store.add([NewTask(task(number)) for number in range(1, 1200)])
        query = StoredTaskFilter(matches_content=is_rare)
        assert 1 == await store.count_tasks("acme", query)
        assert 1200 == len(decoded)
        decoded.clear()
        page = await store.list_tasks("acme", query, limit=1)
        assert ([], 500) == (page.items, len(decoded))
        page = await store.list_tasks("acme", query, cursor=page.cursor, limit=1000)
        page = await store.list_tasks("acme", query, cursor=page.cursor, limit=1)
        assert ([0], None, 1200) == (task_numbers(page.items), page.cursor, len(decoded))
        store._read_database.open()[0].set_trace_callback(statements.append)
        query = StoredTaskFilter(matches_attempt=lambda attempt: attempt.response_status == 503)
        assert 0 == await store.count_tasks("acme", query)
        assert not any("content" in statement for statement in statements)


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
def test_packing_ids_together_equals_packing_one_by_one(ids: list[str]) -> None:
    """`pack_ids` returns the same as `pack_id` for each id, also if some are malformed."""
    assert [pack_id(task_id) for task_id in ids] == pack_ids(ids)


def test_attempts_of_a_task_are_before_those_of_the_next_task() -> None:
    """The row ids of two tasks do not overlap; a number that would overlap is rejected."""
    assert attempt_row_id(7, MAX_ATTEMPT_NUMBER) < attempt_row_id(8, 0)
    with pytest.raises(OverflowError, match="above 16777215"):
        attempt_row_id(7, MAX_ATTEMPT_NUMBER + 1)
