"""Tests for failed copies of a hedged call: it ends, or starts another copy."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.core.downstream import Downstream
from tarry.core.hedging import HedgedCall, Hedging
from tarry.core.hints import Hint
from tarry.core.limiter import InFlight
from tarry.core.outcome import Kind, Outcome
from tarry.core.verdict import Attempt, Reason, Stop

LATE = Hint(121.0)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(Kind.TRANSIENT, repeatable=False), Stop(Reason.NOT_REPEATABLE)),
        (Outcome(Kind.THROTTLED, repeatable=False), Stop(Reason.NOT_REPEATABLE)),
        (Outcome(Kind.TRANSIENT, retried_below=True), Stop(Reason.RETRIED_BELOW)),
        (Outcome(Kind.TRANSIENT, LATE), Stop(Reason.HINT_TOO_LONG, 121.0, LATE)),
        (Outcome(Kind.OVERLOADED, LATE), Stop(Reason.OVERLOADED, 121.0, LATE)),
        (Outcome(Kind.PERMANENT), Stop(Reason.PERMANENT)),
    ],
)
def test_what_may_not_be_repeated_is_the_answer(outcome: Outcome, expected: Stop) -> None:
    """An outcome that a retry would stop at stops a hedged call, and no place is kept."""
    cap = InFlight(3)
    call = HedgedCall(Hedging(after=1, max_attempts=3), Downstream("d", limiter=cap))
    call.start(0.0)
    call.hedge(1.0)

    assert expected == call.record_failure(1, outcome, 2.0, 0.5)
    assert (2, 0) == (call.attempts, cap._in_flight)


@pytest.mark.parametrize("max_hint", [0, 10, 120.5])
def test_longest_hint_is_the_policy_s(max_hint: float) -> None:
    """A hint of just `max_hint` seconds is waited for, a longer one is not."""
    call = HedgedCall(Hedging(after=1, max_attempts=3, max_hint=max_hint), Downstream("d"))
    call.start(0.0)
    hint = Hint(max_hint or 0.5)

    answer = call.record_failure(1, Outcome(Kind.TRANSIENT, hint), 2.0, 0.5)

    if max_hint:
        assert (None, 2.0 + max_hint) == (answer, call.next_hedge_at)
    else:
        assert Stop(Reason.HINT_TOO_LONG, 0.5, hint) == answer


@pytest.mark.parametrize("kind", [Kind.TRANSIENT, Kind.THROTTLED])
@pytest.mark.parametrize("delay", [float("nan"), "5", -1, float("inf"), float("-inf"), None])
def test_hint_that_is_no_time_is_ignored(delay: Any, kind: Kind) -> None:
    """After a hint that is no valid duration the next copy goes at once, as without one."""
    call = HedgedCall(Hedging(after=1), Downstream("d"))
    call.start(0.0)

    assert Attempt(2) == call.record_failure(1, Outcome(kind, Hint(delay)), 0.5, 0.5)


@pytest.mark.parametrize("delay", [float("nan"), "5", -1])
@pytest.mark.parametrize("kind", [Kind.OVERLOADED, Kind.PERMANENT])
def test_hint_that_is_no_time_is_not_passed_on(delay: Any, kind: Kind) -> None:
    """A hint that is no valid duration does not become the `retry_after` of the end."""
    call = HedgedCall(Hedging(after=1), Downstream("d"))
    call.start(0.0)

    answer = call.record_failure(1, Outcome(kind, Hint(delay)), 0.5, 0.5)

    assert isinstance(answer, Stop)
    assert answer.retry_after is None


@pytest.mark.parametrize("capped", [False, True])
def test_a_copy_that_could_not_be_sent_costs_nothing(capped: bool) -> None:
    """Its place and its credit come back, and the copy that runs goes on alone."""
    cap = InFlight(2)
    downstream = Downstream("d", limiter=cap)
    downstream.add_hedge_credit(1.0)
    call = HedgedCall(Hedging(after=1, max_extra_load=0.5 if capped else None), downstream)
    call.start(0.0)
    assert Attempt(2) == call.hedge(1.0)
    assert call.record_unsent(2, 1.0)
    assert (1, None) == (cap._in_flight, call.next_hedge_at)
    assert downstream.take_hedge_credit()
