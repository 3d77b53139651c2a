"""A thousand clients are told to come back in 120 seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.core.checks import check_one_of
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Lognormal
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.simulate import trials_of
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
    """Have clients told `seconds`, and see them return with or without jitter on top."""
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
    return trials_of(scenario, trials, seed)


STUDY = Study(
    name="retry-after",
    question="A thousand clients are told `Retry-After: 120`. What happens at second 120?",
    lesson=(
        "Obeyed to the letter, the hint makes a crowd of its own: everybody is back in the same "
        "moment, most are turned away with the same hint, and meet again two minutes later. With "
        "jitter on top, and never below, the same clients come over a dozen seconds, and hardly "
        "one is turned away again."
    ),
    run=retry_after,
    knob="jitter",
    variants=_JITTERS,
    columns=(
        Column("peak_load", "peak load", "x"),
        Column("amplification", "requests per call", "x"),
        Column("success_rate", "calls that succeed", "%"),
        Column("p50", "p50", "s"),
        Column("p99", "p99", "s"),
    ),
    plots=(
        Plot("series", "requests", "Requests that arrive", y_title="per second"),
        Plot("series", "succeeded", "Calls that end well", y_title="per second"),
    ),
    parameters={"clients": 1000, "seconds": 120.0},
)
