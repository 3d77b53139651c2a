"""A trigger that outlives itself: the model of Marc Brooker's 2023 study.

Calls come at 40 a second, for five seconds at 80. The server takes 1 s and 10 ms more for each
request in progress, and finishes what nobody waits for any more. Clients give up after 3 s and
try three times: 3 x 40 is more than the 100 a second that it can bear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Exponential, Fixed
from tarry.simulator.scenario import Clients, Scenario, Server, Surge
from tarry.simulator.study import Column, Plot, Study, run, with_defences

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.simulator.metrics import Summary


_SURGE = (20.0, 25.0)


def _at_once(_k: int) -> float:
    return 0.0


_RETRIES = Policy(max_attempts=3, attempt_timeout=3.0, backoff=_at_once, jitter="none")
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
    """Run the model behind one of the built-in defences; `surge` is the rate of the trigger."""
    return run(_world, DEFENCES, defence=defence, trials=trials, seed=seed, surge=surge)


def _world(defence: Defence, *, surge: float = 80.0) -> Scenario:
    return Scenario(
        servers={"server": Server(latency=Fixed(1.0), slowdown=0.01)},
        clients=Clients(
            rate=40.0,
            surges=(Surge(start=_SURGE[0], end=_SURGE[1], rate=surge),),
            defence=defence,
        ),
        network=Exponential(0.1),
        duration=120.0,
    )


def _with_defence(defences: Mapping[str, Defence]) -> Study:
    return with_defences(STUDY, _world, defences)


_SPANS = ((*_SURGE, "surge"),)
STUDY = Study(
    name="metastable",
    question=(
        "Load doubles for five seconds. Why is the service still down a minute later, and what "
        "ends it?"
    ),
    lesson=(
        "The trigger is gone, but the retries of timed-out calls keep the load above what the "
        "service can bear, and that keeps calls timing out. Backoff postpones the same load, and "
        "saves a run only here and there. A budget bounds it and ends the outage; so does a "
        "breaker, which fails more calls on the way; so do no retries at all."
    ),
    run=metastable,
    knob="defence",
    variants=tuple(DEFENCES),
    columns=(
        Column("recovered", "runs that recover", "%"),
        Column("recovered_after", "well after", "s"),
        Column("success_rate", "calls that succeed", "%"),
        Column("amplification", "load per call", "x"),
        Column("p99", "p99 of those", "s"),
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
        Plot("series", "succeeded", "Calls that end well", y_title="per second", spans=_SPANS),
        Plot("bars", "recovered", "Share of runs that recover", y_title="share"),
    ),
    parameters={"surge": 80.0},
    with_defence=_with_defence,
    world=_world,
    trials=20,
)
