"""Run a scenario: build its nodes, callers and arrivals on an event loop, and run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.checks import check_count
from tarry.core.hedging import HedgedCall
from tarry.errors import ConfigurationTypeError
from tarry.policyfile.defence import Defence
from tarry.simulator.arrivals import ArrivalSource
from tarry.simulator.caller import HedgingCaller, RetryingCaller, Route
from tarry.simulator.event_loop import EventLoop, trial_seed
from tarry.simulator.metrics import MetricsRecorder
from tarry.simulator.node import LeafNode, RelayNode
from tarry.simulator.scenario import ERROR_STATUSES, Scenario

if TYPE_CHECKING:
    from tarry.core.verdict import Stop
    from tarry.simulator.arrivals import StartCall
    from tarry.simulator.metrics import Summary
    from tarry.simulator.node import Node, OnCallEnd


def simulate(scenario: Scenario, *, seed: int | str = 0) -> Summary:
    """Run a scenario once; the same seed gives the same summary."""
    if not isinstance(scenario, Scenario):
        msg = f"simulate takes a Scenario, got {scenario!r}"
        raise ConfigurationTypeError(msg)
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
    for index in range(metrics.bucket_count):
        loop.schedule(index * scenario.bucket, _record_in_progress, (metrics, nodes[0], index))
    loop.run(scenario.duration)
    return metrics.summarize(scenario, sum(node.crashes for node in nodes))


def run_trials(scenario: Scenario, trials: int, seed: int) -> list[Summary]:
    """Run a scenario several times, each trial with its own seed."""
    return [
        simulate(scenario, seed=trial_seed(seed, trial))
        for trial in range(check_count("trials", trials))
    ]


def _record_in_progress(now: float, arguments: tuple[MetricsRecorder, Node, int]) -> None:
    metrics, node, index = arguments
    metrics.record_in_progress(index, node.in_progress(now))


def _make_start_call(route: Route, defence: Defence, instances: int) -> StartCall:
    """Return a function that starts a call with this defence.

    Each of the instances has its own `Downstream`: the state of its breaker, budget and limiter.
    """
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
