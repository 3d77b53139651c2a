"""The old defence against the new one, on what the log has recorded.

The simulated dependency takes as long as the recorded one took when it was healthy, fails as often,
and has the recorded outages at their recorded lengths. A run is bounded: of a long log it is the
stretch around its longest outage, with an outage cut to half of the run so that the recovery is
seen, and of a busy one every so many-th call. Both runs have the same seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tarry.simulator.distributions import Empirical, Fixed
from tarry.simulator.scenario import Clients, Failure, Scenario, Server
from tarry.simulator.simulate import simulate
from tarry.tuning.estimates import quantile
from tarry.tuning.rules import SLOW

if TYPE_CHECKING:
    from tarry.simulator.summary import Summary
    from tarry.tuning.evidence import Evidence
    from tarry.wire.defence import Defence

ENOUGH = 100
"""Healthy attempts below which nothing is simulated."""
MOST_CALLS = 10_000
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


def replay(evidence: Evidence, old: Defence, new: Defence, *, seed: int = 0) -> Replay | None:
    """Run both on the same days; None when the log is too small for that."""
    if len(evidence.healthy) < ENOUGH:
        return None
    # Without a timeout a call to a server that hangs would never end, as no recorded one did.
    hangs = all(one.hedging is None and one.policy.attempt_timeout for one in (old, new))
    before, after = (scenario_of(evidence, one, may_hang=hangs) for one in (old, new))
    return Replay(
        simulate(before, seed=seed),
        simulate(after, seed=seed),
        before.duration,
        before.clients.rate,
        len(before.servers["server"].failures),
    )


def scenario_of(evidence: Evidence, defence: Defence, *, may_hang: bool = False) -> Scenario:
    """Build the recorded world around a defence."""
    rate = evidence.rate
    duration = max(1.0, min(evidence.span, max(_SHORTEST, MOST_CALLS / rate)))
    server = Server(
        latency=Empirical(_thinned(evidence)),
        failure_rate=evidence.fault_share,
        failures=_failures(evidence, duration, may_hang=may_hang),
    )
    return Scenario(
        servers={"server": server},
        clients=Clients(rate=min(rate, MOST_CALLS / duration), defence=defence),
        network=Fixed(0.0),  # the recorded durations have it in them
        duration=duration,
        bucket=duration / _POINTS,
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
