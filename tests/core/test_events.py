"""Tests for events, which are values that a listener can keep, compare and match."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

import tarry
from tarry.core import events
from tarry.core.breaker import BreakerState
from tarry.core.events import Event
from tarry.core.hints import Hint
from tarry.core.outcome import Kind
from tarry.core.verdict import Reason

WHO: tuple[str, str | None] = ("load", "payments")
WAIT: dict[str, Any] = {
    "retry": 2,
    "max_retries": 3,
    "ceiling": 0.2,
    "delay": 0.15,
    "hint": Hint(0.1),
    "error": None,
    "detail": "503",
}
EXAMPLES: list[Any] = [
    events.AttemptStarted(*WHO, 1, 4),
    events.AttemptFailed(*WHO, 1, 4, Kind.TRANSIENT, None),
    events.WillWait(*WHO, **WAIT),
    events.Waited(*WHO, **WAIT, slept=0.16),
    events.Succeeded(*WHO, 2),
    events.GaveUp(*WHO, 4, Reason.ATTEMPTS, 0.7, None, None, None),
    events.BudgetEmpty(*WHO),
    events.BreakerStateChanged(*WHO, BreakerState.CLOSED, BreakerState.OPEN),
    events.HedgeFired(*WHO, 2),
    events.HedgeWon(*WHO, 2),
]
of_each = pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)


def test_every_event_has_an_example() -> None:
    """The examples of this file are all the events there are, and all are public."""
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type)]
    defined = {kind for kind in kinds if issubclass(kind, Event) and not kind.__subclasses__()}
    assert defined == {type(event) for event in EXAMPLES}
    assert all(kind is getattr(tarry, kind.__name__) for kind in {*defined, Event})


@of_each
def test_events_are_told_apart_by_type(event: Event) -> None:
    """A listener that asks for one type of event gets no other."""
    assert [event] == [other for other in EXAMPLES if isinstance(other, type(event))]


@of_each
def test_events_say_who(event: Event) -> None:
    """Each event names its operation and its dependency, first of all."""
    assert ["operation", "downstream"] == [field.name for field in fields(event)][:2]
    assert WHO == (event.operation, event.downstream)


@of_each
def test_events_are_frozen(event: Event) -> None:
    """A listener cannot change an event for the next one, and events have no room for more."""
    with pytest.raises(FrozenInstanceError):
        event.operation = "other"  # type: ignore[misc]
    assert not hasattr(event, "__dict__")


@of_each
def test_events_are_values(event: Event) -> None:
    """Events with the same content are equal and hash alike; with other content they differ."""
    assert event == replace(event)
    assert hash(event) == hash(replace(event))
    assert event != replace(event, operation="other")


@of_each
def test_events_travel(event: Event) -> None:
    """An event survives copy and pickle."""
    assert event == copy.deepcopy(event) == pickle.loads(pickle.dumps(event))  # noqa: S301


def test_a_wait_tells_what_the_log_needs() -> None:
    """A wait has its number of how many, ceiling, delay, hint, error and the time really slept."""
    expected = {"operation": "load", "downstream": "payments", **WAIT, "slept": 0.16}
    event = events.Waited(*WHO, **WAIT, slept=0.16)
    assert expected == {field.name: getattr(event, field.name) for field in fields(event)}
