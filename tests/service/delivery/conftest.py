"""Real targets, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.hostile import Hostile, hostile_targets


@pytest.fixture(scope="session")
def hostile() -> Iterator[Hostile]:
    """Targets of all kinds."""
    with hostile_targets() as targets:
        yield targets
