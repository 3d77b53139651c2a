"""Run a scenario: the one place that puts a world together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.checks import check_count
from tarry.core.hedging import HedgedCall
from tarry.errors import ConfigurationTypeError
from tarry.policyfile.defence import Defence
from tarry.simulator.arrivals import Arrivals
from tarry.simulator.caller import Caller, HedgedCaller, Line
from tarry.simulator.event_loop import World, seed_of
from tarry.simulator.metrics import Meter
from tarry.simulator.node import Relay, Worker
from tarry.simulator.scenario import ERROR_STATUSES, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.verdict import Stop
    from tarry.simulator.metrics import Summary
    from tarry.simulator.node import Ended, Node


def simulate(scenario: Scenario, *, seed: int | str = 0) -> Summary:
    """Run a scenario from a seed; the same seed gives the same summary."""
    if not isinstance(scenario, Scenario):
        msg = f"simulate takes a Scenario, got {scenario!r}"
        raise ConfigurationTypeError(msg)
    world = World(seed)
    meter = Meter(scenario.duration, scenario.bucket)
    hop = world.sampler(scenario.network, "network")
    nodes: list[Node] = []
    for name in reversed(scenario.path()):
        server = scenario.servers[name]
        if server.calls is None:
            nodes.append(Worker(name, server, world))
            nodes[-1].meter = meter
        else:
            line = Line(world, nodes[-1], hop, None)
            nodes.append(
                Relay(name, server, world, _begin_of(line, server.defence or Defence(), 1))
            )
    line = Line(world, nodes[-1], hop, meter)
    begin = _begin_of(line, scenario.clients.defence, scenario.clients.instances)
    Arrivals(scenario.clients, world, meter, begin).start()
    for index in range(meter.buckets):
        world.at(index * scenario.bucket, _look, (meter, nodes[0], index))
    world.run(scenario.duration)
    return meter.summary(scenario, sum(node.crashes for node in nodes))


def trials_of(scenario: Scenario, trials: int, seed: int) -> list[Summary]:
    """Run a scenario several times, each from a seed of its own."""
    return [
        simulate(scenario, seed=seed_of(seed, trial))
        for trial in range(check_count("trials", trials))
    ]


def _look(now: float, about: tuple[Meter, Node, int]) -> None:
    meter, node, index = about
    meter.in_progress(index, node.in_progress(now))


def _begin_of(
    line: Line, defence: Defence, instances: int
) -> Callable[[float, int, Ended], Stop | None]:
    """Return the function that begins a call behind this defence."""
    hedging, policy = defence.hedging, defence.policy
    alone = hedging is None and (
        defence.breaker is None and defence.budget is None and defence.limiter is None
    )
    downstreams = [defence.downstream(f"instance {number}") for number in range(instances)]

    line.permanent = frozenset(
        str(status) for status in ERROR_STATUSES if status not in policy.retryable_statuses
    )

    def retried(now: float, client: int, ended: Ended) -> Stop | None:
        downstream = None if alone else downstreams[client % instances]
        return Caller(line, policy, downstream, now, ended).start(now)

    if hedging is None:
        return retried

    def hedged(now: float, client: int, ended: Ended) -> Stop | None:
        call = HedgedCall(hedging, downstreams[client % instances])
        return HedgedCaller(line, call, now, ended).start(now)

    return hedged
