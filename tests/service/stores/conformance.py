"""What every store must do: one list of cases, run on each engine.

A test file gives `Bench` a way to make the store, and to make it again over the same data:

    @pytest.mark.parametrize("case", CASES, ids=name_of)
    def test_conformance(case: Case, tmp_path: Path) -> None:
        asyncio.run(Bench(lambda clock: SqliteStore(tmp_path / "db", clock=clock)).run(case))
"""

from __future__ import annotations

from tests.service.stores import (
    cases_abandoned,
    cases_add,
    cases_ask,
    cases_claim,
    cases_dead,
    cases_fair,
    cases_finish,
    cases_lanes,
    cases_lists,
    cases_purge,
    cases_registry,
    cases_release,
    cases_upkeep,
)
from tests.service.stores.bench import CASES, Bench, Case, name_of

__all__ = ["CASES", "PARTS", "Bench", "Case", "name_of"]

PARTS = (
    cases_add,
    cases_claim,
    cases_abandoned,
    cases_lanes,
    cases_fair,
    cases_finish,
    cases_release,
    cases_ask,
    cases_lists,
    cases_dead,
    cases_purge,
    cases_registry,
    cases_upkeep,
)
"""The files that put their cases on the list when they are imported."""
