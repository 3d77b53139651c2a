"""Tests of the scenario `blip`, which shows the effect of the default breaker."""

from __future__ import annotations

import pytest

from tarry import Policy
from tarry.errors import ConfigurationError
from tarry.policyfile.defence import Defence
from tarry.simulator import Clients, Failure, Fixed, Scenario, Server, Surge, blip, simulate
from tarry.simulator.scenarios import STUDIES

TRAFFIC_KINDS = ("steady", "cold-start", "burst")


@pytest.mark.parametrize("traffic", TRAFFIC_KINDS)
@pytest.mark.parametrize("outage", [0.05, 0.15, 0.5, 1.0])
def test_no_call_is_lost_in_a_blip(traffic: str, outage: float) -> None:
    """In a blip of up to a second, the default breaker fails no call that retries would save."""
    without, default = (
        blip(defence=defence, traffic=traffic, outage=outage, trials=3)
        for defence in ("no-breaker", "default")
    )
    assert [(run.calls, run.failed) for run in without] == [
        (run.calls, run.failed) for run in default
    ]


@pytest.mark.parametrize("traffic", TRAFFIC_KINDS)
def test_a_dead_dependency_gets_little_load(traffic: str) -> None:
    """The default breaker sheds at least 95 % of the requests to a dead dependency."""
    (without,) = blip(defence="no-breaker", traffic=traffic, outage=60.0)
    (default,) = blip(defence="default", traffic=traffic, outage=60.0)
    assert 0.05 >= default.failures / without.failures


def test_counted_retries_extend_a_blip() -> None:
    """A breaker that counts retries fails most calls after a blip of 150 ms at a cold start."""
    (counting,) = blip(defence="count-retries", traffic="cold-start")
    (default,) = blip(defence="default", traffic="cold-start")
    assert counting.success_rate < 0.3
    assert default.success_rate > 0.99


@pytest.mark.parametrize(("breaker", "succeeded"), [({}, 50), ({"min_span": 0.0}, 0)])
def test_concurrent_calls(breaker: dict[str, float], succeeded: int) -> None:
    """Fifty calls at once survive 150 ms of errors with `min_span`; without it, none does."""
    server = Server(latency=Fixed(0.01), failures=(Failure(end=0.15, kind="error"),))
    defence = Defence(Policy(jitter="none"), breaker=breaker, budget={"kind": "token"})
    clients = Clients(arrivals="at-once", count=50, defence=defence)
    run = simulate(Scenario(servers={"server": server}, clients=clients, duration=10.0), seed=3)
    assert (succeeded, 50 - succeeded) == (run.succeeded, run.failed)


def test_a_restart_resets_slow_requests() -> None:
    """A restart that drops all running requests at once costs no call, although each takes 3 s."""
    restart = Failure(start=5.0, end=5.001, kind="freeze")
    server = Server(latency=Fixed(3.0), failures=(restart,))
    pause = Surge(start=20.0, end=60.0, rate=0.0)
    clients = Clients(rate=20.0, surges=(pause,), defence=Defence(breaker={}))
    scenario = Scenario(servers={"server": server}, clients=clients, duration=60.0)
    run = simulate(scenario, seed=3)
    assert run.failures > 50
    assert (0, run.calls) == (run.failed, run.succeeded)


def test_unknown_traffic() -> None:
    """An unknown kind of traffic is rejected."""
    with pytest.raises(ConfigurationError, match=r"^traffic must be one of"):
        blip(traffic="none")


def test_study() -> None:
    """The study compares no breaker, a breaker that counts retries, and the default."""
    assert ("no-breaker", "count-retries", "default") == STUDIES["blip"].variants
