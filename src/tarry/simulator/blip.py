"""The scenario `blip`: a dependency fails for a short time, or for a minute.

It compares no breaker, a breaker that counts retries and opens for 30 s, and the default `Breaker`.
A blip must not become a longer outage, and a dead dependency must not get the full load. There is
no retry budget, so that the variants differ only in the breaker.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_one_of, check_positive
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Lognormal
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge
from tarry.simulator.study import Column, Plot, Study, run_with_defence, with_defences_as_variants

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary

_COUNT_RETRIES: dict[str, Any] = {
    "count_retries": True,
    "min_span": 0.0,
    "open_for": 30.0,
}
_BREAKER_DEFENCES: dict[str, Defence] = {
    "no-breaker": Defence(),
    "count-retries": Defence(breaker=_COUNT_RETRIES),
    "default": Defence(breaker={}),
}
_TRAFFIC_KINDS = ("steady", "cold-start", "burst")
_BEFORE_OUTAGE_S = 10.0
"""Seconds of normal traffic before the outage; none before a cold start."""
_BURST_S, _BURST_FACTOR = 0.1, 10.0
_AFTER_OUTAGE_S = 40.0  # longer than the breaker of "count-retries" stays open
_DRAIN_S = 5.0
"""Seconds without new calls at the end, so that all calls end within the run."""


def blip(
    *,
    defence: str = "default",
    traffic: str = "steady",
    outage: float = 0.15,
    rate: float = 50.0,
    trials: int = 1,
    seed: int = 0,
) -> list[Summary]:
    """Run calls to a server that responds with 503 for `outage` seconds.

    `traffic` is "steady" (`rate` calls per second), "burst" (the same, and 10 times the rate in the
    first 0.1 s of the outage) or "cold-start" (the calls begin when the outage begins).
    """
    return run_with_defence(
        _build_blip,
        _BREAKER_DEFENCES,
        defence=defence,
        trials=trials,
        seed=seed,
        traffic=traffic,
        outage=outage,
        rate=rate,
    )


def _build_blip(
    defence: Defence, *, traffic: str = "steady", outage: float = 0.15, rate: float = 50.0
) -> Scenario:
    check_one_of("traffic", traffic, _TRAFFIC_KINDS)
    start = 0.0 if traffic == "cold-start" else _BEFORE_OUTAGE_S
    end = start + check_positive("outage", outage)
    duration = end + _AFTER_OUTAGE_S
    burst = Surge(start=start, end=start + _BURST_S, rate=_BURST_FACTOR * rate)
    pause = Surge(start=duration - _DRAIN_S, end=duration, rate=0.0)
    server = Server(
        latency=Lognormal(0.05, 0.5), failures=(Failure(start=start, end=end, kind="error"),)
    )
    surges = (burst, pause) if traffic == "burst" else (pause,)
    clients = Clients(rate=rate, surges=surges, defence=defence)
    return Scenario(servers={"server": server}, clients=clients, duration=duration)


BLIP_STUDY = Study(
    name="blip",
    question="A dependency fails for 150 ms. Does the breaker turn that into an outage?",
    lesson=(
        "Retries save nearly all calls of a blip, if the breaker stays closed. If each retry "
        "counts towards the minimum number of calls, a few calls during a cold start open the "
        "breaker, here for 30 s. The default breaker needs 20 calls and failures over at least a "
        "second, and opens for 2 s at first. In a blip of up to a second, each call that succeeds "
        "without a breaker succeeds with it too. A dead dependency still gets less than 5 % of "
        "the load."
    ),
    run=blip,
    variant_parameter="defence",
    variants=tuple(_BREAKER_DEFENCES),
    columns=(
        Column("success_rate", "calls succeeded", "%"),
        Column("failed", "failed calls"),
        Column("failures", "failed requests"),
    ),
    plots=(
        Plot("lines", "failed", "Failed calls", x="outage", y_title="calls", is_log=True),
        Plot("lines", "failures", "Requests during the outage", x="outage", y_title="requests"),
    ),
    parameters={"traffic": "steady", "outage": 0.15, "rate": 50.0},
    with_defences=partial(with_defences_as_variants, _build_blip),
    build_scenario=_build_blip,
    sweep={"traffic": _TRAFFIC_KINDS, "outage": (0.05, 0.15, 0.5, 1.0, 2.0, 5.0, 60.0)},
)
