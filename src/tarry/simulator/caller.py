"""Callers: they drive the core's `Call` or `HedgedCall` in virtual time and send its attempts.

Like the drivers in `tarry.runtime`, a caller only carries out the decisions of the core. Where the
runtime sleeps, cancels or waits with a timeout, a caller schedules events.

A node (a simulated server) can replace a response that is already scheduled, for example when it
crashes. The event loop cannot cancel the event of the replaced response, so the caller ignores that
event when it is due. `RetryingCaller` numbers the responses: the first response to an attempt has
the attempt's number, a replacement has another. `HedgingCaller` counts the replacements instead.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from tarry.core.call import Call
from tarry.core.outcome import SUCCESS, Kind
from tarry.core.verdict import Attempt, Stop, Wait
from tarry.simulator.node import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.downstream import Downstream
    from tarry.core.hedging import HedgedCall
    from tarry.core.outcome import Outcome
    from tarry.core.policy import Policy
    from tarry.simulator.distributions import Sampler
    from tarry.simulator.event_loop import EventLoop
    from tarry.simulator.metrics import MetricsRecorder
    from tarry.simulator.node import Node, OnCallEnd


_REPLACEMENT_OFFSET = 1 << 32
"""The number of a replacement is this much higher; more than any attempt number."""


class Route:
    """What all callers of one node share: the network, the node and the metrics."""

    __slots__ = ("metrics", "network_delay", "node", "permanent_statuses", "random", "schedule")

    def __init__(
        self, loop: EventLoop, node: Node, network_delay: Sampler, metrics: MetricsRecorder | None
    ) -> None:
        self.schedule: Callable[..., None] = loop.schedule
        self.random: Callable[[], float] = loop.random_source(f"jitter before {node.name}").random
        """Returns the random numbers from [0, 1) that the core needs for jitter."""
        self.network_delay: Sampler = network_delay
        self.node: Node = node
        self.metrics: MetricsRecorder | None = metrics
        """None if a server makes the calls, because only the calls of clients are recorded."""
        self.permanent_statuses: frozenset[str] = frozenset()
        """Error statuses that the callers' policy does not retry."""


class RetryingCaller:
    """Drives one `Call`, which retries failed attempts."""

    __slots__ = ("_awaited_number", "_call", "_deadline", "_on_end", "_route")

    def __init__(
        self,
        route: Route,
        policy: Policy,
        downstream: Downstream | None,
        now: float,
        on_end: OnCallEnd,
    ) -> None:
        self._route = route
        self._call = Call(policy, downstream, now)
        self._on_end = on_end
        self._awaited_number = 0
        """The number of the response that the running attempt waits for; 0 if no attempt runs. An
        event with another number is outdated and ignored."""
        self._deadline = inf
        """The time at which the running attempt times out."""

    def start(self, now: float, _: object = None) -> Stop | None:
        """Start the next attempt; return the `Stop` if the call ends instead, else None."""
        attempt = self._call.start(now)
        if isinstance(attempt, Stop):
            self._on_end(self._call.started, now, attempt, self._call.attempts)
            return attempt
        route = self._route
        self._awaited_number = attempt.number
        if route.metrics is not None:
            route.metrics.attempt_count += 1
        if attempt.delay:
            self._wait_for_limiter(now)
        else:
            self._send(now, attempt)
        return None

    def _wait_for_limiter(self, now: float, _: object = None) -> None:
        step = self._call.next_delay_step(now)
        if step:
            self._route.schedule(now + step, self._wait_for_limiter)
        else:
            self._send(now, self._call.delayed_attempt())

    def _send(self, now: float, attempt: Attempt) -> None:
        route, number = self._route, attempt.number
        arrives_at = now + route.network_delay()
        if attempt.timeout is not None:
            self._deadline = now + attempt.timeout
            if arrives_at > self._deadline:
                route.schedule(self._deadline, self._time_out, number)
        route.schedule(arrives_at, self._reach_node, number)

    def discard_response(self, number: int) -> int:
        """Make the response with this number invalid; return the number of its replacement."""
        if number != self._awaited_number:
            return number
        self._awaited_number = new_number = number + _REPLACEMENT_OFFSET
        if self._deadline < inf:
            self._route.schedule(self._deadline, self._time_out, new_number)
        return new_number

    def on_response(self, now: float, number: int, outcome: Outcome) -> None:
        """Schedule a response that the node sends now. It replaces a scheduled response, if any."""
        if number == self._awaited_number:
            self._awaited_number = new_number = number + _REPLACEMENT_OFFSET
            self._schedule_response(now + self._route.network_delay(), new_number, outcome)

    def _reach_node(self, now: float, number: int) -> None:
        route = self._route
        response = route.node.handle(now, self, number)
        if number != self._awaited_number:  # the attempt timed out before the request arrived
            return
        if response is None:
            if self._deadline < inf:
                route.schedule(self._deadline, self._time_out, number)
            return
        received_at, outcome = response
        received_at += route.network_delay()
        # _schedule_response does the same. This saves a function call for most responses.
        if outcome is SUCCESS and received_at <= self._deadline:
            route.schedule(received_at, self._succeed, number)
        else:
            self._schedule_response(received_at, number, outcome)

    def _schedule_response(self, received_at: float, number: int, outcome: Outcome) -> None:
        if received_at > self._deadline:
            self._route.schedule(self._deadline, self._time_out, number)
        elif outcome is SUCCESS:
            self._route.schedule(received_at, self._succeed, number)
        else:
            self._route.schedule(received_at, self._fail, (number, outcome))

    def _succeed(self, now: float, number: int) -> None:
        if number == self._awaited_number:
            self._awaited_number = 0
            call = self._call
            call.record_success(now, self._route.random())
            self._on_end(call.started, now, None, call.attempts)

    def _time_out(self, now: float, number: int) -> None:
        self._fail(now, (number, TIMEOUT))

    def _fail(self, now: float, number_and_outcome: tuple[int, Outcome]) -> None:
        number, outcome = number_and_outcome
        if number != self._awaited_number:
            return
        self._awaited_number = 0
        route = self._route
        if route.metrics is not None:
            route.metrics.record_failed_attempt(now)
        if outcome.detail in route.permanent_statuses:
            outcome = outcome.replace(kind=Kind.PERMANENT)
        verdict = self._call.record_failure(outcome, now, route.random())
        if isinstance(verdict, Wait):
            route.schedule(now + verdict.delay, self.start)
        else:
            self._on_end(self._call.started, now, verdict, self._call.attempts)


class HedgingCaller:
    """Drives one `HedgedCall`, which sends a second attempt while the first is still running."""

    __slots__ = ("_call", "_on_end", "_route", "_running_attempts", "_started_at")

    def __init__(self, route: Route, call: HedgedCall, now: float, on_end: OnCallEnd) -> None:
        self._route = route
        self._call = call
        self._started_at = now
        self._on_end = on_end
        self._running_attempts: dict[int, int] = {}
        """The number of each running attempt, and how often its response was replaced. An event
        with another count is outdated and ignored."""

    def start(self, now: float, _: object = None) -> Stop | None:
        """Start the first attempt; return the `Stop` if the call ends instead, else None."""
        attempt = self._call.start(now)
        self._execute(now, attempt)
        return attempt if isinstance(attempt, Stop) else None

    def discard_response(self, number: int) -> int:
        """Make the response to this attempt invalid; its replacement has the same number."""
        if number in self._running_attempts:
            self._running_attempts[number] += 1
        return number

    def on_response(self, now: float, number: int, outcome: Outcome) -> None:
        """Schedule a response that the node sends now. It replaces a scheduled response, if any."""
        if number in self._running_attempts:
            self._running_attempts[number] += 1
            self._schedule_response(now, number, outcome)

    def _schedule_response(self, sent_at: float, number: int, outcome: Outcome) -> None:
        response = (number, self._running_attempts[number], outcome)
        self._route.schedule(sent_at + self._route.network_delay(), self._receive, response)

    def _execute(self, now: float, decision: Attempt | Stop | None) -> None:
        route = self._route
        if isinstance(decision, Stop):
            self._running_attempts.clear()
            self._call.next_hedge_at = None
            self._on_end(self._started_at, now, decision, self._call.attempts)
            return
        if decision is not None:
            self._running_attempts[decision.number] = 0
            if decision.delay:
                route.schedule(now + decision.delay, self._send, decision.number)
            else:
                self._send(now, decision.number)
        if self._call.next_hedge_at is not None:
            route.schedule(self._call.next_hedge_at, self._hedge)

    def _send(self, now: float, number: int) -> None:
        route = self._route
        if number in self._running_attempts:  # otherwise the call ended during the delay
            if route.metrics is not None:
                route.metrics.attempt_count += 1
            route.schedule(now + route.network_delay(), self._reach_node, number)

    def _reach_node(self, now: float, number: int) -> None:
        response = self._route.node.handle(now, self, number)
        if response is not None and number in self._running_attempts:
            self._schedule_response(response[0], number, response[1])

    def _hedge(self, now: float, _: object) -> None:
        if self._call.next_hedge_at == now:  # otherwise the call ended, or the time was changed
            self._execute(now, self._call.hedge(now))

    def _receive(self, now: float, response: tuple[int, int, Outcome]) -> None:
        number, replacement_count, outcome = response
        if self._running_attempts.get(number) != replacement_count:  # an outdated response
            return
        del self._running_attempts[number]
        if outcome is SUCCESS:
            self._running_attempts.clear()
            self._call.record_success(number, now, self._route.random())
            self._call.next_hedge_at = None
            self._on_end(self._started_at, now, None, self._call.attempts)
            return
        if self._route.metrics is not None:
            self._route.metrics.record_failed_attempt(now)
        self._execute(now, self._call.record_failure(number, outcome, now, self._route.random()))
