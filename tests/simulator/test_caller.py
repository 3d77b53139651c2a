"""Calls at work: attempts, timeouts, answers that come too late, and what the core refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry import Policy
from tarry.core.breaker import Breaker
from tarry.core.downstream import Downstream
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Outcome, outcome_of_status
from tarry.core.verdict import Reason
from tarry.simulator.caller import RetryingCaller, Route
from tarry.simulator.event_loop import EventLoop
from tarry.simulator.metrics import MetricsRecorder
from tarry.simulator.node import DROPPED, REFUSED
from tests.simulator.harness import CallEnd, CallEndRecorder, ScriptedLimiter, ScriptedNode

HOP = 0.25
TWO_HOPS = 2 * HOP
FAILS = (0.0, REFUSED)
WORKS = (0.0, SUCCESS)


def steady(timeout: float | None = None, most: int = 3) -> Policy:
    """Return a policy that waits one second before each retry."""
    return Policy(
        max_attempts=most,
        initial_delay=1.0,
        backoff="fixed",
        jitter="none",
        attempt_timeout=timeout,
    )


STEADY = steady()


class Call(NamedTuple):
    """A call on its way, and all who have to do with it."""

    loop: EventLoop
    node: ScriptedNode
    recorder: MetricsRecorder
    ends: CallEndRecorder
    caller: RetryingCaller

    def run(self, until: float = 1_000.0) -> list[CallEnd]:
        """Let the world go on; return how the call ended."""
        self.loop.run(until)
        return self.ends.ends

    @property
    def reason(self) -> Reason | None:
        """Why the call failed, if it did."""
        (end,) = self.ends.ends
        return None if end.stop is None else end.stop.reason


def call(
    *replies: tuple[float, Outcome] | None,
    policy: Policy = STEADY,
    downstream: Downstream | None = None,
    hop: Callable[[], float] = lambda: HOP,
    start: float = 0.0,
) -> Call:
    """Make a call to a server that replies like this."""
    loop, ends, recorder = EventLoop(0), CallEndRecorder(), MetricsRecorder(2_000.0, 1.0)
    node = ScriptedNode(loop, *replies)
    caller = RetryingCaller(Route(loop, node, hop, recorder), policy, downstream, start, ends)
    loop.schedule(start, caller.start)
    return Call(loop, node, recorder, ends, caller)


# --- without a timeout ---------------------------------------------------------------------------


def test_a_call_takes_its_ways_and_its_work() -> None:
    """The answer is there after the way to the server, its work, and the way back."""
    made = call((1.0, SUCCESS), start=3.0)

    assert [(3.0, 3.0 + TWO_HOPS + 1.0, None)] == made.run()
    assert [(3.0 + HOP, 1)] == made.node.seen
    assert (1, 0) == (made.recorder.attempts, sum(made.recorder._failed_attempts))


def test_a_failure_is_retried_after_the_wait_that_the_core_orders() -> None:
    """The next attempt leaves when the wait is over, and the call ends with the first success."""
    made = call((0.5, TRANSIENT), FAILS, WORKS)

    assert [(0.0, 0.5 + 3 * TWO_HOPS + 2.0, None)] == made.run()
    assert [(HOP, 1), (0.5 + 1.0 + 3 * HOP, 2), (0.5 + 2.0 + 5 * HOP, 3)] == made.node.seen
    assert (3, 2) == (made.recorder.attempts, sum(made.recorder._failed_attempts))


def test_a_call_ends_when_the_core_says_so() -> None:
    """After the last attempt the call has failed, with the reason."""
    made = call(FAILS, FAILS, FAILS, WORKS)

    ((begun, now, _),) = made.run()

    assert (0.0, 3 * TWO_HOPS + 2.0, Reason.ATTEMPTS) == (begun, now, made.reason)
    assert (3, 3) == (made.recorder.attempts, sum(made.recorder._failed_attempts))


def test_what_cannot_be_retried_ends_the_call_at_once() -> None:
    """A permanent failure is the last attempt."""
    made = call((0.0, PERMANENT), WORKS)

    assert 1 == len(made.run())
    assert (Reason.PERMANENT, 1) == (made.reason, len(made.node.seen))


def test_a_hint_of_the_server_is_heeded() -> None:
    """A Retry-After moves the next attempt, as everywhere in tarry."""
    made = call((0.0, outcome_of_status(503, {"retry-after": "7"}, now=0.0)), WORKS)
    made.run()

    assert [(HOP, 1), (7.0 + 3 * HOP, 2)] == made.node.seen


def test_a_server_that_never_answers_is_waited_for_without_a_timeout() -> None:
    """Nobody ends a call that may wait for ever."""
    made = call(None)

    assert [] == made.run()


def test_an_answer_may_come_later() -> None:
    """A server that did not know the answer gives it when it does."""
    made = call(None)
    made.loop.schedule(4.0, lambda now, _: made.caller.respond(now, 1, SUCCESS))

    assert [(0.0, 4.0 + HOP, None)] == made.run()


def test_a_dropped_request_is_not_answered_again() -> None:
    """When a server dies, the answer that it had planned never counts."""
    made = call((3.0, SUCCESS), (9.0, SUCCESS))
    made.loop.schedule(1.0, lambda now, _: made.caller.respond(now, 1, DROPPED))

    assert [(0.0, 1.0 + HOP + 1.0 + 9.0 + TWO_HOPS, None)] == made.run()
    assert (2, 1) == (made.recorder.attempts, sum(made.recorder._failed_attempts))


def test_a_drop_counts_also_when_it_is_slower_than_the_planned_answer() -> None:
    """A server that is dead has not answered, whatever the ways of the network take."""
    ways = iter([0.0, 0.0, 5.0, 0.0, 0.0])
    made = call((3.0, SUCCESS), WORKS, hop=lambda: next(ways))
    made.loop.schedule(2.5, lambda now, _: made.caller.respond(now, 1, DROPPED))

    assert [(0.0, 2.5 + 5.0 + 1.0, None)] == made.run()


def test_an_answer_that_is_held_is_waited_for() -> None:
    """The planned one never comes; the other has a number of its own."""
    made = call((3.0, SUCCESS))
    numbers: list[int] = []
    made.loop.schedule(2.0, lambda _now, _about: numbers.append(made.caller.discard_response(1)))
    assert [] == made.run(100.0)

    made.loop.schedule(100.0, lambda now, _: made.caller.respond(now, 1, DROPPED))
    made.loop.schedule(101.0, lambda now, _: made.caller.respond(now, numbers[0], SUCCESS))

    assert [(0.0, 101.0 + HOP, None)] == made.run()


def test_what_is_held_may_time_out() -> None:
    """A server that holds its answer back does not move the deadline, nor the next attempt."""
    made = call((0.25, SUCCESS), WORKS, policy=steady(timeout=1.0))
    numbers: list[int] = []
    made.loop.schedule(0.375, lambda _now, _about: numbers.append(made.caller.discard_response(1)))
    made.loop.schedule(2.0, lambda now, _: made.caller.respond(now, numbers[0], DROPPED))

    assert [(0.0, 1.0 + 1.0 + TWO_HOPS, None)] == made.run()
    assert (2, 1) == (made.recorder.attempts, sum(made.recorder._failed_attempts))


def test_nobody_waits_for_an_attempt_that_is_over() -> None:
    """To hold back what is not waited for changes nothing."""
    made = call((3.0, SUCCESS), (0.5, SUCCESS), policy=steady(timeout=1.0))
    made.loop.schedule(2.5, lambda _now, _about: made.caller.discard_response(1))

    assert [(0.0, 2.0 + 0.5 + TWO_HOPS, None)] == made.run()
    assert 1 == made.caller.discard_response(1)


@pytest.mark.parametrize(
    ("replies", "expected"),
    [([WORKS], 1), ([FAILS, WORKS], 2), ([FAILS, FAILS, FAILS], 3), ([(0.0, PERMANENT)], 1)],
)
def test_the_end_tells_how_many_attempts_were_made(
    replies: list[tuple[float, Outcome]], expected: int
) -> None:
    """Whoever began the call learns its attempts, whether it ended well or not."""
    made = call(*replies)
    made.run()

    assert [expected] == made.ends.attempts


# --- timeouts ------------------------------------------------------------------------------------


def test_a_timeout_on_the_way_to_the_server() -> None:
    """The attempt ends in time, and the request still reaches the server, which works on it."""
    ways = iter([5.0, 0.0, 0.0, 0.0])
    made = call(WORKS, WORKS, policy=steady(timeout=1.0), hop=lambda: next(ways))

    assert [(0.0, 2.0, None)] == made.run()
    assert [(2.0, 2), (5.0, 1)] == made.node.seen
    assert (2, 1) == (made.recorder.attempts, sum(made.recorder._failed_attempts))


def test_a_timeout_during_the_work() -> None:
    """The client leaves at its deadline, and what the server answers then is not heard."""
    made = call((9.0, SUCCESS), WORKS, policy=steady(timeout=1.0))

    assert [(0.0, 1.0 + 1.0 + TWO_HOPS, None)] == made.run()
    assert 1 == made.recorder._failed_attempts[1]


def test_a_timeout_of_a_server_that_hangs() -> None:
    """No answer at all is a timeout too."""
    made = call(policy=steady(timeout=1.0))

    assert [5.0] == [end.now for end in made.run()]
    assert (Reason.ATTEMPTS, 3) == (made.reason, len(made.node.seen))


@pytest.mark.parametrize(("takes", "attempts"), [(0.5, 1), (0.5625, 2)])
def test_an_answer_at_the_deadline_is_in_time(takes: float, attempts: int) -> None:
    """The way back counts: what arrives at the deadline is heard, and nothing after it."""
    made = call((takes, SUCCESS), WORKS, policy=steady(timeout=1.0))
    made.run()

    assert attempts == made.recorder.attempts


@pytest.mark.parametrize(("takes", "expected"), [(0.5, "connection refused"), (0.5625, "timeout")])
def test_a_failure_at_the_deadline_is_in_time_too(takes: float, expected: str) -> None:
    """It counts as what it is, and one after the deadline as a timeout."""
    limits = ScriptedLimiter(0.0)
    downstream = Downstream("there", limiter=limits)
    made = call((takes, REFUSED), policy=steady(timeout=1.0, most=1), downstream=downstream)
    made.run()

    assert [expected] == limits.released


@pytest.mark.parametrize("outcome", [SUCCESS, TRANSIENT])
@pytest.mark.parametrize(
    "late",
    [
        pytest.param(1.5, id="during the wait"),
        pytest.param(2.5, id="during the second attempt"),
        pytest.param(9.0, id="after the call"),
    ],
)
def test_an_answer_that_comes_too_late_is_nobodys(late: float, outcome: Outcome) -> None:
    """Whatever the first attempt comes to after its timeout, the second is not touched by it."""
    made = call(None, (0.5, SUCCESS), policy=steady(timeout=1.0))
    made.loop.schedule(late, lambda now, _: made.caller.respond(now, 1, outcome))

    assert [(0.0, 2.0 + 0.5 + TWO_HOPS, None)] == made.run()
    assert (2, 1) == (made.recorder.attempts, sum(made.recorder._failed_attempts))


@pytest.mark.parametrize("outcome", [SUCCESS, TRANSIENT])
def test_a_planned_answer_that_comes_too_late_is_nobodys(outcome: Outcome) -> None:
    """The same holds where the server knew from the beginning when it would answer."""
    made = call((2.0, outcome), (0.5, SUCCESS), policy=steady(timeout=1.0))

    assert [(0.0, 2.0 + 0.5 + TWO_HOPS, None)] == made.run()


def test_an_answer_given_before_but_due_after_the_deadline_is_a_timeout() -> None:
    """An answer that is still on its way when time is up does not count, and counts once."""
    made = call(None, WORKS, policy=steady(timeout=1.0))
    made.loop.schedule(0.875, lambda now, _: made.caller.respond(now, 1, SUCCESS))

    assert [(0.0, 2.0 + TWO_HOPS, None)] == made.run()
    assert (2, 1) == (made.recorder.attempts, sum(made.recorder._failed_attempts))


def test_each_attempt_has_a_deadline_of_its_own() -> None:
    """A second attempt is not measured by the clock of the first."""
    made = call((0.25, TRANSIENT), (0.25, SUCCESS), policy=steady(timeout=1.0))

    assert [(0.0, 0.5 + 1.0 + TWO_HOPS * 2, None)] == made.run()


# --- what stands around a call -------------------------------------------------------------------


def opened() -> Downstream:
    """Return a dependency whose breaker stands open."""
    downstream = Downstream("there", breaker=Breaker())
    downstream.force("open")
    return downstream


def test_an_open_breaker_ends_the_call_before_it_is_sent() -> None:
    """Nothing reaches the server, and whoever began the call is told why."""
    made = call(WORKS, downstream=opened())

    stop = made.caller.start(0.0)

    assert stop is not None
    assert Reason.BREAKER_OPEN is stop.reason
    assert [(0.0, 0.0, stop)] == made.ends.ends
    assert (0, []) == (made.recorder.attempts, made.node.seen)


def test_a_call_that_was_not_let_through_made_no_attempt() -> None:
    """An open breaker ends a call after none, and one that opens later after those it made."""
    refused = call(WORKS, downstream=opened())
    refused.run()
    downstream = Downstream("there", breaker=Breaker())
    tried = call(FAILS, WORKS, downstream=downstream)
    tried.loop.schedule(1.0, lambda _now, _about: downstream.force("open"))
    tried.run()

    assert ([0], [1]) == (refused.ends.attempts, tried.ends.attempts)


def test_a_call_that_is_let_through_has_nothing_to_tell_at_once() -> None:
    """`start` answers None when an attempt is on its way."""
    made = call(WORKS)

    assert made.caller.start(0.0) is None


def test_a_breaker_that_opens_ends_the_call() -> None:
    """The failure that opens the breaker is the call's last."""
    downstream = Downstream("there", breaker=Breaker(consecutive=2))
    made = call(FAILS, FAILS, WORKS, downstream=downstream)
    made.run()

    assert (Reason.BREAKER_OPEN, 2) == (made.reason, made.recorder.attempts)


def test_a_breaker_that_opens_during_the_wait_ends_the_call() -> None:
    """Others may open it while a call waits."""
    downstream = Downstream("there", breaker=Breaker())
    made = call(FAILS, WORKS, downstream=downstream)
    made.loop.schedule(1.0, lambda _now, _about: downstream.force("open"))

    assert [TWO_HOPS + 1.0] == [end.now for end in made.run()]
    assert (Reason.BREAKER_OPEN, 1) == (made.reason, made.recorder.attempts)


def test_a_limiter_moves_the_attempt() -> None:
    """An attempt that has to wait for its turn leaves then, and its time counts from there."""
    downstream = Downstream("there", limiter=ScriptedLimiter(4.0))
    made = call((0.25, SUCCESS), downstream=downstream, policy=steady(timeout=1.0))

    assert [(0.0, 4.0 + 0.25 + TWO_HOPS, None)] == made.run()
    assert [(4.0 + HOP, 1)] == made.node.seen


def test_a_limiter_moves_the_deadline_too() -> None:
    """A timeout is the time from the moment at which the attempt leaves."""
    downstream = Downstream("there", limiter=ScriptedLimiter(4.0, 0.0))
    made = call(None, WORKS, downstream=downstream, policy=steady(timeout=1.0))

    assert [(0.0, 4.0 + 1.0 + 1.0 + TWO_HOPS, None)] == made.run()


def test_a_full_limiter_ends_the_call() -> None:
    """Who is not let through at all has failed."""
    made = call(WORKS, downstream=Downstream("there", limiter=ScriptedLimiter(None)))
    made.run()

    assert (Reason.LIMIT, 0) == (made.reason, made.recorder.attempts)


def test_each_end_is_told_to_the_limiter_once() -> None:
    """Timeouts, failures and successes all give their place back."""
    limits = ScriptedLimiter(0.0)
    made = call(
        None,
        FAILS,
        WORKS,
        downstream=Downstream("there", limiter=limits),
        policy=steady(timeout=1.0),
    )
    made.loop.schedule(1.5, lambda now, _: made.caller.respond(now, 1, SUCCESS))
    made.run()

    assert ["timeout", "connection refused", ""] == limits.released


def test_a_caller_without_a_meter_is_not_counted() -> None:
    """The calls of a relay are no calls of the clients."""
    loop, ends = EventLoop(0), CallEndRecorder()
    node = ScriptedNode(loop, FAILS, WORKS)
    RetryingCaller(Route(loop, node, lambda: HOP, None), STEADY, None, 0.0, ends).start(0.0)
    loop.run(9.0)

    assert [(0.0, 1.0 + 2 * TWO_HOPS, None)] == ends.ends


# --- whatever happens ----------------------------------------------------------------------------

eighths = st.integers(0, 24).map(lambda number: number / 8)
outcomes = st.sampled_from([SUCCESS, TRANSIENT, DROPPED, PERMANENT])
replies = st.lists(st.none() | st.tuples(eighths, outcomes), max_size=6)


@given(
    replies=replies,
    ways=st.lists(eighths, min_size=16, max_size=16),
    timeout=st.none() | eighths.filter(bool),
    late=st.lists(st.tuples(eighths, st.integers(1, 4), outcomes), max_size=6),
    most=st.integers(1, 4),
)
def test_a_call_ends_at_most_once_and_makes_no_more_attempts_than_it_may(
    replies: list[tuple[float, Outcome] | None],
    ways: list[float],
    timeout: float | None,
    late: list[tuple[float, int, Outcome]],
    most: int,
) -> None:
    """Whatever the server and the network do, attempts are counted, numbered, and ended once."""
    limits = ScriptedLimiter(0.0)
    left = iter(ways * 2)
    made = call(
        *replies,
        policy=steady(timeout, most),
        downstream=Downstream("there", limiter=limits),
        hop=lambda: next(left),
    )
    for when, number, outcome in late:  # only to requests that have arrived, as servers do
        made.loop.schedule(
            when,
            lambda now, about: (
                made.caller.respond(now, *about)
                if about[0] in [seen for _, seen in made.node.seen]
                else None
            ),
            (number, outcome),
        )
    told = made.run()

    attempts = made.recorder.attempts
    assert len(told) <= 1
    assert 1 <= attempts <= most
    assert sorted(number for _, number in made.node.seen) == list(range(1, attempts + 1))
    succeeded = bool(told) and told[0].stop is None
    running = not told
    assert attempts == sum(made.recorder._failed_attempts) + succeeded + running
    assert attempts - running == len(limits.released)
    if timeout is not None:
        assert told
        assert told[0].now <= most * timeout + (most - 1)
