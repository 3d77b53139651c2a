"""Fixtures of the telemetry tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tarry.testing import VirtualClock, scripted_random


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    """Virtual time and random numbers of 0.5: the default delays are 0.05, 0.1 and 0.2 s."""
    with VirtualClock() as clock, scripted_random([0.5]):
        yield clock
