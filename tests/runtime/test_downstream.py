"""The public `Downstream`: its properties, `force`, and rejected arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import pytest

import tarry
from tarry import BreakerState, Downstream
from tarry.runtime import downstream
from tarry.runtime.downstream import internal_downstream, live_downstreams
from tarry.testing import VirtualClock, captured_events
from tests.runtime.drivers import DRIVERS, FAIL, OK, RESULT_DRIVERS, Dependency, Driver, Step

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)
CLOSED, OPEN = BreakerState.CLOSED, BreakerState.OPEN


def test_downstream_without_breaker_and_budget() -> None:
    """A downstream without breaker and budget has no state, balance or latency."""
    payments = Downstream("payments")

    assert ("payments", None, None) == (payments.name, payments.state, payments.balance)
    assert None is payments.quantile(0.5)
    assert "Downstream('payments', state=None)" == repr(payments)


def test_live_downstreams() -> None:
    """`live_downstreams` lists referenced downstreams by name and keeps none alive."""
    downstreams = [Downstream("live-b"), Downstream("live-a")]
    assert ["live-a", "live-b"] == [
        d.name for d in live_downstreams() if d.name.startswith("live-")
    ]

    del downstreams
    assert [] == [d.name for d in live_downstreams() if d.name.startswith("live-")]


def test_internal_downstream_has_no_telemetry(clock: VirtualClock) -> None:
    """Calls with an internal downstream emit no events, and it is not a live downstream."""
    internal = internal_downstream("live-internal")
    with captured_events() as events, tarry.record_calls() as records:
        call = tarry.retry(on=ConnectionError, downstream=internal)
        call(Dependency(clock, FAIL, OK).call)()
        with pytest.raises(ConnectionError):
            call(Dependency(clock, FAIL).call)()

    assert ([], []) == (events, records)
    assert internal not in live_downstreams()


def test_live_downstreams_while_another_thread_adds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`live_downstreams` reads the set again if it changes during the iteration."""
    payments = Downstream("live")

    class ChangingSet:
        changes = 2

        def __iter__(self) -> Iterator[Downstream]:
            yield payments
            if self.changes:
                self.changes -= 1
                raise RuntimeError("Set changed size during iteration")

    monkeypatch.setattr(downstream, "_downstreams", ChangingSet())

    assert [payments] == live_downstreams()


@every_driver
def test_retry_and_success_change_balance_and_latency(driver: Driver, clock: VirtualClock) -> None:
    payments = Downstream("payments", breaker=tarry.Breaker(), budget=tarry.TokenBudget("aws-2020"))
    with pytest.raises(ConnectionError):
        driver.run(clock, Dependency(clock, FAIL), downstream=payments, attempts=2)
    for duration_s in (1, 2, 3):
        driver.run(clock, Dependency(clock, Step(duration_s=duration_s)), downstream=payments)

    assert 498 == payments.balance  # the retry costs 5, and each of the three successes adds 1
    assert pytest.approx(2) == payments.quantile(0.5)
    assert "Downstream('payments', state=closed)" == repr(payments)


@every_driver
def test_success_after_retries_refunds_the_last_one(driver: Driver, clock: VirtualClock) -> None:
    payments = Downstream("payments", budget=tarry.TokenBudget("aws-2020"))

    driver.run(clock, Dependency(clock, FAIL, FAIL, OK), downstream=payments)

    assert 495 == payments.balance


@every_driver
def test_permanent_failures_do_not_count(driver: Driver, clock: VirtualClock) -> None:
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=1))

    with pytest.raises(ValueError, match="bad input"):
        driver.run(
            clock, Dependency(clock, Step(raises=ValueError("bad input"))), downstream=payments
        )

    assert CLOSED == payments.state


@every_driver
def test_slow_calls_open_the_breaker(driver: Driver, clock: VirtualClock) -> None:
    """Slow successes open a breaker that has `slow_after`."""
    breaker = tarry.Breaker(slow_after=1, min_calls=2)
    payments = Downstream("payments", breaker=breaker)

    for _ in range(2):
        driver.run(clock, Dependency(clock, Step(duration_s=2)), downstream=payments)

    assert OPEN == payments.state


@every_driver
def test_error_of_on_is_raised(driver: Driver, clock: VirtualClock) -> None:
    """An error of `on` is raised with the attempt's error as context, and is not counted."""
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=1), max_in_flight=1)

    def raise_error(_: Exception) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        driver.run(clock, Dependency(clock, FAIL), on=raise_error, downstream=payments)

    assert isinstance(caught.value.__context__, ConnectionError)
    assert CLOSED == payments.state
    assert "done" == driver.run(clock, Dependency(clock, OK), downstream=payments)


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
def test_error_of_until_is_raised(driver: Driver, clock: VirtualClock) -> None:
    """An error of `until` is raised, and the permit of the attempt is released."""
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=1), max_in_flight=1)

    def raise_error(_: object) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        driver.run(clock, Dependency(clock, OK), until=raise_error, downstream=payments)

    assert CLOSED == payments.state
    assert "done" == driver.run(clock, Dependency(clock, OK), downstream=payments)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_rate_limit_delay_on_an_event_loop_raises_blocking_wait(
    loop: str, clock: VirtualClock
) -> None:
    payments = Downstream("payments", limiter=tarry.AdaptiveRate(), max_in_flight=1)
    throttled = tarry.Outcome(tarry.Kind.THROTTLED)
    with pytest.raises(ConnectionError):
        tarry.call(
            Dependency(clock, FAIL).call, on=lambda _: throttled, attempts=1, downstream=payments
        )

    async def main() -> None:
        tarry.call(Dependency(clock, OK).call, on=ConnectionError, downstream=payments)

    with pytest.raises(tarry.BlockingWait):
        (clock.run if loop == "asyncio" else clock.run_trio)(main)

    assert "done" == tarry.call(Dependency(clock, OK).call, on=ConnectionError, downstream=payments)


# --- the last error -------------------------------------------------------------------------------


class RefusedError(Exception):
    """An error whose constructor does not take its `args`."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"refused with {code}")
        self.code = code


class UncopyableError(Exception):
    """An error that can be created only by `create`."""

    def __new__(cls, *args: object) -> Self:
        """Refuse to create an object."""
        raise TypeError("use create()")

    @classmethod
    def create(cls) -> Self:
        """Return a new error."""
        return Exception.__new__(cls)


def downstream_with_probe() -> Downstream:
    """Return a downstream whose breaker opens at the first failure and closes with one probe."""
    breaker = tarry.Breaker(consecutive=1, open_for=30, spread=0, probes=1)
    return Downstream("payments", breaker=breaker)


@every_driver
def test_cause_of_a_breaker_error(driver: Driver, clock: VirtualClock) -> None:
    """A breaker error is caused by the last failure, without the traceback of that failure."""
    payments = downstream_with_probe()
    dependency = Dependency(clock, Step(raises=RefusedError(code=7)))
    arguments: dict[str, Any] = {"downstream": payments, "on": RefusedError, "name": "charge"}
    with pytest.raises(RefusedError):
        driver.run(clock, dependency, **arguments)

    with pytest.raises(tarry.BreakerOpen) as caught:
        driver.run(clock, dependency, **arguments)

    cause = caught.value.__cause__
    assert isinstance(cause, RefusedError)
    assert ("refused with 7", 7) == (str(cause), cause.code)
    assert (None, None) == (cause.__traceback__, tarry.record_of(cause))


@every_driver
def test_rejected_during_a_probe(driver: Driver, clock: VirtualClock) -> None:
    """A call that is rejected while a probe runs has a cause and a `retry_after`."""
    payments = downstream_with_probe()
    with pytest.raises(ConnectionError):
        driver.run(clock, Dependency(clock, FAIL), downstream=payments)
    clock.advance(40)

    def probe() -> None:
        clock.advance(10)
        with pytest.raises(tarry.BreakerOpen) as caught:
            driver.run(clock, Dependency(clock, OK), downstream=payments)
        assert isinstance(caught.value.__cause__, ConnectionError)
        assert pytest.approx(20) == caught.value.retry_after

    tarry.call(probe, on=ConnectionError, downstream=payments)

    assert (CLOSED, None) == (payments.state, payments.last_error)


def test_permanent_failure_is_no_cause(clock: VirtualClock) -> None:
    """A permanent failure while the breaker is half-open does not replace the last error."""
    payments = downstream_with_probe()
    with pytest.raises(ConnectionError):
        DRIVERS[0].run(clock, Dependency(clock, FAIL), downstream=payments)
    clock.advance(40)

    with pytest.raises(ValueError, match="bug"):
        tarry.call(Step(raises=ValueError("bug")).finish, on=ConnectionError, downstream=payments)

    assert isinstance(payments.last_error, ConnectionError)


def test_cause_of_a_rejected_result() -> None:
    """If results opened the breaker, the cause has no reference to the last result."""
    payments = downstream_with_probe()
    with pytest.raises(tarry.ResultNotAccepted):
        tarry.call(object, until=lambda _: False, name="charge", downstream=payments)

    with pytest.raises(tarry.BreakerOpen) as caught:
        tarry.call(object, until=lambda _: False, name="charge", downstream=payments)

    cause = caught.value.__cause__
    assert isinstance(cause, tarry.ResultNotAccepted)
    assert ("charge: `until` did not accept the result", None) == (str(cause), cause.result)


def test_error_that_cannot_be_copied() -> None:
    """An error whose class cannot be copied is not used as a cause."""
    payments, error = downstream_with_probe(), UncopyableError.create()
    with pytest.raises(UncopyableError):
        tarry.call(Step(raises=error).finish, on=UncopyableError, downstream=payments)

    with pytest.raises(tarry.BreakerOpen) as caught:
        tarry.call(Step(raises=error).finish, on=UncopyableError, downstream=payments)

    assert None is caught.value.__cause__


def test_forced_open_breaker_has_no_cause(clock: VirtualClock) -> None:
    payments = downstream_with_probe()
    with pytest.raises(ConnectionError):
        DRIVERS[0].run(clock, Dependency(clock, FAIL), downstream=payments)
    payments.force("open")

    with pytest.raises(tarry.BreakerOpen) as caught:
        DRIVERS[0].run(clock, Dependency(clock, OK), downstream=payments)

    assert None is caught.value.__cause__


# --- forced states --------------------------------------------------------------------------------


@every_driver
def test_forced_open_breaker(driver: Driver, clock: VirtualClock) -> None:
    """`force("open")` keeps a breaker open until `force("closed")` makes it automatic again."""
    payments = Downstream("payments", breaker=tarry.Breaker())
    dependency = Dependency(clock, OK)

    payments.force("open")
    clock.advance(1e6)
    with pytest.raises(tarry.BreakerOpen) as caught:
        driver.run(clock, dependency, downstream=payments)
    assert None is caught.value.retry_after
    payments.force("closed")

    assert "done" == driver.run(clock, dependency, downstream=payments)


@every_driver
@pytest.mark.parametrize("state", ["disabled", "metrics-only"])
def test_breaker_that_does_not_open(driver: Driver, state: str, clock: VirtualClock) -> None:
    """A breaker that is disabled or metrics-only admits every call."""
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=1))
    payments.force(state)
    dependency = Dependency(clock, FAIL)

    with pytest.raises(ConnectionError):
        driver.run(clock, dependency, downstream=payments)

    assert 4 == len(dependency.starts)
    assert state == payments.state


def test_force_emits_one_event() -> None:
    """`force` emits one event, and none if the state does not change."""
    payments = Downstream("payments", breaker=tarry.Breaker())

    with captured_events() as events:
        payments.force("open")
        payments.force("open")

    [event] = events
    assert tarry.BreakerStateChanged("", "payments", CLOSED, BreakerState.FORCED_OPEN) == event


def test_force_without_a_breaker() -> None:
    with pytest.raises(tarry.ConfigurationError, match="has no breaker"):
        Downstream("payments").force("open")


def test_force_to_an_unknown_state() -> None:
    """An unknown state is rejected with the list of states."""
    payments = Downstream("payments", breaker=tarry.Breaker())

    with pytest.raises(tarry.ConfigurationError, match="closed, disabled, metrics-only, open"):
        payments.force("half-open")

    assert CLOSED == payments.state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name must be a non-empty string"),
        ({"name": 7}, "name must be a non-empty string"),
        ({"breaker": tarry.Breaker}, r"breaker must be a tarry\.Breaker\(\)"),
        ({"breaker": True}, r"breaker must be a tarry\.Breaker\(\)"),
        ({"budget": 500}, r"budget must be a tarry\.TokenBudget"),
        ({"limiter": 10}, r"limiter must be a tarry\.AIMD"),
        ({"max_in_flight": 0}, "must be at least 1"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    """The error for an invalid argument names it."""
    with pytest.raises(tarry.ConfigurationError, match=message):
        Downstream(**{"name": "payments"} | arguments)


@pytest.mark.parametrize("quantile", [0, -0.5, 95, float("nan"), "p95"])
def test_invalid_quantile_is_rejected(quantile: Any) -> None:
    """A quantile that is not in (0, 1] is rejected."""
    with pytest.raises(tarry.ConfigurationError, match="q must be"):
        Downstream("payments").quantile(quantile)
