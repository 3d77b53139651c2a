"""A retry storm: a dependency freezes, restarts, and meets all its clients at once.

The dependency freezes for 20 s, then restarts and drops every connection, so that all waiting calls
fail at the same moment. If it then gets more requests than it can process in two seconds, it
crashes and is down for 3 s.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from tarry.core.checks import check_count
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Exponential, Lognormal
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.study import Column, Plot, Study, compare_defences, run_with_defence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.simulator.metrics import Summary

_THINK_TIME_S = 30.0
_FREEZE_START_S, _FREEZE_END_S = 20.0, 40.0
_LATENCY = Lognormal(0.08, 0.5)
_HEADROOM = 2.0
"""The capacity of the server, divided by its usual load."""

_EXPONENTIAL_POLICY = Policy(max_attempts=10, jitter="none")
_FULL_JITTER_POLICY = _EXPONENTIAL_POLICY.replace(jitter="full")
_RATIO_BUDGET = {"kind": "ratio"}
DEFENCES: dict[str, Defence] = {
    "fixed": Defence(Policy(max_attempts=30, initial_delay=5.0, backoff="fixed", jitter="none")),
    "exponential": Defence(_EXPONENTIAL_POLICY),
    "full": Defence(_FULL_JITTER_POLICY),
    "full+budget": Defence(_FULL_JITTER_POLICY, budget=_RATIO_BUDGET),
    "full+budget+breaker": Defence(
        _FULL_JITTER_POLICY, budget=_RATIO_BUDGET, breaker={"open_for": 5.0}
    ),
}


def storm(
    *, defence: str = "full", clients: int = 1000, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run the storm with one of the built-in defences.

    The capacity of the server is proportional to the number of clients.
    """
    return run_with_defence(
        _build_scenario, DEFENCES, defence=defence, trials=trials, seed=seed, clients=clients
    )


def _build_scenario(defence: Defence, *, clients: int = 1000) -> Scenario:
    usual_rate = check_count("clients", clients) / _THINK_TIME_S
    workers = max(1, ceil(_HEADROOM * usual_rate * _LATENCY.mean))
    two_seconds_of_work = ceil(2 * workers / _LATENCY.mean)
    return Scenario(
        servers={
            "server": Server(
                latency=_LATENCY,
                concurrency=workers,
                crash_above=two_seconds_of_work,
                restart_after=3.0,
                failures=(Failure(start=_FREEZE_START_S, end=_FREEZE_END_S, kind="freeze"),),
            )
        },
        clients=Clients(
            arrivals="closed",
            count=clients,
            think=Exponential(_THINK_TIME_S),
            instances=min(10, clients),
            defence=defence,
        ),
        duration=120.0,
    )


def _with_defences(defences: Mapping[str, Defence]) -> Study:
    return compare_defences(STUDY, _build_scenario, defences)


_SPANS = ((_FREEZE_START_S, _FREEZE_END_S, "frozen"),)
STUDY = Study(
    name="storm",
    question=(
        "A dependency freezes for 20 s, restarts and drops every connection. Do its clients let "
        "it recover?"
    ),
    lesson=(
        "Clients that failed together return together. Fixed and exponential delays without "
        "jitter keep them synchronised, and each wave crashes the service again until attempts "
        "run out. Full jitter spreads the clients once its ceilings are wide enough: the first "
        "wave, with a ceiling of 100 ms, is the highest. A retry budget prevents the waves, at "
        "the price of calls that fail early. A breaker first keeps all load away, and fails more "
        "calls."
    ),
    run=storm,
    variant_parameter="defence",
    variants=tuple(DEFENCES),
    columns=(
        Column("recovered_after", "recovery time", "s"),
        Column("crashes", "crashes"),
        Column("peak_load", "peak load", "x"),
        Column("amplification", "load per call", "x"),
        Column("success_rate", "success rate", "%"),
        Column("unfinished", "still waiting"),
    ),
    plots=(
        Plot(
            "series",
            "requests",
            "Requests at the service",
            y_title="per second",
            spans=_SPANS,
        ),
        Plot("series", "succeeded", "Successful calls", y_title="per second", spans=_SPANS),
        Plot("bars", "recovered_after", "Time from the restart to recovery", y_title="s"),
        Plot("bars", "crashes", "Crashes after the restart", y_title="crashes"),
    ),
    parameters={"clients": 1000},
    with_defences=_with_defences,
    build_scenario=_build_scenario,
)
