"""Run a scenario: build its nodes (simulated servers), start the calls, and run the event loop.

Each call has a caller, which applies the defence of the client or server that calls: a policy or
hedging, with an optional breaker, budget and limiter. A closed-loop client waits for the end of its
call, pauses for a "think time" and calls again.
"""

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
    from tarry.simulator.metrics import Summary
    from tarry.simulator.node import Node, OnCallEnd, StartCall
    from tarry.simulator.scenario import Clients

_REJECTION_REASONS = frozenset({Reason.BREAKER_OPEN, Reason.LIMIT, Reason.BUDGET_EMPTY})
"""The reasons of a call that breaker, limiter or budget rejected."""
_WARM_UP_THINK_TIMES = 10.0
"""The think times of closed-loop clients start this many mean think times before the run, so that
the first calls in the run are spread out."""
_MAX_WARM_UP_DRAWS = 1000
_MIN_PAUSE_S = 0.1
"""The shortest pause between a rejection by breaker, limiter or budget and the next call."""


def simulate(scenario: Scenario, *, seed: int | str = 0) -> Summary:
    """Run a scenario once; the same seed gives the same summary."""
    if not isinstance(scenario, Scenario):
        raise ConfigurationTypeError(f"simulate takes a Scenario, got {scenario!r}")
    loop = EventLoop(seed)
    metrics = MetricsRecorder(scenario.duration, scenario.bucket)
    network_delay = loop.sampler(scenario.network, "network")
    nodes: list[Node] = []  # from the last server of the path to the first
    for name in reversed(scenario.path()):
        server = scenario.servers[name]
        if server.calls is None:
            nodes.append(LeafNode(name, server, loop))
            nodes[-1].metrics = metrics
        else:
            route = Route(loop, nodes[-1], network_delay, metrics=None)
            start_call = _make_start_call(route, server.defence or Defence(), instance_count=1)
            nodes.append(RelayNode(name, server, loop, start_call))
    route = Route(loop, nodes[-1], network_delay, metrics)
    start_call = _make_start_call(route, scenario.clients.defence, scenario.clients.instances)
    ArrivalSource(scenario.clients, loop, metrics, start_call).start()

    def record_load_of_last_server(now: float, index: int) -> None:
        metrics.record_in_progress(index, nodes[0].in_progress_at(now))

    for index in range(metrics.bucket_count):
        loop.schedule(index * scenario.bucket, record_load_of_last_server, index)
    loop.run(scenario.duration)
    return metrics.summarize(scenario, sum(node.crash_count for node in nodes))


def run_trials(scenario: Scenario, trials: int, seed: int) -> list[Summary]:
    """Run a scenario several times, each trial with its own seed."""
    return [
        simulate(scenario, seed=trial_seed(seed, trial))
        for trial in range(check_count("trials", trials))
    ]


def _make_start_call(route: Route, defence: Defence, instance_count: int) -> StartCall:
    """Return a function that starts a call; each instance (process) has its own downstream."""
    hedging, policy = defence.hedging, defence.policy
    has_state = hedging is not None or any(
        settings is not None for settings in (defence.breaker, defence.budget, defence.limiter)
    )
    downstreams = [defence.downstream(f"instance {number}") for number in range(instance_count)]
    route.permanent_statuses = frozenset(
        str(status) for status in ERROR_STATUSES if status not in policy.retryable_statuses
    )

    def start_retrying_call(now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        downstream = downstreams[client % instance_count] if has_state else None
        return RetryingCaller(route, policy, downstream, now, on_end).start(now)

    if hedging is None:
        return start_retrying_call

    def start_hedged_call(now: float, client: int, on_end: OnCallEnd) -> Stop | None:
        call = HedgedCall(hedging, downstreams[client % instance_count])
        return HedgingCaller(route, call, now, on_end).start(now)

    return start_hedged_call


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
        """Draws the pause between two calls for a rate of 1 per second."""
        self._draw_think_time = clients.think.sampler(self._random)
        self._backlog_size = 0
        self._last_client = 0
        self._is_poll_scheduled = False

    def start(self) -> None:
        """Schedule the first events."""
        clients, loop = self._clients, self._loop
        if clients.arrivals == "poisson":
            self._schedule_arrival(0.0, 0)
        elif clients.arrivals == "backlog":
            self._backlog_size = clients.count
            for _ in range(clients.count):
                self._metrics.record_call(0.0)
            loop.schedule(0.0, self._poll_backlog)
        elif clients.arrivals == "closed":
            for client in range(clients.count):
                loop.schedule(self._first_call_time(), self._start_closed_loop_call, client)
        else:
            for client in range(clients.count):
                loop.schedule(0.0, self._start_client_call, client)

    def _record_end(self, started_at: float, now: float, stop: Stop | None, attempts: int) -> None:
        if stop is None:  # the call succeeded
            self._metrics.record_success(now, now - started_at)
        else:
            self._metrics.record_failed_call(now, stop.reason, attempts)

    def _start_client_call(self, now: float, client: int) -> None:
        self._metrics.record_call(now)
        self._start_call(now, client, self._record_end)

    def _schedule_arrival(self, now: float, client: int) -> None:
        """Schedule the next Poisson arrival, or draw again when the rate changes before it.

        Drawing again is exact, because a Poisson process has no memory: the pause from the change
        to the next arrival does not depend on earlier arrivals.
        """
        if not self._clients.surges:
            pause = self._draw_unit_pause() / self._clients.rate
            self._loop.schedule(now + pause, self._on_poisson_arrival, client)
            return
        rate, next_change = self._clients.rate, inf
        for surge in self._clients.surges:
            if surge.start <= now < surge.end:
                rate, next_change = surge.rate, surge.end
            elif now < surge.start:
                next_change = min(next_change, surge.start)
        when = now + self._draw_unit_pause() / rate if rate else inf
        if when < next_change:
            self._loop.schedule(when, self._on_poisson_arrival, client)
        else:
            self._loop.schedule(next_change, self._schedule_arrival, client)

    def _on_poisson_arrival(self, now: float, client: int) -> None:
        self._start_client_call(now, client)
        self._schedule_arrival(now, client + 1)

    def _first_call_time(self) -> float:
        """Return when a closed-loop client first calls in the run; see `_WARM_UP_THINK_TIMES`."""
        when = -self._clients.think.mean * (_WARM_UP_THINK_TIMES + self._random.random())
        for _ in range(_MAX_WARM_UP_DRAWS):
            if when >= 0:
                return when
            when += self._draw_think_time()
        # If most think times are far below their mean, `when` is still negative after all draws.
        return self._draw_think_time() * self._random.random()

    def _start_closed_loop_call(self, now: float, client: int) -> None:
        def on_end(started_at: float, now: float, stop: Stop | None, attempts: int) -> None:
            self._record_end(started_at, now, stop, attempts)
            when = now + self._draw_think_time()
            # Without a think time, a client that is rejected at once would call again at the same
            # instant, and virtual time would never advance.
            if when <= started_at:
                when = now + _MIN_PAUSE_S
            self._loop.schedule(when, self._start_closed_loop_call, client)

        self._metrics.record_call(now)
        self._start_call(now, client, on_end)

    def _poll_backlog(self, now: float, _: object) -> None:
        self._is_poll_scheduled = False
        self._start_backlog_calls(now)

    def _start_backlog_calls(self, now: float, _: object = None) -> None:
        """Start calls until the backlog is empty, or each instance has rejected one in a row."""
        rejections, shortest_wait = 0, inf
        while self._backlog_size and rejections < self._clients.instances:
            self._backlog_size -= 1
            self._last_client += 1
            stop = self._start_call(now, self._last_client, self._on_backlog_call_end)
            if stop is None:
                rejections, shortest_wait = 0, inf
            else:
                rejections += 1
                shortest_wait = min(shortest_wait, stop.retry_after or _MIN_PAUSE_S)
        if self._backlog_size:
            self._schedule_poll(now + max(_MIN_PAUSE_S, shortest_wait))

    def _schedule_poll(self, when: float) -> None:
        if not self._is_poll_scheduled:
            self._is_poll_scheduled = True
            self._loop.schedule(when, self._poll_backlog)

    def _on_backlog_call_end(
        self, _started_at: float, now: float, stop: Stop | None, attempts: int
    ) -> None:
        # As in the service, a rejected call goes back to the backlog and does not count as failed.
        if stop is not None and stop.reason in _REJECTION_REASONS:
            self._backlog_size += 1
            if attempts:  # without an attempt, _start_backlog_calls itself schedules the next poll
                self._schedule_poll(now + max(_MIN_PAUSE_S, stop.retry_after or 0.0))
        else:
            self._record_end(0.0, now, stop, attempts)
            self._loop.schedule(now, self._start_backlog_calls)
