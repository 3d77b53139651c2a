"""Whole runs: what holds of every scenario, whatever its parts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import isfinite, prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tarry.simulator
from tarry import Policy
from tarry.core.hedging import Hedging
from tarry.errors import ConfigurationError
from tarry.simulator import simulate
from tarry.simulator.distributions import (
    Distribution,
    Exponential,
    Fixed,
    HeavyTail,
    Lognormal,
    Uniform,
)
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge
from tarry.simulator.simulate import trials_of
from tarry.simulator.summary import Summary
from tarry.simulator.world import seed_of
from tarry.wire.defence import Defence

ONCE = Defence(Policy(max_attempts=1))

# --- scenarios by chance -------------------------------------------------------------------------

moments = st.floats(0, 8)
times: st.SearchStrategy[Distribution] = st.one_of(
    st.builds(Fixed, st.floats(0, 1)),
    st.builds(Exponential, st.floats(0.001, 0.5)),
    st.builds(Lognormal, st.floats(0.001, 0.3)),
    st.builds(HeavyTail, st.floats(0.001, 0.1)),
    st.builds(lambda low, more: Uniform(low, low + more), st.floats(0, 0.5), st.floats(0, 1)),
)
policies = st.builds(
    Policy,
    max_attempts=st.integers(1, 4),
    initial_delay=st.floats(0.01, 1),
    attempt_timeout=st.none() | st.floats(0.05, 2),
    total_budget=st.none() | st.floats(0.5, 5),
    jitter=st.sampled_from(["none", "full", "equal", "decorrelated"]),
    retry_marked=st.booleans(),
)
breakers = st.fixed_dictionaries(
    {"min_calls": st.integers(2, 10), "open_for": st.floats(0.1, 3), "probes": st.integers(1, 3)}
)
budgets: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"kind": "token", "capacity": 50}, {"kind": "ratio"}, {"kind": "throttle"}]
)
limiters: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"kind": "in-flight", "limit": 4}, {"kind": "aimd", "initial": 5}, {"kind": "adaptive"}]
)
hedgings = st.builds(
    Hedging,
    after=st.floats(0, 1) | st.just("p90"),
    max_attempts=st.integers(2, 3),
    min_samples=st.just(10),
)


@st.composite
def defences(draw: st.DrawFn) -> Defence:
    """Draw a policy or a hedging, and what stands around it."""
    hedged = draw(st.integers(0, 3)) == 0
    return Defence(
        None if hedged else draw(policies),
        hedging=draw(hedgings) if hedged else None,
        breaker=draw(st.none() | breakers),
        budget=draw(st.none() | budgets),
        limiter=draw(st.none() | limiters),
    )


@st.composite
def failures(draw: st.DrawFn) -> Failure:
    """Draw a failure of any kind."""
    start = draw(moments)
    return Failure(
        start=start,
        end=start + draw(st.floats(0.1, 4)),
        kind=draw(st.sampled_from(["error", "refuse", "hang", "freeze"])),
        rate=draw(st.sampled_from([1.0, 0.3])),
        retry_after=draw(st.none() | st.floats(0, 2)),
    )


@st.composite
def servers(draw: st.DrawFn, calls: str | None) -> Server:
    """Draw a server that calls the next, or works."""
    concurrency = draw(st.none() | st.integers(1, 6))
    bounded = concurrency is not None and calls is None
    return Server(
        latency=draw(times),
        concurrency=concurrency,
        queue=draw(st.none() | st.integers(0, 10)) if bounded else None,
        slowdown=draw(st.sampled_from([0.0, 0.01])),
        failure_rate=draw(st.sampled_from([0.0, 0.2])),
        retry_after=draw(st.none() | st.floats(0, 2)),
        crash_above=draw(st.none() | st.integers(1, 20)),
        restart_after=draw(st.floats(0.1, 2)),
        warmup=draw(st.sampled_from([0.0, 1.0])),
        cold=3.0,
        failures=tuple(draw(st.lists(failures(), max_size=2))),
        calls=calls,
        defence=None if calls is None else draw(st.none() | defences()),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw a small world of one to three servers in a row."""
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    arrivals = draw(st.sampled_from(["at-once", "poisson", "closed", "backlog"]))
    surge = Surge(start=2.0, end=4.0, rate=draw(st.sampled_from([0.0, 20.0])))
    surges = draw(st.sampled_from([(), (surge,)])) if arrivals == "poisson" else ()
    return Scenario(
        servers={
            name: draw(servers(calls))
            for name, calls in zip(names, [*names[1:], None], strict=True)
        },
        clients=Clients(
            calls="a",
            arrivals=arrivals,
            count=draw(st.integers(1, 12)),
            rate=draw(st.floats(0.5, 8)),
            surges=surges,
            think=draw(times),
            instances=draw(st.integers(1, 3)),
            defence=draw(defences()),
        ),
        network=draw(times),
        duration=draw(st.floats(0.5, 10)),
        bucket=draw(st.sampled_from([0.3, 1.0, 2.0])),
    )


def most_attempts(defence: Defence | None) -> int:
    """Return how many attempts a call may make behind this defence."""
    defence = Defence() if defence is None else defence
    return (defence.policy if defence.hedging is None else defence.hedging).max_attempts


@given(scenarios(), st.integers(0, 2**32))
def test_what_holds_of_every_run(scenario: Scenario, seed: int) -> None:
    """Nothing is lost, nothing is counted twice, and no more is sent than may be."""
    summary = simulate(scenario, seed=seed)

    conserves(summary)
    keeps_to_its_bounds(scenario, summary)
    assert summary == simulate(scenario, seed=seed)


def conserves(summary: Summary) -> None:
    """Check that calls, attempts and series add up."""
    assert summary.calls == summary.succeeded + summary.failed + summary.unfinished
    assert summary.unfinished >= 0
    assert summary.failed == sum(summary.reasons.values())
    assert summary.failures + summary.succeeded <= summary.attempts
    for name in ("calls", "requests", "succeeded", "failed"):
        assert getattr(summary, name) == sum(summary.series[name])
    assert 1 == len({len(values) for values in summary.series.values()})
    assert all(value >= 0 for value in summary.metrics().values())
    assert 0 <= summary.success_rate <= 1
    assert summary.p50 <= summary.p99 <= summary.p999
    assert isfinite(summary.p999)
    assert float(isfinite(summary.recovered_after)) == summary.recovered


def keeps_to_its_bounds(scenario: Scenario, summary: Summary) -> None:
    """Check what the policies, the clients and the servers bound."""
    clients, path = scenario.clients, [scenario.servers[name] for name in scenario.path()]
    below = prod(most_attempts(server.defence) for server in path[:-1])
    assert summary.requests <= summary.attempts * below
    if clients.arrivals != "backlog":  # which begins a call anew that was held back
        most = most_attempts(clients.defence)
        assert summary.attempts <= summary.calls * most
        assert summary.amplification <= most * below
    if clients.arrivals in {"at-once", "backlog"}:
        assert clients.count == summary.calls
    if clients.arrivals == "closed":
        assert summary.unfinished <= clients.count
    if all(server.crash_above is None for server in path):
        assert 0 == summary.crashes
    leaf = path[-1]
    if leaf.concurrency is not None and leaf.queue is not None:
        assert max(summary.series["in_progress"]) <= leaf.concurrency + leaf.queue
    if leaf.crash_above is not None:
        assert max(summary.series["in_progress"]) <= leaf.crash_above


@given(st.integers(0, 2**32), st.sampled_from([Fixed(0.1), Exponential(0.1), Lognormal(0.1)]))
def test_in_a_calm_world_every_call_succeeds_at_once(seed: int, latency: Distribution) -> None:
    """Where nothing fails and nothing is full, each call is one request."""
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
    assert (0, 0.0, 1.0) == (summary.failures, summary.recovered_after, summary.success_rate)


# --- seeds ---------------------------------------------------------------------------------------

BUSY = Scenario(
    duration=10.0,
    servers={
        "server": Server(latency=Exponential(0.05), concurrency=2, queue=10, failure_rate=0.1)
    },
    clients=Clients(rate=50.0),
)


@pytest.mark.parametrize("seed", [0, 1, "a text"])
def test_the_same_seed_is_the_same_run(seed: int | str) -> None:
    """Two runs of a seed are equal in every number and every point."""
    assert simulate(BUSY, seed=seed) == simulate(BUSY, seed=seed)


def test_other_seeds_are_other_runs() -> None:
    """No two of many seeds give the same run."""
    latencies = {simulate(BUSY, seed=seed).p99 for seed in range(20)}

    assert 20 == len(latencies)


def test_a_run_leaves_nothing_behind() -> None:
    """The breaker of one run is not that of the next."""
    defence = Defence(Policy(), breaker={"min_calls": 2, "open_for": 100.0})
    dead = Server(failures=(Failure(end=10.0),))
    broken = replace(BUSY, servers={"server": dead}, clients=Clients(rate=50.0, defence=defence))

    first, second = simulate(broken), simulate(broken)

    assert first == second
    assert {"breaker-open"} == first.reasons.keys()


def test_trials_are_runs_with_seeds_of_their_own() -> None:
    """Each trial can be run again alone."""
    expected = [simulate(BUSY, seed=seed_of(7, trial)) for trial in range(3)]

    assert expected == trials_of(BUSY, 3, 7)


@pytest.mark.parametrize("trials", [0, -1])
def test_no_trials_are_refused(trials: int) -> None:
    """There is nothing to sum up in no run."""
    with pytest.raises(ConfigurationError, match=r"^trials must be at least 1"):
        trials_of(BUSY, trials, 0)


# --- worlds put together -------------------------------------------------------------------------


def test_a_call_goes_down_the_path_and_back() -> None:
    """Each server adds its own time and two ways to the next."""
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


def test_a_chain_multiplies_attempts_where_every_layer_retries() -> None:
    """With three attempts in each of three layers, a dead leaf sees 27 requests a call."""
    eager = Defence(Policy(max_attempts=3, initial_delay=0.01, jitter="none", retry_marked=True))
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
        pytest.param(3, 3, 3, "retried-below", id="the layer below"),
        pytest.param(3, 1, 3, "attempts", id="the layer above"),
        pytest.param(1, 3, 3, "attempts", id="only the layer below"),
        pytest.param(1, 1, 1, "attempts", id="nobody"),
    ],
)
def test_one_layer_retries(above: int, below: int, requests: int, reason: str) -> None:
    """A layer that has retried is heeded above; one that made one attempt leaves it to others."""
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


def test_hedged_clients_of_a_relay_end_each_call_once() -> None:
    """A relay that gave up ends a hedged call, and no copy comes after it."""
    servers = {"server": Server(calls="leaf"), "leaf": Server(failures=(Failure(end=30.0),))}
    clients = Clients(rate=5.0, defence=Defence(hedging=Hedging(after=5.0)))
    summary = simulate(Scenario(servers=servers, clients=clients))

    conserves(summary)
    assert 0 == summary.unfinished


def test_instances_have_breakers_of_their_own() -> None:
    """Each process has to find out by itself that a dependency is dead."""
    defence = Defence(
        Policy(max_attempts=1), breaker={"consecutive": 2, "min_calls": 1_000, "open_for": 100.0}
    )
    dead = {"server": Server(failures=(Failure(end=60.0),))}

    def requests(instances: int) -> int:
        clients = Clients(rate=50.0, instances=instances, defence=defence)
        return simulate(Scenario(servers=dead, clients=clients, network=Fixed(0.0))).requests

    assert [2, 8] == [requests(1), requests(4)]


def test_the_load_of_the_last_server_is_looked_at_in_every_bucket() -> None:
    """The series has the requests in progress at the beginning of each bucket."""
    scenario = Scenario(
        servers={"server": Server(calls="leaf"), "leaf": Server(latency=Fixed(2.5), concurrency=1)},
        clients=Clients(arrivals="at-once", count=2),
        duration=7.0,
    )

    assert [0, 2, 2, 1, 1, 1, 0] == simulate(scenario).series["in_progress"]


def test_crashes_of_all_servers_count() -> None:
    """A relay may die of its load as well as a leaf."""
    servers = {
        "server": Server(calls="leaf", latency=Fixed(1.0), crash_above=1),
        "leaf": Server(latency=Fixed(1.0), crash_above=1),
    }
    clients = Clients(arrivals="at-once", count=2, defence=ONCE)

    assert 1 == simulate(Scenario(servers=servers, clients=clients)).crashes


def test_abandoned_requests_keep_the_server_busy() -> None:
    """A client that gave up has not freed the worker that works for it."""
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


# --- the package ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tarry.simulator.__all__)
def test_every_name_of_the_package_is_there(name: str) -> None:
    """Each name in `__all__` is an attribute of the package."""
    assert hasattr(tarry.simulator, name)


def test_all_is_sorted() -> None:
    """`__all__` names nothing twice, in order."""
    assert sorted(set(tarry.simulator.__all__)) == tarry.simulator.__all__


def test_a_simulation_needs_the_standard_library_alone() -> None:
    """Every name loads and a scenario runs without any third party, in a fresh interpreter."""
    program = """
import sys
before = set(sys.modules)
import tarry.simulator
from tarry.simulator import Scenario, Server, simulate
for name in tarry.simulator.__all__:
    getattr(tarry.simulator, name)
assert simulate(Scenario(servers={"server": Server()})).succeeded
tops = {module.partition(".")[0] for module in set(sys.modules) - before}
ours = {"tarry", "__mp_main__"}  # the latter is how multiprocessing calls __main__
print(sorted(tops - ours - sys.stdlib_module_names))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True
    )

    assert "[]" == done.stdout.strip()
