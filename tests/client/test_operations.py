"""Calls of several requests, driven by hand in virtual time."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import msgspec
import pytest

import tarry
from tarry.client.errors import NotFinished
from tarry.client.operations import Operations
from tarry.errors import ConfigurationError
from tarry.testing import VirtualClock, scripted_random
from tarry.wire.tasks import RetryTask
from tests.client.fake_service import task_json

PENDING = msgspec.convert(task_json(1), RetryTask)


def looks(clock: VirtualClock, timeout: float | timedelta | None, most: int) -> list[float]:
    """The moments at which a task is looked at that does not end."""
    operation = Operations().wait("a", timeout)
    step = next(operation)
    moments: list[float] = []
    while len(moments) < most:
        if isinstance(step, (float, int)):
            clock.advance(step)
        else:
            moments.append(round(clock.elapsed, 3))
        step = operation.send(PENDING)
    return moments


def test_looks_grow_rare() -> None:
    """What takes long is looked at less and less, down to once in two seconds."""
    with VirtualClock() as clock, scripted_random([0.999999]):
        moments = looks(clock, None, 20)
    gaps = [round(b - a, 2) for a, b in pairwise(moments)]
    assert sorted(gaps) == gaps
    assert 0.05 == gaps[0]
    assert 2.0 == gaps[-1] == max(gaps)


@pytest.mark.parametrize("timeout", [10.0, timedelta(seconds=10)])
def test_the_last_look_is_at_the_end(timeout: float | timedelta) -> None:
    """A wait is not overslept, and its last moment is used."""
    with VirtualClock() as clock, pytest.raises(NotFinished) as caught:
        looks(clock, timeout, 1000)
    assert 10.0 == pytest.approx(clock.elapsed)
    assert PENDING is caught.value.last


def test_a_deadline_ends_a_wait() -> None:
    """The caller's deadline holds for waits too."""
    with VirtualClock() as clock, tarry.deadline(3), pytest.raises(NotFinished):
        looks(clock, 10, 1000)
    assert 3.0 == pytest.approx(clock.elapsed)


def waits(clock: VirtualClock, timeout: float | None, most: int) -> list[float]:
    """The seconds that a service was asked to wait, and waited; below 0 are pauses."""
    operation = Operations().wait("a", timeout)
    step = next(operation)
    asked: list[float] = []
    while len(asked) < most:
        if isinstance(step, (float, int)):
            asked.append(-step)
            clock.advance(step)
        else:
            asked.append(step.wait_s)
            assert ("long_poll" if step.wait_s else "retry") == step.mode
            clock.advance(step.wait_s)
        step = operation.send(PENDING)
    return asked


def test_a_service_that_waits_is_not_polled() -> None:
    """One look after the other, without a pause, for as long as it takes."""
    with VirtualClock() as clock:
        assert [20, 20, 20, 20] == waits(clock, None, 4)


def test_a_service_is_not_asked_to_wait_for_longer_than_the_caller() -> None:
    """The last second is for looks that are answered at once."""
    with VirtualClock() as clock, scripted_random([0.999999]):
        asked = waits(clock, 25.0, 4)
        assert [20, 4, 0] == asked[:3]
        assert -0.05 == round(asked[3], 2)
    with VirtualClock() as clock, tarry.deadline(3):
        assert [2, 0] == waits(clock, None, 2)


def test_a_wait_is_a_length_of_time() -> None:
    """What is none is refused by name."""
    with pytest.raises(ConfigurationError, match="timeout must be at least 0, got -1"):
        next(Operations().wait("a", -1))
