"""Conformance of records, and of the kinds of records that have rules of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.stores.conformance import lane_activity, records, series, workers
from tests.service.stores.conformance.suite import Case, case_name
from tests.service.stores.sqlite.harness import cases_of, run_case


@pytest.mark.parametrize("case", cases_of(lane_activity, records, series, workers), ids=case_name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    """The store passes the case."""
    run_case(case, tmp_path)
