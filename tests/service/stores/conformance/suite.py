"""The conformance suite: a list of cases that every implementation of the store port must pass.

A test module passes a function to `StoreHarness` that creates a store, each time over the same
data:

    @pytest.mark.parametrize("case", CASES, ids=case_name)
    def test_conformance(case: Case, tmp_path: Path) -> None:
        harness = StoreHarness(lambda clock: SqliteTaskStore(tmp_path / "tasks.db", clock=clock))
        asyncio.run(harness.run(case))
"""

from __future__ import annotations

from tests.service.stores.conformance import (
    add,
    claim,
    dead_letters,
    expired_leases,
    fair_order,
    finish,
    lane_activity,
    lanes,
    policies_and_keys,
    queries,
    records,
    release,
    retention,
    series,
    transfer,
    workers,
)
from tests.service.stores.harness import CASES, Case, StoreHarness, case_name

__all__ = ["CASES", "CASE_MODULES", "Case", "StoreHarness", "case_name"]

CASE_MODULES = (
    add,
    claim,
    expired_leases,
    lanes,
    lane_activity,
    fair_order,
    finish,
    release,
    queries,
    dead_letters,
    policies_and_keys,
    records,
    retention,
    series,
    transfer,
    workers,
)
"""Modules that add their cases to `CASES` when they are imported."""
