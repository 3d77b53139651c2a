"""Retry-After: a thousand clients receive the hint to retry after 120 seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.checks import check_one_of
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Lognormal
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.simulate import run_trials
from tarry.simulator.study import Column, Plot, Study

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary

_JITTERS = ("none", "full")


def retry_after(
    *,
    jitter: str = "full",
    clients: int = 1000,
    seconds: float = 120.0,
    trials: int = 1,
    seed: int = 0,
) -> list[Summary]:
    """Run clients that receive `Retry-After: seconds`, and add jitter to that delay or not."""
    check_one_of("jitter", jitter, _JITTERS)
    policy = Policy(max_attempts=5, max_hint=max(120.0, seconds), jitter=jitter)  # type: ignore[arg-type]
    scenario = Scenario(
        servers={
            "server": Server(
                latency=Lognormal(0.09, 0.4),
                concurrency=10,
                queue=100,
                retry_after=seconds,
                failures=(Failure(end=5.0, kind="error", retry_after=seconds),),
            )
        },
        clients=Clients(arrivals="at-once", count=clients, instances=1, defence=Defence(policy)),
        duration=5 * seconds + 60.0,
    )
    return run_trials(scenario, trials, seed)


STUDY = Study(
    name="retry-after",
    question="A thousand clients receive `Retry-After: 120`. What happens at second 120?",
    lesson=(
        "Without jitter, the hint itself synchronises the clients: all return at the same moment, "
        "most are rejected with the same hint, and they collide again two minutes later. With "
        "jitter on top of the hint, and never below it, the same clients return over a dozen "
        "seconds, and hardly any is rejected again."
    ),
    run=retry_after,
    variant_parameter="jitter",
    variants=_JITTERS,
    columns=(
        Column("peak_load", "peak load", "x"),
        Column("amplification", "requests per call", "x"),
        Column("success_rate", "calls succeeded", "%"),
        Column("p50", "p50", "s"),
        Column("p99", "p99", "s"),
    ),
    plots=(
        Plot("series", "requests", "Requests at the server", y_title="per second"),
        Plot("series", "succeeded", "Successful calls", y_title="per second"),
    ),
    parameters={"clients": 1000, "seconds": 120.0},
)
