"""The harness of the API as a fixture."""

from __future__ import annotations

import pytest

from tests.service.api.harness import ApiHarness


@pytest.fixture
def api() -> ApiHarness:
    """Return an API with the default options."""
    return ApiHarness()
