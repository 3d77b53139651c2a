"""The scenario `shared-capacity`: several processes deliver a backlog to a rate-limited server.

It compares limiters that each process has for itself with a single process. In the service, a
single process delivers the tasks of a lane at its rate limit, for the reason that this scenario
shows: a process with its own limiter sees refused requests that the others have caused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_count, check_one_of
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Lognormal
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.simulate import run_trials
from tarry.simulator.study import Column, Plot, Study

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary

_MAX_IN_FLIGHT = 128
_ADAPTIVE: dict[str, Any] = {
    "kind": "adaptive-limit",
    "max_in_flight": _MAX_IN_FLIGHT,
    "max_wait": 0.2,
}
"""As in the service, a call that the rate does not admit soon stays in the backlog. If all calls
waited for their turns, a lower rate would come too late for them."""
_LIMITERS: dict[str, dict[str, Any]] = {
    "none": {"kind": "in-flight", "limit": _MAX_IN_FLIGHT},
    "aimd": {"kind": "aimd", "max_limit": _MAX_IN_FLIGHT},
    "adaptive": _ADAPTIVE,
    "one-process": _ADAPTIVE,
}
_OUTAGE_S = 20.0
_POLICY = Policy(max_attempts=100, attempt_timeout=2.0, initial_delay=0.5)
_BREAKER = {  # counts each attempt, as the breaker of the service does
    "failure_rate": 0.9,
    "count_retries": True,
    "min_span": 0.0,
    "open_for": 0.5,
    "growth": 1.05,
}


def shared_capacity(
    *,
    limit: str = "adaptive",
    processes: int = 3,
    capacity: float = 100.0,
    failing: float = 0.2,
    backlog: int = 2000,
    trials: int = 1,
    seed: int = 0,
) -> list[Summary]:
    """Run a backlog of calls to a server that accepts `capacity` requests per second after 20 s.

    The share `failing` of the accepted requests fails. `limit` selects the limiter of each process:
    "none" (only 128 requests in flight), "aimd" or "adaptive". With "one-process", there is one
    process with the limiter of "adaptive".
    """
    check_one_of("limit", limit, _LIMITERS)
    server = Server(
        latency=Lognormal(0.02, 0.4),
        rate_limit=capacity,
        failure_rate=failing,
        failures=(Failure(end=_OUTAGE_S, kind="refuse"),),
    )
    clients = Clients(
        arrivals="backlog",
        count=backlog,
        instances=1 if limit == "one-process" else check_count("processes", processes),
        defence=Defence(_POLICY, breaker=_BREAKER, limiter=_LIMITERS[limit]),
    )
    duration = _OUTAGE_S + 4 * backlog / capacity
    scenario = Scenario(servers={"server": server}, clients=clients, duration=duration)
    return run_trials(scenario, trials, seed)


SHARED_CAPACITY_STUDY = Study(
    name="shared-capacity",
    question=(
        "A server returns after an outage. It accepts 100 requests per second, of which a fifth "
        "fails. How hard do three processes with 2,000 calls hit it?"
    ),
    lesson=(
        "A limit on requests in flight is no limit on their rate: the server refuses most of them. "
        "AIMD cannot tell requests that always fail from refused ones, and does not limit the rate "
        "either. An adaptive limit finds the rate. But if each process has its own, a process sees "
        "refused requests that the others have caused, and takes them for requests that always "
        "fail. A single process exceeds the rate least, and needs longer. Therefore only one "
        "process of the service delivers the tasks of a downstream at its limit. Without failing "
        "requests (--set failing=0), three limiters do as well as one."
    ),
    run=shared_capacity,
    variant_parameter="limit",
    variants=tuple(_LIMITERS),
    columns=(
        Column("peak_load", "peak load", "x"),
        Column("failures", "failed attempts"),
        Column("p50", "half finished after", "s"),
        Column("p99", "99 % finished after", "s"),
    ),
    plots=(
        Plot("series", "requests", "Requests at the server", y_title="per second", is_log=True),
        Plot("series", "succeeded", "Successful calls", y_title="per second"),
        Plot("bars", "failures", "Failed attempts", y_title="attempts"),
    ),
    parameters={"processes": 3, "capacity": 100.0, "failing": 0.2, "backlog": 2000},
)
