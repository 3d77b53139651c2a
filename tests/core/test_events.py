"""Tests for events: immutable values that listeners can compare, copy and pickle."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

import tarry
from tarry.core import events
from tarry.core.breaker import BreakerState
from tarry.core.events import Event
from tarry.core.hints import Hint
from tarry.core.outcome import Kind
from tarry.core.verdict import Reason

SOURCE: tuple[str, str | None] = ("load", "payments")
WAIT_FIELDS: dict[str, Any] = {
    "retry": 2,
    "max_retries": 3,
    "ceiling": 0.2,
    "delay": 0.15,
    "hint": Hint(0.1),
    "error": None,
    "detail": "503",
}
EXAMPLES: list[Any] = [
    events.AttemptStarted(*SOURCE, 1, 4),
    events.AttemptFailed(*SOURCE, 1, 4, Kind.TRANSIENT, None),
    events.WillWait(*SOURCE, **WAIT_FIELDS),
    events.Waited(*SOURCE, **WAIT_FIELDS, slept=0.16),
    events.Succeeded(*SOURCE, 2),
    events.GaveUp(*SOURCE, 4, Reason.ATTEMPTS, 0.7, None, None, None),
    events.BudgetEmpty(*SOURCE),
    events.BreakerStateChanged(*SOURCE, BreakerState.CLOSED, BreakerState.OPEN),
    events.HedgeFired(*SOURCE, 2),
    events.HedgeWon(*SOURCE, 2),
]
each_event = pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)


def test_every_event_has_an_example() -> None:
    """EXAMPLES contains every event type, and every event type is public."""
    classes = [value for value in vars(events).values() if isinstance(value, type)]
    event_types = {cls for cls in classes if issubclass(cls, Event) and not cls.__subclasses__()}
    assert event_types == {type(event) for event in EXAMPLES}
    assert all(cls is getattr(tarry, cls.__name__) for cls in {*event_types, Event})


@each_event
def test_events_name_operation_and_downstream(event: Event) -> None:
    """The first two fields of each event are its operation and its downstream."""
    assert ["operation", "downstream"] == [field.name for field in fields(event)][:2]
    assert SOURCE == (event.operation, event.downstream)


@each_event
def test_events_are_frozen(event: Event) -> None:
    """The fields of an event cannot be changed, and events have no `__dict__`."""
    with pytest.raises(AttributeError):
        event.operation = "other"  # type: ignore[misc]
    assert not hasattr(event, "__dict__")


@each_event
def test_events_are_values(event: Event) -> None:
    """Events with the same fields are equal and have the same hash."""
    assert event == replace(event)
    assert hash(event) == hash(replace(event))
    assert event != replace(event, operation="other")


@each_event
def test_call_and_time_do_not_count(event: Event) -> None:
    """Events of different calls and times are equal if their other fields are."""
    other = replace(event, call_id="other", time=1.0)
    assert event == other
    assert ("other", 1.0) == (other.call_id, other.time)


@each_event
def test_events_are_dataclasses(event: Event) -> None:
    """The functions of `dataclasses` work with events."""
    assert asdict(event) == {field.name: getattr(event, field.name) for field in fields(event)}
    assert ["call_id", "time"] == [field.name for field in fields(event) if not field.compare][:2]
    assert event.__replace__(operation="other") == replace(event, operation="other")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        (("load",), {}),
        (("load", None, 1, "extra"), {}),
        (("load", None, 1), {"attempts": 1}),
        (("load", None, 1), {"unknown": 1}),
    ],
)
def test_wrong_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Missing and unknown arguments raise a TypeError that names the event."""
    with pytest.raises(TypeError, match="Succeeded takes operation, downstream, attempts"):
        events.Succeeded(*args, **kwargs)


def test_events_of_different_types_differ() -> None:
    """Events with the same values but different types are not equal."""
    assert events.HedgeFired(*SOURCE, 2) != events.HedgeWon(*SOURCE, 2)
    assert events.HedgeFired(*SOURCE, 2) != 2


@each_event
def test_events_can_be_copied_and_pickled(event: Event) -> None:
    """A copied or pickled event is equal to the original."""
    assert event == copy.deepcopy(event) == pickle.loads(pickle.dumps(event))  # noqa: S301


def test_fields_of_a_wait() -> None:
    """A `Waited` event has the number of the retry, ceiling, delay, hint, error and time slept."""
    call_fields = {"operation": "load", "downstream": "payments", "call_id": "a-1", "time": 7.5}
    expected = {**call_fields, **WAIT_FIELDS, "slept": 0.16}
    event = events.Waited(*SOURCE, **WAIT_FIELDS, slept=0.16, call_id="a-1", time=7.5)
    assert expected == {field.name: getattr(event, field.name) for field in fields(event)}
    assert expected == events.fields_of(event)
