"""Properties that hold for all scenarios."""

from __future__ import annotations

from math import prod
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tarry import Policy
from tarry.core.hedging import Hedging
from tarry.policyfile.defence import Defence
from tarry.simulator import simulate
from tarry.simulator.distributions import (
    Distribution,
    Exponential,
    Fixed,
    HeavyTail,
    Lognormal,
    Uniform,
)
from tarry.simulator.metrics import Summary
from tarry.simulator.scenario import Clients, Failure, Scenario, Server, Surge
from tests.simulator.harness import check_totals

start_times = st.floats(0, 8)
durations: st.SearchStrategy[Distribution] = st.one_of(
    st.builds(Fixed, st.just(0.0) | st.floats(0.02, 1)),
    st.builds(Exponential, st.floats(0.02, 0.5)),
    st.builds(Lognormal, st.floats(0.02, 0.3)),
    st.builds(HeavyTail, st.floats(0.02, 0.1)),
    st.builds(lambda low, width: Uniform(low, low + width), st.floats(0.02, 0.5), st.floats(0, 1)),
)
policies = st.builds(
    Policy,
    max_attempts=st.integers(1, 4),
    initial_delay=st.floats(0.01, 1),
    attempt_timeout=st.none() | st.floats(0.05, 2),
    total_budget=st.none() | st.floats(0.5, 5),
    jitter=st.sampled_from(["none", "full", "equal", "decorrelated"]),
    ignore_retried_below=st.booleans(),
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
    """Draw a policy or hedging with a breaker, budget and limiter."""
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
    start = draw(start_times)
    return Failure(
        start=start,
        end=start + draw(st.floats(0.1, 4)),
        kind=draw(st.sampled_from(["error", "refuse", "hang", "freeze"])),
        rate=draw(st.sampled_from([1.0, 0.3])),
        retry_after=draw(st.none() | st.floats(0, 2)),
    )


@st.composite
def servers(draw: st.DrawFn, calls: str | None) -> Server:
    """Draw a server that calls the next one or does the work itself."""
    concurrency = draw(st.none() | st.integers(1, 6))
    queue = None if concurrency is None else draw(st.none() | st.integers(0, 10))
    max_crash_above = 20 if concurrency is None or queue is None else concurrency + queue - 1
    return Server(
        latency=draw(durations),
        concurrency=concurrency,
        queue=queue,
        rate_limit=draw(st.none() | st.floats(1, 20)),
        slowdown=draw(st.sampled_from([0.0, 0.01])) if calls is None else 0.0,
        failure_rate=draw(st.sampled_from([0.0, 0.2])),
        retry_after=draw(st.none() | st.floats(0, 2)),
        crash_above=draw(st.none() | st.integers(1, max_crash_above)) if max_crash_above else None,
        restart_after=draw(st.floats(0.1, 2)),
        warmup=draw(st.sampled_from([0.0, 1.0])) if calls is None else 0.0,
        cold_factor=3.0,
        failures=tuple(draw(st.lists(failures(), max_size=2))),
        calls=calls,
        defence=None if calls is None else draw(st.none() | defences()),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw a scenario with a chain of one to three servers."""
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
            think=draw(durations),
            instances=draw(st.integers(1, 3)),
            defence=draw(defences()),
        ),
        network=draw(durations),
        duration=draw(st.floats(0.5, 10)),
        bucket=draw(st.sampled_from([0.3, 1.0, 2.0])),
    )


def max_attempts_of(defence: Defence | None) -> int:
    """Return how many attempts a call with this defence may make."""
    defence = Defence() if defence is None else defence
    return (defence.policy if defence.hedging is None else defence.hedging).max_attempts


@given(scenarios(), st.integers(0, 2**32))
def test_calls_add_up_and_limits_hold(scenario: Scenario, seed: int) -> None:
    """Totals add up, no limit is exceeded, and the same seed gives the same summary."""
    summary = simulate(scenario, seed=seed)

    check_totals(summary)
    check_limits(scenario, summary)
    assert summary == simulate(scenario, seed=seed)


def check_limits(scenario: Scenario, summary: Summary) -> None:
    """Check that attempts, calls and requests are within the limits of the scenario."""
    clients, path = scenario.clients, [scenario.servers[name] for name in scenario.path()]
    requests_per_attempt = prod(max_attempts_of(server.defence) for server in path[:-1])
    assert summary.requests <= summary.attempts * requests_per_attempt
    if clients.arrivals != "backlog":  # a deferred call of a backlog is started again
        max_attempts = max_attempts_of(clients.defence)
        assert summary.attempts <= summary.calls * max_attempts
        assert not summary.amplification > max_attempts * requests_per_attempt
    if clients.arrivals in {"at-once", "backlog"}:
        assert clients.count == summary.calls
    if clients.arrivals == "closed":
        assert summary.unfinished <= clients.count
    if all(server.crash_above is None for server in path):
        assert 0 == summary.crashes
    leaf = path[-1]
    if any(
        failure.kind == "freeze" for failure in leaf.failures
    ):  # frozen requests are in progress too
        return
    if leaf.concurrency is not None and leaf.queue is not None:
        assert max(summary.series["in_progress"]) <= leaf.concurrency + leaf.queue
    if leaf.crash_above is not None:
        assert max(summary.series["in_progress"]) <= leaf.crash_above
