"""A played service, and each kind of client to talk to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tarry.testing import no_wait
from tests.client.playing import Played, playing
from tests.client.talking import OPENED, Talker

Opened = Callable[..., AbstractContextManager[Talker]]


@pytest.fixture
def service() -> Iterator[Played]:
    """A service of the test's own."""
    with playing() as played:
        yield played


@pytest.fixture(params=OPENED)
def opened(request: pytest.FixtureRequest) -> Opened:
    """Each kind of client in turn."""
    found: Opened = OPENED[request.param]
    return found


@pytest.fixture
def talker(service: Played, opened: Opened) -> Iterator[Any]:
    """A client of the service."""
    with opened(service.url, key="secret") as talker:
        yield talker


@pytest.fixture
def _hurry() -> Iterator[None]:
    """Make no real waits."""
    with no_wait():
        yield
