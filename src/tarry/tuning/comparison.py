"""The old defence against the new one, on what the log has recorded.

The simulated dependency takes as long as the recorded one took when it was healthy, fails as often,
and has the recorded outages at their recorded lengths. A run is bounded: of a long log it is the
stretch around its longest outage, with an outage cut to half of the run so that the recovery is
seen, and of a busy one every so many-th call. Both runs have the same seed.

How much the dependency can bear, no log says before it breaks; without a bound, retries would cost
nothing. So it is taken to work on twice as many requests at a time as it was seen to; a hundred
times as many may wait. In an outage, failures that took longer than nearly all successes take as
long as recorded, and others are answered at once. Outside outages they take as long as successes.
"""

from __future__ import annotations

from math import ceil, isclose, isnan, sqrt
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.verdict import Reason
from tarry.policyfile.defence import Defence
from tarry.simulator.distributions import Empirical, Fixed
from tarry.simulator.metrics import quantile
from tarry.simulator.report.formatting import shown
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.simulate import simulate
from tarry.tuning.evidence import TAIL
from tarry.tuning.timeouts import SLOW

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary

if TYPE_CHECKING:
    from tarry.simulator.metrics import Summary
    from tarry.tuning.evidence import Evidence

ENOUGH = 100
"""Healthy attempts below which nothing is simulated."""
MOST_CALLS = 10_000
HEADROOM = 2
QUEUE = 100
"""Requests that wait for each one that is worked on; what comes then is rejected."""
_SHORTEST = 600.0
"""Seconds: a stretch is not made shorter than this for the sake of fewer calls."""
_MOST_SAMPLES = 10_000
_MOST_OUTAGES = 20
_LEAD = 0.1
_POINTS = 600


class Replay(NamedTuple):
    """Both runs, and what they were of."""

    old: Summary
    new: Summary
    duration: float
    rate: float
    outages: int
    concurrency: int
    """Requests that the simulated server works on at a time."""


def replay(evidence: Evidence, old: Defence, new: Defence, *, seed: int = 0) -> Replay | None:
    """Run both on the same days; None when the log is too small for that."""
    if len(evidence.healthy) < ENOUGH or not evidence.calls:
        return None
    hangs = old.hedging is None and new.hedging is None  # a hedge has no timeout to end it
    before, after = (scenario_of(evidence, one, may_hang=hangs) for one in (old, new))
    server = before.servers["server"]
    return Replay(
        simulate(before, seed=seed),
        simulate(after, seed=seed),
        before.duration,
        before.clients.rate,
        len(server.failures),
        server.concurrency or 0,
    )


def scenario_of(evidence: Evidence, defence: Defence, *, may_hang: bool = True) -> Scenario:
    """Build the recorded world around a defence."""
    duration = max(1.0, min(evidence.span, max(_SHORTEST, MOST_CALLS / evidence.rate)))
    rate = min(evidence.rate, MOST_CALLS / duration)
    latency = Empirical(_thinned(evidence))
    concurrency = _concurrency(evidence, rate, latency.mean)
    server = Server(
        latency=latency,
        concurrency=concurrency,
        queue=QUEUE * concurrency,
        failure_rate=evidence.fault_share,
        failures=_failures(evidence, duration, may_hang=may_hang),
    )
    if any(failure.kind == "hang" for failure in server.failures):
        defence = _patient(evidence, defence)
    return Scenario(
        servers={"server": server},
        clients=Clients(rate=rate, defence=defence),
        network=Fixed(0.0),  # the recorded durations have it in them
        duration=duration,
        bucket=duration / _POINTS,
    )


def _concurrency(evidence: Evidence, rate: float, mean: float) -> int:
    """Return what the server is taken to bear: twice what it was seen to, for the calls simulated.

    And no less than independent calls need, which is a Poisson number: few calls make for larger
    peaks, by their size, than the many of a busy log that they stand for.
    """
    usual = rate * mean
    peak = HEADROOM * evidence.most_at_once * rate / evidence.rate
    return ceil(max(peak, usual + 4 * sqrt(usual) + 1))


def _patient(evidence: Evidence, defence: Defence) -> Defence:
    """Wait for an answer no longer than recorded failures took: what hangs there never ends."""
    longest = max(outage.failing for outage in evidence.outages)
    longest = max(longest, quantile(evidence.healthy, TAIL))
    policy = defence.policy
    timeout = min(policy.attempt_timeout or longest, longest)
    return Defence(
        policy.replace(attempt_timeout=timeout),
        breaker=defence.breaker,
        budget=defence.budget,
        limiter=defence.limiter,
    )


def _thinned(evidence: Evidence) -> tuple[float, ...]:
    """Return every so many-th of the sorted durations, which has the same quantiles."""
    size = len(evidence.healthy)
    count = min(size, _MOST_SAMPLES)
    return tuple(evidence.healthy[(2 * index + 1) * size // (2 * count)] for index in range(count))


def _failures(evidence: Evidence, duration: float, *, may_hang: bool) -> tuple[Failure, ...]:
    if not evidence.outages:
        return ()
    longest = max(evidence.outages, key=lambda outage: outage.length)
    latest = evidence.start + evidence.span - duration
    begin = max(evidence.start, min(longest.start - _LEAD * duration, latest))
    slow = quantile(evidence.healthy, SLOW)
    failures: list[Failure] = []
    for outage in evidence.outages:
        start = max(0.0, outage.start - begin)
        end = min(outage.end - begin, start + duration / 2, duration)
        if end > start and len(failures) < _MOST_OUTAGES:
            kind = "hang" if may_hang and outage.failing > slow else "error"
            failures.append(Failure(start=start, end=end, kind=kind, rate=outage.share))
    return tuple(failures)


LOSES = 0.01
"""The share of all calls from which on the loss is said first."""
_NOTABLE = 0.05
_CALLS = 0.001
"""Of ten thousand calls, ten more or less that succeed are not worth a word."""
_LESS_IS_BETTER = (
    ("p99", "ms", 0.001, "calls that succeed end sooner: p99", "calls that succeed end later: p99"),
    ("amplification", "x", 0.01, "fewer requests for each call:", "more requests for each call:"),
    ("recovered_after", "s", 2.0, "well again sooner:", "well again later:"),
)


def verdict(old: Summary, new: Summary) -> str:
    """Say which numbers got better and which got worse; small changes are left out."""
    better: list[str] = []
    worse: list[str] = []
    gain = new.success_rate - old.success_rate
    rates = _change(old.success_rate, new.success_rate, "%")
    if gain > _CALLS:
        better.append(f"more calls succeed: {rates}")
    if gain < -_CALLS:
        worse.append(f"fewer calls succeed: {rates}{_because(old, new)}")
    for name, unit, least, sooner, later in _LESS_IS_BETTER:
        before, after = float(getattr(old, name)), float(getattr(new, name))
        if isnan(before + after) or isclose(before, after, rel_tol=_NOTABLE, abs_tol=least):
            continue
        change = _change(before, after, unit)
        if after < before:
            better.append(f"{sooner} {change}")
        else:
            worse.append(f"{later} {change}")
    said = [
        f"{title}: {'; '.join(changes)}."
        for title, changes in (("Worse", worse), ("Better", better))
        if changes
    ]
    if gain < -LOSES:
        said.insert(0, "The proposal loses calls in this simulation.")
    return " ".join(said) or "No number changes by much."


def _change(before: float, after: float, unit: str) -> str:
    return f"{shown(before, unit)} → {shown(after, unit)}"


def _because(old: Summary, new: Summary) -> str:
    """Name what ends more calls than before, by the simulation's own count."""
    more = {name: count - old.reasons.get(name, 0) for name, count in new.reasons.items()}
    name = max(more, key=more.__getitem__, default=None)
    if name is None or more[name] <= 0:
        return ""
    words = "no attempts are left" if name == Reason.ATTEMPTS else Reason(name).description
    counts = f"{old.reasons.get(name, 0):,} → {new.reasons[name]:,}"
    return f", because more calls end where {words}: {counts}"
