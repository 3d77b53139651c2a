"""Tests for the decision record of a call."""

from __future__ import annotations

import pytest

from tarry.core.outcome import Kind
from tarry.core.verdict import CallRecord, Reason, Step, Stop, Wait


def record(
    attempts: int, waited: float, reason: Reason, retry_after: float | None = None
) -> CallRecord:
    """Return a record without steps."""
    return CallRecord("load", "payments", attempts, waited, reason, retry_after, ())


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (
            record(0, 0.0, Reason.BREAKER_OPEN, 12.0),
            "gave up after 0 attempts: the circuit breaker is open; retry after 12 s",
        ),
        (
            record(1, 0.0, Reason.PERMANENT),
            "gave up after 1 attempt: the error is not retryable",
        ),
        (
            record(4, 0.7, Reason.ATTEMPTS),
            "gave up after 4 attempts and 700 ms of waiting: no attempts left",
        ),
        (
            record(2, 1.5, Reason.HINT_TOO_LONG, 180.0),
            (
                "gave up after 2 attempts and 1.5 s of waiting: "
                f"{Reason.HINT_TOO_LONG.description}; retry after 3 min"
            ),
        ),
        (
            record(1, 0.0, Reason.DEADLINE, 0.0),
            f"gave up after 1 attempt: {Reason.DEADLINE.description}; retry after 0 ms",
        ),
    ],
    ids=lambda made: made.reason if isinstance(made, CallRecord) else "",
)
def test_sentence(made: CallRecord, expected: str) -> None:
    """The summary has the attempts, the waiting time, the reason and retry_after."""
    assert expected == made.summary()


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_reaches_the_sentence(reason: Reason) -> None:
    """Every reason has a description in the summary."""
    assert record(3, 0.0, reason).summary().endswith(f": {reason.description}")


def test_steps_are_kept() -> None:
    """A record holds each failed attempt with its verdict, breaker and balance."""
    steps = (
        Step(1, Kind.TRANSIENT, "503", Wait(0.05, 0.1), "closed", 500.0),
        Step(2, Kind.PERMANENT, "404", Stop(Reason.PERMANENT), "closed", 495.0),
    )
    made = CallRecord("load", None, 2, 0.05, Reason.PERMANENT, None, steps)
    assert (Wait(0.05, 0.1), 500.0) == (made.steps[0].verdict, made.steps[0].balance)
    assert Stop(made.reason) == made.steps[-1].verdict
