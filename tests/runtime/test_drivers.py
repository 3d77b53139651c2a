"""Cases in which all drivers make the same attempts and waits and return the same result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

import tarry
from tarry import Downstream, Hint, Kind, Policy, Reason
from tarry.testing import VirtualClock, captured_events, scripted_random
from tests.runtime.drivers import (
    DRIVERS,
    FAIL,
    OK,
    RESULT_DRIVERS,
    ClassifiedError,
    Dependency,
    Driver,
    Step,
    classify,
    failing_step,
)

BUG = Step(raises=ValueError)


@dataclass(frozen=True)
class Case:
    """The behaviour of a dependency, the options of the call, and the expected result.

    All random numbers are 0.5, so that the default delays are 0.05, 0.1 and 0.2 s.
    """

    name: str
    steps: tuple[Step, ...]
    starts: tuple[float, ...]
    """The start of each attempt, in seconds."""
    ended_at: float
    """The end of the call, in seconds."""
    returns: object = "done"
    raises: type[Exception] | None = None
    reason: Reason | None = None
    retry_after: float | None = None
    options: Callable[[], dict[str, Any]] = dict
    drivers: tuple[Driver, ...] = tuple(DRIVERS)

    def __str__(self) -> str:
        return self.name


def with_downstream(**components: Any) -> dict[str, Any]:
    """Return options with a new downstream."""
    return {"on": classify, "downstream": Downstream("payments", **components)}


class RisingRate(tarry.AdaptiveRate):
    """A limiter whose rate rises a second after a throttled attempt: then no attempt waits."""

    def remaining_wait(self, token: int, now: float) -> float:
        """Return the seconds until the token is available."""
        assert self._throttled_at is not None
        has_risen = now >= self._throttled_at + 1
        return 0.0 if has_risen else super().remaining_wait(token, now)


def with_open_breaker() -> dict[str, Any]:
    """Return options with a breaker that was forced open."""
    options = with_downstream(breaker=tarry.Breaker())
    options["downstream"].force("open")
    return options


TRANSIENT = failing_step(Kind.TRANSIENT)
THROTTLED = failing_step(Kind.THROTTLED)

NO_JITTER = Policy(initial_delay=0.05, jitter="none")  # the delays are 0.05, 0.1 and 0.2 s

CASES = [
    Case("succeeds at once", (OK,), (0,), 0),
    Case("succeeds on the third attempt", (FAIL, FAIL, OK), (0, 0.05, 0.15), 0.15),
    Case("succeeds on the last attempt", (FAIL, FAIL, FAIL, OK), (0, 0.05, 0.15, 0.35), 0.35),
    Case(
        "no attempts left",
        (FAIL,),
        starts=(0, 0.05, 0.15, 0.35),
        ended_at=0.35,
        raises=ConnectionError,
        reason=Reason.ATTEMPTS,
    ),
    Case(
        "one attempt only",
        (FAIL,),
        starts=(0,),
        ended_at=0,
        raises=ConnectionError,
        reason=Reason.ATTEMPTS,
        options=lambda: {"attempts": 1},
    ),
    Case(
        "error that is not retryable",
        (BUG,),
        starts=(0,),
        ended_at=0,
        raises=ValueError,
        reason=Reason.PERMANENT,
    ),
    Case(
        "permanent error after a transient one",
        (FAIL, BUG),
        starts=(0, 0.05),
        ended_at=0.05,
        raises=ValueError,
        reason=Reason.PERMANENT,
    ),
    Case(
        "several types in on",
        (FAIL, BUG, Step(raises=KeyError)),
        starts=(0, 0.05, 0.15),
        ended_at=0.15,
        raises=KeyError,
        reason=Reason.PERMANENT,
        options=lambda: {"on": (ConnectionError, ValueError)},
    ),
    Case(
        "predicate",
        (FAIL, BUG),
        starts=(0, 0.05),
        ended_at=0.05,
        raises=ValueError,
        reason=Reason.PERMANENT,
        options=lambda: {"on": lambda error: isinstance(error, ConnectionError)},
    ),
    Case(
        "hint longer than the delay: jitter is added",
        (failing_step(Kind.TRANSIENT, hint=Hint(3.0)), OK),
        starts=(0, 3.15),
        ended_at=3.15,
        options=lambda: {"on": classify},
    ),
    Case(
        "hint longer than the delay, without jitter: exactly the hint",
        (failing_step(Kind.TRANSIENT, hint=Hint(3.0)), OK),
        starts=(0, 3),
        ended_at=3,
        options=lambda: {"on": classify, "policy": Policy(jitter="none")},
    ),
    Case(
        "hint shorter than the delay: the delay applies",
        (failing_step(Kind.TRANSIENT, hint=Hint(0.001)), OK),
        starts=(0, 0.051),
        ended_at=0.051,
        options=lambda: {"on": classify},
    ),
    Case(
        "exact hint: backoff starts over",
        (TRANSIENT, failing_step(Kind.TRANSIENT, hint=Hint(2.0, exact=True)), TRANSIENT, OK),
        starts=(0, 0.05, 2.05, 2.1),
        ended_at=2.1,
        options=lambda: {"on": classify},
    ),
    Case(
        "hint longer than max_hint",
        (failing_step(Kind.TRANSIENT, hint=Hint(121.0)),),
        starts=(0,),
        ended_at=0,
        raises=ClassifiedError,
        reason=Reason.HINT_TOO_LONG,
        retry_after=121.0,
        options=lambda: {"on": classify},
    ),
    Case(
        "hint longer than the total budget",
        (failing_step(Kind.TRANSIENT, hint=Hint(60.0)),),
        starts=(0,),
        ended_at=0,
        raises=ClassifiedError,
        reason=Reason.TOTAL_BUDGET,
        retry_after=60.0,
        options=lambda: {"on": classify, "policy": Policy(total_budget=30.0)},
    ),
    Case(
        "hint longer than the deadline",
        (failing_step(Kind.TRANSIENT, hint=Hint(60.0)),),
        starts=(0,),
        ended_at=0,
        raises=ClassifiedError,
        reason=Reason.DEADLINE,
        retry_after=60.0,
        options=lambda: {"on": classify, "deadline": 30.0},
    ),
    Case(
        "throttled: a longer initial delay",
        (THROTTLED, THROTTLED, OK),
        starts=(0, 0.5, 1.5),
        ended_at=1.5,
        options=lambda: {"on": classify},
    ),
    Case(
        "hint not to retry",
        (failing_step(Kind.OVERLOADED),),
        starts=(0,),
        ended_at=0,
        raises=ClassifiedError,
        reason=Reason.OVERLOADED,
        options=lambda: {"on": classify},
    ),
    Case(
        "not repeatable",
        (failing_step(Kind.TRANSIENT, repeatable=False),),
        starts=(0,),
        ended_at=0,
        raises=ClassifiedError,
        reason=Reason.NOT_REPEATABLE,
        options=lambda: {"on": classify},
    ),
    Case(
        "total budget used up",
        (Step(raises=ConnectionError, duration_s=0.05),),
        starts=(0, 0.1, 0.25),
        ended_at=0.3,
        raises=ConnectionError,
        reason=Reason.TOTAL_BUDGET,
        options=lambda: {"policy": NO_JITTER.replace(total_budget=0.4)},
    ),
    Case(
        "deadline too near for a retry",
        (Step(raises=ConnectionError, duration_s=0.05),),
        starts=(0, 0.1, 0.25),
        ended_at=0.3,
        raises=ConnectionError,
        reason=Reason.DEADLINE,
        options=lambda: {"policy": NO_JITTER, "deadline": 0.4},
    ),
    Case(
        "until accepts a later result",
        (Step("one"), Step("two"), Step("three")),
        starts=(0, 0.05, 0.15),
        ended_at=0.15,
        returns="three",
        options=lambda: {"on": None, "until": lambda result: result == "three"},
        drivers=tuple(RESULT_DRIVERS),
    ),
    Case(
        "until accepts no result",
        (Step("one"), FAIL, Step("two")),
        starts=(0, 0.05, 0.15, 0.35),
        ended_at=0.35,
        raises=tarry.ResultNotAccepted,
        reason=Reason.ATTEMPTS,
        options=lambda: {"until": lambda result: result == "three"},
        drivers=tuple(RESULT_DRIVERS),
    ),
    Case(
        "breaker opens during the call",
        (TRANSIENT,),
        starts=(0, 0.05),
        ended_at=0.05,
        raises=ClassifiedError,
        reason=Reason.BREAKER_OPEN,
        retry_after=2.0,
        options=lambda: with_downstream(breaker=tarry.Breaker(consecutive=2, spread=0)),
    ),
    Case(
        "breaker open before the call",
        (OK,),
        starts=(),
        ended_at=0,
        raises=tarry.BreakerOpen,
        reason=Reason.BREAKER_OPEN,
        options=with_open_breaker,
    ),
    Case(
        "retry budget empty",
        (TRANSIENT,),
        starts=(0, 0.05),
        ended_at=0.05,
        raises=ClassifiedError,
        reason=Reason.BUDGET_EMPTY,
        options=lambda: with_downstream(budget=tarry.TokenBudget(capacity=5)),
    ),
    Case(
        "downstream with breaker, budget and limits, success on the second attempt",
        (TRANSIENT, OK),
        starts=(0, 0.05),
        ended_at=0.05,
        options=lambda: with_downstream(
            breaker=tarry.Breaker(),
            budget=tarry.TokenBudget(),
            limiter=tarry.AIMD(),
            max_in_flight=1,
        ),
    ),
    Case(
        "adaptive rate: one attempt in two seconds after a throttle",
        (THROTTLED, OK),
        starts=(0, 2),
        ended_at=2,
        options=lambda: with_downstream(limiter=tarry.AdaptiveRate()),
    ),
    Case(
        "adaptive rate that rises during the delay",
        (THROTTLED, OK),
        starts=(0, 1),
        ended_at=1,
        options=lambda: with_downstream(limiter=RisingRate()),
    ),
    Case(
        "adaptive rate that rises during the delay of an attempt with a timeout",
        (THROTTLED, OK),
        starts=(0, 1),
        ended_at=1,
        options=lambda: with_downstream(limiter=RisingRate()) | {"deadline": 9},
    ),
    Case(
        "adaptive rate would delay past the deadline",
        (THROTTLED, OK),
        starts=(0,),
        ended_at=0.5,
        raises=ClassifiedError,
        reason=Reason.LIMIT,
        retry_after=1.5,
        options=lambda: with_downstream(limiter=tarry.AdaptiveRate()) | {"deadline": 1.9},
    ),
]


@pytest.mark.parametrize("observer", ["none", "logger", "listener"])
@pytest.mark.parametrize(
    ("case", "driver"),
    [pytest.param(c, d, id=f"{c}-{d}") for c in CASES for d in c.drivers],
)
def test_all_drivers_behave_alike(
    case: Case, driver: Driver, observer: str, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Every driver makes the same attempts at the same times and returns the same result.

    With a listener or with the log enabled, drivers take other code paths.
    """
    dependency = Dependency(clock, *case.steps)
    with ExitStack() as stack:
        if observer == "listener":
            stack.enter_context(captured_events())
        elif observer == "none":
            caplog.set_level(logging.CRITICAL, "tarry")
        if case.raises is None:
            assert case.returns == driver.run(clock, dependency, **case.options())
        else:
            with pytest.raises(case.raises) as caught:
                driver.run(clock, dependency, **case.options())
            assert case.raises is type(caught.value)
            record = tarry.record_of(caught.value)
            assert record is not None
            assert (len(case.starts), case.reason) == (record.attempts, record.reason)
            assert pytest.approx(case.retry_after) == record.retry_after
            assert [f"tarry: op {record.summary()}"] == caught.value.__notes__

    assert case.starts == tuple(dependency.starts)
    assert case.ended_at == round(clock.elapsed, 6)


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_random_numbers_give_exact_delays(driver: Driver, clock: VirtualClock) -> None:
    """Each delay is its ceiling times a new random number."""
    dependency = Dependency(clock, FAIL)

    with scripted_random([0.0, 0.25, 0.75]), pytest.raises(ConnectionError):
        driver.run(clock, dependency)

    assert [0, 0, 0.05, 0.35] == dependency.starts


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_random_source_of_the_user(driver: Driver, clock: VirtualClock) -> None:
    """The `random` argument replaces the default random source."""

    class FixedRandom:
        def random(self) -> float:
            return 0.9

    dependency = Dependency(clock, FAIL, OK)

    driver.run(clock, dependency, random=FixedRandom())

    assert [0, 0.09] == dependency.starts


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_breaker_opens_while_a_call_waits(driver: Driver, clock: VirtualClock) -> None:
    """A breaker that opens during a wait ends the call with the error of the last attempt."""
    payments = Downstream("payments", breaker=tarry.Breaker(), budget=tarry.TokenBudget())
    dependency = Dependency(clock, FAIL)

    def open_breaker(event: tarry.Event) -> None:
        if type(event) is tarry.WillWait:
            payments.force("open")

    remove = tarry.listen(open_breaker)
    try:
        with pytest.raises(ConnectionError) as caught:
            driver.run(clock, dependency, downstream=payments)
    finally:
        remove()

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (1, Reason.BREAKER_OPEN) == (record.attempts, record.reason)
    assert [0] == dependency.starts
    assert 500 == payments.balance  # a retry that was not made is not charged


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
def test_breaker_opens_while_a_call_with_until_waits(driver: Driver, clock: VirtualClock) -> None:
    """A call that a breaker ends during a wait raises ResultNotAccepted with the last result."""
    payments = Downstream("payments", breaker=tarry.Breaker())

    def open_breaker(event: tarry.Event) -> None:
        if type(event) is tarry.WillWait:
            payments.force("open")

    remove = tarry.listen(open_breaker)
    try:
        with pytest.raises(tarry.ResultNotAccepted) as caught:
            driver.run(
                clock, Dependency(clock, Step("stale")), downstream=payments, until=lambda _: False
            )
    finally:
        remove()

    assert "stale" == caught.value.result


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_breaker_error_has_downstream_and_retry_after(driver: Driver, clock: VirtualClock) -> None:
    """The error of an open breaker has the downstream and the seconds until a retry."""
    breaker = tarry.Breaker(consecutive=1, open_for=30, spread=0)
    payments = Downstream("payments", breaker=breaker)
    dependency = Dependency(clock, FAIL)
    with pytest.raises(ConnectionError):
        driver.run(clock, dependency, downstream=payments)
    clock.advance(10)

    with pytest.raises(tarry.BreakerOpen) as caught:
        driver.run(clock, dependency, downstream=payments)

    assert "payments" == caught.value.downstream
    assert pytest.approx(20) == caught.value.retry_after
    assert "payments: the circuit breaker is open; retry after 20 s" == str(caught.value)
    assert [0] == dependency.starts


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_in_flight_limit(driver: Driver, clock: VirtualClock) -> None:
    """A call is rejected while all in-flight slots are used, and admitted afterwards."""
    payments = Downstream("payments", max_in_flight=1)
    dependency = Dependency(clock, OK)

    for attempt in tarry.attempts(on=ConnectionError, downstream=payments):
        with attempt, pytest.raises(tarry.LimitReached, match="payments: the local limit"):
            driver.run(clock, dependency, downstream=payments)

    assert [] == dependency.starts
    assert "done" == driver.run(clock, dependency, downstream=payments)


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_half_open_breaker_closes(driver: Driver, clock: VirtualClock) -> None:
    """After its open time a breaker admits probes and closes when they succeed."""
    breaker = tarry.Breaker(consecutive=1, spread=0, probes=2)
    payments = Downstream("payments", breaker=breaker)
    dependency = Dependency(clock, FAIL, OK)
    with pytest.raises(ConnectionError):
        driver.run(clock, dependency, downstream=payments)
    clock.advance(30)

    states = []
    for _ in range(2):
        driver.run(clock, dependency, downstream=payments)
        states.append(payments.state)

    assert [tarry.BreakerState.HALF_OPEN, tarry.BreakerState.CLOSED] == states
