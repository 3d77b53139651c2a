"""The simulated comparison: its scenario, its limits, and the description of changes."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import TYPE_CHECKING, Any

import pytest

from tarry.core.hedging import Hedging
from tarry.core.policy import Policy
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Empirical
from tarry.simulator.metrics import quantile
from tarry.simulator.simulate import simulate
from tarry.tuning.comparison import (
    MAX_SIMULATED_CALLS,
    MIN_SUCCESSES,
    build_scenario,
    compare_policies,
    describe_changes,
)
from tarry.tuning.evidence import analyze_log
from tarry.tuning.proposal import propose
from tests.tuning.builders import LogModel, analyze_model

if TYPE_CHECKING:
    from tarry.tuning.evidence import Evidence

LOG_MODEL = LogModel(
    calls=3_000, rate=10.0, success_rates=(0.95,) * 4, outages=((60, 80), (200, 240))
)
EVIDENCE = analyze_log(LOG_MODEL.log())
OLD, NEW = Defence(Policy()), Defence(Policy(max_attempts=2, attempt_timeout=0.2))


def evidence_with_slow_failures(seconds: float) -> Evidence:
    """Return evidence with one outage whose failures took this long."""
    return replace(
        EVIDENCE, outages=(EVIDENCE.outages[0]._replace(median_failure_duration=seconds),)
    )


def test_scenario_models_the_log() -> None:
    """Latency, rate, failures and outages of the scenario are those of the log."""
    scenario = build_scenario(EVIDENCE, OLD)
    server = scenario.servers["server"]

    assert isinstance(server.latency, Empirical)
    assert quantile(EVIDENCE.success_durations, 0.99) == pytest.approx(
        quantile(server.latency.values, 0.99), rel=0.02
    )
    assert 10 == pytest.approx(scenario.clients.rate, rel=0.05)
    assert 0.05 == pytest.approx(server.failure_rate, rel=0.2)
    times = [time for outage in server.failures for time in (outage.start, outage.end)]
    assert [60, 80, 200, 240] == pytest.approx(times, abs=2)
    assert EVIDENCE.span == scenario.duration


def test_current_policy_reproduces_the_log() -> None:
    """With the policy of the log, attempts and successes are those of the log."""
    pauses = Policy(max_attempts=4, initial_delay=0.2, multiplier=1.0)
    summary = simulate(build_scenario(EVIDENCE, Defence(pauses)), seed=3)

    assert EVIDENCE.attempts / EVIDENCE.calls == pytest.approx(summary.amplification, rel=0.05)
    assert len(EVIDENCE.call_durations) / EVIDENCE.calls == pytest.approx(
        summary.success_rate, rel=0.02
    )
    assert quantile(EVIDENCE.call_durations, 0.99) == pytest.approx(summary.p99, rel=0.15)


def test_both_runs_have_the_same_seed() -> None:
    """The same seed gives the same results, and both policies get the same calls."""
    first, second = (compare_policies(EVIDENCE, OLD, NEW, seed=5) for _ in range(2))

    assert first is not None
    assert first == second
    assert first != compare_policies(EVIDENCE, OLD, NEW, seed=6)
    assert 2 == first.outages


def test_proposal_reduces_the_load_of_an_outage() -> None:
    """With the proposed budget, retries do not multiply the requests of an outage."""
    proposal = propose(EVIDENCE)
    comparison = compare_policies(EVIDENCE, proposal.current, proposal.proposed)

    assert comparison is not None
    assert comparison.proposed.amplification < 1.2 < comparison.current.amplification
    assert comparison.current.success_rate - 0.03 < comparison.proposed.success_rate


def test_a_small_log_is_not_simulated() -> None:
    """A log with fewer than a hundred successes is not simulated."""
    assert None is compare_policies(
        analyze_log(LogModel(calls=MIN_SUCCESSES - 1, success_rates=(1.0,)).log()), OLD, NEW
    )
    assert None is not compare_policies(
        analyze_log(LogModel(calls=MIN_SUCCESSES, success_rates=(1.0,)).log()), OLD, NEW
    )


def test_a_log_without_calls_is_not_simulated() -> None:
    """Without first attempts the call rate is unknown."""
    assert None is compare_policies(replace(EVIDENCE, calls=0), OLD, NEW)


def test_a_busy_log_is_thinned() -> None:
    """Of a log with 2,000 calls per second, only the maximum number of calls is simulated."""
    scenario = build_scenario(replace(EVIDENCE, calls=2_000 * 300), OLD)

    assert MAX_SIMULATED_CALLS == pytest.approx(scenario.clients.rate * scenario.duration)
    assert EVIDENCE.span == scenario.duration


def test_a_long_log_is_cut_to_the_time_around_its_longest_outage() -> None:
    """Of a log of a day, 600 s around the longest outage are simulated."""
    (first, longest) = EVIDENCE.outages
    day = replace(EVIDENCE, span=86_400.0, calls=20 * 86_400)
    late = longest._replace(start=longest.start + 40_000, end=longest.end + 40_000)
    scenario = build_scenario(replace(day, outages=(first, late)), OLD)
    (failure,) = scenario.servers["server"].failures

    assert 600.0 == scenario.duration
    assert (60.0, 60.0 + longest.length) == pytest.approx((failure.start, failure.end))


def test_an_outage_leaves_time_to_recover() -> None:
    """An outage that fills the run is cut to half of it."""
    endless = EVIDENCE.outages[0]._replace(end=EVIDENCE.start + EVIDENCE.span)
    scenario = build_scenario(replace(EVIDENCE, outages=(endless,)), OLD)
    (failure,) = scenario.servers["server"].failures

    assert scenario.duration / 2 == pytest.approx(failure.end - failure.start)


def test_number_of_outages_is_limited() -> None:
    """A log with many outages gives a scenario with a limited number."""
    (first, _) = EVIDENCE.outages
    many = tuple(
        first._replace(start=first.start + k, end=first.start + k + 0.5) for k in range(100)
    )

    assert 20 == len(
        build_scenario(replace(EVIDENCE, outages=many), OLD).servers["server"].failures
    )


@pytest.mark.parametrize(
    ("old", "failure_duration", "kind"),
    [
        (NEW, 30.0, "hang"),
        (NEW, 0.05, "error"),
        (OLD, 30.0, "hang"),
        (Defence(hedging=Hedging(after="p95")), 30.0, "error"),
    ],
)
def test_slow_failures_hang_only_without_hedging(
    old: Defence, failure_duration: float, kind: str
) -> None:
    """Slow failures are simulated as a hang, or as errors if a hedged call would wait forever."""
    scenario = build_scenario(
        evidence_with_slow_failures(failure_duration), old, may_hang=old.hedging is None
    )

    assert [kind] == [failure.kind for failure in scenario.servers["server"].failures]
    comparison = compare_policies(evidence_with_slow_failures(failure_duration), old, NEW)
    assert comparison is not None
    assert comparison.current.unfinished < 100


@pytest.mark.parametrize(
    ("timeout", "failure_duration", "expected"),
    [(None, 5.0, 5.0), (1.0, 5.0, 1.0), (30.0, 5.0, 5.0)],
)
def test_slow_failures_take_as_long_as_logged(
    timeout: float | None, failure_duration: float, expected: float
) -> None:
    """An attempt in an outage fails after its timeout or the logged duration, whichever is less."""
    policy = Policy(max_attempts=1, attempt_timeout=timeout)
    defence = Defence(policy, breaker={"consecutive": 9}, budget={"kind": "ratio", "ratio": 0.5})
    simulated = build_scenario(
        evidence_with_slow_failures(failure_duration), defence
    ).clients.defence

    assert expected == simulated.policy.attempt_timeout
    assert (defence.breaker, defence.budget) == (simulated.breaker, simulated.budget)


def test_retries_that_keep_a_server_down_are_visible() -> None:
    """In the comparison, 100 fast attempts per call keep the server overloaded after an outage."""
    eager = Policy(max_attempts=100, attempt_timeout=0.2, max_delay=1.0)
    evidence = analyze_log(LogModel(calls=1_800, rate=30.0, outages=((10, 25),)).log())
    comparison = compare_policies(evidence, Defence(eager), Defence(eager.replace(max_attempts=4)))

    assert comparison is not None
    assert comparison.current.success_rate < 0.5 < comparison.proposed.success_rate
    assert comparison.proposed.recovered_after < 5 < inf == comparison.current.recovered_after
    assert comparison.proposed.amplification < 3 < comparison.current.amplification / 10


def test_healthy_calls_do_not_queue() -> None:
    """With the assumed capacity, healthy calls have the same p99.9 as with unlimited capacity."""
    limited = build_scenario(EVIDENCE, OLD)
    server = replace(limited.servers["server"], concurrency=None, queue=None)
    unlimited = replace(limited, servers={"server": server})

    assert simulate(unlimited, seed=3).p999 == simulate(limited, seed=3).p999
    assert 2 * EVIDENCE.max_concurrency == limited.servers["server"].concurrency


@pytest.mark.parametrize(("factor", "minimum"), [(1, 14), (100, 6), (10_000, 6)])
def test_capacity_is_scaled_with_a_thinned_log(factor: int, minimum: int) -> None:
    """If only a share of the calls is simulated, the server has a proportional capacity."""
    busy = replace(EVIDENCE, calls=EVIDENCE.calls * factor, max_concurrency=7 * factor)
    concurrency = build_scenario(busy, OLD).servers["server"].concurrency

    assert concurrency is not None
    assert minimum <= concurrency <= 70


def test_log_without_a_span_is_simulated() -> None:
    """A span of 0 does not cause a division by zero."""
    comparison = compare_policies(replace(EVIDENCE, span=0.0, outages=()), OLD, NEW)

    assert comparison is not None
    assert 1.0 == comparison.duration


OLD_SUMMARY = replace(
    simulate(build_scenario(analyze_model(LogModel(calls=200)), Defence())),
    success_rate=0.97,
    p99=2.1,
    amplification=1.3,
    recovered_after=3.0,
    reasons={"attempts": 300},
)


def describe_with(**changes: Any) -> str:
    """Return the description of a run that differs in these metrics."""
    return describe_changes(OLD_SUMMARY, replace(OLD_SUMMARY, **changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"success_rate": 0.9695}, {"p99": 2.0}, {"p99": nan}, {"recovered_after": 4.5}],
)
def test_small_changes_are_left_out(changes: dict[str, float]) -> None:
    """Small changes and missing values are not described."""
    assert "No metric changes by much." == describe_with(**changes)


def test_loss_of_calls_comes_first() -> None:
    """A loss of calls is stated first, followed by the worse and the better metrics."""
    assert (
        "With the proposal, more calls fail in this simulation. "
        "Worse: fewer calls succeed: 97 % → 95.7 %, "
        "because more calls end when no attempts are left: 300 → 430. "
        "Better: calls that succeed end sooner: p99 2,100 ms → 500 ms."
    ) == describe_with(success_rate=0.957, p99=0.5, reasons={"attempts": 430})


def test_small_loss_is_only_listed_as_worse() -> None:
    """A loss of up to 1 % is listed as worse, with the reason that ends more calls."""
    reasons = {"attempts": 10, "budget-empty": 350}

    assert (
        "Worse: fewer calls succeed: 97 % → 96.5 %, "
        "because more calls end when the retry budget is empty: 0 → 350. "
        "Better: fewer requests per call: 1.3x → 1.03x."
    ) == describe_with(success_rate=0.965, amplification=1.03, reasons=reasons)


def test_loss_may_have_no_reason() -> None:
    """A loss is listed without a reason if no reason ends more calls."""
    for reasons in ({}, {"attempts": 300}):
        assert "Worse: fewer calls succeed: 97 % → 96.5 %." == describe_with(
            success_rate=0.965, reasons=reasons
        )


def test_all_metrics_can_be_better_or_worse() -> None:
    """Each metric is listed as better or worse, and a run may never recover."""
    assert "Better: more calls succeed: 97 % → 99 %." == describe_with(success_rate=0.99)
    assert (
        "Worse: calls that succeed end later: p99 2,100 ms → 4,000 ms; "
        "more requests per call: 1.3x → 2x; recovered later: 3 s → never."
    ) == describe_with(p99=4.0, amplification=2.0, recovered_after=inf)
