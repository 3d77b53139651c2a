"""What all tests of the gRPC adapter share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tarry.testing import no_wait
from tests.adapters.grpc.service import WAYS, Service, Way, serving


@pytest.fixture
def service() -> Iterator[Service]:
    """Run a server for one test, so that no late attempt of another arrives there."""
    with serving() as service:
        yield service


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Way:
    """Every way to call."""
    found: Way = request.param
    return found


@pytest.fixture(autouse=True)
def _hurry() -> Iterator[None]:
    """Make no real waits."""
    with no_wait():
        yield
