"""Complete runs: seeds, chains of servers, recovery, and the public names of the package."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import exp, inf, isnan, sqrt
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tarry.simulator
from tarry import Policy
from tarry.core.hedging import Hedging
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.policyfile.defence import Defence
from tarry.simulator import simulate
from tarry.simulator.distributions import (
    Distribution,
    Exponential,
    Fixed,
    Lognormal,
)
from tarry.simulator.event_loop import trial_seed
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.scenarios import STUDIES, amplification
from tarry.simulator.simulate import run_trials
from tests.simulator.harness import check_totals

ONCE = Defence(Policy(max_attempts=1))


@given(st.integers(0, 2**32), st.sampled_from([Fixed(0.1), Exponential(0.1), Lognormal(0.1)]))
def test_without_failures_every_call_succeeds_with_one_request(
    seed: int, latency: Distribution
) -> None:
    scenario = Scenario(
        duration=20.0,
        servers={"server": Server(latency=latency)},
        clients=Clients(arrivals="at-once", count=20),
    )
    summary = simulate(scenario, seed=seed)

    assert (20, 20, 20, 20) == (
        summary.calls,
        summary.succeeded,
        summary.attempts,
        summary.requests,
    )
    assert (0, 1.0) == (summary.failures, summary.success_rate)
    assert isnan(summary.recovered_after)


# --- seeds ---------------------------------------------------------------------------------------

BUSY = Scenario(
    duration=10.0,
    servers={
        "server": Server(latency=Exponential(0.05), concurrency=2, queue=10, failure_rate=0.1)
    },
    clients=Clients(rate=50.0),
)


@pytest.mark.parametrize("seed", [0, 1, "a text"])
def test_same_seed_gives_the_same_run(seed: int | str) -> None:
    """Two runs with the same seed are equal in all metrics and series."""
    assert simulate(BUSY, seed=seed) == simulate(BUSY, seed=seed)


def test_different_seeds_give_different_runs() -> None:
    """No two of many seeds give the same run."""
    latencies = {simulate(BUSY, seed=seed).p99 for seed in range(20)}

    assert 20 == len(latencies)


def test_arrivals_do_not_depend_on_the_policy() -> None:
    """Random sources are separate, so that two policies get the same arrivals."""
    without_retries = replace(BUSY, clients=Clients(rate=50.0, defence=ONCE))

    assert simulate(BUSY).series["calls"] == simulate(without_retries).series["calls"]


def test_servers_of_a_chain_draw_separate_latencies() -> None:
    """The median of two exponential latencies in sequence is that of a gamma distribution."""
    servers = {
        "server": Server(latency=Exponential(1.0), calls="leaf"),
        "leaf": Server(latency=Exponential(1.0)),
    }
    clients = Clients(rate=0.1, defence=ONCE)
    scenario = Scenario(servers=servers, clients=clients, network=Fixed(0.0), duration=50_000.0)

    assert pytest.approx(1.678, abs=0.1) == simulate(scenario).p50


def test_servers_of_a_chain_draw_separate_jitter() -> None:
    """The jitter of the client is independent of the jitter of the server."""
    policy = Policy(max_attempts=2, initial_delay=1.0, ignore_retried_below=True)
    defence = Defence(policy)
    servers = {"server": Server(calls="leaf", defence=defence), "leaf": Server(failure_rate=1.0)}
    scenario = Scenario(
        servers=servers,
        clients=Clients(arrivals="at-once", defence=defence),
        network=Fixed(0.0),
        duration=5.0,
        bucket=1e-3,
    )
    points = simulate(scenario).series["requests"]
    first, second, third, fourth = (index for index, count in enumerate(points) if count)

    assert 0 == first < second < third < fourth
    assert abs(second - (third - second)) > 2


def test_runs_share_no_state() -> None:
    """The breaker of one run does not affect the next run."""
    defence = Defence(Policy(), breaker={"min_calls": 2, "min_span": 0, "open_for": 100.0})
    dead = Server(failures=(Failure(end=10.0),))
    broken = replace(BUSY, servers={"server": dead}, clients=Clients(rate=50.0, defence=defence))

    first, second = simulate(broken), simulate(broken)

    assert first == second
    assert {"breaker-open"} == first.reasons.keys()


def test_trials_have_separate_seeds() -> None:
    """Each trial can be repeated by itself."""
    expected = [simulate(BUSY, seed=trial_seed(7, trial)) for trial in range(3)]

    assert expected == run_trials(BUSY, 3, 7)


def test_simulate_rejects_other_types() -> None:
    """An argument that is not a scenario is rejected."""
    with pytest.raises(ConfigurationTypeError, match=r"^simulate takes a Scenario, got 'storm'$"):
        simulate(cast("Scenario", "storm"))


@pytest.mark.parametrize("trials", [0, -1])
def test_zero_trials_are_rejected(trials: int) -> None:
    """The number of trials must be at least 1."""
    with pytest.raises(ConfigurationError, match=r"^trials must be at least 1"):
        run_trials(BUSY, trials, 0)


# --- scenarios with several nodes ----------------------------------------------------------------


def test_call_passes_all_servers_of_the_path() -> None:
    """Each server adds its latency and two network delays."""
    servers = {
        "server": Server(latency=Fixed(1.0), calls="b"),
        "b": Server(latency=Fixed(2.0), calls="c"),
        "c": Server(latency=Fixed(4.0)),
    }
    scenario = Scenario(
        servers=servers, network=Fixed(0.125), clients=Clients(arrivals="at-once", count=3)
    )
    summary = simulate(scenario)

    assert (3, 3, 7.75) == (summary.succeeded, summary.requests, summary.p999)


def test_chain_multiplies_attempts_if_every_layer_retries() -> None:
    """With three attempts in each of three layers, a dead server gets 27 requests per call."""
    eager = Defence(
        Policy(max_attempts=3, initial_delay=0.01, jitter="none", ignore_retried_below=True)
    )
    servers = {
        "server": Server(calls="b", defence=eager),
        "b": Server(calls="c", defence=eager),
        "c": Server(failure_rate=1.0),
    }
    clients = Clients(arrivals="at-once", count=5, defence=eager)

    assert 27.0 == simulate(Scenario(servers=servers, clients=clients)).amplification


@pytest.mark.parametrize(
    ("above", "below", "requests", "reason"),
    [
        pytest.param(3, 3, 3, "retried-below", id="both policies retry"),
        pytest.param(3, 1, 3, "attempts", id="only the policy above retries"),
        pytest.param(1, 3, 3, "attempts", id="only the policy below retries"),
        pytest.param(1, 1, 1, "attempts", id="no policy retries"),
    ],
)
def test_only_one_layer_retries(above: int, below: int, requests: int, reason: str) -> None:
    """A layer does not retry a failure that the layer below has retried."""
    servers = {
        "server": Server(calls="leaf", defence=Defence(Policy(max_attempts=below))),
        "leaf": Server(failure_rate=1.0),
    }
    defence = Defence(Policy(max_attempts=above))
    clients = Clients(arrivals="at-once", defence=defence)
    summary = simulate(Scenario(servers=servers, clients=clients))

    assert requests == summary.requests
    if above > 1 or below == 1:
        assert [reason] == list(summary.reasons)


def test_retried_below_passes_through_a_layer_with_one_attempt() -> None:
    servers = {
        "server": Server(calls="b", defence=ONCE),
        "b": Server(calls="leaf", defence=Defence(Policy(max_attempts=3))),
        "leaf": Server(failure_rate=1.0),
    }
    clients = Clients(arrivals="at-once", defence=Defence(Policy(max_attempts=3)))
    summary = simulate(Scenario(servers=servers, clients=clients))

    assert (3, {"retried-below": 1}) == (summary.requests, summary.reasons)


def test_hedged_calls_to_a_failing_relay_all_end() -> None:
    """Every hedged call to a failing relay ends, and the totals add up."""
    servers = {"server": Server(calls="leaf"), "leaf": Server(failures=(Failure(end=30.0),))}
    clients = Clients(rate=5.0, defence=Defence(hedging=Hedging(after=5.0)))
    summary = simulate(Scenario(servers=servers, clients=clients))

    check_totals(summary)
    assert 0 == summary.unfinished


@pytest.mark.parametrize(
    "defence", [ONCE, Defence(hedging=Hedging(after=1e6))], ids=["retried", "hedged"]
)
def test_requests_dropped_in_an_outage_fail(defence: Defence) -> None:
    """Only requests that arrive at least 0.5 s before the outage succeed: 1 - exp(-0.5)."""
    scenario = Scenario(
        servers={"server": Server(latency=Fixed(0.5), failures=(Failure(start=1.0, end=60.0),))},
        clients=Clients(arrivals="at-once", count=20_000, defence=defence),
        network=Exponential(1.0),
    )
    summary = simulate(scenario)

    p = 1 - exp(-0.5)
    assert pytest.approx(20_000 * p, abs=4 * sqrt(20_000 * p * (1 - p))) == summary.succeeded
    assert (0, 20_000 - summary.succeeded) == (summary.unfinished, summary.failed)


# --- recovery ------------------------------------------------------------------------------------


def test_clients_without_timeout_never_recover_from_a_hang() -> None:
    """Without a timeout, clients that called during a hang wait forever."""
    hung = Failure(start=10.0, end=20.0, kind="hang")
    scenario = Scenario(
        servers={"server": Server(latency=Fixed(0.1), failures=(hung,))},
        clients=Clients(arrivals="closed", count=50, think=Fixed(1.0)),
    )
    summary = simulate(scenario)

    assert (inf, 0.0, 50) == (summary.recovered_after, summary.recovered, summary.unfinished)


@pytest.mark.parametrize("seed", range(5))
def test_configured_failures_do_not_prevent_recovery(seed: int) -> None:
    """After a short outage a run recovers although a tenth of the requests always fails."""
    server = Server(failure_rate=0.1, failures=(Failure(start=20.0, end=22.0),))
    scenario = Scenario(servers={"server": server}, clients=Clients(rate=10.0))

    assert simulate(scenario, seed=seed).recovered_after < 10


@pytest.mark.parametrize("rule", STUDIES["amplification"].variants)
def test_server_that_stays_down_never_recovers(rule: str) -> None:
    """A run whose failure lasts until the end has not recovered."""
    (summary,) = amplification(rule=rule, attempts=2)

    assert (inf, 0.0) == (summary.recovered_after, summary.recovered)


# --- instances, load and crashes -----------------------------------------------------------------


def test_instances_have_separate_breakers() -> None:
    """The breaker of each process opens separately."""
    defence = Defence(
        Policy(max_attempts=1), breaker={"consecutive": 2, "min_calls": 1_000, "open_for": 100.0}
    )
    dead = {"server": Server(failures=(Failure(end=60.0),))}

    def requests(instances: int) -> int:
        clients = Clients(rate=50.0, instances=instances, defence=defence)
        return simulate(Scenario(servers=dead, clients=clients, network=Fixed(0.0))).requests

    assert [2, 8] == [requests(1), requests(4)]


def test_series_of_requests_in_progress() -> None:
    """The series has the requests in progress at the start of each bucket."""
    scenario = Scenario(
        servers={"server": Server(calls="leaf"), "leaf": Server(latency=Fixed(2.5), concurrency=1)},
        clients=Clients(arrivals="at-once", count=2),
        duration=7.0,
    )

    assert [0, 2, 2, 1, 1, 1, 0] == simulate(scenario).series["in_progress"]


def test_frozen_requests_are_in_progress() -> None:
    """Requests of a frozen server are in progress until they are dropped."""
    frozen = Failure(start=1.0, end=3.0, kind="freeze")
    scenario = Scenario(
        servers={"server": Server(latency=Fixed(1.5), failures=(frozen,))},
        clients=Clients(arrivals="at-once", count=2, defence=ONCE),
        duration=5.0,
    )

    assert [0, 2, 2, 0, 0] == simulate(scenario).series["in_progress"]


def test_crash_of_a_relay_is_counted() -> None:
    servers = {
        "server": Server(calls="leaf", latency=Fixed(1.0), crash_above=1),
        "leaf": Server(latency=Fixed(1.0), crash_above=1),
    }
    clients = Clients(arrivals="at-once", count=2, defence=ONCE)

    assert 1 == simulate(Scenario(servers=servers, clients=clients)).crashes


def test_abandoned_requests_keep_the_server_busy() -> None:
    """A request whose client has timed out still occupies a worker."""
    scenario = Scenario(
        servers={"server": Server(latency=Fixed(4.0), concurrency=1)},
        clients=Clients(
            arrivals="at-once",
            defence=Defence(
                Policy(max_attempts=2, attempt_timeout=1.0, initial_delay=0.01, jitter="none")
            ),
        ),
        duration=20.0,
    )
    summary = simulate(scenario)

    assert (2, 2, 1) == (summary.requests, summary.failures, summary.failed)
    assert [0, 1, 2, 2, 2, 1, 1, 1, 1, 0] == summary.series["in_progress"][:10]


# --- public names --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tarry.simulator.__all__)
def test_every_public_name_exists(name: str) -> None:
    """Each name in `__all__` is an attribute of the package."""
    assert hasattr(tarry.simulator, name)


def test_all_is_sorted() -> None:
    """`__all__` is sorted and has no duplicates."""
    assert sorted(set(tarry.simulator.__all__)) == tarry.simulator.__all__


def test_simulation_needs_only_the_standard_library() -> None:
    """A fresh interpreter without third-party packages can run a scenario."""
    program = """
import sys
before = set(sys.modules)
import tarry.simulator
from tarry.simulator import Scenario, Server, simulate
for name in tarry.simulator.__all__:
    getattr(tarry.simulator, name)
assert simulate(Scenario(servers={"server": Server()})).succeeded
top_level = {module.partition(".")[0] for module in set(sys.modules) - before}
allowed = {"tarry", "__mp_main__"}  # multiprocessing adds __mp_main__, an alias of __main__
print(sorted(top_level - allowed - sys.stdlib_module_names))
"""
    process = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True
    )

    assert "[]" == process.stdout.strip()
