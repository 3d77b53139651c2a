"""Test doubles and helper functions for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan
from typing import NamedTuple

from tarry.core.outcome import SUCCESS, Outcome
from tarry.core.verdict import Stop
from tarry.simulator.distributions import RandomSource, Sampler
from tarry.simulator.event_loop import EventLoop
from tarry.simulator.metrics import MetricsRecorder, Summary
from tarry.simulator.node import LeafNode, Node, OnCallEnd, Requester
from tarry.simulator.scenario import Scenario, Server

REPLACEMENT_OFFSET = 1_000_000
"""`RecordingRequester` adds this to the number of a discarded response for its replacement."""


class ScriptedDistribution:
    """A distribution that returns these values in order, and then repeats the last one."""

    def __init__(self, *values: float) -> None:
        self.values = values

    @property
    def mean(self) -> float:
        """The average of the values."""
        return sum(self.values) / len(self.values)

    def sampler(self, source: RandomSource) -> Sampler:
        """Return a function that returns the next value."""
        remaining = list(self.values)
        return lambda: remaining.pop(0) if len(remaining) > 1 else remaining[0]


class ReceivedResponse(NamedTuple):
    """A response that a requester received."""

    when: float
    number: int
    outcome: Outcome


class RecordingRequester:
    """A requester that records the responses it receives."""

    def __init__(self, responses: list[ReceivedResponse] | None = None) -> None:
        self.responses: list[ReceivedResponse] = [] if responses is None else responses

    def on_response(self, now: float, number: int, outcome: Outcome) -> None:
        """Record the response."""
        self.responses.append(ReceivedResponse(now, number, outcome))

    def discard_response(self, number: int) -> int:
        """Return the number of the replacement."""
        return number + REPLACEMENT_OFFSET


class ScriptedNode(LeafNode):
    """A node that responds to each request with the next reply, and never when none is left.

    A reply is the seconds until the response and its outcome, or None for no response.
    """

    def __init__(self, loop: EventLoop, *replies: tuple[float, Outcome] | None) -> None:
        super().__init__("server", Server(), loop)
        self.replies = list(replies)
        self.requests: list[tuple[float, int]] = []
        """The arrival time and the number of each request."""
        self.requesters: list[Requester] = []

    def handle(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Return the next reply."""
        self.requests.append((now, number))
        self.requesters.append(requester)
        reply = self.replies.pop(0) if self.replies else None
        return None if reply is None else (now + reply[0], reply[1])


class ScriptedLimiter:
    """A limiter that delays attempts by these waits in order, and then repeats the last wait."""

    def __init__(self, *waits: float | None) -> None:
        self.waits = list(waits)
        self.released: list[str | None] = []
        """The detail of each attempt's outcome; None for a cancelled attempt."""

    def acquire(self, now: float) -> float | None:
        """Return the next wait."""
        return self.waits.pop(0) if len(self.waits) > 1 else self.waits[0]

    def release(self, outcome: Outcome | None, duration: float, now: float) -> None:
        """Record the outcome."""
        self.released.append(None if outcome is None else outcome.detail)

    def on_recovery(self, now: float) -> None:
        """Do nothing."""


class CallEnd(NamedTuple):
    """The start and end of a call, and the reason if it failed."""

    started: float
    ended: float
    stop: Stop | None


class CallEndRecorder:
    """An `OnCallEnd` callback that records its arguments."""

    def __init__(self) -> None:
        self.ends: list[CallEnd] = []
        self.attempts: list[int] = []

    def __call__(self, started: float, now: float, stop: Stop | None, attempts: int) -> None:
        """Record the call."""
        self.ends.append(CallEnd(started, now, stop))
        self.attempts.append(attempts)


class StartedCall(NamedTuple):
    """The start of a call, its client, and the callback for its end."""

    started: float
    client: int
    on_end: OnCallEnd


class CallStartRecorder:
    """A `StartCall` function that records calls, or rejects them if `reject` returns a stop."""

    def __init__(self, reject: Callable[[float], Stop | None] = lambda _: None) -> None:
        self.reject = reject
        self.calls: list[StartedCall] = []

    def __call__(self, now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        """Record a call, or end it at once with the stop."""
        stop = self.reject(now)
        if stop is not None:
            on_end(now, now, stop, 0)
            return stop
        self.calls.append(StartedCall(now, client, on_end))
        return None


def make_leaf_node(server: Server, seed: int = 0) -> tuple[EventLoop, LeafNode]:
    """Return an event loop and a leaf node on it."""
    loop = EventLoop(seed)
    return loop, LeafNode("server", server, loop)


def immediate_response(
    node: Node, now: float, requester: RecordingRequester | None = None, number: int = 1
) -> ReceivedResponse | None:
    """Send a request; return its response, or None if the node sends it later or never."""
    response = node.handle(now, RecordingRequester() if requester is None else requester, number)
    return None if response is None else ReceivedResponse(response[0], number, response[1])


def response_times(node: Node, times: list[float]) -> list[float | str]:
    """Send a request at each time; return the time of each success, or the detail of a failure."""
    responses = [immediate_response(node, now) for now in times]
    return [
        "never"
        if response is None
        else response.when
        if response.outcome is SUCCESS
        else response.outcome.detail
        for response in responses
    ]


def summarize(
    recorder: MetricsRecorder, scenario: Scenario | None = None, crashes: int = 0
) -> Summary:
    """Return the summary of a run, by default without a disruption."""
    return recorder.summarize(scenario or Scenario(servers={"server": Server()}), crashes)


def check_totals(summary: Summary) -> None:
    """Check that the calls, attempts and time series of a summary add up."""
    assert summary.calls == summary.succeeded + summary.failed + summary.unfinished
    assert summary.unfinished >= 0
    assert summary.failed == sum(summary.reasons.values())
    assert summary.failures + summary.succeeded <= summary.attempts
    for name in ("calls", "requests", "succeeded", "failed"):
        assert getattr(summary, name) == sum(summary.series[name])
    assert 1 == len({len(values) for values in summary.series.values()})
    assert not any(value < 0 for value in summary.metrics().values())
    assert not summary.calls or 0 <= summary.success_rate <= 1
    assert not summary.succeeded or 0 <= summary.p50 <= summary.p99 <= summary.p999 < inf
    if isnan(summary.recovered_after):
        assert isnan(summary.recovered)
    else:
        assert float(summary.recovered_after < inf) == summary.recovered
