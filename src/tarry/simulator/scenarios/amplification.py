"""Retry amplification: three layers make four attempts each while the last server is down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.checks import check_one_of
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Fixed
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge
from tarry.simulator.simulate import run_trials
from tarry.simulator.study import Column, Plot, Study

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary

_DURATION_S = 60.0
_LAST_CALL_AT_S = 50.0


def _build_defence(rule: str, attempts: int) -> Defence:
    # retry_marked: also retry errors that are marked as retried by a layer below.
    policy = Policy(max_attempts=attempts, initial_delay=0.01, retry_marked=True)
    if rule == "every-layer":
        return Defence(policy)
    if rule == "budget":
        return Defence(policy, budget={"kind": "ratio", "min_per_second": 0.0})
    return Defence(policy.replace(retry_marked=False))


RULES = ("every-layer", "budget", "one-layer")


def amplification(
    *, rule: str = "every-layer", attempts: int = 4, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run the chain of three layers.

    `rule` is "every-layer" (each layer retries), "budget" (each retries within a budget of 10 %)
    or "one-layer" (a layer does not retry an error that a layer below has already retried).
    """
    check_one_of("rule", rule, RULES)
    defence = _build_defence(rule, attempts)
    scenario = Scenario(
        servers={
            "gateway": Server(calls="orders", defence=defence),
            "orders": Server(calls="stock", defence=defence),
            "stock": Server(failures=(Failure(end=_DURATION_S, kind="error"),)),
        },
        clients=Clients(
            calls="gateway",
            rate=20.0,
            # No calls start in the last seconds, so that all calls end before the run does.
            surges=(Surge(start=_LAST_CALL_AT_S, end=_DURATION_S, rate=0.0),),
            defence=defence,
        ),
        network=Fixed(0.001),
        duration=_DURATION_S,
    )
    return run_trials(scenario, trials, seed)


STUDY = Study(
    name="amplification",
    question="Three layers make four attempts each. How many requests reach a dead server?",
    lesson=(
        "Attempts multiply from layer to layer: 4 x 4 x 4 = 64 requests for one call, exactly "
        "when the last server is least able to handle them. A budget of 10 % limits each layer to "
        "a factor of 1.1. tarry's rule is to retry at one layer: only the layer next to the "
        "failing server retries, the layers above pass on its marked error, and 4 requests remain."
    ),
    run=amplification,
    variant_parameter="rule",
    variants=RULES,
    columns=(
        Column("amplification", "requests per call", "x"),
        Column("requests", "requests"),
        Column("calls", "calls"),
    ),
    plots=(
        Plot(
            "bars", "amplification", "Requests at the last server per call", y_title="x", log=True
        ),
        Plot("series", "requests", "Requests at the last server", y_title="per second", log=True),
    ),
    parameters={"attempts": 4},
)
