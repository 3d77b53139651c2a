"""Simulate the current and the proposed defence, on a model of the logged dependency.

A defence is a policy, or hedging, with an optional breaker, retry budget and limiter.
The simulated server has the durations, the failure rate and the outages of the log. If the log is
long, a run covers only the period around the longest outage. An outage lasts for at most half of
the run, so that the run also shows the recovery. Both runs have the same seed.

A log does not show how much load the dependency can handle. If the simulated server could handle
any load, retries would cost nothing. So the server is assumed to run twice as many requests at a
time as ever succeeded at the same time in the log, and to queue a hundred requests for each running
one. If the median failure of an outage took longer than nearly all successes, the attempts in this
outage hang until their timeout; in other outages, attempts fail at once. Outside outages, failures
take as long as successes.
"""

from __future__ import annotations

from math import ceil, isclose, isnan, sqrt
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.text import format_count
from tarry.core.verdict import Reason
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Empirical, Fixed
from tarry.simulator.formatting import format_value
from tarry.simulator.metrics import quantile
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.simulate import simulate
from tarry.tuning.evidence import TAIL_QUANTILE
from tarry.tuning.rules import TIMEOUT_QUANTILE

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary
    from tarry.tuning.evidence import Evidence

MIN_SUCCESSES = 100
"""`compare_policies` returns None if fewer attempts succeeded outside outages."""
MAX_SIMULATED_CALLS = 10_000
CONCURRENCY_FACTOR = 2
QUEUE_FACTOR = 100
"""The length of the server's queue, as a multiple of its concurrency."""
_MIN_RUN_S = 600.0
"""A run is shortened to reduce its number of calls, but not to less than this."""
_MAX_DURATIONS = 10_000  # in the latency distribution of the simulated server
_MAX_OUTAGES = 20
_LEAD_SHARE = 0.1
"""The share of a run that comes before its longest outage."""
_BUCKETS_PER_RUN = 600  # of the simulator's time series
_MAX_MINOR_DROP = 0.01
"""If the success rate drops by more than this, `describe_changes` starts with a warning."""
_MIN_RELATIVE_CHANGE = 0.05
_MIN_SUCCESS_RATE_CHANGE = 0.001
"""A smaller change is not reported: it is less than ten of 10,000 calls."""
_LESS_IS_BETTER = (
    ("p99", "ms", 0.001, "calls that succeed end sooner: p99", "calls that succeed end later: p99"),
    ("amplification", "x", 0.01, "fewer requests per call:", "more requests per call:"),
    ("recovered_after", "s", 2.0, "recovered sooner:", "recovered later:"),
)
"""Metric, unit, smallest absolute change, and the texts for a decrease and an increase."""


class Comparison(NamedTuple):
    """The simulated results of the current and the proposed defence, and the simulated load."""

    current: Summary
    proposed: Summary
    duration: float
    """The simulated time of each run, in seconds."""
    rate: float
    """Calls per second."""
    outages: int
    """The number of simulated outages."""
    concurrency: int
    """The number of requests that the simulated server runs at a time."""


def explain_missing_comparison(evidence: Evidence, current: Defence, proposed: Defence) -> str:
    """Return why simulating both defences is pointless or impossible, or else an empty string."""
    if proposed == current:
        return "the proposed policy equals the current one"
    if not evidence.calls:
        return "too little data: the log contains no first attempt of a call"
    if len(evidence.success_durations) < MIN_SUCCESSES:
        attempts = format_count(len(evidence.success_durations), "attempt")
        return f"too little data: {attempts} succeeded outside outages, {MIN_SUCCESSES} needed"
    return ""


def compare_policies(
    evidence: Evidence, current: Defence, proposed: Defence, *, seed: int = 0
) -> Comparison | None:
    """Simulate both defences under the same conditions; return None if the log is too small."""
    if len(evidence.success_durations) < MIN_SUCCESSES or not evidence.calls:
        return None
    # A hedged call has no attempt timeout, so a hanging attempt would never end.
    may_hang = current.hedging is None and proposed.hedging is None
    current_scenario = build_scenario(evidence, current, may_hang=may_hang)
    proposed_scenario = build_scenario(evidence, proposed, may_hang=may_hang)
    server = current_scenario.servers["server"]
    return Comparison(
        current=simulate(current_scenario, seed=seed),
        proposed=simulate(proposed_scenario, seed=seed),
        duration=current_scenario.duration,
        rate=current_scenario.clients.rate,
        outages=len(server.failures),
        concurrency=server.concurrency or 0,
    )


def build_scenario(evidence: Evidence, defence: Defence, *, may_hang: bool = True) -> Scenario:
    """Model the logged dependency; with `may_hang`, attempts in outages with slow failures hang."""
    duration = max(1.0, min(evidence.span, max(_MIN_RUN_S, MAX_SIMULATED_CALLS / evidence.rate)))
    rate = min(evidence.rate, MAX_SIMULATED_CALLS / duration)
    latency = Empirical(_thin_durations(evidence))
    concurrency = _concurrency(evidence, rate, latency.mean)
    server = Server(
        latency=latency,
        concurrency=concurrency,
        queue=QUEUE_FACTOR * concurrency,
        failure_rate=evidence.failure_rate,
        failures=_outages_of_run(evidence, duration, may_hang=may_hang),
    )
    if any(failure.kind == "hang" for failure in server.failures):
        defence = _limit_timeout(evidence, defence)
    return Scenario(
        servers={"server": server},
        clients=Clients(rate=rate, defence=defence),
        network=Fixed(0.0),  # the logged durations include the network
        duration=duration,
        bucket=duration / _BUCKETS_PER_RUN,
    )


def describe_changes(current: Summary, proposed: Summary) -> str:
    """Describe which metrics got worse and which got better; small changes are left out."""
    better: list[str] = []
    worse: list[str] = []
    gain = proposed.success_rate - current.success_rate
    rates = _format_change(current.success_rate, proposed.success_rate, "%")
    if gain > _MIN_SUCCESS_RATE_CHANGE:
        better.append(f"more calls succeed: {rates}")
    if gain < -_MIN_SUCCESS_RATE_CHANGE:
        worse.append(f"fewer calls succeed: {rates}{_describe_cause(current, proposed)}")
    for name, unit, min_change, decrease, increase in _LESS_IS_BETTER:
        before, after = float(getattr(current, name)), float(getattr(proposed, name))
        limits = {"rel_tol": _MIN_RELATIVE_CHANGE, "abs_tol": min_change}
        if isnan(before + after) or isclose(before, after, **limits):
            continue
        texts, prefix = (better, decrease) if after < before else (worse, increase)
        texts.append(f"{prefix} {_format_change(before, after, unit)}")
    sentences = (
        "With the proposal, more calls fail in this simulation." if gain < -_MAX_MINOR_DROP else "",
        f"Worse: {'; '.join(worse)}." if worse else "",
        f"Better: {'; '.join(better)}." if better else "",
    )
    return " ".join(filter(None, sentences)) or "No metric changes by much."


def _concurrency(evidence: Evidence, rate: float, mean_duration: float) -> int:
    """Return the assumed concurrency: twice the logged one, scaled to the simulated rate.

    Scaling alone would be too low for a small rate, because the peaks of few calls are higher
    relative to their mean than those of many. The number of independent calls in progress has a
    Poisson distribution, so the result is at least its mean plus four standard deviations.
    """
    mean_in_progress = rate * mean_duration
    scaled = CONCURRENCY_FACTOR * evidence.max_concurrency * rate / evidence.rate
    return ceil(max(scaled, mean_in_progress + 4 * sqrt(mean_in_progress) + 1))


def _limit_timeout(evidence: Evidence, defence: Defence) -> Defence:
    """Limit the attempt timeout, so that attempts hang no longer than failures took in the log."""
    longest = max(outage.median_failure_duration for outage in evidence.outages)
    longest = max(longest, quantile(evidence.success_durations, TAIL_QUANTILE))
    timeout = min(defence.policy.attempt_timeout or longest, longest)
    policy = defence.policy.replace(attempt_timeout=timeout)
    arguments = {name: getattr(defence, name) for name in ("breaker", "budget", "limiter")}
    return Defence(policy, **arguments)


def _thin_durations(evidence: Evidence) -> tuple[float, ...]:
    """Return at most 10,000 durations, at evenly spaced ranks, to keep the quantiles."""
    durations = evidence.success_durations
    size = len(durations)
    count = min(size, _MAX_DURATIONS)
    return tuple(durations[(2 * index + 1) * size // (2 * count)] for index in range(count))


def _outages_of_run(evidence: Evidence, duration: float, *, may_hang: bool) -> tuple[Failure, ...]:
    """Return the outages that lie in the simulated period, as failures of the server."""
    if not evidence.outages:
        return ()
    longest = max(evidence.outages, key=lambda outage: outage.length)
    latest_start = evidence.start + evidence.span - duration
    # The time in the log at which the simulated period starts.
    run_start = max(evidence.start, min(longest.start - _LEAD_SHARE * duration, latest_start))
    slow_duration = quantile(evidence.success_durations, TIMEOUT_QUANTILE)
    failures: list[Failure] = []
    for outage in evidence.outages:
        start = max(0.0, outage.start - run_start)
        end = min(outage.end - run_start, start + duration / 2, duration)
        if end > start and len(failures) < _MAX_OUTAGES:
            hangs = may_hang and outage.median_failure_duration > slow_duration
            kind = "hang" if hangs else "error"
            failures.append(Failure(start=start, end=end, kind=kind, rate=outage.share))
    return tuple(failures)


def _format_change(before: float, after: float, unit: str) -> str:
    return f"{format_value(before, unit)} → {format_value(after, unit)}"


def _describe_cause(current: Summary, proposed: Summary) -> str:
    """Return a clause with the stop reason whose number of calls grows most, or an empty text."""
    before, after = current.reasons, proposed.reasons
    growth = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    reason = max(growth, key=growth.__getitem__, default=None)
    if reason is None or growth[reason] <= 0:
        return ""
    cause = "no attempts are left" if reason == Reason.ATTEMPTS else Reason(reason).description
    counts = f"{before.get(reason, 0):,} → {after[reason]:,}"
    return f", because more calls end when {cause}: {counts}"
