"""Claims: conformance, and tasks of parked lanes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tarry.service.store import NewTask
from tarry.service.stores.sqlite import SqliteTaskStore
from tests.service.stores.conformance import claim as claim_cases
from tests.service.stores.conformance import expired_leases, fair_order
from tests.service.stores.conformance.suite import Case, case_name
from tests.service.stores.harness import LANE, LEASE, START_MS, ManualClock, task, task_numbers
from tests.service.stores.sqlite.harness import cases_of, run_case


@pytest.mark.parametrize("case", cases_of(claim_cases, expired_leases, fair_order), ids=case_name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    """The store passes this part of the conformance suite."""
    run_case(case, tmp_path)


async def test_a_parked_lane_is_not_claimed_within_the_horizon(tmp_path: Path) -> None:
    clock = ManualClock()

    store = SqliteTaskStore(tmp_path / "tasks.db", clock=clock)
    await store.open()
    try:
        await store.add([NewTask(task(1), delay_ms=800)])
        await store.park(LANE, START_MS + 500, probes=1, consecutive_opens=1)
        for _ in range(2):
            early = await store.claim(LEASE, limit=10, per_lane=10)
            assert ([], START_MS + 500) == (early.tasks, early.next_at)
        clock.advance(500)
        claimed = await store.claim(LEASE, limit=10, per_lane=10)
        assert ([1], {LANE: 1}) == (task_numbers(claimed.tasks), claimed.consecutive_opens_by_lane)
    finally:
        await store.close()
