"""Operations of several requests, run by hand in virtual time."""

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


def poll_times(clock: VirtualClock, timeout: float | timedelta | None, most: int) -> list[float]:
    """Return the times at which an unfinished task is polled."""
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


def test_polls_become_rarer() -> None:
    """Polls become rarer, down to one in two seconds."""
    with VirtualClock() as clock, scripted_random([0.999999]):
        moments = poll_times(clock, None, 20)
    gaps = [round(b - a, 2) for a, b in pairwise(moments)]
    assert sorted(gaps) == gaps
    assert 0.05 == gaps[0]
    assert 2.0 == gaps[-1] == max(gaps)


@pytest.mark.parametrize("timeout", [10.0, timedelta(seconds=10)])
def test_last_poll_is_at_the_timeout(timeout: float | timedelta) -> None:
    """The last poll is at the timeout."""
    with VirtualClock() as clock, pytest.raises(NotFinished) as caught:
        poll_times(clock, timeout, 1000)
    assert 10.0 == pytest.approx(clock.elapsed)
    assert PENDING is caught.value.last


def test_a_deadline_ends_a_wait() -> None:
    """The caller's deadline limits a wait."""
    with VirtualClock() as clock, tarry.deadline(3), pytest.raises(NotFinished):
        poll_times(clock, 10, 1000)
    assert 3.0 == pytest.approx(clock.elapsed)


def long_polls(clock: VirtualClock, timeout: float | None, most: int) -> list[float]:
    """Return the seconds of each long poll, and the pauses as negative numbers."""
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


def test_long_polls_have_no_pauses() -> None:
    """Long polls follow each other without pauses."""
    with VirtualClock() as clock:
        assert [20, 20, 20, 20] == long_polls(clock, None, 4)


def test_long_poll_is_shorter_than_the_timeout() -> None:
    """A long poll ends before the timeout; the rest is short polls."""
    with VirtualClock() as clock, scripted_random([0.999999]):
        asked = long_polls(clock, 25.0, 4)
        assert [20, 4, 0] == asked[:3]
        assert -0.05 == round(asked[3], 2)
    with VirtualClock() as clock, tarry.deadline(3):
        assert [2, 0] == long_polls(clock, None, 2)


def test_negative_timeout_is_rejected() -> None:
    """A negative timeout is rejected."""
    with pytest.raises(ConfigurationError, match="timeout must be at least 0, got -1"):
        next(Operations().wait("a", -1))
