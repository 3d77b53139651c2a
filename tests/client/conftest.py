"""Fixtures of the client tests: a fake service, and drivers of both clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tarry.testing import no_wait
from tests.client.client_drivers import DRIVERS, ClientDriver
from tests.client.fake_service import FakeService, run_fake_service

OpenDriver = Callable[..., AbstractContextManager[ClientDriver]]


@pytest.fixture
def service() -> Iterator[FakeService]:
    """A fake service."""
    with run_fake_service() as service:
        yield service


@pytest.fixture(params=DRIVERS)
def open_driver(request: pytest.FixtureRequest) -> OpenDriver:
    """A function that opens a driver; the test runs once for each client."""
    open_driver: OpenDriver = DRIVERS[request.param]
    return open_driver


@pytest.fixture
def driver(service: FakeService, open_driver: OpenDriver) -> Iterator[Any]:
    """A driver of a client of the fake service."""
    with open_driver(service.url, key="secret") as driver:
        yield driver


@pytest.fixture
def _no_wait() -> Iterator[None]:
    """Skip the waits of retries."""
    with no_wait():
        yield
