"""Tests for the decision record of a call."""

from __future__ import annotations

import pytest

from tarry.core.outcome import Kind
from tarry.core.verdict import CallRecord, Reason, Step, Stop, Wait


def make_record(
    attempts: int, waited: float, reason: Reason | None, retry_after: float | None = None
) -> CallRecord:
    """Return a record without steps."""
    return CallRecord("load", "payments", attempts, waited, reason, retry_after, ())


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (make_record(1, 0.0, None), "succeeded after 1 attempt"),
        (make_record(3, 0.15, None), "succeeded after 3 attempts and 150 ms of waiting"),
        (
            make_record(0, 0.0, Reason.BREAKER_OPEN, 12.0),
            "gave up after 0 attempts: the circuit breaker is open; retry after 12 s",
        ),
        (
            make_record(1, 0.0, Reason.PERMANENT),
            "gave up after 1 attempt: the error is not retryable",
        ),
        (
            make_record(4, 0.7, Reason.ATTEMPTS),
            "gave up after 4 attempts and 700 ms of waiting: no attempts left",
        ),
        (
            make_record(2, 1.5, Reason.HINT_TOO_LONG, 180.0),
            (
                "gave up after 2 attempts and 1.5 s of waiting: "
                f"{Reason.HINT_TOO_LONG.description}; retry after 3 min"
            ),
        ),
        (
            make_record(1, 0.0, Reason.DEADLINE, 0.0),
            f"gave up after 1 attempt: {Reason.DEADLINE.description}; retry after 0 ms",
        ),
    ],
    ids=lambda record: (
        f"{record.reason}-{record.attempts}" if isinstance(record, CallRecord) else ""
    ),
)
def test_summary(record: CallRecord, expected: str) -> None:
    """The summary has the attempts, the waiting time, the reason and retry_after."""
    assert expected == record.summary()


@pytest.mark.parametrize("reason", Reason)
def test_summary_ends_with_the_description_of_the_reason(reason: Reason) -> None:
    """Without retry_after a summary ends with the description of the reason."""
    assert make_record(3, 0.0, reason).summary().endswith(f": {reason.description}")


def test_record_contains_the_steps() -> None:
    """A record contains each failed attempt with its verdict, breaker state and balance."""
    steps = (
        Step(1, Kind.TRANSIENT, "503", Wait(0.05, 0.1), "closed", 500.0),
        Step(2, Kind.PERMANENT, "404", Stop(Reason.PERMANENT), "closed", 495.0),
    )
    record = CallRecord("load", None, 2, 0.05, Reason.PERMANENT, None, steps)
    assert (Wait(0.05, 0.1), 500.0) == (record.steps[0].verdict, record.steps[0].balance)
    assert Stop(Reason.PERMANENT) == record.steps[-1].verdict
