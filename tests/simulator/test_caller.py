"""Retried calls: attempts, timeouts, late responses, breakers and limiters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry import Policy
from tarry.core.breaker import Breaker
from tarry.core.downstream import Downstream
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Outcome
from tarry.core.verdict import Reason
from tarry.simulator.caller import RetryingCaller, Route
from tarry.simulator.event_loop import EventLoop
from tarry.simulator.metrics import MetricsRecorder
from tarry.simulator.node import DROPPED, REFUSED
from tests.simulator.harness import (
    CallEnd,
    CallEndRecorder,
    ScriptedLimiter,
    ScriptedNode,
    summarize,
)

NETWORK_DELAY = 0.25
ROUND_TRIP = 2 * NETWORK_DELAY
FAILS = (0.0, REFUSED)
SUCCEEDS = (0.0, SUCCESS)


def steady_policy(timeout: float | None = None, max_attempts: int = 3) -> Policy:
    """Return a policy that waits one second before each retry."""
    return Policy(
        max_attempts=max_attempts,
        initial_delay=1.0,
        backoff="fixed",
        jitter="none",
        attempt_timeout=timeout,
    )


STEADY = steady_policy()


class CallHarness(NamedTuple):
    """A call with its event loop, node and recorders."""

    loop: EventLoop
    node: ScriptedNode
    recorder: MetricsRecorder
    ends: CallEndRecorder
    caller: RetryingCaller

    def run(self, until: float = 1_000.0) -> list[CallEnd]:
        """Run the event loop; return how the call ended."""
        self.loop.run(until)
        return self.ends.ends

    @property
    def reason(self) -> Reason | None:
        """The reason why the call failed, or None."""
        (end,) = self.ends.ends
        return None if end.stop is None else end.stop.reason


def start_call(
    *replies: tuple[float, Outcome] | None,
    policy: Policy = STEADY,
    downstream: Downstream | None = None,
    network_delay: Callable[[], float] = lambda: NETWORK_DELAY,
    start: float = 0.0,
) -> CallHarness:
    """Start a call to a node with these replies."""
    loop, ends, recorder = EventLoop(0), CallEndRecorder(), MetricsRecorder(2_000.0, 1.0)
    node = ScriptedNode(loop, *replies)
    caller = RetryingCaller(
        Route(loop, node, network_delay, recorder), policy, downstream, start, ends
    )
    loop.schedule(start, caller.start)
    return CallHarness(loop, node, recorder, ends, caller)


# --- without a timeout ---------------------------------------------------------------------------


def test_call_takes_the_server_latency_and_two_network_delays() -> None:
    harness = start_call((1.0, SUCCESS), start=3.0)

    assert [(3.0, 3.0 + ROUND_TRIP + 1.0, None)] == harness.run()
    assert [(3.0 + NETWORK_DELAY, 1)] == harness.node.requests
    assert (1, 0) == (harness.recorder.attempt_count, summarize(harness.recorder).failures)


def test_failure_is_retried_after_the_wait() -> None:
    """Each retry is sent when its wait ends, and the first success ends the call."""
    harness = start_call((0.5, TRANSIENT), FAILS, SUCCEEDS)

    assert [(0.0, 0.5 + 3 * ROUND_TRIP + 2.0, None)] == harness.run()
    assert [
        (NETWORK_DELAY, 1),
        (0.5 + 1.0 + 3 * NETWORK_DELAY, 2),
        (0.5 + 2.0 + 5 * NETWORK_DELAY, 3),
    ] == harness.node.requests
    assert (3, 2) == (harness.recorder.attempt_count, summarize(harness.recorder).failures)


def test_permanent_failure_ends_the_call() -> None:
    """A permanent failure is not retried."""
    harness = start_call((0.0, PERMANENT), SUCCEEDS)

    assert 1 == len(harness.run())
    assert (Reason.PERMANENT, 1) == (harness.reason, len(harness.node.requests))


def test_node_may_respond_later() -> None:
    """A node that does not return its response at once may send it later."""
    harness = start_call(None)
    harness.loop.schedule(4.0, lambda now, _: harness.caller.on_response(now, 1, SUCCESS))

    assert [(0.0, 4.0 + NETWORK_DELAY, None)] == harness.run()


def test_dropped_request_gets_no_second_response() -> None:
    """After a crash of the server, the response that was scheduled before is ignored."""
    harness = start_call((3.0, SUCCESS), (9.0, SUCCESS))
    harness.loop.schedule(1.0, lambda now, _: harness.caller.on_response(now, 1, DROPPED))

    assert [(0.0, 1.0 + NETWORK_DELAY + 1.0 + 9.0 + ROUND_TRIP, None)] == harness.run()
    assert (2, 1) == (harness.recorder.attempt_count, summarize(harness.recorder).failures)


def test_discarded_response_is_replaced() -> None:
    """A discarded response never arrives; its replacement has a new number."""
    harness = start_call((3.0, SUCCESS))
    numbers: list[int] = []
    harness.loop.schedule(
        2.0, lambda _now, _argument: numbers.append(harness.caller.discard_response(1))
    )
    assert [] == harness.run(100.0)

    harness.loop.schedule(100.0, lambda now, _: harness.caller.on_response(now, 1, DROPPED))
    harness.loop.schedule(
        101.0, lambda now, _: harness.caller.on_response(now, numbers[0], SUCCESS)
    )

    assert [(0.0, 101.0 + NETWORK_DELAY, None)] == harness.run()


def test_attempt_with_a_discarded_response_may_time_out() -> None:
    """Discarding a response changes neither the deadline of its attempt nor the next attempt."""
    harness = start_call((0.25, SUCCESS), SUCCEEDS, policy=steady_policy(timeout=1.0))
    numbers: list[int] = []
    harness.loop.schedule(
        0.375, lambda _now, _argument: numbers.append(harness.caller.discard_response(1))
    )
    harness.loop.schedule(2.0, lambda now, _: harness.caller.on_response(now, numbers[0], DROPPED))

    assert [(0.0, 1.0 + 1.0 + ROUND_TRIP, None)] == harness.run()
    assert (2, 1) == (harness.recorder.attempt_count, summarize(harness.recorder).failures)


def test_response_of_an_ended_attempt_cannot_be_discarded() -> None:
    harness = start_call((3.0, SUCCESS), (0.5, SUCCESS), policy=steady_policy(timeout=1.0))
    harness.loop.schedule(2.5, lambda _now, _argument: harness.caller.discard_response(1))

    assert [(0.0, 2.0 + 0.5 + ROUND_TRIP, None)] == harness.run()
    assert 1 == harness.caller.discard_response(1)


@pytest.mark.parametrize(
    ("replies", "expected"),
    [([SUCCEEDS], 1), ([FAILS, SUCCEEDS], 2), ([FAILS, FAILS, FAILS], 3), ([(0.0, PERMANENT)], 1)],
)
def test_on_end_gets_the_number_of_attempts(
    replies: list[tuple[float, Outcome]], expected: int
) -> None:
    """The callback gets the number of attempts of a successful or failed call."""
    harness = start_call(*replies)
    harness.run()

    assert [expected] == harness.ends.attempts


def test_timeout_before_the_request_arrives() -> None:
    """The attempt times out, and the request still reaches the server."""
    delays = iter([5.0, 0.0, 0.0, 0.0])
    harness = start_call(
        SUCCEEDS, SUCCEEDS, policy=steady_policy(timeout=1.0), network_delay=lambda: next(delays)
    )

    assert [(0.0, 2.0, None)] == harness.run()
    assert [(2.0, 2), (5.0, 1)] == harness.node.requests
    assert (2, 1) == (harness.recorder.attempt_count, summarize(harness.recorder).failures)


# --- timeouts ------------------------------------------------------------------------------------


def test_timeout_during_the_work() -> None:
    """The attempt ends at its deadline, and the later response is ignored."""
    harness = start_call((9.0, SUCCESS), SUCCEEDS, policy=steady_policy(timeout=1.0))

    assert [(0.0, 1.0 + 1.0 + ROUND_TRIP, None)] == harness.run()
    assert 1 == harness.recorder._failed_attempts[1]


@pytest.mark.parametrize(("duration", "attempts"), [(0.5, 1), (0.5625, 2)])
def test_response_at_the_deadline_is_in_time(duration: float, attempts: int) -> None:
    """A response that arrives at the deadline counts, and one after it does not."""
    harness = start_call((duration, SUCCESS), SUCCEEDS, policy=steady_policy(timeout=1.0))
    harness.run()

    assert attempts == harness.recorder.attempt_count


@pytest.mark.parametrize(
    ("duration", "expected"), [(0.5, "connection refused"), (0.5625, "timeout")]
)
def test_failure_at_the_deadline_is_in_time(duration: float, expected: str) -> None:
    """A failure at the deadline keeps its outcome; a later one is a timeout."""
    limiter = ScriptedLimiter(0.0)
    downstream = Downstream("there", limiter=limiter)
    harness = start_call(
        (duration, REFUSED),
        policy=steady_policy(timeout=1.0, max_attempts=1),
        downstream=downstream,
    )
    harness.run()

    assert [expected] == limiter.released


@pytest.mark.parametrize("outcome", [SUCCESS, TRANSIENT])
@pytest.mark.parametrize(
    "response_at",
    [
        pytest.param(1.5, id="during the wait"),
        pytest.param(2.5, id="during the second attempt"),
        pytest.param(9.0, id="after the call"),
    ],
)
def test_late_response_is_ignored(response_at: float, outcome: Outcome) -> None:
    """A response to a timed-out attempt does not affect the next attempt."""
    harness = start_call(None, (0.5, SUCCESS), policy=steady_policy(timeout=1.0))
    harness.loop.schedule(response_at, lambda now, _: harness.caller.on_response(now, 1, outcome))

    assert [(0.0, 2.0 + 0.5 + ROUND_TRIP, None)] == harness.run()
    assert (2, 1) == (harness.recorder.attempt_count, summarize(harness.recorder).failures)


@pytest.mark.parametrize("outcome", [SUCCESS, TRANSIENT])
def test_late_scheduled_response_is_ignored(outcome: Outcome) -> None:
    """A late response is ignored, too, if the node returned it when the request arrived."""
    harness = start_call((2.0, outcome), (0.5, SUCCESS), policy=steady_policy(timeout=1.0))

    assert [(0.0, 2.0 + 0.5 + ROUND_TRIP, None)] == harness.run()


def test_response_in_transit_at_the_deadline_is_a_timeout() -> None:
    """A response that is still in the network at the deadline does not count."""
    harness = start_call(None, SUCCEEDS, policy=steady_policy(timeout=1.0))
    harness.loop.schedule(0.875, lambda now, _: harness.caller.on_response(now, 1, SUCCESS))

    assert [(0.0, 2.0 + ROUND_TRIP, None)] == harness.run()
    assert (2, 1) == (harness.recorder.attempt_count, summarize(harness.recorder).failures)


# --- breaker, budget and limiter -----------------------------------------------------------------


def open_downstream() -> Downstream:
    """Return a downstream with an open breaker."""
    downstream = Downstream("there", breaker=Breaker())
    downstream.force("open")
    return downstream


def test_open_breaker_ends_the_call_before_it_is_sent() -> None:
    """No request reaches the server, and `start` returns the reason."""
    harness = start_call(SUCCEEDS, downstream=open_downstream())

    stop = harness.caller.start(0.0)

    assert stop is not None
    assert Reason.BREAKER_OPEN is stop.reason
    assert [(0.0, 0.0, stop)] == harness.ends.ends
    assert (0, []) == (harness.recorder.attempt_count, harness.node.requests)


def test_rejected_call_makes_no_attempt() -> None:
    """A call that a breaker rejects at once has 0 attempts; one that it stops later has 1."""
    rejected = start_call(SUCCEEDS, downstream=open_downstream())
    rejected.run()
    downstream = Downstream("there", breaker=Breaker())
    harness = start_call(FAILS, SUCCEEDS, downstream=downstream)
    harness.loop.schedule(1.0, lambda _now, _argument: downstream.force("open"))
    harness.run()

    assert ([0], [1]) == (rejected.ends.attempts, harness.ends.attempts)


def test_a_breaker_that_opens_ends_the_call() -> None:
    """A call makes no further attempt after the failure that opens the breaker."""
    downstream = Downstream("there", breaker=Breaker(consecutive=2))
    harness = start_call(FAILS, FAILS, SUCCEEDS, downstream=downstream)
    harness.run()

    assert (Reason.BREAKER_OPEN, 2) == (harness.reason, harness.recorder.attempt_count)


def test_a_breaker_that_opens_during_the_wait_ends_the_call() -> None:
    downstream = Downstream("there", breaker=Breaker())
    harness = start_call(FAILS, SUCCEEDS, downstream=downstream)
    harness.loop.schedule(1.0, lambda _now, _argument: downstream.force("open"))

    assert [ROUND_TRIP + 1.0] == [end.ended for end in harness.run()]
    assert (Reason.BREAKER_OPEN, 1) == (harness.reason, harness.recorder.attempt_count)


def test_limiter_delays_the_attempt() -> None:
    """A delayed attempt is sent later, and its timeout counts from then."""
    downstream = Downstream("there", limiter=ScriptedLimiter(4.0))
    harness = start_call((0.25, SUCCESS), downstream=downstream, policy=steady_policy(timeout=1.0))

    assert [(0.0, 4.0 + 0.25 + ROUND_TRIP, None)] == harness.run()
    assert [(4.0 + NETWORK_DELAY, 1)] == harness.node.requests


def test_limiter_is_released_once_per_attempt() -> None:
    """Timeouts, failures and successes each release the limiter."""
    limiter = ScriptedLimiter(0.0)
    harness = start_call(
        None,
        FAILS,
        SUCCEEDS,
        downstream=Downstream("there", limiter=limiter),
        policy=steady_policy(timeout=1.0),
    )
    harness.loop.schedule(1.5, lambda now, _: harness.caller.on_response(now, 1, SUCCESS))
    harness.run()

    assert ["timeout", "connection refused", ""] == limiter.released


def test_caller_without_metrics_is_not_counted() -> None:
    """The calls of a relay are not counted as calls of clients."""
    loop, ends = EventLoop(0), CallEndRecorder()
    node = ScriptedNode(loop, FAILS, SUCCEEDS)
    RetryingCaller(Route(loop, node, lambda: NETWORK_DELAY, None), STEADY, None, 0.0, ends).start(
        0.0
    )
    loop.run(9.0)

    assert [(0.0, 1.0 + 2 * ROUND_TRIP, None)] == ends.ends


# --- properties ----------------------------------------------------------------------------------

eighths = st.integers(0, 24).map(lambda number: number / 8)
outcomes = st.sampled_from([SUCCESS, TRANSIENT, DROPPED, PERMANENT])
replies = st.lists(st.none() | st.tuples(eighths, outcomes), max_size=6)


@given(
    replies=replies,
    delays=st.lists(eighths, min_size=16, max_size=16),
    timeout=st.none() | eighths.filter(bool),
    late_responses=st.lists(st.tuples(eighths, st.integers(1, 4), outcomes), max_size=6),
    max_attempts=st.integers(1, 4),
)
def test_call_ends_at_most_once_within_its_attempts(
    replies: list[tuple[float, Outcome] | None],
    delays: list[float],
    timeout: float | None,
    late_responses: list[tuple[float, int, Outcome]],
    max_attempts: int,
) -> None:
    """For all replies and network delays, each attempt is counted, numbered and ended once."""
    limiter = ScriptedLimiter(0.0)
    remaining_delays = iter(delays * 2)
    harness = start_call(
        *replies,
        policy=steady_policy(timeout, max_attempts),
        downstream=Downstream("there", limiter=limiter),
        network_delay=lambda: next(remaining_delays),
    )
    # Servers respond only to requests that have arrived.
    for when, number, outcome in late_responses:
        harness.loop.schedule(
            when,
            lambda now, response: (
                harness.caller.on_response(now, *response)
                if response[0] in [received for _, received in harness.node.requests]
                else None
            ),
            (number, outcome),
        )
    call_ends = harness.run()

    attempts = harness.recorder.attempt_count
    assert len(call_ends) <= 1
    assert 1 <= attempts <= max_attempts
    assert sorted(number for _, number in harness.node.requests) == list(range(1, attempts + 1))
    succeeded = bool(call_ends) and call_ends[0].stop is None
    running = not call_ends
    assert attempts == summarize(harness.recorder).failures + succeeded + running
    assert attempts - running == len(limiter.released)
    if timeout is not None:
        assert call_ends
        assert call_ends[0].ended <= max_attempts * timeout + (max_attempts - 1)
