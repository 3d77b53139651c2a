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
from tarry.core.verdict import Attempt, DelayedPermit, Progress, Reason, Step, Stop, Wait

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
    ],
)
def test_reasons_are_labels(reason: Reason, label: str) -> None:
    """A reason is the text of its metric label, and found by it."""
    assert label == reason
    assert label == f"{reason}"
    assert reason is Reason(label)


def test_there_are_eleven_reasons() -> None:
    """All reasons are listed above."""
    assert 11 == len(Reason)


def test_every_reason_has_words() -> None:
    """Each reason reads as part of a sentence, and no two read the same."""
    words = [reason.description for reason in Reason]
    assert len(Reason) == len(set(words))
    assert [] == [text for text in words if not text[0].islower() or text[-1] in ". "]


def test_defaults() -> None:
    """A bare command has no ceiling, hint, time or delay."""
    assert Wait(1.5, 0.0, None) == Wait(1.5)
    assert Stop(Reason.ATTEMPTS, None, None) == Stop(Reason.ATTEMPTS)
    assert Attempt(1, None, 0.0) == Attempt(1)
    assert Progress(0, 0.0, None, 0) == Progress()


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_frozen(value: Any) -> None:
    """Commands and records are values: they cannot be changed or grow, and they can be hashed."""
    first = inspect.getfullargspec(type(value)).args[1]
    with pytest.raises(AttributeError):
        setattr(value, first, None)
    assert not hasattr(value, "__dict__")
    assert hash(value) == hash(copy.deepcopy(value))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_travel(value: Any) -> None:
    """Each survives pickle with its type."""
    other = pickle.loads(pickle.dumps(value))  # noqa: S301
    assert (type(value), value) == (type(other), other)


def test_commands_are_told_apart_by_type() -> None:
    """A driver can match on what it got."""

    def named(command: Wait | Stop | Attempt) -> str:
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
    assert ["wait 1.5", "stop hint-too-long 9.0", "attempt 2"] == [*map(named, commands)]


def test_progress_is_plain_data() -> None:
    """Progress can be stored as JSON and read by another process."""
    progress = Progress(3, 1000.5, 0.25, 2)
    assert progress == Progress(*json.loads(json.dumps(progress)))
    assert progress == Progress(**json.loads(json.dumps(progress._asdict())))
