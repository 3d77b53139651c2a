"""Tests for backoff: ceilings are exact, never fall and have an upper bound."""

from __future__ import annotations

import copy
import pickle
from math import inf, log, nan
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tarry.core.backoff import BACKOFFS, Schedule, exponential, fixed, linear
from tarry.errors import ConfigurationError, ConfigurationTypeError

attempt_numbers = st.integers(1, 10_000)
seconds = st.floats(1e-6, 1e6)
multipliers = st.floats(1, 1e6)
names = st.sampled_from(sorted(BACKOFFS))


def test_names_of_backoffs() -> None:
    """The backoffs are named fixed, linear and exponential."""
    assert {"fixed": fixed, "linear": linear, "exponential": exponential} == BACKOFFS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fixed", [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
        ("linear", [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]),
        ("exponential", [0.5, 1.5, 4.5, 10.0, 10.0, 10.0]),
    ],
)
def test_first_ceilings(name: str, expected: list[float]) -> None:
    """Each backoff has the expected ceilings for initial 0.5, multiplier 3 and maximum 10."""
    assert expected == [BACKOFFS[name](k, 0.5, 3.0, 10.0) for k in range(1, 7)]


@given(attempt_numbers, seconds, multipliers, seconds)
def test_fixed(k: int, initial: float, multiplier: float, maximum: float) -> None:
    """The ceiling of a fixed backoff is always the initial delay."""
    assert initial == fixed(k, initial, multiplier, maximum)


@given(attempt_numbers, seconds, multipliers, seconds)
def test_linear(k: int, initial: float, multiplier: float, maximum: float) -> None:
    """The ceiling of a linear backoff is k times the initial delay, up to the maximum."""
    assert min(maximum, initial * k) == linear(k, initial, multiplier, maximum)


@given(st.integers(1, 50), seconds, multipliers, seconds)
def test_exponential(k: int, initial: float, multiplier: float, maximum: float) -> None:
    """Ceiling k is the initial delay multiplied k - 1 times, up to the maximum."""
    product = initial
    for _ in range(k - 1):
        product *= multiplier
    expected = min(maximum, product)
    assert pytest.approx(expected, rel=1e-12) == exponential(k, initial, multiplier, maximum)


@given(attempt_numbers, seconds, multipliers, seconds)
def test_exponential_of_large_numbers(
    k: int, initial: float, multiplier: float, maximum: float
) -> None:
    """For every attempt number the ceiling agrees with the one computed from logarithms."""
    log_ceiling = log(initial) + (k - 1) * log(multiplier)
    assume(abs(log_ceiling - log(maximum)) > 1e-6)
    actual = exponential(k, initial, multiplier, maximum)
    if log_ceiling > log(maximum):
        assert maximum == actual
    else:
        assert pytest.approx(log_ceiling, abs=1e-6) == log(actual)


@given(names, st.integers(1, 9_999), seconds, multipliers, seconds)
def test_ceilings_rise(
    name: str, k: int, initial: float, multiplier: float, maximum: float
) -> None:
    """Ceilings start at the initial delay, never fall and never exceed the maximum."""
    assume(maximum >= initial)
    before, after = (BACKOFFS[name](n, initial, multiplier, maximum) for n in (k, k + 1))
    assert initial <= before <= after <= maximum


@pytest.mark.parametrize("k", [1_024, 1_025, 1_026, 10_000, 1_000_000])
@pytest.mark.parametrize("multiplier", [2, 2.0, 10.0, 1e308])
def test_ceiling_of_a_power_that_overflows(k: int, multiplier: float) -> None:
    """When the power is too large for a float, the ceiling is the maximum."""
    assert 30.0 == exponential(k, 0.1, multiplier, 30.0)


@pytest.mark.parametrize("name", ["linear", "exponential"])
def test_ceilings_near_the_largest_float(name: str) -> None:
    """When the product overflows to infinity, the ceiling is the maximum."""
    assert 1.7e308 == BACKOFFS[name](2, 1e308, 2.0, 1.7e308)


def test_schedule() -> None:
    """A schedule returns its delays in order and then repeats the last one."""
    schedule = Schedule((5, 300, 1800))
    assert [5.0, 300.0, 1800.0, 1800.0] == [schedule(k) for k in range(1, 5)]
    assert 1800.0 == schedule(10_000)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=20), attempt_numbers)
def test_schedule_returns_the_delay_at_k(delays: list[float], k: int) -> None:
    """Ceiling k is the k-th delay, or the last."""
    expected = delays[k - 1] if k <= len(delays) else delays[-1]
    assert expected == Schedule(tuple(delays))(k)


def test_schedule_accepts_a_list_of_ints() -> None:
    """A list of ints becomes a tuple of floats, so that schedules with equal delays are equal."""
    delays: Any = [0, 1]
    schedule = Schedule(delays)
    assert (0.0, 1.0) == schedule.delays
    assert [float, float] == [type(delay) for delay in schedule.delays]
    assert Schedule((0.0, 1.0)) == schedule
    assert hash(Schedule((0.0, 1.0))) == hash(schedule)


def test_schedule_can_be_copied_and_pickled() -> None:
    """A copied or pickled schedule is equal to the original."""
    schedule = Schedule((1.0, 2.0))
    assert schedule == copy.deepcopy(schedule) == pickle.loads(pickle.dumps(schedule))  # noqa: S301


def test_schedule_is_immutable() -> None:
    """A schedule cannot be changed."""
    with pytest.raises(AttributeError):
        Schedule((1.0,)).delays = (2.0,)


@pytest.mark.parametrize(
    ("delays", "message"),
    [
        ((), "delays must contain at least one delay, got none"),
        ((1, -1), "delays[1] must be at least 0, got -1"),
        ((nan,), "delays[0] must be finite, got nan"),
        ((1, 2, inf), "delays[2] must be finite, got inf"),
    ],
)
def test_invalid_schedules(delays: tuple[float, ...], message: str) -> None:
    """An empty schedule or an invalid delay is rejected, and the message names the index."""
    with pytest.raises(ConfigurationError) as caught:
        Schedule(delays)
    assert message == str(caught.value)


@pytest.mark.parametrize("delay", [True, "1", None])
def test_schedule_with_a_delay_of_another_type(delay: Any) -> None:
    """A delay that is not a number is rejected."""
    with pytest.raises(ConfigurationTypeError) as caught:
        Schedule((1, delay))
    assert f"delays[1] must be a number, got {delay!r}" == str(caught.value)


def test_schedule_that_is_not_a_collection() -> None:
    """A single delay is rejected."""
    with pytest.raises(ConfigurationTypeError) as caught:
        Schedule(5)  # type: ignore[arg-type]
    assert "delays must be a collection of seconds, got 5" == str(caught.value)
