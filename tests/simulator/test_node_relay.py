"""Servers that answer by a call of their own."""

from __future__ import annotations

import pytest

from tarry import Policy
from tarry.core.hedging import Hedging
from tarry.core.outcome import SUCCESS, Outcome
from tarry.core.verdict import Reason, Stop
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Fixed
from tarry.simulator.event_loop import World
from tarry.simulator.node import DROPPED, ERROR, GAVE_UP, UNAVAILABLE, Relay
from tarry.simulator.scenario import Failure, Server
from tests.simulator.harness import HELD, Answer, Asker, Begins

ONCE = Defence(Policy(max_attempts=1))
TWICE = Defence(Policy(max_attempts=2))


def relay_of(server: Server) -> tuple[World, Relay, Begins]:
    """Return a relay at work, its world, and the calls that it makes."""
    world, begins = World(0), Begins()
    return world, Relay("relay", server, world, begins), begins


def test_a_relay_works_a_little_and_then_calls() -> None:
    """The call begins after the relay's own latency, and its end is the answer."""
    world, relay, begins = relay_of(Server(calls="next", latency=Fixed(0.5)))
    asker = Asker()
    assert relay.take(1.0, asker, 7) is None
    assert [] == begins.begun

    world.run(2.0)
    (begun,) = begins.begun
    assert (1.5, 0, 1) == (begun.now, begun.client, relay.load(2.0))

    begun.ended(1.5, 3.0, None, 1)
    assert [Answer(3.0, 7, SUCCESS)] == asker.answers
    assert 0 == relay.load(3.0)


@pytest.mark.parametrize(
    ("defence", "reason", "attempts", "expected"),
    [
        (None, Reason.ATTEMPTS, 4, GAVE_UP),
        (TWICE, Reason.ATTEMPTS, 2, GAVE_UP),
        (TWICE, Reason.BREAKER_OPEN, 1, GAVE_UP),
        (TWICE, Reason.BREAKER_OPEN, 0, GAVE_UP),
        (ONCE, Reason.ATTEMPTS, 1, UNAVAILABLE),
        (ONCE, Reason.BREAKER_OPEN, 0, GAVE_UP),
        (ONCE, Reason.RETRIED_BELOW, 1, GAVE_UP),
        (Defence(hedging=Hedging(after=1.0)), Reason.ATTEMPTS, 2, GAVE_UP),
    ],
)
def test_a_relay_whose_call_failed_says_so(
    defence: Defence | None, reason: Reason, attempts: int, expected: Outcome
) -> None:
    """It answers that it gave up; only one that tried once leaves the retry to those above."""
    world, relay, begins = relay_of(Server(calls="next", defence=defence))
    asker = Asker()
    relay.take(0.0, asker, 1)
    world.run(1.0)

    begins.begun[0].ended(0.0, 2.0, Stop(reason), attempts)

    assert [Answer(2.0, 1, expected)] == asker.answers
    assert (False, True) == (UNAVAILABLE.retried, GAVE_UP.retried)


def test_concurrency_bounds_the_calls_that_run() -> None:
    """One more than a relay may have waits for its turn, and takes its time from then on."""
    world, relay, begins = relay_of(Server(calls="next", latency=Fixed(0.5), concurrency=2))
    asker = Asker()
    for number in (1, 2, 3, 4):
        assert relay.take(0.0, asker, number) is None
    world.run(1.0)
    assert ([0.5, 0.5], 4) == ([begun.now for begun in begins.begun], relay.load(1.0))

    begins.begun[1].ended(0.5, 1.0, None, 1)
    world.run(2.0)

    assert [Answer(1.0, 2, SUCCESS)] == asker.answers
    assert ([0.5, 0.5, 1.5], 3) == ([begun.now for begun in begins.begun], relay.load(2.0))


def test_a_relay_rejects_what_finds_its_queue_full() -> None:
    """One more than may wait is turned away at once, with the hint."""
    world, relay, begins = relay_of(Server(calls="next", concurrency=1, queue=1, retry_after=3.0))
    asker = Asker()
    assert [None, None] == [relay.take(0.0, asker, number) for number in (1, 2)]

    rejected = relay.take(0.0, asker, 3)
    assert rejected is not None
    when, outcome = rejected
    assert (0.0, "503", False) == (when, outcome.detail, outcome.retried)
    assert outcome.hint is not None
    assert 3.0 == outcome.hint.delay

    world.run(1.0)
    begins.begun[0].ended(0.0, 1.0, None, 1)
    assert relay.take(1.0, asker, 4) is None
    assert 2 == relay.load(1.0)


def test_a_relay_that_freezes_holds_what_waits_for_it() -> None:
    """Its calls go on, but nobody hears of them; at the end of the freeze all are dropped."""
    frozen = Failure(start=2.0, end=4.0, kind="freeze")
    world, relay, begins = relay_of(Server(calls="next", concurrency=1, failures=(frozen,)))
    asker = Asker()
    relay.take(1.0, asker, 1)
    relay.take(1.0, asker, 2)
    world.run(2.5)
    assert (0, 2) == (relay.load(2.5), relay.in_progress(2.5))
    begins.begun[0].ended(1.0, 3.0, None, 1)
    world.run(9.0)

    assert [Answer(4.0, HELD + number, DROPPED) for number in (1, 2)] == asker.answers
    assert (1, 0) == (len(begins.begun), relay.in_progress(9.0))


def test_a_share_of_its_requests_fails_before_the_call() -> None:
    """A relay that fails by itself makes no call for that request."""
    world, relay, begins = relay_of(Server(calls="next", latency=Fixed(0.5), failure_rate=0.25))
    asker = Asker()
    for number in range(2_000):
        relay.take(0.0, asker, number)
    world.run(1.0)

    assert {(0.5, ERROR)} == {(answer.when, answer.outcome) for answer in asker.answers}
    assert 2_000 == len(asker.answers) + len(begins.begun)
    assert pytest.approx(500, abs=100) == len(asker.answers)
    assert len(begins.begun) == relay.load(1.0)


def test_a_request_that_fails_makes_room_for_the_next() -> None:
    """A relay that fails by itself goes on with its queue, in the order of arrival."""
    world, relay, begins = relay_of(
        Server(calls="next", latency=Fixed(0.5), concurrency=1, failure_rate=1.0)
    )
    asker = Asker()
    for number in (1, 2, 3):
        relay.take(0.0, asker, number)
    world.run(9.0)

    expected = [Answer(0.5, 1, ERROR), Answer(1.0, 2, ERROR), Answer(1.5, 3, ERROR)]
    assert (expected, []) == (asker.answers, begins.begun)


def test_a_relay_without_a_queue_lets_nobody_wait() -> None:
    """A queue of 0 leaves as many as it works on."""
    _, relay, _ = relay_of(Server(calls="next", concurrency=1, queue=0))
    asker = Asker()
    assert relay.take(0.0, asker, 1) is None

    rejected = relay.take(0.0, asker, 2)

    assert rejected is not None
    assert ("503", 1) == (rejected[1].detail, relay.load(0.0))


def test_a_relay_that_dies_drops_its_queue_too() -> None:
    """Those whose call runs and those who wait are lost, and the next finds a free worker."""
    world, relay, begins = relay_of(
        Server(calls="next", concurrency=1, crash_above=2, restart_after=2.0)
    )
    asker = Asker()
    relay.take(0.0, asker, 1)
    relay.take(0.0, asker, 2)
    world.run(1.0)

    assert (1.0, DROPPED) == relay.take(1.0, asker, 3)
    assert [Answer(1.0, 1, DROPPED), Answer(1.0, 2, DROPPED)] == asker.answers

    assert relay.take(3.0, asker, 4) is None
    world.run(4.0)
    assert [0.0, 3.0] == [begun.now for begun in begins.begun]


def test_a_relay_that_goes_away_drops_its_requests() -> None:
    """Those that wait for a call and those that have not made theirs are lost, in order."""
    away = Failure(start=2.0, end=4.0)
    world, relay, begins = relay_of(Server(calls="next", latency=Fixed(1.0), failures=(away,)))
    asker = Asker()
    relay.take(0.0, asker, 1)
    world.run(1.5)
    relay.take(1.5, asker, 2)
    world.run(3.5)

    assert [Answer(2.0, 1, DROPPED), Answer(2.0, 2, DROPPED)] == asker.answers
    assert 1 == len(begins.begun)
    begins.begun[0].ended(1.0, 3.5, None, 1)
    assert 2 == len(asker.answers)
    assert 0 == relay.load(3.5)


def test_a_relay_may_crash_under_load() -> None:
    """One request too many kills it; what its calls come to is nobody's matter."""
    world, relay, begins = relay_of(Server(calls="next", crash_above=1, restart_after=2.0))
    asker = Asker()
    relay.take(0.0, asker, 1)
    world.run(1.0)

    assert (1.0, DROPPED) == relay.take(1.0, asker, 2)
    begins.begun[0].ended(0.0, 1.5, Stop(Reason.ATTEMPTS), 1)

    assert [Answer(1.0, 1, DROPPED)] == asker.answers
    assert 1 == relay.crashes
    refused = relay.take(2.0, asker, 3)
    assert refused is not None
    assert "connection refused" == refused[1].detail
    assert relay.take(3.0, asker, 4) is None


def test_a_call_that_is_refused_at_once_is_answered_at_once() -> None:
    """A breaker that stands open before the next server makes no request there."""
    world = World(0)
    asker = Asker()
    relay = Relay("relay", Server(calls="next"), world, Begins(lambda _: Stop(Reason.BREAKER_OPEN)))
    relay.take(0.0, asker, 1)
    world.run(1.0)

    assert [Answer(0.0, 1, GAVE_UP)] == asker.answers
    assert 0 == relay.load(1.0)
