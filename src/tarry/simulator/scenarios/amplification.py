"""Three layers that each try four times, over a leaf that is dead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.checks import check_one_of
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Fixed
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge
from tarry.simulator.simulate import trials_of
from tarry.simulator.study import Column, Plot, Study

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary

_DURATION, _LAST_CALL = 60.0, 50.0


def _defence(rule: str, attempts: int) -> Defence:
    everywhere = Policy(max_attempts=attempts, initial_delay=0.01, retry_marked=True)
    if rule == "every-layer":
        return Defence(everywhere)
    if rule == "budget":
        return Defence(everywhere, budget={"kind": "ratio", "min_per_second": 0.0})
    return Defence(everywhere.replace(retry_marked=False))


RULES = ("every-layer", "budget", "one-layer")


def amplification(
    *, rule: str = "every-layer", attempts: int = 4, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run the chain: retry at every layer, behind a budget of 10 % at each, or at one layer."""
    check_one_of("rule", rule, RULES)
    defence = _defence(rule, attempts)
    scenario = Scenario(
        servers={
            "gateway": Server(calls="orders", defence=defence),
            "orders": Server(calls="stock", defence=defence),
            "stock": Server(failures=(Failure(end=_DURATION, kind="error"),)),
        },
        clients=Clients(
            calls="gateway",
            rate=20.0,
            # No new ones at the end, so that every call is counted to its last attempt.
            surges=(Surge(start=_LAST_CALL, end=_DURATION, rate=0.0),),
            defence=defence,
        ),
        network=Fixed(0.001),
        duration=_DURATION,
    )
    return trials_of(scenario, trials, seed)


STUDY = Study(
    name="amplification",
    question="Three layers try four times each. What does a dead leaf get for every call?",
    lesson=(
        "Attempts multiply from layer to layer: 4 x 4 x 4 = 64 requests for one call, exactly "
        "when the leaf can bear them least. A budget of 10 % bounds each layer to 1.1. tarry's "
        "rule, retry at one layer, leaves 4: whoever stands next to the leaf retries, and those "
        "above pass the marked error on."
    ),
    run=amplification,
    knob="rule",
    variants=RULES,
    columns=(
        Column("amplification", "requests per call", "x"),
        Column("requests", "requests"),
        Column("calls", "calls"),
    ),
    plots=(
        Plot("bars", "amplification", "Requests at the leaf for each call", y_title="x", log=True),
        Plot("series", "requests", "Requests at the leaf", y_title="per second", log=True),
    ),
    parameters={"attempts": 4},
)
