"""A metastable failure: retries keep an outage alive after its trigger is gone.

This is the model of Marc Brooker's 2023 study. Calls arrive at 40 per second, and at 80 per second
for five seconds. A request takes 1 s, plus 10 ms for each other request in progress, and the server
also finishes requests whose client has timed out. Clients time out after 3 s and make three
attempts: 3 x 40 requests per second exceed the server's capacity of 100.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Exponential, Fixed
from tarry.simulator.scenario import Clients, Scenario, Server, Surge
from tarry.simulator.study import Column, Plot, Study, compare_defences, run_with_defence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.simulator.metrics import Summary


_SURGE_START_S, _SURGE_END_S = 20.0, 25.0


def _no_delay(_retry: int) -> float:
    return 0.0


_RETRIES = Policy(max_attempts=3, attempt_timeout=3.0, backoff=_no_delay, jitter="none")
DEFENCES: dict[str, Defence] = {
    "retries": Defence(_RETRIES),
    "backoff": Defence(_RETRIES.replace(backoff="exponential", initial_delay=1.0, jitter="full")),
    "budget": Defence(_RETRIES, budget={"kind": "ratio"}),
    "breaker": Defence(_RETRIES, breaker={"open_for": 5.0}),
    "no-retries": Defence(_RETRIES.replace(max_attempts=1)),
}


def metastable(
    *, defence: str = "retries", surge: float = 80.0, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run the model with one of the built-in defences; `surge` is the call rate in the surge."""
    return run_with_defence(
        _build_scenario, DEFENCES, defence=defence, trials=trials, seed=seed, surge=surge
    )


def _build_scenario(defence: Defence, *, surge: float = 80.0) -> Scenario:
    return Scenario(
        servers={"server": Server(latency=Fixed(1.0), slowdown=0.01)},
        clients=Clients(
            rate=40.0,
            surges=(Surge(start=_SURGE_START_S, end=_SURGE_END_S, rate=surge),),
            defence=defence,
        ),
        network=Exponential(0.1),
        duration=120.0,
    )


def _with_defences(defences: Mapping[str, Defence]) -> Study:
    return compare_defences(STUDY, _build_scenario, defences)


_SPANS = ((_SURGE_START_S, _SURGE_END_S, "surge"),)
STUDY = Study(
    name="metastable",
    question=(
        "Load doubles for five seconds. Why is the service still down a minute later, and what "
        "ends the outage?"
    ),
    lesson=(
        "The trigger is gone, but the retries of timed-out calls keep the load above the capacity "
        "of the service, and so calls keep timing out. Backoff only postpones that load, and "
        "rarely saves a run. A budget limits the load and ends the outage. So does a breaker, "
        "which fails more calls meanwhile, and so does a policy without retries."
    ),
    run=metastable,
    variant_parameter="defence",
    variants=tuple(DEFENCES),
    columns=(
        Column("recovered", "runs that recover", "%"),
        Column("recovered_after", "recovery time", "s"),
        Column("success_rate", "calls succeeded", "%"),
        Column("amplification", "load per call", "x"),
        Column("p99", "p99", "s"),
    ),
    plots=(
        Plot(
            "series",
            "in_progress",
            "Requests in progress",
            y_title="requests",
            log=True,
            spans=_SPANS,
        ),
        Plot("series", "succeeded", "Successful calls", y_title="per second", spans=_SPANS),
        Plot("bars", "recovered", "Runs that recovered", y_title="share"),
    ),
    parameters={"surge": 80.0},
    with_defences=_with_defences,
    build_scenario=_build_scenario,
    trials=20,
)
