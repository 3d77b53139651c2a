"""Fixtures of the telemetry tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tarry.testing import VirtualClock, scripted_random


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    """Virtual time and random numbers of 0.5: the default delays are 0.05, 0.1 and 0.2 s."""
    # A fixed start: a sum such as `now + 30` has a rounding error if it passes a power of two, so
    # tests that compare times would fail while the machine has run for 8,170 to 8,192 s.
    with VirtualClock(start=1024) as clock, scripted_random([0.5]):
        yield clock
