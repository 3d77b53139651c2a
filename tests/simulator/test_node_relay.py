"""Relay nodes: servers that call another server."""

from __future__ import annotations

import pytest

from tarry import Policy
from tarry.core.hedging import Hedging
from tarry.core.outcome import SUCCESS, Outcome
from tarry.core.verdict import Reason, Stop
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Fixed
from tarry.simulator.event_loop import EventLoop
from tarry.simulator.node import (
    DROPPED,
    INTERNAL_ERROR,
    UNAVAILABLE,
    UNAVAILABLE_RETRIED,
    RelayNode,
)
from tarry.simulator.scenario import Failure, Server
from tests.simulator.harness import (
    REPLACEMENT_OFFSET,
    CallStartRecorder,
    ReceivedResponse,
    RecordingRequester,
)

ONCE = Defence(Policy(max_attempts=1))
TWICE = Defence(Policy(max_attempts=2))


def make_relay(server: Server) -> tuple[EventLoop, RelayNode, CallStartRecorder]:
    """Return an event loop, a relay on it, and a recorder of its calls."""
    loop, starts = EventLoop(0), CallStartRecorder()
    return loop, RelayNode("relay", server, loop, starts), starts


def test_relay_calls_after_its_latency() -> None:
    """A relay starts its call after its own latency, and responds when the call ends."""
    loop, relay, starts = make_relay(Server(calls="next", latency=Fixed(0.5)))
    requester = RecordingRequester()
    assert relay.handle(1.0, requester, 7) is None
    assert [] == starts.calls

    loop.run(2.0)
    (call,) = starts.calls
    assert (1.5, 0, 1) == (call.started, call.client, relay.load_at(2.0))

    call.on_end(1.5, 3.0, None, 1)
    assert [ReceivedResponse(3.0, 7, SUCCESS)] == requester.responses
    assert 0 == relay.load_at(3.0)


@pytest.mark.parametrize(
    ("defence", "reason", "attempts", "expected"),
    [
        (None, Reason.ATTEMPTS, 4, UNAVAILABLE_RETRIED),
        (TWICE, Reason.ATTEMPTS, 2, UNAVAILABLE_RETRIED),
        (TWICE, Reason.BREAKER_OPEN, 1, UNAVAILABLE_RETRIED),
        (TWICE, Reason.BREAKER_OPEN, 0, UNAVAILABLE_RETRIED),
        (ONCE, Reason.ATTEMPTS, 1, UNAVAILABLE),
        (ONCE, Reason.BREAKER_OPEN, 0, UNAVAILABLE_RETRIED),
        (ONCE, Reason.RETRIED_BELOW, 1, UNAVAILABLE_RETRIED),
        (Defence(hedging=Hedging(after=1.0)), Reason.ATTEMPTS, 2, UNAVAILABLE_RETRIED),
    ],
)
def test_relay_reports_exhausted_retries(
    defence: Defence | None, reason: Reason, attempts: int, expected: Outcome
) -> None:
    """The response has `retried_below`, unless a policy of one attempt used that attempt."""
    loop, relay, starts = make_relay(Server(calls="next", defence=defence))
    requester = RecordingRequester()
    relay.handle(0.0, requester, 1)
    loop.run(1.0)

    starts.calls[0].on_end(0.0, 2.0, Stop(reason), attempts)

    assert [ReceivedResponse(2.0, 1, expected)] == requester.responses
    assert (False, True) == (UNAVAILABLE.retried_below, UNAVAILABLE_RETRIED.retried_below)


def test_concurrency_limits_running_calls() -> None:
    """A request above the concurrency waits, and its latency counts from its start."""
    loop, relay, starts = make_relay(Server(calls="next", latency=Fixed(0.5), concurrency=2))
    requester = RecordingRequester()
    for number in (1, 2, 3, 4):
        assert relay.handle(0.0, requester, number) is None
    loop.run(1.0)
    assert ([0.5, 0.5], 4) == ([call.started for call in starts.calls], relay.load_at(1.0))

    starts.calls[1].on_end(0.5, 1.0, None, 1)
    loop.run(2.0)

    assert [ReceivedResponse(1.0, 2, SUCCESS)] == requester.responses
    assert ([0.5, 0.5, 1.5], 3) == ([call.started for call in starts.calls], relay.load_at(2.0))


def test_relay_with_a_full_queue_rejects() -> None:
    """A request that finds the queue full is rejected at once, with a Retry-After hint."""
    loop, relay, starts = make_relay(Server(calls="next", concurrency=1, queue=1, retry_after=3.0))
    requester = RecordingRequester()
    assert [None, None] == [relay.handle(0.0, requester, number) for number in (1, 2)]

    rejected = relay.handle(0.0, requester, 3)
    assert rejected is not None
    when, outcome = rejected
    assert (0.0, "503", False) == (when, outcome.detail, outcome.retried_below)
    assert outcome.hint is not None
    assert 3.0 == outcome.hint.delay

    loop.run(1.0)
    starts.calls[0].on_end(0.0, 1.0, None, 1)
    assert relay.handle(1.0, requester, 4) is None
    assert 2 == relay.load_at(1.0)


def test_frozen_relay_drops_requests_at_the_end() -> None:
    """A frozen relay drops all its requests at the end, also those whose call has ended."""
    frozen = Failure(start=2.0, end=4.0, kind="freeze")
    loop, relay, starts = make_relay(Server(calls="next", concurrency=1, failures=(frozen,)))
    requester = RecordingRequester()
    relay.handle(1.0, requester, 1)
    relay.handle(1.0, requester, 2)
    loop.run(2.5)
    assert (0, 2) == (relay.load_at(2.5), relay.in_progress_at(2.5))
    starts.calls[0].on_end(1.0, 3.0, None, 1)
    loop.run(9.0)

    assert [
        ReceivedResponse(4.0, REPLACEMENT_OFFSET + number, DROPPED) for number in (1, 2)
    ] == requester.responses
    assert (1, 0) == (len(starts.calls), relay.in_progress_at(9.0))


def test_request_that_fails_in_the_relay_makes_no_call() -> None:
    """A share of `failure_rate` of the requests fails in the relay, without a call."""
    loop, relay, starts = make_relay(Server(calls="next", latency=Fixed(0.5), failure_rate=0.25))
    requester = RecordingRequester()
    for number in range(2_000):
        relay.handle(0.0, requester, number)
    loop.run(1.0)

    assert {(0.5, INTERNAL_ERROR)} == {
        (response.when, response.outcome) for response in requester.responses
    }
    assert 2_000 == len(requester.responses) + len(starts.calls)
    assert pytest.approx(500, abs=100) == len(requester.responses)
    assert len(starts.calls) == relay.load_at(1.0)


def test_request_that_fails_in_the_relay_frees_its_worker() -> None:
    """After a failure in the relay itself, the queue continues in the order of arrival."""
    loop, relay, starts = make_relay(
        Server(calls="next", latency=Fixed(0.5), concurrency=1, failure_rate=1.0)
    )
    requester = RecordingRequester()
    for number in (1, 2, 3):
        relay.handle(0.0, requester, number)
    loop.run(9.0)

    expected = [
        ReceivedResponse(0.5, 1, INTERNAL_ERROR),
        ReceivedResponse(1.0, 2, INTERNAL_ERROR),
        ReceivedResponse(1.5, 3, INTERNAL_ERROR),
    ]
    assert (expected, []) == (requester.responses, starts.calls)


def test_relay_without_a_queue_rejects_at_once() -> None:
    """With a queue of 0, requests above the concurrency are rejected."""
    _, relay, _ = make_relay(Server(calls="next", concurrency=1, queue=0))
    requester = RecordingRequester()
    assert relay.handle(0.0, requester, 1) is None

    rejected = relay.handle(0.0, requester, 2)

    assert rejected is not None
    assert ("503", 1) == (rejected[1].detail, relay.load_at(0.0))


def test_crash_of_a_relay_drops_its_queue() -> None:
    """Running and queued requests are dropped, and the next one finds a free worker."""
    loop, relay, starts = make_relay(
        Server(calls="next", concurrency=1, crash_above=2, restart_after=2.0)
    )
    requester = RecordingRequester()
    relay.handle(0.0, requester, 1)
    relay.handle(0.0, requester, 2)
    loop.run(1.0)

    assert (1.0, DROPPED) == relay.handle(1.0, requester, 3)
    assert [
        ReceivedResponse(1.0, 1, DROPPED),
        ReceivedResponse(1.0, 2, DROPPED),
    ] == requester.responses

    assert relay.handle(3.0, requester, 4) is None
    loop.run(4.0)
    assert [0.0, 3.0] == [call.started for call in starts.calls]


def test_outage_of_a_relay_drops_its_requests() -> None:
    """An outage drops requests with and without a call in the order of arrival."""
    outage = Failure(start=2.0, end=4.0)
    loop, relay, starts = make_relay(Server(calls="next", latency=Fixed(1.0), failures=(outage,)))
    requester = RecordingRequester()
    relay.handle(0.0, requester, 1)
    loop.run(1.5)
    relay.handle(1.5, requester, 2)
    loop.run(3.5)

    assert [
        ReceivedResponse(2.0, 1, DROPPED),
        ReceivedResponse(2.0, 2, DROPPED),
    ] == requester.responses
    assert 1 == len(starts.calls)
    starts.calls[0].on_end(1.0, 3.5, None, 1)
    assert 2 == len(requester.responses)
    assert 0 == relay.load_at(3.5)


def test_a_relay_may_crash_under_load() -> None:
    """One request too many crashes the relay, and the results of its calls are ignored."""
    loop, relay, starts = make_relay(Server(calls="next", crash_above=1, restart_after=2.0))
    requester = RecordingRequester()
    relay.handle(0.0, requester, 1)
    loop.run(1.0)

    assert (1.0, DROPPED) == relay.handle(1.0, requester, 2)
    starts.calls[0].on_end(0.0, 1.5, Stop(Reason.ATTEMPTS), 1)

    assert [ReceivedResponse(1.0, 1, DROPPED)] == requester.responses
    assert 1 == relay.crash_count
    refused = relay.handle(2.0, requester, 3)
    assert refused is not None
    assert "connection refused" == refused[1].detail
    assert relay.handle(3.0, requester, 4) is None
