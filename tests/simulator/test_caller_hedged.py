"""Hedged calls at work: winners, losers, failures, and copies that were never sent."""

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
from tarry.simulator.node import DROPPED, REFUSED, RETRIES_EXHAUSTED
from tests.simulator.harness import CallEnd, CallEndRecorder, ScriptedLimiter, ScriptedNode

HOP = 0.25
TWO_HOPS = 2 * HOP
AFTER_1 = Hedging(after=1.0)
FAILS = (0.0, REFUSED)
WORKS = (0.0, SUCCESS)


class Call(NamedTuple):
    """A hedged call on its way, and all who have to do with it."""

    loop: EventLoop
    node: ScriptedNode
    recorder: MetricsRecorder
    ends: CallEndRecorder
    caller: HedgingCaller

    def run(self) -> list[CallEnd]:
        """Let the world go on; return how the call ended."""
        self.loop.run(1_000.0)
        return self.ends.ends

    @property
    def reason(self) -> Reason | None:
        """Why the call failed, if it did."""
        (end,) = self.ends.ends
        return None if end.stop is None else end.stop.reason


def call(
    *replies: tuple[float, Outcome] | None,
    hedging: Hedging = AFTER_1,
    downstream: Downstream | None = None,
    hop: Callable[[], float] = lambda: HOP,
) -> Call:
    """Make a hedged call to a server that replies like this."""
    loop, ends, recorder = EventLoop(0), CallEndRecorder(), MetricsRecorder(2_000.0, 1.0)
    node = ScriptedNode(loop, *replies)
    core = HedgedCall(hedging, downstream or Downstream("there"))
    caller = HedgingCaller(Route(loop, node, hop, recorder), core, 0.0, ends)
    loop.schedule(0.0, caller.start)
    return Call(loop, node, recorder, ends, caller)


def test_a_fast_answer_needs_no_copy() -> None:
    """What is answered before its time is sent once."""
    made = call((0.25, SUCCESS), WORKS)

    assert [(0.0, 0.25 + TWO_HOPS, None)] == made.run()
    assert [(HOP, 1)] == made.node.seen
    assert (1, 0) == (made.recorder.attempts, sum(made.recorder._failed_attempts))


def test_the_first_answer_wins() -> None:
    """A copy that overtakes ends the call; the server works on the first one to no end."""
    made = call((9.0, SUCCESS), (0.5, SUCCESS))

    assert [(0.0, 1.0 + 0.5 + TWO_HOPS, None)] == made.run()
    assert [(HOP, 1), (1.0 + HOP, 2)] == made.node.seen
    assert (2, 0) == (made.recorder.attempts, sum(made.recorder._failed_attempts))


def test_the_first_copy_may_win_after_all() -> None:
    """A copy that was sent in vain is ignored."""
    made = call((1.0, SUCCESS), (9.0, SUCCESS))

    assert [(0.0, 1.0 + TWO_HOPS, None)] == made.run()


def test_a_copy_goes_after_each_delay() -> None:
    """As many as there may be leave, one delay after the other."""
    made = call(None, None, WORKS, WORKS, hedging=Hedging(after=1.0, max_attempts=3))

    assert [(0.0, 2.0 + TWO_HOPS, None)] == made.run()
    assert [(HOP, 1), (1.0 + HOP, 2), (2.0 + HOP, 3)] == made.node.seen


def test_copies_may_go_together() -> None:
    """A delay of 0 sends them all at the start."""
    made = call(
        (3.0, SUCCESS), (1.0, SUCCESS), (2.0, SUCCESS), hedging=Hedging(after=0.0, max_attempts=3)
    )

    assert [(0.0, 1.0 + TWO_HOPS, None)] == made.run()
    assert [(HOP, number) for number in (1, 2, 3)] == made.node.seen


def test_a_failure_sends_the_next_copy_at_once() -> None:
    """There is no reason to wait for a copy that has failed."""
    made = call((0.25, REFUSED), WORKS, WORKS)

    assert [(0.0, 0.25 + 2 * TWO_HOPS, None)] == made.run()
    assert [(HOP, 1), (0.25 + TWO_HOPS + HOP, 2)] == made.node.seen
    assert (2, 1) == (made.recorder.attempts, sum(made.recorder._failed_attempts))


def test_a_failure_of_one_leaves_the_others_running() -> None:
    """While a copy runs, the call has not failed."""
    made = call((2.0, SUCCESS), FAILS)

    assert [(0.0, 2.0 + TWO_HOPS, None)] == made.run()
    assert 1 == sum(made.recorder._failed_attempts)


def test_a_call_fails_with_its_last_copy() -> None:
    """When all that may be sent have failed, the call has."""
    made = call(FAILS, FAILS, WORKS)

    assert [2 * TWO_HOPS] == [end.now for end in made.run()]
    assert (Reason.ATTEMPTS, 2, 2) == (
        made.reason,
        made.recorder.attempts,
        sum(made.recorder._failed_attempts),
    )


def test_a_hint_moves_the_next_copy() -> None:
    """A server that names a time gets no copy before it."""
    made = call((0.0, outcome_of_status(503, {"retry-after": "7"}, now=0.0)), WORKS)

    assert [(0.0, 7.0 + 2 * TWO_HOPS, None)] == made.run()
    assert [(HOP, 1), (7.0 + 3 * HOP, 2)] == made.node.seen


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (RETRIES_EXHAUSTED, Reason.RETRIED_BELOW),
        (PERMANENT, Reason.PERMANENT),
        (outcome_of_status(503, {"retry-after": "500"}, now=0.0), Reason.HINT_TOO_LONG),
    ],
    ids=["retried below", "permanent", "hint too long"],
)
def test_a_call_that_is_over_sends_no_copy(outcome: Outcome, reason: Reason) -> None:
    """What may not be repeated ends the call, and the copy that was planned never leaves."""
    made = call((0.0, outcome), WORKS)

    assert [TWO_HOPS] == [end.now for end in made.run()]
    assert (reason, 1, 1) == (made.reason, made.recorder.attempts, len(made.node.seen))


def test_what_ends_the_call_ends_the_other_copies_too() -> None:
    """An answer that must not be repeated is the call's, also while another copy runs."""
    made = call((3.0, SUCCESS), (0.0, PERMANENT))

    assert [1.0 + TWO_HOPS] == [end.now for end in made.run()]
    assert Reason.PERMANENT is made.reason


def test_copies_that_never_come_back_never_end_the_call() -> None:
    """A hedged call has no timeout of its own."""
    made = call(None, None)

    assert [] == made.run()
    assert 2 == made.recorder.attempts


def test_answers_may_come_later() -> None:
    """A server that did not know the answer gives it when it does, and only the first counts."""
    made = call(None, None)
    made.loop.schedule(5.0, lambda now, _: made.caller.respond(now, 1, SUCCESS))
    made.loop.schedule(5.0, lambda now, _: made.caller.respond(now, 2, TRANSIENT))

    assert [(0.0, 5.0 + HOP, None)] == made.run()
    assert 0 == sum(made.recorder._failed_attempts)


def test_a_dropped_copy_is_not_answered_again() -> None:
    """When a server dies, the answer that it had planned never counts."""
    made = call((3.0, SUCCESS), (9.0, SUCCESS))
    made.loop.schedule(0.5, lambda now, _: made.caller.respond(now, 1, DROPPED))

    assert [(0.0, 0.5 + HOP + 9.0 + TWO_HOPS, None)] == made.run()


def test_a_drop_counts_also_when_it_is_slower_than_the_planned_answer() -> None:
    """A server that is dead has not answered, whatever the ways of the network take."""
    ways = iter([0.0, 0.0, 5.0, 0.0, 0.0])
    made = call((0.75, SUCCESS), (9.0, SUCCESS), hop=lambda: next(ways))
    made.loop.schedule(0.5, lambda now, _: made.caller.respond(now, 1, DROPPED))

    assert [(0.0, 1.0 + 9.0, None)] == made.run()


def test_an_answer_that_is_held_is_waited_for() -> None:
    """The planned one never comes, and a copy that is over is not held."""
    made = call((0.25, SUCCESS), (2.0, SUCCESS))
    made.loop.schedule(0.375, lambda _now, _about: made.caller.discard_response(1))

    assert [(0.0, 1.0 + 2.0 + TWO_HOPS, None)] == made.run()
    assert 1 == made.caller.discard_response(1)


def test_a_held_answer_may_win() -> None:
    """What a server says at last counts as any answer does."""
    made = call((0.25, SUCCESS), None)
    made.loop.schedule(0.375, lambda _now, _about: made.caller.discard_response(1))
    made.loop.schedule(5.0, lambda now, _: made.caller.respond(now, 1, SUCCESS))
    made.loop.schedule(6.0, lambda now, _: made.caller.respond(now, 2, SUCCESS))

    assert [(0.0, 5.0 + HOP, None)] == made.run()


@pytest.mark.parametrize(
    ("replies", "expected"),
    [([WORKS], 1), ([(9.0, SUCCESS), WORKS], 2), ([FAILS, FAILS], 2), ([(0.0, PERMANENT)], 1)],
)
def test_the_end_tells_how_many_copies_were_sent(
    replies: list[tuple[float, Outcome]], expected: int
) -> None:
    """Whoever began the call learns its copies, whether it ended well or not."""
    made = call(*replies)
    made.run()

    assert [expected] == made.ends.attempts


# --- what stands around a call -------------------------------------------------------------------


def test_an_open_breaker_ends_the_call_before_it_is_sent() -> None:
    """Nothing reaches the server, and whoever began the call is told why."""
    downstream = Downstream("there", breaker=Breaker())
    downstream.force("open")
    made = call(WORKS, downstream=downstream)

    stop = made.caller.start(0.0)

    assert stop is not None
    assert Reason.BREAKER_OPEN is stop.reason
    assert [(0.0, 0.0, stop)] == made.ends.ends
    assert (0, []) == (made.recorder.attempts, made.node.seen)


def test_a_call_that_was_not_let_through_sent_no_copy() -> None:
    """An open breaker ends a hedged call after none."""
    downstream = Downstream("there", breaker=Breaker())
    downstream.force("open")
    made = call(WORKS, downstream=downstream)
    made.run()

    assert [0] == made.ends.attempts


def test_a_call_that_is_let_through_has_nothing_to_tell_at_once() -> None:
    """`start` answers None when a copy is on its way."""
    made = call(WORKS)

    assert made.caller.start(0.0) is None


def test_an_open_breaker_sends_no_copy() -> None:
    """The copy that runs is waited for."""
    downstream = Downstream("there", breaker=Breaker())
    made = call((3.0, SUCCESS), WORKS, downstream=downstream)
    made.loop.schedule(0.5, lambda _now, _about: downstream.force("open"))

    assert [(0.0, 3.0 + TWO_HOPS, None)] == made.run()
    assert 1 == made.recorder.attempts


def test_a_limiter_moves_the_first_copy_and_the_hedge_after_it() -> None:
    """A copy that has to wait for its turn leaves then, and the delay counts from there."""
    made = call(None, WORKS, downstream=Downstream("there", limiter=ScriptedLimiter(4.0, 0.0)))

    assert [(0.0, 5.0 + TWO_HOPS, None)] == made.run()
    assert [(4.0 + HOP, 1), (5.0 + HOP, 2)] == made.node.seen


def test_a_copy_that_waits_for_its_turn_when_the_call_ends_is_never_sent() -> None:
    """A token that was given back was not used: the server never sees that copy."""
    limits = ScriptedLimiter(0.0, 5.0)
    made = call((2.0, SUCCESS), WORKS, downstream=Downstream("there", limiter=limits))

    assert [(0.0, 2.0 + TWO_HOPS, None)] == made.run()
    assert [(HOP, 1)] == made.node.seen
    assert (1, ["", None]) == (made.recorder.attempts, limits.released)


def test_a_caller_without_a_meter_is_not_counted() -> None:
    """The calls of a relay are no calls of the clients."""
    loop, ends = EventLoop(0), CallEndRecorder()
    node = ScriptedNode(loop, FAILS, WORKS)
    core = HedgedCall(AFTER_1, Downstream("next"))
    HedgingCaller(Route(loop, node, lambda: HOP, None), core, 0.0, ends).start(0.0)
    loop.run(9.0)

    assert [(0.0, 2 * TWO_HOPS, None)] == ends.ends


# --- whatever happens ----------------------------------------------------------------------------

eighths = st.integers(0, 24).map(lambda number: number / 8)
outcomes = st.sampled_from([SUCCESS, SUCCESS, TRANSIENT, DROPPED, RETRIES_EXHAUSTED, PERMANENT])


@given(
    replies=st.lists(st.none() | st.tuples(eighths, outcomes), max_size=6),
    ways=st.lists(eighths, min_size=16, max_size=16),
    after=eighths,
    waits=st.lists(st.none() | eighths, min_size=1, max_size=4),
    most=st.integers(2, 4),
)
def test_a_call_ends_at_most_once_and_sends_no_more_copies_than_it_may(
    replies: list[tuple[float, Outcome] | None],
    ways: list[float],
    after: float,
    waits: list[float | None],
    most: int,
) -> None:
    """Whatever happens, copies are numbered, places are given back, and no copy comes after."""
    limits = ScriptedLimiter(*waits)
    left = iter(ways)
    made = call(
        *replies,
        hedging=Hedging(after=after, max_attempts=most),
        downstream=Downstream("there", limiter=limits),
        hop=lambda: next(left),
    )
    told = made.run()

    attempts = made.recorder.attempts
    assert len(told) <= 1
    assert attempts == len(made.node.seen) <= most
    assert len(set(made.node.seen)) == attempts
    if told:
        core = made.caller._call
        assert core.attempts == len(limits.released)
        assert attempts <= core.attempts
        assert core.next_hedge_at is None
