"""The simulator, compared with analytical results."""

from __future__ import annotations

from math import comb, exp, log
from statistics import fmean

import pytest

from tarry import Policy
from tarry.core.hedging import Hedging
from tarry.simulator import (
    Clients,
    Defence,
    Exponential,
    Failure,
    Fixed,
    Scenario,
    Server,
    simulate,
)
from tarry.simulator.scenarios import metastable


def _no_delay(_k: int) -> float:
    return 0.0


@pytest.mark.long_run
@pytest.mark.parametrize(("clients", "slots"), [(50, 100), (200, 100), (200, 400)])
def test_collisions_of_full_jitter(clients: int, slots: int) -> None:
    """Of N clients that draw from W slots, C(N, 2) / W pairs collide."""
    # First attempts arrive together at 0.5 s and fail; retries arrive between 1.5 s and 2.5 s.
    scenario = Scenario(
        servers={"server": Server(failures=(Failure(end=1.0, kind="error"),))},
        clients=Clients(
            arrivals="at-once",
            count=clients,
            defence=Defence(Policy(max_attempts=2, initial_delay=1.0)),
        ),
        network=Fixed(0.5),
        bucket=1 / slots,
        duration=4.0,
    )
    first, end = int(1.5 * slots), int(2.5 * slots)
    pairs = [
        sum(comb(int(n), 2) for n in simulate(scenario, seed=seed).series["requests"][first:end])
        for seed in range(100)
    ]

    expected = comb(clients, 2) / slots

    assert expected == pytest.approx(fmean(pairs), rel=0.06)


@pytest.mark.long_run
def test_mean_time_of_retries() -> None:
    """With full jitter, attempt m starts on average after the sum of c(k) / 2 for k < m."""
    policy = Policy(max_attempts=6, initial_delay=1.0, max_delay=8.0)
    bucket = 0.05
    scenario = Scenario(
        servers={"server": Server(failures=(Failure(end=60.0, kind="error"),))},
        clients=Clients(arrivals="at-once", count=5000, defence=Defence(policy)),
        network=Fixed(0.0),
        bucket=bucket,
        duration=60.0,
    )

    series = simulate(scenario).series["requests"]
    mean = sum((index + 0.5) * bucket * n for index, n in enumerate(series)) / sum(series)

    # Ceilings 1, 2, 4, 8, 8: attempts start on average after 0, 0.5, 1.5, 3.5, 7.5 and 11.5 s.
    assert fmean([0, 0.5, 1.5, 3.5, 7.5, 11.5]) == pytest.approx(mean, rel=0.02)


@pytest.mark.long_run
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_queue_length_of_m_m_1(load: float) -> None:
    """An M/M/1 queue has load / (1 - load) requests on average."""
    scenario = Scenario(
        servers={"server": Server(latency=Exponential(load), concurrency=1)},
        clients=Clients(rate=1.0, defence=Defence(Policy(max_attempts=1))),
        network=Fixed(0.0),
        duration=60_000.0,
    )

    summary = simulate(scenario, seed=3)

    assert load / (1 - load) == pytest.approx(fmean(summary.series["in_progress"]), rel=0.08)
    # The time in the system is exponential, too, with mean 1 / (1 / load - 1).
    mean = 1 / (1 / load - 1)
    assert mean * log(2) == pytest.approx(summary.p50, rel=0.06)
    assert mean * log(100) == pytest.approx(summary.p99, rel=0.1)


@pytest.mark.long_run
@pytest.mark.parametrize("delay", [0.5, 2.0])
def test_tail_of_a_hedged_call(delay: float) -> None:
    """A hedged call has P(T > t) = P(X > t) * P(X > t - delay)."""
    scenario = Scenario(
        servers={"server": Server(latency=Exponential(1.0))},
        clients=Clients(rate=1000.0, defence=Defence(hedging=Hedging(after=delay))),
        network=Fixed(0.0),
        duration=100.0,
    )

    summary = simulate(scenario, seed=5)

    # exp(-t) * exp(-(t - delay)) = q, solved for t.
    assert (log(100) + delay) / 2 == pytest.approx(summary.p99, rel=0.03)
    assert (log(1000) + delay) / 2 == pytest.approx(summary.p999, rel=0.08)
    assert 1 + exp(-delay) == pytest.approx(summary.amplification, rel=0.01)


@pytest.mark.long_run
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_load_of_independent_failures(p: float) -> None:
    """A call of four attempts succeeds with 1 - p**4 and makes (1 - p**4) / (1 - p) requests."""
    scenario = Scenario(
        servers={"server": Server(failure_rate=p)},
        clients=Clients(
            arrivals="at-once",
            count=20_000,
            defence=Defence(Policy(max_attempts=4, backoff=_no_delay, jitter="none")),
        ),
        network=Exponential(0.01),
        duration=60.0,
    )

    summary = simulate(scenario, seed=1)

    assert 1 - p**4 == pytest.approx(summary.success_rate, abs=0.015)
    assert (4 if p == 1 else (1 - p**4) / (1 - p)) == pytest.approx(summary.amplification, rel=0.02)


@pytest.mark.long_run
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_load_without_retries(p: float) -> None:
    """A call of one attempt succeeds with 1 - p and makes 1 request."""
    scenario = Scenario(
        servers={"server": Server(failure_rate=p)},
        clients=Clients(arrivals="at-once", count=20_000, defence=Defence(Policy(max_attempts=1))),
        network=Exponential(0.01),
        duration=60.0,
    )

    summary = simulate(scenario, seed=2)

    assert 1 == summary.amplification
    assert 1 - p == pytest.approx(summary.success_rate, abs=0.01)


@pytest.mark.long_run
def test_retries_sustain_a_metastable_failure() -> None:
    """Long after the surge each call makes three attempts, and hardly any succeeds."""
    runs = (metastable(defence="retries", trials=1, seed=seed)[0] for seed in range(20))
    run = next(run for run in runs if not run.recovered)

    requests, succeeded = run.series["requests"][90:], run.series["succeeded"][90:]

    assert 3 * 40 == pytest.approx(fmean(requests), rel=0.1)
    assert fmean(succeeded) < 2
