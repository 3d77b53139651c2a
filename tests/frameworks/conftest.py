"""Fixtures of the framework tests."""

from __future__ import annotations

import pytest

from tests.frameworks.integrations import INTEGRATIONS, Integration


@pytest.fixture(params=INTEGRATIONS, ids=str)
def integration(request: pytest.FixtureRequest) -> Integration:
    """Return each integration in turn."""
    param: Integration = request.param
    return param
