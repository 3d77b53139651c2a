"""Hedged calls: the first success, failures, breakers and limiters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.breaker import Breaker
from tarry.core.downstream import Downstream
from tarry.core.hedging import HedgedCall, Hedging
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Outcome, outcome_of_status
from tarry.core.verdict import Reason
from tarry.simulator.caller import HedgingCaller, Route
from tarry.simulator.event_loop import EventLoop
from tarry.simulator.metrics import MetricsRecorder
from tarry.simulator.node import DROPPED, REFUSED, UNAVAILABLE_RETRIED
from tests.simulator.harness import (
    CallEnd,
    CallEndRecorder,
    ScriptedLimiter,
    ScriptedNode,
    summarize,
)

NETWORK_DELAY = 0.25
ROUND_TRIP = 2 * NETWORK_DELAY
AFTER_1 = Hedging(after=1.0)
FAILS = (0.0, REFUSED)
SUCCEEDS = (0.0, SUCCESS)


class CallHarness(NamedTuple):
    """A hedged call with its event loop, node and recorders."""

    loop: EventLoop
    node: ScriptedNode
    recorder: MetricsRecorder
    ends: CallEndRecorder
    caller: HedgingCaller

    def run(self) -> list[CallEnd]:
        """Run the event loop; return how the call ended."""
        self.loop.run(1_000.0)
        return self.ends.ends

    @property
    def reason(self) -> Reason | None:
        """The reason why the call failed, or None."""
        (end,) = self.ends.ends
        return None if end.stop is None else end.stop.reason


def start_call(
    *replies: tuple[float, Outcome] | None,
    hedging: Hedging = AFTER_1,
    downstream: Downstream | None = None,
    network_delay: Callable[[], float] = lambda: NETWORK_DELAY,
) -> CallHarness:
    """Start a hedged call to a node with these replies."""
    loop, ends, recorder = EventLoop(0), CallEndRecorder(), MetricsRecorder(2_000.0, 1.0)
    node = ScriptedNode(loop, *replies)
    core = HedgedCall(hedging, downstream or Downstream("there"))
    caller = HedgingCaller(Route(loop, node, network_delay, recorder), core, 0.0, ends)
    loop.schedule(0.0, caller.start)
    return CallHarness(loop, node, recorder, ends, caller)


def test_a_copy_is_sent_after_each_delay() -> None:
    """All allowed copies are sent, one delay after the other."""
    harness = start_call(None, None, SUCCEEDS, SUCCEEDS, hedging=Hedging(after=1.0, max_attempts=3))

    assert [(0.0, 2.0 + ROUND_TRIP, None)] == harness.run()
    assert [
        (NETWORK_DELAY, 1),
        (1.0 + NETWORK_DELAY, 2),
        (2.0 + NETWORK_DELAY, 3),
    ] == harness.node.requests


def test_call_fails_when_its_last_copy_fails() -> None:
    """The call fails when all allowed copies have failed."""
    harness = start_call(FAILS, FAILS, SUCCEEDS)

    assert [2 * ROUND_TRIP] == [end.ended for end in harness.run()]
    assert (Reason.ATTEMPTS, 2, 2) == (
        harness.reason,
        harness.recorder.attempt_count,
        summarize(harness.recorder).failures,
    )


def test_hint_delays_the_next_copy() -> None:
    """No copy is sent before the time in a Retry-After hint."""
    harness = start_call((0.0, outcome_of_status(503, {"retry-after": "7"}, now=0.0)), SUCCEEDS)

    assert [(0.0, 7.0 + 2 * ROUND_TRIP, None)] == harness.run()
    assert [(NETWORK_DELAY, 1), (7.0 + 3 * NETWORK_DELAY, 2)] == harness.node.requests


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (UNAVAILABLE_RETRIED, Reason.RETRIED_BELOW),
        (PERMANENT, Reason.PERMANENT),
        (outcome_of_status(503, {"retry-after": "500"}, now=0.0), Reason.HINT_TOO_LONG),
    ],
    ids=["retried below", "permanent", "hint too long"],
)
def test_failure_that_must_not_be_repeated_ends_the_call(outcome: Outcome, reason: Reason) -> None:
    harness = start_call((0.0, outcome), SUCCEEDS)

    assert [ROUND_TRIP] == [end.ended for end in harness.run()]
    assert (reason, 1, 1) == (
        harness.reason,
        harness.recorder.attempt_count,
        len(harness.node.requests),
    )


def test_permanent_failure_ends_the_call_while_another_copy_runs() -> None:
    harness = start_call((3.0, SUCCESS), (0.0, PERMANENT))

    assert [1.0 + ROUND_TRIP] == [end.ended for end in harness.run()]
    assert Reason.PERMANENT is harness.reason


def test_only_the_first_late_response_counts() -> None:
    """If a node sends its responses later, only the first one counts."""
    harness = start_call(None, None)
    harness.loop.schedule(5.0, lambda now, _: harness.caller.on_response(now, 1, SUCCESS))
    harness.loop.schedule(5.0, lambda now, _: harness.caller.on_response(now, 2, TRANSIENT))

    assert [(0.0, 5.0 + NETWORK_DELAY, None)] == harness.run()
    assert 0 == summarize(harness.recorder).failures


def test_dropped_copy_gets_no_second_response() -> None:
    """After a crash of the server, the response that was scheduled before is ignored."""
    harness = start_call((3.0, SUCCESS), (9.0, SUCCESS))
    harness.loop.schedule(0.5, lambda now, _: harness.caller.on_response(now, 1, DROPPED))

    assert [(0.0, 0.5 + NETWORK_DELAY + 9.0 + ROUND_TRIP, None)] == harness.run()


def test_drop_replaces_an_earlier_response() -> None:
    """A dropped connection replaces the response, even with a longer network delay."""
    delays = iter([0.0, 0.0, 5.0, 0.0, 0.0])
    harness = start_call((0.75, SUCCESS), (9.0, SUCCESS), network_delay=lambda: next(delays))
    harness.loop.schedule(0.5, lambda now, _: harness.caller.on_response(now, 1, DROPPED))

    assert [(0.0, 1.0 + 9.0, None)] == harness.run()


def test_discarded_response_does_not_arrive() -> None:
    """A discarded response never arrives; the response of an ended copy cannot be discarded."""
    harness = start_call((0.25, SUCCESS), (2.0, SUCCESS))
    harness.loop.schedule(0.375, lambda _now, _argument: harness.caller.discard_response(1))

    assert [(0.0, 1.0 + 2.0 + ROUND_TRIP, None)] == harness.run()
    assert 1 == harness.caller.discard_response(1)


def test_replacement_of_a_discarded_response_counts() -> None:
    """The replacement of a discarded response ends the call."""
    harness = start_call((0.25, SUCCESS), None)
    harness.loop.schedule(0.375, lambda _now, _argument: harness.caller.discard_response(1))
    harness.loop.schedule(5.0, lambda now, _: harness.caller.on_response(now, 1, SUCCESS))
    harness.loop.schedule(6.0, lambda now, _: harness.caller.on_response(now, 2, SUCCESS))

    assert [(0.0, 5.0 + NETWORK_DELAY, None)] == harness.run()


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([SUCCEEDS], 1),
        ([(9.0, SUCCESS), SUCCEEDS], 2),
        ([FAILS, FAILS], 2),
        ([(0.0, PERMANENT)], 1),
    ],
)
def test_on_end_gets_the_number_of_copies(
    replies: list[tuple[float, Outcome]], expected: int
) -> None:
    """The callback gets the number of copies of a successful or failed call."""
    harness = start_call(*replies)
    harness.run()

    assert [expected] == harness.ends.attempts


# --- breaker and limiter -------------------------------------------------------------------------


def test_open_breaker_ends_the_call_before_it_is_sent() -> None:
    """No request reaches the server, and `start` returns the reason."""
    downstream = Downstream("there", breaker=Breaker())
    downstream.force("open")
    harness = start_call(SUCCEEDS, downstream=downstream)

    stop = harness.caller.start(0.0)

    assert stop is not None
    assert Reason.BREAKER_OPEN is stop.reason
    assert [(0.0, 0.0, stop)] == harness.ends.ends
    assert (0, []) == (harness.recorder.attempt_count, harness.node.requests)


def test_breaker_that_opens_stops_further_copies() -> None:
    """After the breaker opens, no further copy is sent, and the running copy continues."""
    downstream = Downstream("there", breaker=Breaker())
    harness = start_call((3.0, SUCCESS), SUCCEEDS, downstream=downstream)
    harness.loop.schedule(0.5, lambda _now, _argument: downstream.force("open"))

    assert [(0.0, 3.0 + ROUND_TRIP, None)] == harness.run()
    assert 1 == harness.recorder.attempt_count


def test_limiter_delays_the_first_copy_and_the_hedge() -> None:
    """A delayed copy is sent later, and the hedging delay counts from then."""
    harness = start_call(
        None, SUCCEEDS, downstream=Downstream("there", limiter=ScriptedLimiter(4.0, 0.0))
    )

    assert [(0.0, 5.0 + ROUND_TRIP, None)] == harness.run()
    assert [(4.0 + NETWORK_DELAY, 1), (5.0 + NETWORK_DELAY, 2)] == harness.node.requests


def test_delayed_copy_is_not_sent_after_the_end() -> None:
    """A copy that the limiter delays past the end of the call never reaches the server."""
    limiter = ScriptedLimiter(0.0, 5.0)
    harness = start_call((2.0, SUCCESS), SUCCEEDS, downstream=Downstream("there", limiter=limiter))

    assert [(0.0, 2.0 + ROUND_TRIP, None)] == harness.run()
    assert [(NETWORK_DELAY, 1)] == harness.node.requests
    assert (1, ["", None]) == (harness.recorder.attempt_count, limiter.released)


def test_caller_without_metrics_is_not_counted() -> None:
    """The calls of a relay are not counted as calls of clients."""
    loop, ends = EventLoop(0), CallEndRecorder()
    node = ScriptedNode(loop, FAILS, SUCCEEDS)
    core = HedgedCall(AFTER_1, Downstream("next"))
    HedgingCaller(Route(loop, node, lambda: NETWORK_DELAY, None), core, 0.0, ends).start(0.0)
    loop.run(9.0)

    assert [(0.0, 2 * ROUND_TRIP, None)] == ends.ends


# --- properties ----------------------------------------------------------------------------------

eighths = st.integers(0, 24).map(lambda number: number / 8)
outcomes = st.sampled_from([SUCCESS, SUCCESS, TRANSIENT, DROPPED, UNAVAILABLE_RETRIED, PERMANENT])


@given(
    replies=st.lists(st.none() | st.tuples(eighths, outcomes), max_size=6),
    delays=st.lists(eighths, min_size=16, max_size=16),
    after=eighths,
    waits=st.lists(st.none() | eighths, min_size=1, max_size=4),
    max_attempts=st.integers(2, 4),
)
def test_hedged_call_ends_at_most_once(
    replies: list[tuple[float, Outcome] | None],
    delays: list[float],
    after: float,
    waits: list[float | None],
    max_attempts: int,
) -> None:
    """For all replies and delays, each permit is released, and no copy is sent after the end."""
    limiter = ScriptedLimiter(*waits)
    remaining_delays = iter(delays)
    harness = start_call(
        *replies,
        hedging=Hedging(after=after, max_attempts=max_attempts),
        downstream=Downstream("there", limiter=limiter),
        network_delay=lambda: next(remaining_delays),
    )
    call_ends = harness.run()

    attempts = harness.recorder.attempt_count
    assert len(call_ends) <= 1
    assert attempts == len(harness.node.requests) <= max_attempts
    assert len(set(harness.node.requests)) == attempts
    if call_ends:
        core = harness.caller._call
        assert core.attempts == len(limiter.released)
        assert attempts <= core.attempts
        assert core.next_hedge_at is None
