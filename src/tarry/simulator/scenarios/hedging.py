"""Hedging: how much a second copy of slow calls shortens the tail, and the load it adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.checks import check_one_of, check_positive
from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import HeavyTail
from tarry.simulator.scenario import Clients, Scenario, Server
from tarry.simulator.simulate import run_trials
from tarry.simulator.study import Column, Plot, Study

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary

HEDGE_DELAYS = ("none", "p50", "p75", "p90", "p95", "p99")


def hedging(
    *, after: str = "p95", shape: float = 1.5, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run calls with heavy-tailed latency, hedged after a percentile or ("none") not at all.

    `shape` is the shape of the Pareto distribution of latencies.
    """
    check_one_of("after", after, HEDGE_DELAYS)
    check_positive("shape", shape)
    if after == "none":
        defence = Defence(Policy(max_attempts=1))
    else:
        defence = Defence(hedging=Hedging(after=after))
    scenario = Scenario(
        servers={"server": Server(latency=HeavyTail(0.01, shape))},
        clients=Clients(rate=2000.0, defence=defence),
        duration=30.0,
    )
    return run_trials(scenario, trials, seed)


STUDY = Study(
    name="hedging",
    question=(
        "One call in a thousand takes a second. How much of that does a second copy save, and "
        "how much load does it add?"
    ),
    lesson=(
        "An earlier copy shortens the tail more and costs more. At p95 one call in twenty is sent "
        "twice, and the tail is a fraction of what it was. At p50 half of the calls are sent twice "
        "and little more is gained. This server handles any load; where copies slow the server "
        "down, hedge later."
    ),
    run=hedging,
    variant_parameter="after",
    variants=HEDGE_DELAYS,
    columns=(
        Column("p50", "p50", "ms"),
        Column("p99", "p99", "ms"),
        Column("p999", "p99.9", "ms"),
        Column("amplification", "load per call", "x"),
    ),
    plots=(
        Plot("bars", "p999", "The slowest call in a thousand", y_title="p99.9", log=True),
        Plot("lines", "p999", "Tail against load", x="amplification", y_title="p99.9", log=True),
    ),
    parameters={"shape": 1.5},
)
