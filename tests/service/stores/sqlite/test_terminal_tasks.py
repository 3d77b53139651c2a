"""Terminal tasks: conformance, and many dead letters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tarry.service.model import ReplayRecord
from tarry.service.store import NewTask, TaskFilter
from tarry.service.stores.sqlite import SqliteStore
from tests.service.stores.conformance import dead_letters, retention
from tests.service.stores.conformance.suite import Case, case_name
from tests.service.stores.harness import LEASE, exhausted_result, task
from tests.service.stores.sqlite.harness import cases_of, run_case, run_on_store


@pytest.mark.parametrize("case", cases_of(dead_letters, retention), ids=case_name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    """The store passes this part of the conformance suite."""
    run_case(case, tmp_path)


def test_many_dead_letters_are_read_in_steps(tmp_path: Path) -> None:
    """Of 4100 dead letters all are counted, and a filter finds the only match."""

    async def main(store: SqliteStore) -> None:
        new_tasks = [NewTask(task(number), lease_on_add=True) for number in range(4100)]
        leased = [added.task for added in await store.add(new_tasks, LEASE)]
        await store.finish(
            [exhausted_result(task, "rare" if task is leased[4000] else "usual") for task in leased]
        )

        assert 4100 == await store.count_dead_letters(ReplayRecord(id="", tenant="acme"))
        assert 1 == await store.count_dead_letters(
            ReplayRecord(id="", tenant="acme", reason="rare")
        )
        created = await store.start_replay(ReplayRecord(id="replay", tenant="acme", reason="rare"))
        step_count = 1
        while (current := await store.replay_step("replay", 10)) and current.status == "running":
            step_count += 1
        assert (1, 1, 3) == (created.matched, current and current.replayed, step_count)
        assert 1 == await store.purge("acme", TaskFilter(reason="usual"), 1)
        assert 0 == await store.purge("acme", TaskFilter(reason="rare"), 1)

    run_on_store(tmp_path / "tasks.db", main)
