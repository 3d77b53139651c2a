"""Every test of a `way` runs in all of them."""

from __future__ import annotations

import pytest

from tests.frameworks.ways import WAYS, Way


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    """Every way in turn."""
    found: Way = request.param
    return found
