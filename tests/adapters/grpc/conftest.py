"""Fixtures of the gRPC adapter tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tarry.testing import no_wait
from tests.adapters.grpc.fake_service import CALL_STYLES, CallStyle, FakeService, run_fake_service


@pytest.fixture
def service() -> Iterator[FakeService]:
    """Run a service for one test, so that late attempts of other tests do not reach it."""
    with run_fake_service() as service:
        yield service


@pytest.fixture(params=CALL_STYLES, ids=lambda call_style: call_style.__name__)
def call_style(request: pytest.FixtureRequest) -> CallStyle:
    """Return each call style in turn."""
    param: CallStyle = request.param
    return param


@pytest.fixture(autouse=True)
def _no_waits() -> Iterator[None]:
    """Make waits return at once."""
    with no_wait():
        yield
