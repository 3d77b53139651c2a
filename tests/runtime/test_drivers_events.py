"""Events, notes and records of every driver."""

from __future__ import annotations

import pytest

import tarry
from tarry import (
    AttemptFailed,
    AttemptStarted,
    BudgetEmpty,
    Downstream,
    Event,
    GaveUp,
    Hint,
    Kind,
    Reason,
    Succeeded,
    Waited,
    WillWait,
)
from tarry.runtime.effects import effects
from tarry.testing import VirtualClock, captured_events
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

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)


# --- events ---------------------------------------------------------------------------------------


@every_driver
def test_events_of_a_success(driver: Driver, clock: VirtualClock) -> None:
    """A call that succeeds at once emits AttemptStarted and Succeeded."""
    with captured_events() as events:
        driver.run(clock, Dependency(clock, OK))

    assert [AttemptStarted("op", None, 1, 4), Succeeded("op", None, 1)] == events


@every_driver
def test_events_of_a_retry(driver: Driver, clock: VirtualClock) -> None:
    """The events of a retry come in order, with all fields."""
    error = ConnectionError("unreachable")

    with captured_events() as events:
        driver.run(clock, Dependency(clock, Step(raises=error), OK))

    waited = events.pop(3)
    assert [
        AttemptStarted("op", None, 1, 4),
        AttemptFailed("op", None, 1, 4, Kind.TRANSIENT, error, detail="ConnectionError"),
        WillWait("op", None, 1, 3, 0.1, 0.05, None, error, detail="ConnectionError"),
        AttemptStarted("op", None, 2, 4),
        Succeeded("op", None, 2),
    ] == events
    assert isinstance(waited, Waited)
    assert waited == Waited(
        "op", None, 1, 3, 0.1, 0.05, None, error, waited.slept, detail="ConnectionError"
    )
    assert pytest.approx(0.05) == waited.slept


@every_driver
@pytest.mark.parametrize("has_downstream", [False, True])
def test_call_id_time_and_duration(
    driver: Driver, has_downstream: bool, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events have the id of their call and the time, and those of attempts the duration."""
    dependency = Dependency(clock, Step(raises=ConnectionError(), duration_s=0.2), OK)
    monkeypatch.setattr(effects, "unix_time", effects.now)
    started = effects.unix_time()

    with captured_events() as events:
        for _ in range(2):
            options = {"downstream": Downstream("payments")} if has_downstream else {}
            driver.run(clock, dependency, **options)

    first_call, second_call = events[:6], events[6:]
    assert 1 == len({event.call_id for event in first_call})
    assert 1 == len({event.call_id for event in second_call})
    assert first_call[0].call_id != second_call[0].call_id
    times = [event.time - started for event in first_call]
    assert [0, 0.2, 0.2, 0.25, 0.25, 0.25] == [pytest.approx(time, abs=1e-6) for time in times]
    failed, succeeded = first_call[1], first_call[5]
    assert isinstance(failed, AttemptFailed)
    assert isinstance(succeeded, Succeeded)
    assert pytest.approx(0.2) == failed.duration
    assert pytest.approx(0.05) == failed.delay
    assert pytest.approx(0.0) == succeeded.duration


@every_driver
def test_events_of_giving_up(driver: Driver, clock: VirtualClock) -> None:
    """A call that gives up emits GaveUp last, with the reason and the sum of its waits."""
    with captured_events() as events, pytest.raises(ConnectionError) as caught:
        driver.run(clock, Dependency(clock, FAIL))

    retry_events = [AttemptStarted, AttemptFailed, WillWait, Waited]
    assert [*retry_events * 3, AttemptStarted, AttemptFailed, GaveUp] == event_types(events)
    last = events[-1]
    assert isinstance(last, GaveUp)
    fields = (Reason.ATTEMPTS, last.waited, None, None, caught.value)
    assert GaveUp("op", None, 4, *fields, detail="ConnectionError") == last
    assert pytest.approx(0.35) == last.waited


@every_driver
def test_events_of_a_hint(driver: Driver, clock: VirtualClock) -> None:
    """The server's hint is in the event of its wait."""
    hint = Hint(3.0, source="retry-after")
    with captured_events() as events:
        driver.run(
            clock, Dependency(clock, failing_step(Kind.THROTTLED, hint=hint), OK), on=classify
        )

    [wait] = [event for event in events if type(event) is WillWait]
    assert (hint, 1.0, 3.5) == (wait.hint, wait.ceiling, wait.delay)


@every_driver
def test_events_of_a_hint_that_is_too_long(driver: Driver, clock: VirtualClock) -> None:
    """A hint that ends the call is in the last event, with the seconds to wait."""
    hint = Hint(300.0, source="retry-after")
    with captured_events() as events, pytest.raises(ClassifiedError):
        driver.run(clock, Dependency(clock, failing_step(Kind.TRANSIENT, hint=hint)), on=classify)

    last = events[-1]
    assert isinstance(last, GaveUp)
    assert (Reason.HINT_TOO_LONG, 300.0, hint) == (last.reason, last.retry_after, last.hint)


@every_driver
def test_events_of_an_empty_budget(driver: Driver, clock: VirtualClock) -> None:
    """An empty retry budget emits BudgetEmpty before GaveUp."""
    payments = Downstream("payments", budget=tarry.TokenBudget(capacity=1))

    with captured_events() as events, pytest.raises(ConnectionError):
        driver.run(clock, Dependency(clock, FAIL), downstream=payments)

    assert [AttemptStarted, AttemptFailed, BudgetEmpty, GaveUp] == event_types(events)
    assert BudgetEmpty("op", "payments") == events[2]


@every_driver
def test_events_of_a_breaker(driver: Driver, clock: VirtualClock) -> None:
    """Each state change of a breaker emits an event, and a call that it rejects emits GaveUp."""
    breaker = tarry.Breaker(consecutive=1, open_for=30, spread=0, probes=1)
    payments = Downstream("payments", breaker=breaker)
    dependency = Dependency(clock, FAIL, OK)

    with captured_events() as events:
        with pytest.raises(ConnectionError):
            driver.run(clock, dependency, downstream=payments)
        with pytest.raises(tarry.BreakerOpen) as caught:
            driver.run(clock, dependency, downstream=payments)
        rejected = events[-1]
        clock.advance(30)
        driver.run(clock, dependency, downstream=payments)

    changes = [event for event in events if isinstance(event, tarry.BreakerStateChanged)]
    assert ["open", "half-open", "closed"] == [change.after.value for change in changes]
    assert ["closed", "open", "half-open"] == [change.before.value for change in changes]
    assert {"payments"} == {change.downstream for change in changes}
    fields = (Reason.BREAKER_OPEN, 0.0, 30.0, None, caught.value)
    assert GaveUp("op", "payments", 0, *fields, detail="BreakerOpen") == rejected


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
def test_events_of_a_result_that_is_not_accepted(driver: Driver, clock: VirtualClock) -> None:
    """A result that `until` rejects is a failed attempt whose error holds the result."""
    with captured_events() as events:
        driver.run(clock, Dependency(clock, Step(1), Step(2)), until=lambda result: result == 2)

    failed = events[1]
    assert isinstance(failed, AttemptFailed)
    assert (1, Kind.TRANSIENT) == (failed.attempt, failed.kind)
    assert isinstance(failed.error, tarry.ResultNotAccepted)
    assert 1 == failed.error.result
    assert Succeeded("op", None, 2) == events[-1]


def event_types(events: list[Event]) -> list[type[Event]]:
    """Return the types of the events."""
    return [type(event) for event in events]


# --- notes ----------------------------------------------------------------------------------------


@every_driver
@pytest.mark.parametrize(
    ("steps", "note"),
    [
        ((FAIL,), "gave up after 4 attempts and 350 ms of waiting: no attempts left"),
        (
            (Step(raises=ValueError),),
            "gave up after 1 attempt: the error is not retryable",
        ),
        (
            (FAIL, Step(raises=ValueError)),
            "gave up after 2 attempts and 50 ms of waiting: the error is not retryable",
        ),
    ],
)
def test_note_has_attempts_waits_and_reason(
    driver: Driver, steps: tuple[Step, ...], note: str, clock: VirtualClock
) -> None:
    with pytest.raises((ConnectionError, ValueError)) as caught:
        driver.run(clock, Dependency(clock, *steps))

    assert [f"tarry: op {note}"] == caught.value.__notes__


@every_driver
def test_notes_of_the_user_are_kept(driver: Driver, clock: VirtualClock) -> None:
    """Notes of the user's code are kept, before the note of tarry."""
    error = ValueError("bad")
    error.add_note("a note of the user")

    with pytest.raises(ValueError, match="bad"):
        driver.run(clock, Dependency(clock, Step(raises=error)))

    assert "a note of the user" == error.__notes__[0]
    assert 2 == len(error.__notes__)


# --- causes and contexts --------------------------------------------------------------------------


@every_driver
def test_cause_of_the_last_error_is_kept(driver: Driver, clock: VirtualClock) -> None:
    """The error of the last attempt is raised with its own cause."""
    cause = KeyError("deep")
    last = ConnectionError("last")
    last.__cause__ = cause

    with pytest.raises(ConnectionError) as caught:
        driver.run(clock, Dependency(clock, FAIL, FAIL, FAIL, Step(raises=last)))

    assert last is caught.value
    assert cause is last.__cause__
    assert None is last.__context__


@every_driver
def test_no_cause_and_no_context_are_added(driver: Driver, clock: VirtualClock) -> None:
    """The errors of earlier attempts are not chained to the last one."""
    with pytest.raises(ConnectionError) as caught:
        driver.run(clock, Dependency(clock, FAIL))

    assert None is caught.value.__cause__
    assert None is caught.value.__context__


@every_driver
def test_error_of_a_frozen_class(driver: Driver, clock: VirtualClock) -> None:
    """An error of a class that forbids setting attributes is raised with its record."""

    class Frozen(ConnectionError):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    with pytest.raises(Frozen) as caught:
        driver.run(clock, Dependency(clock, Step(raises=Frozen)))

    record = tarry.record_of(caught.value)
    assert record is not None
    assert 4 == record.attempts


# --- records --------------------------------------------------------------------------------------


@every_driver
def test_record_has_every_step(driver: Driver, clock: VirtualClock) -> None:
    """The record has every step: attempt, kind, verdict, breaker and balance."""
    payments = Downstream("payments", breaker=tarry.Breaker(), budget=tarry.TokenBudget())
    steps = (FAIL, Step(raises=ValueError))

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - it has no message
        driver.run(clock, Dependency(clock, *steps), downstream=payments)

    record = tarry.record_of(caught.value)
    assert record == tarry.CallRecord(
        operation="op",
        downstream="payments",
        attempts=2,
        waited=0.05,
        reason=Reason.PERMANENT,
        retry_after=None,
        steps=(
            tarry.Step(1, Kind.TRANSIENT, "ConnectionError", tarry.Wait(0.05, 0.1), "closed", 500),
            tarry.Step(
                2, Kind.PERMANENT, "ValueError", tarry.Stop(Reason.PERMANENT), "closed", 495
            ),
        ),
    )


def test_error_of_other_code_has_no_record() -> None:
    assert None is tarry.record_of(ConnectionError())
