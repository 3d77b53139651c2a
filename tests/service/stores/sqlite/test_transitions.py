"""Released tasks: conformance."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.stores.conformance import release
from tests.service.stores.conformance.suite import Case, case_name
from tests.service.stores.sqlite.harness import cases_of, run_case


@pytest.mark.parametrize("case", cases_of(release), ids=case_name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    """The store passes this part of the conformance suite."""
    run_case(case, tmp_path)
