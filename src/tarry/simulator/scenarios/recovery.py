"""A backlog against a service that returns with cold caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_one_of
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Lognormal
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.simulate import trials_of
from tarry.simulator.study import Column, Plot, Study

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary

_AT_A_TIME = 200
_DOWN = (0.0, 20.0)
_LIMITERS: dict[str, dict[str, Any]] = {
    "wall": {"kind": "in-flight", "limit": _AT_A_TIME, "ramp": 0.001},
    "ramp": {"kind": "in-flight", "limit": _AT_A_TIME, "ramp": 20.0},
    "aimd": {"kind": "aimd", "max_limit": _AT_A_TIME},
}
_POLICY = Policy(max_attempts=100, attempt_timeout=2.0, initial_delay=0.5)
_BREAKER = {"open_for": 5.0, "growth": 1.0, "spread": 0.0}


def recovery(
    *, limit: str = "ramp", backlog: int = 5000, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Drain a backlog at once, along a ramp, or with a limit that finds itself."""
    check_one_of("limit", limit, _LIMITERS)
    scenario = Scenario(
        servers={
            "server": Server(
                latency=Lognormal(0.1, 0.4),
                concurrency=40,
                queue=1000,
                warmup=20.0,
                cold=8.0,
                failures=(Failure(start=_DOWN[0], end=_DOWN[1], kind="refuse"),),
            )
        },
        clients=Clients(
            arrivals="backlog",
            count=backlog,
            defence=Defence(_POLICY, breaker=_BREAKER, limiter=_LIMITERS[limit]),
        ),
        duration=90.0,
    )
    return trials_of(scenario, trials, seed)


STUDY = Study(
    name="recovery",
    question=(
        "A service returns with cold caches, and 5,000 calls have piled up. At once, or along a "
        "ramp?"
    ),
    lesson=(
        "All that is allowed at once meets caches that are cold: attempts time out, the breaker "
        "opens again, and warm-up time is lost in silence. Along the ramp nearly all that fails "
        "has failed before the service came back, and the backlog is done sooner, although it "
        "began more slowly. A limit that finds itself wastes the fewest attempts of all."
    ),
    run=recovery,
    knob="limit",
    variants=tuple(_LIMITERS),
    columns=(
        Column("failures", "failed attempts"),
        Column("p50", "half done after", "s"),
        Column("p999", "all done after", "s"),
    ),
    plots=(
        Plot("series", "succeeded", "Calls that end well", y_title="per second"),
        Plot("series", "requests", "Requests that reach the service", y_title="per second"),
        Plot("bars", "failures", "Attempts that failed", y_title="attempts"),
    ),
    parameters={"backlog": 5000},
)
