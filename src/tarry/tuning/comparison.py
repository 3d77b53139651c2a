"""Simulate the current defence against the proposed one, on a model of the logged dependency.

The simulated server has the logged durations of healthy attempts, fails as often, and has the
logged outages. A simulation is limited in size: of a long log it covers the period around the
longest outage, with an outage cut to half of the run so that its recovery is visible; of a busy log
it has fewer calls per second. Both runs have the same seed.

A log does not show how much load the dependency can handle before it breaks, and without a limit
retries would cost nothing. So the server is assumed to run twice as many requests at a time as were
seen to succeed together, and a hundred times as many may wait. In an outage, failures that took
longer than nearly all successes take as long as logged; other failures are immediate. Outside
outages failures take as long as successes.
"""

from __future__ import annotations

from math import ceil, isclose, isnan, sqrt
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.verdict import Reason
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Empirical, Fixed
from tarry.simulator.metrics import quantile
from tarry.simulator.report.formatting import format_value
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.simulate import simulate
from tarry.tuning.evidence import TAIL_QUANTILE
from tarry.tuning.timeouts import TIMEOUT_QUANTILE

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary
    from tarry.tuning.evidence import Evidence

MIN_HEALTHY_ATTEMPTS = 100
"""With fewer healthy attempts nothing is simulated."""
MAX_CALLS = 10_000
CONCURRENCY_HEADROOM = 2
QUEUE_PER_WORKER = 100
"""Requests that may wait for each one that runs; further ones are rejected."""
_MIN_DURATION_S = 600.0
"""A run is not shortened below this to reduce the number of calls."""
_MAX_SAMPLES = 10_000
_MAX_OUTAGES = 20
_LEAD_SHARE = 0.1
"""The share of a run that lies before its longest outage."""
_SERIES_POINTS = 600
_MAX_UNREPORTED_LOSS = 0.01
"""If more of all calls are lost, `describe_changes` says so first."""
_MIN_RELATIVE_CHANGE = 0.05
_MIN_SUCCESS_RATE_CHANGE = 0.001
"""Of 10,000 calls, ten more or fewer successes are not worth mentioning."""
_LESS_IS_BETTER = (
    ("p99", "ms", 0.001, "calls that succeed end sooner: p99", "calls that succeed end later: p99"),
    ("amplification", "x", 0.01, "fewer requests per call:", "more requests per call:"),
    ("recovered_after", "s", 2.0, "recovered sooner:", "recovered later:"),
)
"""Metric, unit, smallest absolute change, and the texts for a decrease and an increase."""


class Comparison(NamedTuple):
    """The results of both runs, and the size of the simulation."""

    old: Summary
    new: Summary
    duration: float
    rate: float
    outages: int
    concurrency: int
    """Requests that the simulated server runs at a time."""


def compare_policies(
    evidence: Evidence, old: Defence, new: Defence, *, seed: int = 0
) -> Comparison | None:
    """Simulate both defences under the same conditions; None if the log is too small."""
    if len(evidence.success_durations) < MIN_HEALTHY_ATTEMPTS or not evidence.calls:
        return None
    # A hedged call has no timeout that would end an attempt that hangs.
    may_hang = old.hedging is None and new.hedging is None
    before, after = (build_scenario(evidence, one, may_hang=may_hang) for one in (old, new))
    server = before.servers["server"]
    return Comparison(
        simulate(before, seed=seed),
        simulate(after, seed=seed),
        before.duration,
        before.clients.rate,
        len(server.failures),
        server.concurrency or 0,
    )


def build_scenario(evidence: Evidence, defence: Defence, *, may_hang: bool = True) -> Scenario:
    """Return a scenario that models the logged dependency, called with this defence."""
    duration = max(1.0, min(evidence.span, max(_MIN_DURATION_S, MAX_CALLS / evidence.rate)))
    rate = min(evidence.rate, MAX_CALLS / duration)
    latency = Empirical(_thin_durations(evidence))
    concurrency = _concurrency(evidence, rate, latency.mean)
    server = Server(
        latency=latency,
        concurrency=concurrency,
        queue=QUEUE_PER_WORKER * concurrency,
        failure_rate=evidence.failure_rate,
        failures=_failures(evidence, duration, may_hang=may_hang),
    )
    if any(failure.kind == "hang" for failure in server.failures):
        defence = _limit_timeout(evidence, defence)
    return Scenario(
        servers={"server": server},
        clients=Clients(rate=rate, defence=defence),
        network=Fixed(0.0),  # the logged durations include the network
        duration=duration,
        bucket=duration / _SERIES_POINTS,
    )


def describe_changes(old: Summary, new: Summary) -> str:
    """Return which metrics got better and which got worse; small changes are left out."""
    better: list[str] = []
    worse: list[str] = []
    gain = new.success_rate - old.success_rate
    rates = _format_change(old.success_rate, new.success_rate, "%")
    if gain > _MIN_SUCCESS_RATE_CHANGE:
        better.append(f"more calls succeed: {rates}")
    if gain < -_MIN_SUCCESS_RATE_CHANGE:
        worse.append(f"fewer calls succeed: {rates}{_describe_cause(old, new)}")
    for name, unit, min_change, decrease, increase in _LESS_IS_BETTER:
        before, after = float(getattr(old, name)), float(getattr(new, name))
        if isnan(before + after) or isclose(
            before, after, rel_tol=_MIN_RELATIVE_CHANGE, abs_tol=min_change
        ):
            continue
        change = _format_change(before, after, unit)
        if after < before:
            better.append(f"{decrease} {change}")
        else:
            worse.append(f"{increase} {change}")
    sentences = [
        f"{title}: {'; '.join(changes)}."
        for title, changes in (("Worse", worse), ("Better", better))
        if changes
    ]
    if gain < -_MAX_UNREPORTED_LOSS:
        sentences.insert(0, "The proposal loses calls in this simulation.")
    return " ".join(sentences) or "No metric changes by much."


def _concurrency(evidence: Evidence, rate: float, mean: float) -> int:
    """Return the assumed concurrency: twice the logged one, scaled to the simulated rate.

    It is no less than independent calls need, whose number in progress has a Poisson distribution:
    relative to their number, few calls have larger peaks than many.
    """
    usual = rate * mean
    peak = CONCURRENCY_HEADROOM * evidence.max_concurrency * rate / evidence.rate
    return ceil(max(peak, usual + 4 * sqrt(usual) + 1))


def _limit_timeout(evidence: Evidence, defence: Defence) -> Defence:
    """Limit the attempt timeout to the logged duration of failures, so that hangs end."""
    longest = max(outage.median_failure_duration for outage in evidence.outages)
    longest = max(longest, quantile(evidence.success_durations, TAIL_QUANTILE))
    policy = defence.policy
    timeout = min(policy.attempt_timeout or longest, longest)
    return Defence(
        policy.replace(attempt_timeout=timeout),
        breaker=defence.breaker,
        budget=defence.budget,
        limiter=defence.limiter,
    )


def _thin_durations(evidence: Evidence) -> tuple[float, ...]:
    """Return evenly spaced ranks of the sorted durations, which have the same quantiles."""
    durations = evidence.success_durations
    size = len(durations)
    count = min(size, _MAX_SAMPLES)
    return tuple(durations[(2 * index + 1) * size // (2 * count)] for index in range(count))


def _failures(evidence: Evidence, duration: float, *, may_hang: bool) -> tuple[Failure, ...]:
    if not evidence.outages:
        return ()
    longest = max(evidence.outages, key=lambda outage: outage.length)
    latest_begin = evidence.start + evidence.span - duration
    begin = max(evidence.start, min(longest.start - _LEAD_SHARE * duration, latest_begin))
    slow = quantile(evidence.success_durations, TIMEOUT_QUANTILE)
    failures: list[Failure] = []
    for outage in evidence.outages:
        start = max(0.0, outage.start - begin)
        end = min(outage.end - begin, start + duration / 2, duration)
        if end > start and len(failures) < _MAX_OUTAGES:
            hangs = may_hang and outage.median_failure_duration > slow
            kind = "hang" if hangs else "error"
            failures.append(Failure(start=start, end=end, kind=kind, rate=outage.share))
    return tuple(failures)


def _format_change(before: float, after: float, unit: str) -> str:
    return f"{format_value(before, unit)} → {format_value(after, unit)}"


def _describe_cause(old: Summary, new: Summary) -> str:
    """Return the stop reason whose number of calls grew most, as a subordinate clause."""
    growth = {name: count - old.reasons.get(name, 0) for name, count in new.reasons.items()}
    name = max(growth, key=growth.__getitem__, default=None)
    if name is None or growth[name] <= 0:
        return ""
    cause = "no attempts are left" if name == Reason.ATTEMPTS else Reason(name).description
    counts = f"{old.reasons.get(name, 0):,} → {new.reasons[name]:,}"
    return f", because more calls end where {cause}: {counts}"
