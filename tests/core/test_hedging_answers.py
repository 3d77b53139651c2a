"""Tests for failed attempts of a hedged call, which end the call or start the next attempt."""

from __future__ import annotations

import pytest

from tarry.core.downstream import Downstream
from tarry.core.hedging import HedgedCall, Hedging
from tarry.core.hints import Hint
from tarry.core.limiter import InFlight
from tarry.core.outcome import Kind, Outcome
from tarry.core.verdict import Attempt, Reason, Stop

LONG_HINT = Hint(121.0)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(Kind.TRANSIENT, repeatable=False), Stop(Reason.NOT_REPEATABLE)),
        (Outcome(Kind.THROTTLED, repeatable=False), Stop(Reason.NOT_REPEATABLE)),
        (Outcome(Kind.TRANSIENT, retried_below=True), Stop(Reason.RETRIED_BELOW)),
        (Outcome(Kind.TRANSIENT, LONG_HINT), Stop(Reason.HINT_TOO_LONG, 121.0, LONG_HINT)),
        (Outcome(Kind.OVERLOADED, LONG_HINT), Stop(Reason.OVERLOADED, 121.0, LONG_HINT)),
        (Outcome(Kind.PERMANENT), Stop(Reason.PERMANENT)),
    ],
)
def test_outcomes_that_end_a_hedged_call(outcome: Outcome, expected: Stop) -> None:
    """An outcome that is not retried ends a hedged call and releases all its permits."""
    limiter = InFlight(3)
    call = HedgedCall(Hedging(after=1, max_attempts=3), Downstream("d", limiter=limiter))
    call.start(0.0)
    call.hedge(1.0)

    assert expected == call.record_failure(1, outcome, 2.0, 0.5)
    assert (2, 0) == (call.attempts, limiter._in_flight)


@pytest.mark.parametrize("max_hint", [0, 10, 120.5])
def test_max_hint(max_hint: float) -> None:
    """A hint of exactly `max_hint` seconds sets the next hedge, a longer one ends the call."""
    call = HedgedCall(Hedging(after=1, max_attempts=3, max_hint=max_hint), Downstream("d"))
    call.start(0.0)
    hint = Hint(max_hint or 0.5)

    result = call.record_failure(1, Outcome(Kind.TRANSIENT, hint), 2.0, 0.5)

    if max_hint:
        assert (None, 2.0 + max_hint) == (result, call.next_hedge_at)
    else:
        assert Stop(Reason.HINT_TOO_LONG, 0.5, hint) == result


@pytest.mark.parametrize("kind", [Kind.TRANSIENT, Kind.THROTTLED])
def test_hint_without_a_delay(kind: Kind) -> None:
    """After a hint without a delay the next attempt starts at once."""
    call = HedgedCall(Hedging(after=1), Downstream("d"))
    call.start(0.0)

    assert Attempt(2) == call.record_failure(1, Outcome(kind, Hint()), 0.5, 0.5)


@pytest.mark.parametrize("limits_load", [False, True])
def test_an_unsent_hedge_costs_nothing(limits_load: bool) -> None:
    """A hedge that could not be sent returns its permit and credit; the first attempt runs on."""
    limiter = InFlight(2)
    downstream = Downstream("d", limiter=limiter)
    downstream.add_hedge_credit(1.0)
    call = HedgedCall(Hedging(after=1, max_extra_load=0.5 if limits_load else None), downstream)
    call.start(0.0)
    assert Attempt(2) == call.hedge(1.0)
    assert call.record_unsent(2, 1.0)
    assert (1, None) == (limiter._in_flight, call.next_hedge_at)
    assert downstream.take_hedge_credit()
