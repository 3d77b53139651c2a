"""A shared dependency: what can be seen of it, what an operator can do, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tarry
from tarry import BreakerState, Downstream
from tarry.runtime import downstream
from tarry.runtime.downstream import live_downstreams
from tarry.testing import VirtualClock, captured_events
from tests.runtime.drivers import DRIVERS, FAIL, FUNCTION_DRIVERS, OK, Dependency, Driver, Step

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)
CLOSED, OPEN = BreakerState.CLOSED, BreakerState.OPEN


def test_downstream_with_nothing() -> None:
    """A downstream without parts has neither state nor balance nor latency."""
    payments = Downstream("payments")

    assert ("payments", None, None) == (payments.name, payments.state, payments.balance)
    assert None is payments.quantile(0.5)
    assert "Downstream('payments', state=None)" == repr(payments)


def test_live_downstreams() -> None:
    """Those that somebody holds can be listed by name, and are not kept alive by that."""
    held = [Downstream("live-b"), Downstream("live-a")]
    assert ["live-a", "live-b"] == [
        d.name for d in live_downstreams() if d.name.startswith("live-")
    ]

    del held
    assert [] == [d.name for d in live_downstreams() if d.name.startswith("live-")]


def test_live_while_another_thread_makes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that changes while it is read is read again."""
    held = Downstream("live")

    class Changing:
        changes = 2

        def __iter__(self) -> Iterator[Downstream]:
            yield held
            if self.changes:
                self.changes -= 1
                raise RuntimeError("Set changed size during iteration")

    monkeypatch.setattr(downstream, "_downstreams", Changing())

    assert [held] == live_downstreams()


@every_driver
def test_balance_and_latency(driver: Driver, clock: VirtualClock) -> None:
    """Balance and latency can be read: a retry has a price, a success its duration."""
    payments = Downstream("payments", breaker=tarry.Breaker(), budget=tarry.TokenBudget("aws-2020"))
    with pytest.raises(ConnectionError):
        driver.run(clock, Dependency(clock, FAIL), downstream=payments, attempts=2)
    for length in (1, 2, 3):
        driver.run(clock, Dependency(clock, Step(takes=length)), downstream=payments)

    assert 498 == payments.balance  # a retry took 5, each clean success gave 1
    assert pytest.approx(2) == payments.quantile(0.5)
    assert "Downstream('payments', state=closed)" == repr(payments)


@every_driver
def test_success_after_retries_pays_back(driver: Driver, clock: VirtualClock) -> None:
    """A success after retries gives back what the last retry had cost."""
    payments = Downstream("payments", budget=tarry.TokenBudget("aws-2020"))

    driver.run(clock, Dependency(clock, FAIL, FAIL, OK), downstream=payments)

    assert 495 == payments.balance


@every_driver
def test_permanent_failures_do_not_count(driver: Driver, clock: VirtualClock) -> None:
    """An error that is the caller's own fault does not speak against the dependency."""
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=1))

    with pytest.raises(ValueError, match="mine"):
        driver.run(clock, Dependency(clock, Step(raises=ValueError("mine"))), downstream=payments)

    assert CLOSED == payments.state


@every_driver
def test_slow_calls_open_the_breaker(driver: Driver, clock: VirtualClock) -> None:
    """Calls that succeed too slowly open a breaker that was told what slow is."""
    breaker = tarry.Breaker(slow_after=1, min_calls=2)
    payments = Downstream("payments", breaker=breaker)

    for _ in range(2):
        driver.run(clock, Dependency(clock, Step(takes=2)), downstream=payments)

    assert OPEN == payments.state


@every_driver
def test_predicate_that_raises(driver: Driver, clock: VirtualClock) -> None:
    """An error in the predicate comes out with the first as its context; nothing is counted."""
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=1), max_in_flight=1)

    def broken(_: Exception) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        driver.run(clock, Dependency(clock, FAIL), on=broken, downstream=payments)

    assert isinstance(caught.value.__context__, ConnectionError)
    assert CLOSED == payments.state
    assert "done" == driver.run(clock, Dependency(clock, OK), downstream=payments)


@pytest.mark.parametrize("driver", FUNCTION_DRIVERS, ids=str)
def test_until_that_raises(driver: Driver, clock: VirtualClock) -> None:
    """An error in `until` comes out, and the place of the attempt is given back."""
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=1), max_in_flight=1)

    def broken(_: object) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        driver.run(clock, Dependency(clock, OK), until=broken, downstream=payments)

    assert CLOSED == payments.state
    assert "done" == driver.run(clock, Dependency(clock, OK), downstream=payments)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_rate_limit_would_block_the_loop(loop: str, clock: VirtualClock) -> None:
    """Plain code that a rate holds back inside a running loop fails with advice, place returned."""
    payments = Downstream("payments", limiter=tarry.AdaptiveRate(), max_in_flight=1)
    throttled = tarry.Outcome(tarry.Kind.THROTTLED)
    with pytest.raises(ConnectionError):
        tarry.call(
            Dependency(clock, FAIL).hit, on=lambda _: throttled, attempts=1, downstream=payments
        )

    async def main() -> None:
        tarry.call(Dependency(clock, OK).hit, on=ConnectionError, downstream=payments)

    with pytest.raises(tarry.BlockingWait):
        (clock.run if loop == "asyncio" else clock.run_trio)(main)

    assert "done" == tarry.call(Dependency(clock, OK).hit, on=ConnectionError, downstream=payments)


# --- the operator's hand --------------------------------------------------------------------------


@every_driver
def test_force(driver: Driver, clock: VirtualClock) -> None:
    """An operator can open a breaker for good, and give it back to itself."""
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
    """A breaker that is disabled, or only counts, lets everything through."""
    payments = Downstream("payments", breaker=tarry.Breaker(consecutive=1))
    payments.force(state)
    dependency = Dependency(clock, FAIL)

    with pytest.raises(ConnectionError):
        driver.run(clock, dependency, downstream=payments)

    assert 4 == len(dependency.starts)
    assert state == payments.state


def test_force_is_told_once() -> None:
    """A state set by hand is told like any other move, and not when it is there already."""
    payments = Downstream("payments", breaker=tarry.Breaker())

    with captured_events() as events:
        payments.force("open")
        payments.force("open")

    [moved] = events
    assert tarry.BreakerMoved("", "payments", CLOSED, BreakerState.FORCED_OPEN) == moved


def test_force_without_a_breaker() -> None:
    """Without a breaker there is nothing to set, and the error says how to get one."""
    with pytest.raises(tarry.ConfigurationError, match="has no breaker"):
        Downstream("payments").force("open")


def test_force_to_an_unknown_state() -> None:
    """A wrong name is refused with the names that there are."""
    payments = Downstream("payments", breaker=tarry.Breaker())

    with pytest.raises(tarry.ConfigurationError, match="closed, disabled, metrics-only, open"):
        payments.force("half-open")

    assert CLOSED == payments.state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name must be a text"),
        ({"name": 7}, "name must be a text"),
        ({"breaker": tarry.Breaker}, r"breaker must be a tarry\.Breaker\(\)"),
        ({"breaker": True}, r"breaker must be a tarry\.Breaker\(\)"),
        ({"budget": 500}, r"budget must be a tarry\.TokenBudget"),
        ({"limiter": 10}, r"limiter must be a tarry\.AIMD"),
        ({"max_in_flight": 0}, "must be at least 1"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    """A wrong part is refused where it is written."""
    with pytest.raises(tarry.ConfigurationError, match=message):
        Downstream(**{"name": "payments"} | arguments)


@pytest.mark.parametrize("wrong", [0, -0.5, 95, float("nan"), "p95"])
def test_quantile_is_a_share(wrong: Any) -> None:
    """A quantile lies above 0 and at most at 1; anything else is refused by its name."""
    with pytest.raises(tarry.ConfigurationError, match="q must be"):
        Downstream("payments").quantile(wrong)
