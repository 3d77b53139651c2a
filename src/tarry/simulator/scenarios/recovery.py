"""Recovery: a backlog of calls meets a service that restarts with cold caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_one_of
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Lognormal
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.simulate import run_trials
from tarry.simulator.study import Column, Plot, Study

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary

_MAX_IN_FLIGHT = 200
_DOWN_START_S, _DOWN_END_S = 0.0, 20.0
_LIMITERS: dict[str, dict[str, Any]] = {
    "wall": {"kind": "in-flight", "limit": _MAX_IN_FLIGHT, "ramp": 0.001},
    "ramp": {"kind": "in-flight", "limit": _MAX_IN_FLIGHT, "ramp": 20.0},
    "aimd": {"kind": "aimd", "max_limit": _MAX_IN_FLIGHT},
}
_POLICY = Policy(max_attempts=100, attempt_timeout=2.0, initial_delay=0.5)
_BREAKER = {"open_for": 5.0, "growth": 1.0, "spread": 0.0}


def recovery(
    *, limit: str = "ramp", backlog: int = 5000, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run a backlog with one of three in-flight limits.

    "wall" permits the full number of requests at once, "ramp" increases the limit over 20 s, and
    "aimd" adapts it to successes and failures.
    """
    check_one_of("limit", limit, _LIMITERS)
    scenario = Scenario(
        servers={
            "server": Server(
                latency=Lognormal(0.1, 0.4),
                concurrency=40,
                queue=1000,
                warmup=20.0,
                cold_factor=8.0,
                failures=(Failure(start=_DOWN_START_S, end=_DOWN_END_S, kind="refuse"),),
            )
        },
        clients=Clients(
            arrivals="backlog",
            count=backlog,
            defence=Defence(_POLICY, breaker=_BREAKER, limiter=_LIMITERS[limit]),
        ),
        duration=90.0,
    )
    return run_trials(scenario, trials, seed)


STUDY = Study(
    name="recovery",
    question=(
        "A service restarts with cold caches, and 5,000 calls are waiting. Send them at once, or "
        "along a ramp?"
    ),
    lesson=(
        "With the full limit at once, requests meet cold caches: attempts time out, the breaker "
        "opens again, and the service does not warm up meanwhile. Along the ramp nearly all "
        "failures happen before the service is back, and the backlog is finished sooner although "
        "it starts more slowly. The adaptive limit wastes the fewest attempts of all."
    ),
    run=recovery,
    variant_parameter="limit",
    variants=tuple(_LIMITERS),
    columns=(
        Column("failures", "failed attempts"),
        Column("p50", "half finished after", "s"),
        Column("p999", "all finished after", "s"),
    ),
    plots=(
        Plot("series", "succeeded", "Successful calls", y_title="per second"),
        Plot("series", "requests", "Requests at the service", y_title="per second"),
        Plot("bars", "failures", "Failed attempts", y_title="attempts"),
    ),
    parameters={"backlog": 5000},
)
