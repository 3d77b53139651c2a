"""Tests for the values that the core returns to its drivers."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from typing import Any

import pytest

from tarry.core.hints import Hint
from tarry.core.outcome import Kind
from tarry.core.verdict import (
    Attempt,
    CallState,
    DelayedPermit,
    Progress,
    Reason,
    Step,
    Stop,
    Wait,
    forbids_outer_retry,
)

VALUES: list[Any] = [
    Wait(1.5),
    Stop(Reason.ATTEMPTS),
    Attempt(1),
    DelayedPermit(3, 0.5),
    Progress(),
    Step(1, Kind.TRANSIENT, "503", Wait(1.5), "closed", 495.0),
]


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        (Reason.PERMANENT, "permanent"),
        (Reason.OVERLOADED, "overloaded"),
        (Reason.NOT_REPEATABLE, "not-repeatable"),
        (Reason.RETRIED_BELOW, "retried-below"),
        (Reason.ATTEMPTS, "attempts"),
        (Reason.BREAKER_OPEN, "breaker-open"),
        (Reason.BUDGET_EMPTY, "budget-empty"),
        (Reason.LIMIT, "limit"),
        (Reason.HINT_TOO_LONG, "hint-too-long"),
        (Reason.TOTAL_BUDGET, "total-budget"),
        (Reason.DEADLINE, "deadline"),
        (Reason.STOPPED, "stopped"),
        (Reason.RETRIES_OFF, "retries-off"),
    ],
)
def test_labels_of_reasons(reason: Reason, label: str) -> None:
    """A reason is equal to the string of its metric label."""
    assert label == reason
    assert label == f"{reason}"
    assert reason is Reason(label)


def test_every_reason_has_a_description() -> None:
    """Each description is unique, starts with a lower-case letter and has no final period."""
    descriptions = [reason.description for reason in Reason]
    assert len(Reason) == len(set(descriptions))
    assert [] == [text for text in descriptions if not text[0].islower() or text[-1] in ". "]


def test_defaults() -> None:
    """By default a verdict has no ceiling, hint and time, and an attempt no timeout and delay."""
    assert Wait(1.5, 0.0, None) == Wait(1.5)
    assert Stop(Reason.ATTEMPTS, None, None) == Stop(Reason.ATTEMPTS)
    assert Attempt(1, None, 0.0) == Attempt(1)
    assert Progress(0, 0.0, None, 0) == Progress()


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_frozen(value: Any) -> None:
    """Each value is immutable and hashable, and has no `__dict__`."""
    first_field = inspect.getfullargspec(type(value)).args[1]
    with pytest.raises(AttributeError):
        setattr(value, first_field, None)
    assert not hasattr(value, "__dict__")
    assert hash(value) == hash(copy.deepcopy(value))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_can_be_pickled(value: Any) -> None:
    """A pickled value keeps its type and is equal to the original."""
    other = pickle.loads(pickle.dumps(value))  # noqa: S301
    assert (type(value), value) == (type(other), other)


def test_commands_can_be_matched_by_type() -> None:
    """A match statement can distinguish the commands and bind their fields."""

    def describe(command: Wait | Stop | Attempt) -> str:
        match command:
            case Wait(delay):
                return f"wait {delay}"
            case Stop(reason, retry_after=after):
                return f"stop {reason} {after}"
            case Attempt(number):
                return f"attempt {number}"

    commands: list[Wait | Stop | Attempt] = [
        Wait(1.5, 2.0, Hint(1.0)),
        Stop(Reason.HINT_TOO_LONG, 9.0),
        Attempt(2),
    ]
    assert ["wait 1.5", "stop hint-too-long 9.0", "attempt 2"] == [*map(describe, commands)]


def test_state_of_a_call() -> None:
    """The fields of a call's state can be read by name and by position."""
    state = CallState("load", 2, 1.5, 0.5, OSError("reset"))
    match state:
        case CallState(operation, attempts, elapsed, delay, error):
            assert ("load", 2, 1.5, 0.5) == (operation, attempts, elapsed, delay)
            assert error is state.error


@pytest.mark.parametrize(
    ("reason", "attempts", "max_attempts", "expected"),
    [
        (Reason.ATTEMPTS, 3, 3, True),
        (Reason.BREAKER_OPEN, 0, 1, True),
        (Reason.ATTEMPTS, 1, 1, False),
        (Reason.PERMANENT, 1, 3, False),
    ],
)
def test_forbids_outer_retry(
    reason: Reason, attempts: int, max_attempts: int, expected: bool
) -> None:
    """A call that was retried or rejected is final; one attempt or a permanent error is not."""
    assert expected is forbids_outer_retry(Stop(reason), attempts, max_attempts)


def test_progress_can_be_stored_as_json() -> None:
    """Progress can be stored as a JSON array or object and restored."""
    progress = Progress(3, 1000.5, 0.25, 2)
    assert progress == Progress(*json.loads(json.dumps(progress)))
    assert progress == Progress(**json.loads(json.dumps(progress._asdict())))
