"""Run a scenario: build its nodes and callers on an event loop, start the calls, and run it."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from tarry.core.checks import check_count
from tarry.core.hedging import HedgedCall
from tarry.core.verdict import Reason
from tarry.errors import ConfigurationTypeError
from tarry.policyfile.defence import Defence
from tarry.simulator.caller import HedgingCaller, RetryingCaller, Route
from tarry.simulator.distributions import Exponential
from tarry.simulator.event_loop import EventLoop, trial_seed
from tarry.simulator.metrics import MetricsRecorder
from tarry.simulator.node import LeafNode, RelayNode
from tarry.simulator.scenario import ERROR_STATUSES, Scenario

if TYPE_CHECKING:
    from tarry.core.verdict import Stop
    from tarry.simulator.distributions import Sampler
    from tarry.simulator.metrics import Summary
    from tarry.simulator.node import Node, OnCallEnd, StartCall
    from tarry.simulator.scenario import Clients

_DEFERRABLE_REASONS = frozenset({Reason.BREAKER_OPEN, Reason.LIMIT, Reason.BUDGET_EMPTY})
"""A call that stops for one of these reasons goes back to the backlog."""
_WARM_UP_THINK_TIMES = 10.0
"""Closed clients are simulated from this many mean think times before the start of the run, so that
their calls are spread out when it starts."""
_MAX_WARM_UP_CALLS = 1000
_POLL_INTERVAL_S = 0.1
"""The time after which a refused call is tried again, if the refusal has no `retry_after`."""


def simulate(scenario: Scenario, *, seed: int | str = 0) -> Summary:
    """Run a scenario once; the same seed gives the same summary."""
    if not isinstance(scenario, Scenario):
        raise ConfigurationTypeError(f"simulate takes a Scenario, got {scenario!r}")
    loop = EventLoop(seed)
    metrics = MetricsRecorder(scenario.duration, scenario.bucket)
    network_delay = loop.sampler(scenario.network, "network")
    nodes: list[Node] = []
    for name in reversed(scenario.path()):
        server = scenario.servers[name]
        if server.calls is None:
            nodes.append(LeafNode(name, server, loop))
            nodes[-1].metrics = metrics
        else:
            route = Route(loop, nodes[-1], network_delay, metrics=None)
            start_call = _make_start_call(route, server.defence or Defence(), instances=1)
            nodes.append(RelayNode(name, server, loop, start_call))
    route = Route(loop, nodes[-1], network_delay, metrics)
    start_call = _make_start_call(route, scenario.clients.defence, scenario.clients.instances)
    ArrivalSource(scenario.clients, loop, metrics, start_call).start()

    def record_in_progress(now: float, index: int) -> None:
        metrics.record_in_progress(index, nodes[0].in_progress(now))

    for index in range(metrics.bucket_count):
        loop.schedule(index * scenario.bucket, record_in_progress, index)
    loop.run(scenario.duration)
    return metrics.summarize(scenario, sum(node.crashes for node in nodes))


def run_trials(scenario: Scenario, trials: int, seed: int) -> list[Summary]:
    """Run a scenario several times, each trial with its own seed."""
    return [
        simulate(scenario, seed=trial_seed(seed, trial))
        for trial in range(check_count("trials", trials))
    ]


def _make_start_call(route: Route, defence: Defence, instances: int) -> StartCall:
    """Return a function that starts a call; each instance has its own breaker, budget, limiter."""
    hedging, policy = defence.hedging, defence.policy
    has_state = hedging is not None or any(
        settings is not None for settings in (defence.breaker, defence.budget, defence.limiter)
    )
    downstreams = [defence.downstream(f"instance {number}") for number in range(instances)]

    route.permanent_statuses = frozenset(
        str(status) for status in ERROR_STATUSES if status not in policy.retryable_statuses
    )

    def start_retrying(now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        downstream = downstreams[client % instances] if has_state else None
        return RetryingCaller(route, policy, downstream, now, on_end).start(now)

    if hedging is None:
        return start_retrying

    def start_hedging(now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        call = HedgedCall(hedging, downstreams[client % instances])
        return HedgingCaller(route, call, now, on_end).start(now)

    return start_hedging


class ArrivalSource:
    """Starts the calls of a scenario's clients and records how they end."""

    def __init__(
        self, clients: Clients, loop: EventLoop, metrics: MetricsRecorder, start_call: StartCall
    ) -> None:
        self._clients = clients
        self._loop = loop
        self._metrics = metrics
        self._start_call = start_call
        self._random = loop.random_source("arrivals")
        self._draw_unit_pause = Exponential(1.0).sampler(self._random)
        self._backlog = 0
        self._next_client = 0
        self._is_poll_scheduled = False

    def start(self) -> None:
        """Schedule the first events."""
        clients, loop = self._clients, self._loop
        if clients.arrivals == "poisson":
            self._schedule_arrival(0.0, 0)
        elif clients.arrivals == "backlog":
            self._backlog = clients.count
            for _ in range(clients.count):
                self._metrics.record_call(0.0)
            loop.schedule(0.0, self._poll_backlog)
        elif clients.arrivals == "closed":
            think = clients.think.sampler(self._random)
            for client in range(clients.count):
                loop.schedule(self._first_call_time(think), self._start_closed, (client, think))
        else:
            for client in range(clients.count):
                loop.schedule(0.0, self._start_recorded, client)

    def _record_end(self, started: float, now: float, stop: Stop | None, attempts: int) -> None:
        if stop is None:
            self._metrics.record_success(now, now - started)
        else:
            self._metrics.record_failed_call(now, stop.reason, attempts)

    def _start_recorded(self, now: float, client: int) -> None:
        self._metrics.record_call(now)
        self._start_call(now, client, self._record_end)

    def _schedule_arrival(self, now: float, client: int) -> None:
        """Schedule the next Poisson arrival, or a new draw at the time when the rate changes.

        Drawing again is exact, because a Poisson process has no memory: the pause from the change
        to the next arrival does not depend on the arrivals before.
        """
        if not self._clients.surges:
            pause = self._draw_unit_pause() / self._clients.rate
            self._loop.schedule(now + pause, self._start_poisson, client)
            return
        rate, next_change = self._clients.rate, inf
        for surge in self._clients.surges:
            if surge.start <= now < surge.end:
                rate, next_change = surge.rate, surge.end
            elif now < surge.start:
                next_change = min(next_change, surge.start)
        when = now + self._draw_unit_pause() / rate if rate else inf
        if when < next_change:
            self._loop.schedule(when, self._start_poisson, client)
        else:
            self._loop.schedule(next_change, self._schedule_arrival, client)

    def _start_poisson(self, now: float, client: int) -> None:
        self._start_recorded(now, client)
        self._schedule_arrival(now, client + 1)

    def _first_call_time(self, think: Sampler) -> float:
        """Return the time of a closed client's first call in the run; draw its earlier pauses."""
        when = -self._clients.think.mean * (_WARM_UP_THINK_TIMES + self._random.random())
        for _ in range(_MAX_WARM_UP_CALLS):
            if when >= 0:
                return when
            when += think()
        # If most think times are far below their mean, the loop does not reach 0.
        return think() * self._random.random()

    def _start_closed(self, now: float, client_and_think: tuple[int, Sampler]) -> None:
        def on_end(started: float, now: float, stop: Stop | None, attempts: int) -> None:
            self._record_end(started, now, stop, attempts)
            when = now + think()
            # Without a think time, a client that is refused at once would call again at the same
            # instant, and virtual time would never advance.
            if when <= started:
                when = now + _POLL_INTERVAL_S
            self._loop.schedule(when, self._start_closed, client_and_think)

        client, think = client_and_think
        self._metrics.record_call(now)
        self._start_call(now, client, on_end)

    def _poll_backlog(self, now: float, _: object) -> None:
        self._is_poll_scheduled = False
        self._start_backlog(now)

    def _start_backlog(self, now: float, _: object = None) -> None:
        """Start calls of the backlog until each instance in turn has refused one."""
        refusals, shortest_wait = 0, inf
        while self._backlog and refusals < self._clients.instances:
            self._backlog -= 1
            self._next_client += 1
            stop = self._start_call(now, self._next_client, self._end_backlog_call)
            if stop is None:
                refusals, shortest_wait = 0, inf
            else:
                refusals += 1
                shortest_wait = min(shortest_wait, stop.retry_after or _POLL_INTERVAL_S)
        if self._backlog:
            self._schedule_poll(now + max(_POLL_INTERVAL_S, shortest_wait))

    def _schedule_poll(self, when: float) -> None:
        if not self._is_poll_scheduled:
            self._is_poll_scheduled = True
            self._loop.schedule(when, self._poll_backlog)

    def _end_backlog_call(
        self, _started: float, now: float, stop: Stop | None, attempts: int
    ) -> None:
        # As in the service, a refused call goes back to the backlog and does not count as failed.
        if stop is not None and stop.reason in _DEFERRABLE_REASONS:
            self._backlog += 1
            if attempts:  # without an attempt, _start_backlog itself schedules the next poll
                self._schedule_poll(now + max(_POLL_INTERVAL_S, stop.retry_after or 0.0))
        else:
            self._record_end(0.0, now, stop, attempts)
            self._loop.schedule(now, self._start_backlog)
