"""A dependency dies and returns, and its clients with it.

It freezes for 20 s, then restarts and drops every connection, so that all who waited fail at the
same moment. With more than two seconds of work in progress it dies again for 3 s.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from tarry.core.checks import check_count
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Exponential, Lognormal
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.study import Column, Plot, Study, run, with_defences

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tarry.simulator.metrics import Summary

_THINK = 30.0
_FROZEN = (20.0, 40.0)
_LATENCY = Lognormal(0.08, 0.5)
_HEADROOM = 2.0
"""Capacity over the usual load."""

_EXPONENTIAL = Policy(max_attempts=10, jitter="none")
_FULL = _EXPONENTIAL.replace(jitter="full")
_RATIO = {"kind": "ratio"}
DEFENCES: dict[str, Defence] = {
    "fixed": Defence(Policy(max_attempts=30, initial_delay=5.0, backoff="fixed", jitter="none")),
    "exponential": Defence(_EXPONENTIAL),
    "full": Defence(_FULL),
    "full+budget": Defence(_FULL, budget=_RATIO),
    "full+budget+breaker": Defence(_FULL, budget=_RATIO, breaker={"open_for": 5.0}),
}


def storm(
    *, defence: str = "full", clients: int = 1000, trials: int = 1, seed: int = 0
) -> list[Summary]:
    """Run the storm behind one of the built-in defences; the service grows with its clients."""
    return run(_world, DEFENCES, defence=defence, trials=trials, seed=seed, clients=clients)


def _world(defence: Defence, *, clients: int = 1000) -> Scenario:
    load = check_count("clients", clients) / _THINK
    workers = max(1, ceil(_HEADROOM * load * _LATENCY.mean))
    two_seconds = ceil(2 * workers / _LATENCY.mean)
    return Scenario(
        servers={
            "server": Server(
                latency=_LATENCY,
                concurrency=workers,
                crash_above=two_seconds,
                restart_after=3.0,
                failures=(Failure(start=_FROZEN[0], end=_FROZEN[1], kind="freeze"),),
            )
        },
        clients=Clients(
            arrivals="closed",
            count=clients,
            think=Exponential(_THINK),
            instances=min(10, clients),
            defence=defence,
        ),
        duration=120.0,
    )


def _with_defence(defences: Mapping[str, Defence]) -> Study:
    return with_defences(STUDY, _world, defences)


_SPANS = ((*_FROZEN, "frozen"),)
STUDY = Study(
    name="storm",
    question=(
        "A dependency freezes for 20 s, restarts and drops every connection. Do its clients let "
        "it live?"
    ),
    lesson=(
        "Clients that failed together return together. Fixed and bare exponential delays keep "
        "the crowd in step, and each wave kills the service again until attempts run out. Full "
        "jitter spreads the crowd, once its ceilings are wide enough: the first, of 100 ms, is "
        "the highest wave of all. A retry budget never lets a crowd form, at the price of calls "
        "that fail early; a breaker gives the service silence first, and fails more of them."
    ),
    run=storm,
    knob="defence",
    variants=tuple(DEFENCES),
    columns=(
        Column("recovered_after", "well after", "s"),
        Column("crashes", "crashes"),
        Column("peak_load", "peak load", "x"),
        Column("amplification", "load per call", "x"),
        Column("success_rate", "calls that succeed", "%"),
        Column("unfinished", "still waiting"),
    ),
    plots=(
        Plot(
            "series",
            "requests",
            "Requests that reach the service",
            y_title="per second",
            spans=_SPANS,
        ),
        Plot("series", "succeeded", "Calls that end well", y_title="per second", spans=_SPANS),
        Plot("bars", "recovered_after", "Seconds from the restart until all is well", y_title="s"),
        Plot("bars", "crashes", "Times that the clients killed it again", y_title="crashes"),
    ),
    parameters={"clients": 1000},
    with_defence=_with_defence,
    world=_world,
)
