"""`attempts=None`: a call whose number of attempts is not limited."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import tarry
from tarry import Downstream, Policy, Reason
from tarry.testing import VirtualClock, captured_events
from tests.runtime.drivers import DRIVERS, FAIL, OK, Dependency, Driver

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)


@every_driver
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"deadline": 300}, Reason.DEADLINE),
        ({"policy": Policy(total_budget=300)}, Reason.TOTAL_BUDGET),
    ],
    ids=["deadline", "total budget"],
)
def test_only_the_time_limits_the_attempts(
    driver: Driver, options: dict[str, Any], reason: Reason, clock: VirtualClock
) -> None:
    """With `attempts=None`, a call makes attempts until its time is over."""
    dependency = Dependency(clock, FAIL)

    with pytest.raises(ConnectionError) as caught:
        driver.run(clock, dependency, attempts=None, **options)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert reason is record.reason
    assert len(dependency.starts) > 20
    assert 270 < dependency.starts[-1] < 300


@every_driver
def test_retry_budget_limits_the_attempts(driver: Driver, clock: VirtualClock) -> None:
    """With `attempts=None` and a retry budget, a call makes attempts until the budget is empty."""
    dependency = Dependency(clock, FAIL)
    payments = Downstream("payments", budget=tarry.TokenBudget())

    with pytest.raises(ConnectionError) as caught:
        driver.run(clock, dependency, attempts=None, downstream=payments)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (Reason.BUDGET_EMPTY, 101) == (record.reason, len(dependency.starts))


@pytest.mark.parametrize("options", [{}, {"downstream": Downstream("payments")}], ids=str)
def test_unlimited_attempts_need_another_limit(options: dict[str, Any]) -> None:
    """`attempts=None` is rejected if no time, retry budget or stop function limits the call."""
    with pytest.raises(tarry.ConfigurationError, match="attempts=None needs another limit"):
        tarry.retry(on=ConnectionError, attempts=None, **options)


@every_driver
def test_stop_function_limits_the_attempts(driver: Driver, clock: VirtualClock) -> None:
    """With `attempts=None` and a stop function, a call makes attempts until that returns True."""
    dependency = Dependency(clock, FAIL)

    with pytest.raises(ConnectionError):
        driver.run(clock, dependency, attempts=None, stop=lambda state: state.attempts == 7)

    assert 7 == len(dependency.starts)


def test_default_is_the_limit_of_the_policy(clock: VirtualClock) -> None:
    """Without `attempts`, the policy limits the number of attempts."""
    dependency = Dependency(clock, FAIL)

    with pytest.raises(ConnectionError):
        tarry.call(dependency.call, on=ConnectionError, policy=Policy(max_attempts=2))

    assert 2 == len(dependency.starts)


def test_events_have_no_limit(clock: VirtualClock) -> None:
    """In the events of a call with unlimited attempts, and for its hook, the limit is None."""
    hook_events: list[tarry.WillWait] = []
    with captured_events() as events:
        tarry.call(
            Dependency(clock, FAIL, OK).call,
            on=ConnectionError,
            attempts=None,
            deadline=9,
            on_retry=hook_events.append,
        )

    limits = [getattr(event, "max_attempts", None) for event in events]
    limits += [getattr(event, "max_retries", None) for event in (*events, *hook_events)]
    assert {None} == set(limits)
    assert {"AttemptStarted", "AttemptFailed", "WillWait", "Waited"} < {
        type(event).__name__ for event in events
    }


def test_log_has_no_limit(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    """The log message for a retry of an unlimited call has only the number of the retry."""
    with caplog.at_level(logging.DEBUG, "tarry"):
        tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError, attempts=None, deadline=9)

    assert any("retry 1 in 50 ms" in message for message in caplog.messages)
